"""The import arrows of the package, read from its source: none may turn back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "wellposed"

COMMON = {"errors", "status", "_file_lock", "_files", "_npz", "_reading", "_tree", "_typing"}
CORE = ["linalg", "solve", "implicit", "nn"]
LEAVES = {"data", "plot"}

# What each part may import, besides itself and COMMON.
ALLOWED: dict[str, set[str]] = {layer: set(CORE[:rank]) for rank, layer in enumerate(CORE)}
ALLOWED |= {"convex": set(CORE), "kernel": set(CORE)}
ALLOWED["certify"] = {*CORE, "convex", "kernel"}
ALLOWED["train"] = ALLOWED["certify"] | {"certify"}
ALLOWED["sklearn"] = ALLOWED["train"] | {"train"}
ALLOWED["landscape"] = ALLOWED["train"] | {"train"} | LEAVES
ALLOWED["experiments"] = ALLOWED["landscape"] | {"landscape"}
ALLOWED["cli"] = ALLOWED["experiments"] | {"experiments"}
ALLOWED["__main__"] = {"cli"}
ALLOWED |= {leaf: set() for leaf in LEAVES}


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


def violations(source: Path) -> list[str]:
    """Every import under `source` (the folder of the package) that breaks a rule, as readable lines."""
    parts = {path.stem for path in source.iterdir() if path.is_dir() or path.suffix == ".py"}
    found = []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        layer = relative.parts[0].removesuffix(".py")
        module = [source.name, *relative.with_suffix("").parts]
        if path.name == "__init__.py":
            module.pop()
        if layer == "__init__":
            continue  # the public face gathers everything
        if layer not in COMMON | ALLOWED.keys():
            found.append(f"{relative}: '{layer}' has no place among the layers; add it to ALLOWED")
            continue
        for line, target in imported_modules(path, module):
            if target[0] == "matplotlib" and layer != "plot":
                found.append(f"{relative}:{line}: only plot imports matplotlib")
            if target[0] != source.name:
                continue
            other = target[1] if len(target) > 1 and target[1] in parts else "__init__"
            if other != layer and other not in ALLOWED.get(layer, set()) | COMMON:
                found.append(f"{relative}:{line}: {layer} must not import {other}")
    return found


def test_no_import_against_the_arrows() -> None:
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "statement", "complaint"),
    [
        ("solve/picard.py", "from ..nn.layer import EquilibriumLayer", "solve must not import nn"),
        ("solve/picard.py", "from .. import nn", "solve must not import nn"),
        ("solve/__init__.py", "from ..implicit import exact", "solve must not import implicit"),
        ("linalg/bounds.py", "import wellposed.solve.picard", "linalg must not import solve"),
        ("linalg/deep/er.py", "from ...solve import picard", "linalg must not import solve"),
        ("implicit/exact.py", "def f():\n    from wellposed.nn import layer", "implicit must not import nn"),
        ("certify/monitor.py", "from wellposed.train import loop", "certify must not import train"),
        ("nn/layer.py", "from wellposed import fixed_point", "nn must not import __init__"),
        ("errors.py", "from .solve import picard", "errors must not import solve"),
        ("data/images.py", "from ..linalg import bounds", "data must not import linalg"),
        ("train/loop.py", "import matplotlib.pyplot as plt", "only plot imports matplotlib"),
        ("wrong/place.py", "", "'wrong' has no place among the layers"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, file: str, statement: str, complaint: str) -> None:
    source = tmp_path / "wellposed"
    for layer in ["linalg", "solve", "implicit", "nn", "certify", "train", "data"]:
        (source / layer).mkdir(parents=True)
        (source / layer / "__init__.py").touch()
    planted = source / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(statement, encoding="utf-8")
    found = violations(source)
    assert len(found) == 1
    assert complaint in found[0]


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
    assert violations(source) == []
