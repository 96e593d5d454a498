"""Every public name is on a page of the reference; what else the reference shows is counted."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from types import ModuleType

import pytest

import doc_hooks
import wellposed

REFERENCE = doc_hooks.DOCS / "reference"
PACKAGES = sorted(
    {info.name for info in pkgutil.iter_modules(wellposed.__path__) if info.ispkg and not info.name.startswith("_")}
    | {"errors"}
)
#: Packages that are called like the function of their name.
CALLABLE = ("certify", "prove")
#: What a page shows beyond the names of its package, at most: results that functions return, interfaces to inherit, and parts
#: that a user names by their module.
SHOWN_ONLY = {
    "certify": 10, "convex": 20, "descent": 2, "errors": 4, "kernel": 6, "landscape": 9, "nn": 16, "prove": 1, "testing": 2,
}  # fmt: skip
SHOWN = re.compile(r"^::: (wellposed(?:_lab)?\.[\w.]+)$", re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_of_a_package_are_on_its_page(package: str) -> None:
    module = importlib.import_module(f"wellposed.{package}")
    shown = SHOWN.findall((REFERENCE / f"{package}.md").read_text())
    assert len(shown) == len(set(shown)), "shown twice"
    wanted = {f"wellposed.{package}.{name}" for name in module.__all__}
    assert not wanted - set(shown), f"docs/reference/{package}.md lacks '::: ' lines for {sorted(wanted - set(shown))}"
    more = set(shown) - wanted
    assert len(more) <= SHOWN_ONLY.get(package, 0), f"export what a user types, or raise the number: {sorted(more)}"


def test_everything_shown_exists() -> None:
    for page in REFERENCE.glob("*.md"):
        for path in SHOWN.findall(page.read_text()):
            module, _, name = path.rpartition(".")
            if module == "wellposed.lightning":
                continue  # needs an optional package; the site finds it without importing
            importlib.import_module(module)
            shown = getattr(sys.modules[module], name, None)
            assert shown is not None, f"{page.name} shows {path}, which does not exist"
            assert not isinstance(shown, ModuleType), f"{page.name} shows {path}, which is a module"


def test_names_of_wellposed_are_on_the_first_page() -> None:
    page = (REFERENCE / "index.md").read_text()
    for name in wellposed.__all__:
        if name in PACKAGES and name not in CALLABLE:
            assert f"]({name}.md)" in page, f"docs/reference/index.md does not list the package {name}"
            continue
        target = re.search(rf"\[`{name}`\]\[(wellposed\.(\w+)\.{name}(?:\.{name})?)\]", page)
        assert target is not None, f"docs/reference/index.md does not list {name}"
        assert getattr(importlib.import_module(f"wellposed.{target[2]}"), name) is getattr(wellposed, name) or name in CALLABLE
        pages = "\n".join(path.read_text() for path in REFERENCE.glob("*.md"))
        assert f"::: {target[1]}\n" in pages


def test_the_navigation_has_every_page_of_the_reference() -> None:
    navigation = (doc_hooks.ROOT / "mkdocs.yml").read_text()
    for page in REFERENCE.glob("*.md"):
        assert f"reference/{page.name}" in navigation


def test_long_signatures_can_be_read() -> None:
    """mkdocstrings breaks signatures into lines only if ruff or black is installed; what is still too long must wrap."""
    needed = re.search(r"^docs = (\[.*\])", (doc_hooks.ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert needed and re.search(r'"(ruff|black)\b', needed[1])
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", (doc_hooks.DOCS / "assets" / "site.css").read_text())
    assert any(".doc-signature" in selector and "white-space: pre-wrap" in rule for selector, rule in rules)
