"""Where the equilibria of a point of a grid may lie, judged from those of its neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wellposed._tree import Layout, leaves, rebuild
from wellposed.landscape._model import Key

#: Bytes of equilibria that are kept; where two rows of the grid need more, only the last two points
#: are.
MEMORY = 2**30
#: Samples of each call from which coefficients are fitted.
FIT_SAMPLES = 32
#: Neighbours: rows back, then columns along the way (negative: behind).
BEHIND, SECOND, BESIDE, CORNER, AHEAD, ABOVE = (0, -1), (0, -2), (-1, 0), (-1, -1), (-1, 1), (-2, 0)

Index = tuple[int, int]
State = dict[Key, Any]


class Predictor:
    r"""Keeps the equilibria of the last rows of a grid, walked in a snake, and extrapolates.

    With h the spacing, the line 2 z(i, j-1) - z(i, j-2) is wrong by h^2 z_bb, the parallelogram
    z(i, j-1) + z(i-1, j) - z(i-1, j-1) by h^2 z_ab. Higher orders do not help: z has kinks wherever
    a ReLU switches. What helps is an average of all neighbours, by the coefficients that would have
    predicted the point before best:

        z(i, j) ~ z(i, j-1) + sum_k c_k (z_k - z(i, j-1)), c the least squares solution of the same
        at (i, j-1)

    Args:
        columns: Points in a row.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._known: dict[Index, State] = {}

    def keep(self, index: Index, state: State) -> None:
        """Remembers the equilibria of a point."""
        self._known[index] = state
        size = sum(leaf.numel() * leaf.element_size() for value in state.values() for leaf in leaves(value))
        if (2 * self.columns + 1) * size <= MEMORY:
            first = index[0] - 2
            self._known = {place: known for place, known in self._known.items() if place[0] >= first}
        else:
            self._known = dict(list(self._known.items())[-2:])

    def predict(self, index: Index, way: int) -> State:
        """By call, where to begin; nothing if no neighbour is known.

        Args:
            index: The point.
            way: 1 if its row is walked through to the right, -1 to the left.
        """
        known = {place: self._at(index, place, way) for place in (BEHIND, SECOND, BESIDE, CORNER, AHEAD, ABOVE)}
        near = {place: state for place, state in known.items() if state is not None}
        if not near:
            return {}
        base = next(iter(near.values()))
        return {key: self._one(key, near, index, way) for key in base}

    def _at(self, index: Index, place: tuple[int, int], way: int) -> State | None:
        return self._known.get((index[0] + place[0], index[1] + way * place[1]))

    def _one(self, key: Key, near: dict[tuple[int, int], State], index: Index, way: int) -> Any:
        """The prediction of one call."""
        model = next(iter(near.values()))[key]
        fitting = {place: state[key] for place, state in near.items() if key in state and _alike(state[key], model)}
        columns = [place for place in fitting if place != BEHIND]
        if BEHIND in fitting and CORNER in columns:
            coefficients = self._fitted(key, columns, index, way, model)
            if coefficients is not None:
                return _combined(fitting[BEHIND], [fitting[place] for place in columns], coefficients)
        if all(place in fitting for place in (BEHIND, BESIDE, CORNER)):
            return _combined(fitting[BEHIND], [fitting[BESIDE], fitting[CORNER]], [1.0, -1.0])
        for last, before in ((BEHIND, SECOND), (BESIDE, ABOVE)):
            if last in fitting:
                return _combined(fitting[last], [fitting[before]], [-1.0]) if before in fitting else fitting[last]
        return model

    def _fitted(self, key: Key, columns: list[tuple[int, int]], index: Index, way: int, model: Any) -> list[float] | None:
        """c for these neighbours, fitted at the point before; None if a neighbour is not known."""
        before = (index[0], index[1] - way)
        states = [self._at(before, place, way) for place in (BEHIND, *columns)]
        target = self._known[before][key]
        if any(state is None or key not in state or not _alike(state[key], model) for state in states):
            return None
        base, *others = (_sampled(state[key]) for state in states if state is not None)
        A = torch.stack([other - base for other in others], dim=1)
        b = _sampled(target) - base
        gram = A.T @ A
        gram.diagonal().add_(1e-6 * gram.diagonal().mean())  # neighbours that are all the same have no coefficients
        solution, failed = torch.linalg.solve_ex(gram, A.T @ b)
        return None if bool(failed) or not bool(solution.isfinite().all()) else solution.tolist()


def _alike(a: Any, b: Any) -> bool:
    return [leaf.shape for leaf in leaves(a)] == [leaf.shape for leaf in leaves(b)]


def _sampled(state: Any) -> Tensor:
    """The features of some samples, in one vector of float64."""
    rows = Layout.of(state, "z").flatten(state)
    stride = max(1, rows.shape[0] // FIT_SAMPLES)
    return rows[::stride].double().reshape(-1)


def _combined(base: Any, others: list[Any], coefficients: list[float]) -> Any:
    """base + sum_k c_k (other_k - base), leaf by leaf."""
    new = [(1.0 - sum(coefficients)) * leaf for leaf in leaves(base)]
    for other, coefficient in zip(others, coefficients, strict=True):
        for total, leaf in zip(new, leaves(other), strict=True):
            total.add_(leaf, alpha=coefficient)
    return rebuild(base, new)
