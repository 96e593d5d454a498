"""The import arrows of the library and the laboratory, read from their source: none may turn back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

COMMON = {
    "errors",
    "references",
    "status",
    "_checks",
    "_io",
    "_latex",
    "_latex_characters",
    "_memory",
    "_package",
    "_progress",
    "_reading",
    "_stored",
    "_torch",
    "_tree",
}
CORE = ["linalg", "solve", "implicit", "nn"]
LEAVES = {"data", "plot"}

# What each part of the library may import, besides itself and COMMON.
LIBRARY: dict[str, set[str]] = {layer: set(CORE[:rank]) for rank, layer in enumerate(CORE)}
LIBRARY |= {"convex": set(CORE), "kernel": set(CORE)}
LIBRARY["gpytorch"] = {*CORE, "kernel"}
LIBRARY["certify"] = {*CORE, "convex", "kernel"}
LIBRARY["descent"] = LIBRARY["certify"] | {"certify"}
LIBRARY["prove"] = LIBRARY["descent"] | {"descent"}
LIBRARY["sklearn"] = LIBRARY["lightning"] = LIBRARY["descent"] | {"descent"}
LIBRARY["imaging"] = set(CORE)
LIBRARY["tasks"] = {*CORE, "imaging"}
LIBRARY["testing"] = LIBRARY["sklearn"]
LIBRARY["landscape"] = LIBRARY["descent"] | {"descent"} | LEAVES
LIBRARY |= {leaf: set() for leaf in LEAVES} | {"__main__": set()}

# The laboratory may import the whole library; these are the arrows between its own parts.
LABORATORY: dict[str, set[str]] = {"runs": set(), "report": {"runs"}, "papers": {"runs"}, "tasks": set(), "doctor": set()}
LABORATORY["cli"] = {"runs", "report", "papers", "doctor"}
LABORATORY["__main__"] = {"cli"}


def imported_modules(path: Path, module: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Each import in a file as (line, absolute dotted parts), wherever in the file it stands."""
    package = module if path.name == "__init__.py" else module[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield node.lineno, [*base, alias.name]


def violations(source: Path, allowed: dict[str, set[str]], common: set[str], outside: set[str]) -> list[str]:
    """Every import under `source` (the folder of a package) that breaks a rule, as readable lines.

    Args:
        source: The folder of the package.
        allowed: What each of its parts may import of the others.
        common: Parts that every other part may import.
        outside: Packages that none of its files may import.
    """
    parts = {path.stem for path in source.iterdir() if path.is_dir() or path.suffix == ".py"}
    found = []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        layer = relative.parts[0].removesuffix(".py")
        module = [source.name, *relative.with_suffix("").parts]
        if path.name == "__init__.py":
            module.pop()
        if layer != "__init__" and layer not in common | allowed.keys():
            found.append(f"{relative}: '{layer}' has no place among the layers; add it to the table")
            continue
        for line, target in imported_modules(path, module):
            if target[0] == "matplotlib" and layer != "plot":
                found.append(f"{relative}:{line}: only plot imports matplotlib")
            if target[0] in outside:
                found.append(f"{relative}:{line}: {source.name} must not import {target[0]}")
            if target[0] != source.name or layer == "__init__":  # the public face gathers everything
                continue
            other = target[1] if len(target) > 1 and target[1] in parts else "__init__"
            if other != layer and other not in allowed.get(layer, set()) | common:
                found.append(f"{relative}:{line}: {layer} must not import {other}")
    return found


def library(source: Path) -> list[str]:
    return violations(source, LIBRARY, COMMON, {"wellposed_lab"})


def laboratory(source: Path) -> list[str]:
    return violations(source, LABORATORY, set(), set())


def test_no_import_against_the_arrows() -> None:
    assert library(SOURCE / "wellposed") == []
    assert laboratory(SOURCE / "wellposed_lab") == []


@pytest.mark.parametrize(
    ("file", "statement", "complaint"),
    [
        ("solve/picard.py", "from ..nn.layer import EquilibriumLayer", "solve must not import nn"),
        ("solve/picard.py", "from .. import nn", "solve must not import nn"),
        ("solve/__init__.py", "from ..implicit import exact", "solve must not import implicit"),
        ("linalg/bounds.py", "import wellposed.solve.picard", "linalg must not import solve"),
        ("linalg/deep/er.py", "from ...solve import picard", "linalg must not import solve"),
        ("implicit/exact.py", "def f():\n    from wellposed.nn import layer", "implicit must not import nn"),
        ("certify/monitor.py", "from wellposed.descent import flow", "certify must not import descent"),
        ("nn/layer.py", "from wellposed import fixed_point", "nn must not import __init__"),
        ("errors.py", "from .solve import picard", "errors must not import solve"),
        ("data/images.py", "from ..linalg import bounds", "data must not import linalg"),
        ("descent/flow.py", "import matplotlib.pyplot as plt", "only plot imports matplotlib"),
        ("descent/flow.py", "def f():\n    import wellposed_lab.runs", "wellposed must not import wellposed_lab"),
        ("__init__.py", "from wellposed_lab import runs", "wellposed must not import wellposed_lab"),
        ("wrong/place.py", "", "'wrong' has no place among the layers"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, file: str, statement: str, complaint: str) -> None:
    source = tmp_path / "wellposed"
    for layer in ["linalg", "solve", "implicit", "nn", "certify", "descent", "data"]:
        (source / layer).mkdir(parents=True)
        (source / layer / "__init__.py").touch()
    planted = source / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(statement, encoding="utf-8")
    found = library(source)
    assert len(found) == 1
    assert complaint in found[0]


def test_a_planted_violation_in_the_laboratory_is_caught(tmp_path: Path) -> None:
    source = tmp_path / "wellposed_lab"
    (source / "runs").mkdir(parents=True)
    (source / "papers").mkdir()
    (source / "papers" / "figure.py").write_text("from wellposed_lab.runs import loop\nimport wellposed\n", encoding="utf-8")
    assert laboratory(source) == []
    (source / "runs" / "loop.py").write_text("from wellposed_lab.papers import registry\n", encoding="utf-8")
    assert laboratory(source) == ["runs/loop.py:1: runs must not import papers"]


def test_arrows_forward_pass(tmp_path: Path) -> None:
    source = tmp_path / "wellposed"
    for layer in ["linalg", "solve", "nn", "plot"]:
        (source / layer).mkdir(parents=True)
        (source / layer / "__init__.py").touch()
    (source / "errors.py").touch()
    (source / "__init__.py").write_text("from .nn import layer\n", encoding="utf-8")
    (source / "nn" / "layer.py").write_text(
        "import torch\nfrom ..errors import InvalidType\nfrom ..solve import Picard\nfrom . import cell\n",
        encoding="utf-8",
    )
    (source / "plot" / "lines.py").write_text("import matplotlib\nfrom .. import errors\n", encoding="utf-8")
    assert library(source) == []
