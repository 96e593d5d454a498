"""The public names: sorted, complete, importable."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import wellposed

PACKAGES = ["wellposed"] + [
    f"wellposed.{info.name}"
    for info in pkgutil.iter_modules(wellposed.__path__)
    if info.ispkg and not info.name.startswith("_")
]


@pytest.mark.parametrize("name", PACKAGES)
def test_exports_are_sorted_and_importable(name: str) -> None:
    package = importlib.import_module(name)
    assert hasattr(package, "__all__"), f"{name} does not say what is public"
    exported = list(package.__all__)
    assert exported == sorted(set(exported))
    missing = [export for export in exported if not hasattr(package, export)]
    assert not missing, f"{name} exports names it does not have: {missing}"


def test_sub_packages_are_attributes() -> None:
    for name in PACKAGES[1:]:
        assert hasattr(wellposed, name.removeprefix("wellposed.")), f"`import wellposed` does not load {name}"
