"""A reader can follow one pass through a layer: it crosses few files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import wellposed as wp


def _load(path: Path) -> ModuleType:
    """A script of benchmarks/, whose other modules have names of modules of tests/."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


files_crossed = _load(Path(__file__).parents[1] / "benchmarks" / "files_crossed.py")
#: At most as many files as this; `certify` (20) and `train` (40) follow.
LAYER = 14


@pytest.mark.parametrize(
    "cell",
    [
        wp.nn.DenseCell(4, 8),
        wp.nn.DenseCell(4, 8, weight=wp.nn.Spectral(0.9)),
        files_crossed.OwnCell(),
    ],
    ids=["dense", "spectral", "own"],
)
def test_a_layer_crosses_few_files(cell: torch.nn.Module) -> None:
    files = files_crossed.forward_backward(cell)
    assert "wellposed/solve/loop.py" in files and "wellposed/implicit/exact.py" in files  # it really counts
    assert len(files) <= LAYER, sorted(files)


def test_nested_calls_are_counted_once_a_file() -> None:
    assert files_crossed.crossed(lambda: None) == {}
    files = files_crossed.crossed(lambda: wp.fixed_point(lambda z: 0.5 * z + 1, torch.zeros(2, 3)))
    assert files["wellposed/solve/_fixed_point.py"] >= 1
