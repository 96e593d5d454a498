"""Marks of points of a landscape that are not known to be true; the same in every picture and in its legend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["UNKNOWN", "Mark", "marks_of"]

#: The colour of what has no value.
UNKNOWN = "#d9d9d9"
_EDGE = "#777777"


@dataclass(frozen=True)
class Mark:
    """How one reason looks.

    Attributes:
        label: In the legend.
        hatch: Of an area.
        marker: Of a point.
        valued: Whether such points have values, which shine through.
    """

    label: str
    hatch: str
    marker: str
    valued: bool = False

    def patch(self, **options: Any) -> Any:
        """What stands in the legend."""
        from matplotlib.patches import Patch

        face = "none" if self.valued else UNKNOWN
        return Patch(
            **{"facecolor": face, "edgecolor": _EDGE, "hatch": self.hatch, "label": self.label, "linewidth": 0.6, **options}
        )

    def fill(self, ax: Any, edges: tuple[np.ndarray, np.ndarray], where: np.ndarray) -> None:
        """Hatches the rectangles of a grid, grey unless they have values.

        Args:
            ax: Where.
            edges: (k + 1,) and (l + 1,) of the rectangles.
            where: (k, l) which.
        """
        from matplotlib.colors import ListedColormap, to_rgba

        chosen = np.ma.masked_where(~where, np.ones(where.shape))
        face = ListedColormap([(0.0, 0.0, 0.0, 0.0) if self.valued else to_rgba(UNKNOWN)])
        ax.pcolor(*edges, chosen.T, hatch=self.hatch, cmap=face, edgecolor=_EDGE, linewidth=0.0)


_MARKS = {
    "PENDING": Mark("not evaluated yet", "", "_"),
    "UNCHECKED": Mark("uniqueness not checked", "...", ".", valued=True),
    "NOT_PROVED": Mark("equilibrium found, not proved", "..", ".", valued=True),
    "NOT_CONVERGED": Mark("failed to converge", "xxxx", "x"),
    "NOT_UNIQUE": Mark("several equilibria", "////", "^"),
    "ILL_POSED": Mark("ill posed: no equilibrium", "++++", "s"),
    "NOT_FINITE": Mark("loss not finite", "----", "d"),
}


def marks_of(record: Mapping[str, Any]) -> Iterator[tuple[Mark, np.ndarray]]:
    """Every reason that some point of a surface is not valid, with the points that have it."""
    status, bad = np.array(record["status"]), ~np.array(record["valid"], dtype=bool)
    for code, name in enumerate(record["status_names"]):
        where = bad & (status == code)
        if where.any():
            yield _MARKS.get(name) or Mark(str(name).lower().replace("_", " "), "oo", "o"), where
