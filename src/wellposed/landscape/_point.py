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
    """value: The loss, NaN unless `status` is VALID or UNCHECKED. num_steps: Evaluations a sample. failed: Part of samples."""

    value: float
    status: CellStatus
    num_steps: float
    failed: float = 0.0


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
            except NotConvergedWarning:
                return self._lost(CellStatus.NOT_CONVERGED)
            except NotConverged as error:
                solution = error.solution
                part = math.nan if solution is None else float((~solution.converged).sum()) / self.n
                return self._lost(CellStatus.NOT_CONVERGED, failed=part)

    def _lost(self, status: CellStatus, *, num_steps: float = math.nan, failed: float = math.nan) -> Measured:
        """A point without an equilibrium is no place to begin the next solve at."""
        self._last, self._before = {}, {}
        return Measured(math.nan, status, num_steps, failed)

    def _measured(self, number: int) -> Measured:
        prediction = self._first()
        found = self.equilibria.found
        steps = _mean_steps(found)
        status, failed = CellStatus.VALID, 0.0
        if self.equilibria.layers and not proved_unique(self.model):
            if not found or self.num_starts == 0:
                status = CellStatus.UNCHECKED
            else:
                failed, extra = self._strayed(found, number)
                steps += extra
        if failed > 0:
            return self._lost(CellStatus.NOT_UNIQUE, num_steps=steps, failed=failed)
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

    def _strayed(self, found: dict[Key, Solution], number: int) -> tuple[float, float]:
        """The part of the checked samples that other starts led elsewhere, and the evaluations a sample that this took."""
        generator = torch.Generator().manual_seed((self.seed + number) % 2**63)
        rows = torch.randperm(self.n, generator=generator)[: self.probes].sort().values
        if self.probes < self.n and len(self.chunks) == 1 and all(len(one.status) == self.n for one in found.values()):
            expected = {key: rows_of(one.value, rows) for key, one in found.items()}
            part = True
        else:
            expected, part = {key: one.value for key, one in found.items()}, False
        extra = 0.0
        for _ in range(self.num_starts):
            starts = {key: random_start(value, generator) for key, value in expected.items()}
            if part:
                self.equilibria.begin(starts)
                self.model(_part(self.X, rows))
                extra += _mean_steps(self.equilibria.found) * len(rows) / self.n
            else:
                self._forward(starts)
                extra += _mean_steps(self.equilibria.found)
            again = self.equilibria.found
            # a call that did not come again cannot be compared, so nothing is known of its samples
            failed = max((self._apart(key, expected[key], again[key]) if key in again else 1.0) for key in expected)
            if failed > 0:
                return failed, extra
        return 0.0, extra

    def _apart(self, key: Key, expected: Any, again: Solution) -> float:
        """The part of the samples of one call that have two different results."""
        layer = self.equilibria.layers[key[0]]
        limit = agreement_of(layer, again.residual.dtype) if self.agreement is None else self.agreement
        return float((~(distances(expected, again.value) <= limit)).double().mean())

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
