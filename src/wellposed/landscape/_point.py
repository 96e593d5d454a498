"""The loss at one point of parameters, and whether it may be believed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._tree import leaves, rebuild
from wellposed.errors import IllPosed, IllPosedWarning, InvalidArgument, InvalidType, NotConverged, NotConvergedWarning
from wellposed.landscape._equilibria import Equilibria, Key, agreement_of, distances, proved_unique, random_start, rows_of
from wellposed.landscape.cell_status import CellStatus
from wellposed.solve import Solution

__all__ = ["Measured", "PointLoss"]


@dataclass(frozen=True)
class Measured:
    """value: The loss, NaN unless `status` is VALID or UNCHECKED. num_steps: Evaluations a sample."""

    value: float
    status: CellStatus
    num_steps: float


class PointLoss:
    """Evaluates loss(model(X), y) at the model's present parameters; call it inside `preserved` and `watched`.

    Args:
        model, loss, X, y: As in `surface`.
        warm_start, num_starts, probes, agreement, batch_size: As in `surface`.
        seed: Of the random starts and of which samples are probed; each point has its own draw, by its number.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        X: Any,
        y: Any,
        *,
        warm_start: bool,
        num_starts: int,
        probes: int | None,
        agreement: float | None,
        batch_size: int | None,
        seed: int,
    ) -> None:
        self.model, self.loss, self.X, self.y = model, loss, X, y
        self.n = len(X)
        self.warm_start, self.num_starts, self.agreement, self.seed = warm_start, num_starts, agreement, seed
        self.probes = self.n if probes is None else min(probes, self.n)
        self.chunks = torch.arange(self.n).split(batch_size or max(self.n, 1))
        self.equilibria = Equilibria(model)
        self._last: dict[Key, Any] = {}
        self._before: dict[Key, Any] = {}

    def turn(self) -> None:
        """The next point lies in another direction than the one before: do not follow the line through the last two."""
        self._before = {}

    def __call__(self, number: int) -> Measured:
        """The loss at the present parameters of point `number`."""
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error", NotConvergedWarning)
            warnings.simplefilter("error", IllPosedWarning)
            try:
                return self._measured(number)
            except (IllPosed, IllPosedWarning):
                return self._lost(CellStatus.ILL_POSED)
            except (NotConverged, NotConvergedWarning):
                return self._lost(CellStatus.NOT_CONVERGED)

    def _lost(self, status: CellStatus) -> Measured:
        """A point without an equilibrium is no place to begin the next solve at."""
        self._last, self._before = {}, {}
        return Measured(math.nan, status, math.nan)

    def _measured(self, number: int) -> Measured:
        prediction = self._first()
        found = self.equilibria.found
        steps = _mean_steps(found)
        status = CellStatus.VALID
        if self.equilibria.layers and not proved_unique(self.model):
            if not found or self.num_starts == 0:
                status = CellStatus.UNCHECKED
            else:
                unique, extra = self._unique(found, number)
                steps += extra
                status = CellStatus.VALID if unique else CellStatus.NOT_UNIQUE
        if status == CellStatus.NOT_UNIQUE:
            return Measured(math.nan, self._lost(status).status, steps)
        self._keep(found)
        value = self._scalar(self.loss(prediction, self.y))
        if not math.isfinite(value):
            return Measured(math.nan, CellStatus.NOT_FINITE, steps)
        return Measured(value, status, steps)

    def _first(self) -> Any:
        """The prediction, warm if anything is known; a warm start that fails is no verdict, so the cold one is tried."""
        starts = self._starts()
        if starts:
            try:
                return self._forward(starts)
            except (NotConverged, NotConvergedWarning):
                self._last, self._before = {}, {}
        return self._forward(None)

    def _forward(self, starts: dict[Key, Any] | None) -> Any:
        self.equilibria.begin(starts)
        parts = [self.model(_part(self.X, rows)) for rows in self.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _starts(self) -> dict[Key, Any]:
        """The line through the last two points where there are two, else the last."""
        if not self.warm_start:
            return {}
        return {key: _line(self._before[key], last) if key in self._before else last for key, last in self._last.items()}

    def _keep(self, found: dict[Key, Solution]) -> None:
        self._before, self._last = self._last, {key: solution.value for key, solution in found.items()}

    def _unique(self, found: dict[Key, Solution], number: int) -> tuple[bool, float]:
        """Whether other starts lead to the same equilibria, and the evaluations a sample that the answer took."""
        generator = torch.Generator().manual_seed((self.seed + number) % 2**63)
        rows = torch.randperm(self.n, generator=generator)[: self.probes].sort().values
        if self.probes < self.n and len(self.chunks) == 1 and all(len(one.status) == self.n for one in found.values()):
            expected = {key: rows_of(one.value, rows) for key, one in found.items()}
            part = True
        else:
            expected, part = {key: one.value for key, one in found.items()}, False
        extra = 0.0
        for _ in range(self.num_starts):
            starts = {key: random_start(one, generator) for key, one in found.items()}
            if part:
                self.equilibria.begin({key: rows_of(start, rows) for key, start in starts.items()})
                self.model(_part(self.X, rows))
                extra += _mean_steps(self.equilibria.found) * len(rows) / self.n
            else:
                self._forward(starts)
                extra += _mean_steps(self.equilibria.found)
            again = self.equilibria.found
            if any(key not in again or not self._agree(key, expected[key], again[key]) for key in expected):
                return False, extra
        return True, extra

    def _agree(self, key: Key, expected: Any, again: Solution) -> bool:
        layer = self.equilibria.layers[key[0]]
        limit = agreement_of(layer, again.residual.dtype) if self.agreement is None else self.agreement
        return bool((distances(expected, again.value) <= limit).all())

    @staticmethod
    def _scalar(value: Any) -> float:
        if not isinstance(value, Tensor):
            raise InvalidType(f"loss(model(X), y) must be a tensor with one number; got {type(value).__name__}.")
        if value.numel() != 1:
            raise InvalidArgument(
                f"loss(model(X), y) must be one number; got shape {tuple(value.shape)}. Reduce it, e.g. with .mean()."
            )
        return float(value)


def _part(X: Any, rows: Tensor) -> Any:
    if len(rows) == len(X):
        return X
    return X[rows.to(X.device)]


def _line(before: Any, last: Any) -> Any:
    """last + (last - before), leaf by leaf; last itself where the shapes differ."""
    pairs = list(zip(leaves(before), leaves(last), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return last
    return rebuild(last, [torch.lerp(a, b, 2.0) for a, b in pairs])


def _mean_steps(found: dict[Key, Solution]) -> float:
    """Evaluations a sample, all layers together."""
    total = sum(float(one.num_steps.sum()) for one in found.values())
    samples: dict[int, int] = {}
    for (layer, _), one in found.items():
        samples[layer] = samples.get(layer, 0) + len(one.status)
    return total / max(samples.values()) if samples else 0.0
