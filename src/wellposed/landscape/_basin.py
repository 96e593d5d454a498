"""The area of the basin of low loss on a surface."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from wellposed.errors import InvalidArgument
from wellposed.landscape.record import Surface

# The neighbours of a point along the edges of the triangulation: the sides of its squares and one
# diagonal.
_EDGES = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1]])


@dataclass(frozen=True)
class Basin:
    """Where the loss is at most a level, around a point.

    Attributes:
        level: The level.
        area: Of the part of the plane known to belong to it, in units of the coordinates.
        undecided: Area that it may have beyond that: points without a valid value may belong to it,
            and so may what they connect to it.
        touches_border: Whether it leaves the picture, so that its true area is larger.
    """

    level: float
    area: float
    undecided: float
    touches_border: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain Python."""
        return asdict(self)


def basin(surface: Surface, *, level: float) -> Basin:
    r"""The area of the component of {loss <= level} with the least loss, on a grid.

    Between points the loss is taken as linear on triangles (each square of the grid cut along one
    diagonal); on these the area is exact. Points without a valid value are not counted; the area
    that the basin would have beyond that, if the loss were low at all of them, is `undecided`.

    Args:
        surface: Of two directions.
        level: Of the loss.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> X, y = torch.eye(2), torch.ones(2, 1)
        >>> surface = wp.landscape.surface(model, torch.nn.functional.mse_loss, X, y, num=5, radius=0.5)
        >>> basin = wp.landscape.basin(surface, level=1e6)  # the whole square, of side 1
        >>> basin.touches_border, round(basin.area, 3)
        (True, 1.0)
    """
    from scipy import ndimage  # here: SciPy takes longer to import than the library

    if surface.values.ndim != 2 or min(surface.values.shape) < 2:
        raise InvalidArgument(f"basin needs a surface of two directions; got one of shape {surface.values.shape}.")
    valid = surface.valid
    if not valid.any():
        raise InvalidArgument("basin: no point of this surface has a valid value.")
    values = np.where(valid, surface.values, np.inf)
    labels, _ = ndimage.label(values <= level, structure=_EDGES)
    lowest = np.unravel_index(np.argmin(values), values.shape)
    if labels[lowest] == 0:
        return Basin(float(level), 0.0, 0.0, False)
    inside = labels == labels[lowest]
    labels, _ = ndimage.label((values <= level) | ~valid, structure=_EDGES)
    possible = labels == labels[lowest]
    heights = np.diff(surface.coordinates[0])[:, None] * np.diff(surface.coordinates[1])[None, :] / 2
    area = undecided = 0.0
    first, second = slice(0, -1), slice(1, None)
    corner, right, below, across = (first, first), (first, second), (second, first), (second, second)
    for triangle in ((corner, below, across), (corner, right, across)):
        v = np.stack([values[place] for place in triangle])
        ok = np.stack([valid[place] for place in triangle]).all(axis=0)
        touched, may_touch = (np.stack([points[place] for place in triangle]).any(axis=0) for points in (inside, possible))
        low = heights * np.where(ok, _part_below(v, level), 1.0)
        area += float(low[ok & touched].sum())
        undecided += float(low[may_touch & ~(ok & touched)].sum())
    border = np.concatenate([inside[0], inside[-1], inside[:, 0], inside[:, -1]])
    return Basin(float(level), area, undecided, bool(border.any()))


def _part_below(v: np.ndarray, level: float) -> np.ndarray:
    """(...) the part of triangles with corner values v, (3, ...), that is at most the level."""
    a, b, c = np.sort(v, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        tip = (level - a) ** 2 / ((b - a) * (c - a))  # only the lowest corner is below: a similar triangle
        rest = 1 - (c - level) ** 2 / ((c - a) * (c - b))  # only the highest corner is above
    return np.where(level < a, 0.0, np.where(level < b, tip, np.where(level < c, rest, 1.0)))
