"""A reader can follow one call: it crosses few files."""

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
#: At most as many files as this. What a certificate crosses are 12 files of the solve, 3 of the
#: network, 3 of bounds, 11 of the theorems and the display; training adds the run directory to that.
LAYER, CERTIFY, TRAIN = 14, 32, 58


@pytest.mark.parametrize(
    "cell",
    [
        wp.nn.DenseCell(4, 8, generator=torch.Generator().manual_seed(0)),
        wp.nn.DenseCell(4, 8, weight=wp.nn.Spectral(0.9), generator=torch.Generator().manual_seed(0)),
        files_crossed.OwnCell(),
    ],
    ids=["dense", "spectral", "own"],
)
def test_a_layer_crosses_few_files(cell: torch.nn.Module) -> None:
    files = files_crossed.forward_backward(cell)
    assert "wellposed/solve/loop.py" in files and "wellposed/implicit/implicit_gradient.py" in files  # it really counts
    assert len(files) <= LAYER, sorted(files)


def test_a_certificate_crosses_few_files() -> None:
    files = files_crossed.certify()
    assert "wellposed/certify/radius_certificate.py" in files  # it really counts
    assert len(files) <= CERTIFY, sorted(files)


def test_training_crosses_few_files() -> None:
    files = files_crossed.train()
    assert "wellposed_lab/runs/loop.py" in files
    assert len(files) <= TRAIN, sorted(files)


def test_nested_calls_are_counted_once_a_file() -> None:
    assert files_crossed.crossed(lambda: None) == {}
    files = files_crossed.crossed(lambda: wp.fixed_point(lambda z: 0.5 * z + 1, torch.zeros(2, 3)))
    assert files["wellposed/solve/_fixed_point.py"] >= 1
