"""Areas of basins against geometry."""

from __future__ import annotations

import math

import numpy as np
import pytest

import wellposed as wp
from wellposed.landscape import CellStatus, Surface, basin


def made(values: np.ndarray, radius: float = 1.0) -> Surface:
    axes = tuple(np.linspace(-radius, radius, k) for k in values.shape)
    status = np.where(np.isfinite(values), CellStatus.VALID, CellStatus.NOT_UNIQUE).astype(np.int8)
    return Surface(axes, values, status, np.zeros(values.shape), np.zeros(values.shape))


def grid(k: int, radius: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    axis = np.linspace(-radius, radius, k)
    a, b = np.meshgrid(axis, axis, indexing="ij")
    return a, b


def test_the_area_of_a_circle() -> None:
    a, b = grid(201)
    found = basin(made(a**2 + b**2), level=0.49)
    assert found.area == pytest.approx(math.pi * 0.49, rel=1e-3)
    assert found.undecided == 0 and not found.touches_border


@pytest.mark.parametrize("level", [-1.2, -0.3, 0.0, 0.37, 1.4, 3.0])
def test_linear_functions_are_exact(level: float) -> None:
    a, b = grid(7)
    found = basin(made(a + b), level=level)
    t = min(max(level + 2, 0), 4)  # area of {a + b <= level} in the square
    assert found.area == pytest.approx(t**2 / 2 if t <= 2 else 4 - (4 - t) ** 2 / 2)


def test_only_the_component_of_the_minimum_counts() -> None:
    a, b = grid(101, 2.0)
    two = np.minimum((a - 1) ** 2 + b**2, (a + 1) ** 2 + b**2 + 0.01)
    assert basin(made(two, 2.0), level=0.25).area == pytest.approx(math.pi * 0.25, rel=5e-3)
    assert basin(made(two, 2.0), level=1.2).area > 2 * math.pi * 0.25  # now they have met


def test_points_that_are_not_valid_are_undecided() -> None:
    a, b = grid(11)
    values = a**2 + b**2
    values[5, 6] = np.nan
    found = basin(made(values), level=0.5)
    assert found.undecided == pytest.approx(6 * 0.2**2 / 2)  # six triangles meet in a point
    whole = basin(made(a**2 + b**2), level=0.5)
    assert found.area + found.undecided == pytest.approx(whole.area)


def test_what_undecided_points_may_connect_is_undecided() -> None:
    """A valley along a, cut by a strip of points without a value: the far part may belong to the basin."""
    a, b = grid(41)
    values = b**2 + 0.001 * a
    cut = np.where(np.abs(a) < 0.16, np.nan, values)
    level = 0.04
    whole, found = basin(made(values), level=level), basin(made(cut), level=level)
    assert found.area < 0.5 * whole.area < whole.area < found.area + found.undecided


def test_borders_and_nothing() -> None:
    a, b = grid(5)
    assert basin(made(a + b), level=0.0).touches_border
    assert basin(made(a**2 + b**2 + 1), level=0.5).area == 0.0
    with pytest.raises(wp.InvalidArgument, match="no point of this surface"):
        basin(made(np.full((3, 3), np.nan)), level=1.0)
    with pytest.raises(wp.InvalidArgument, match="two directions"):
        basin(made(np.zeros(3)), level=1.0)
