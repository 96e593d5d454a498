"""A reader can follow one pass through a layer: it crosses few files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import wellposed as wp

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import files_crossed

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
