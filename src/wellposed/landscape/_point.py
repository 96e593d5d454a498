"""The loss at one point of parameters, and what is known about its equilibria."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval, check_positive_integer
from wellposed._tree import leaves, rebuild
from wellposed.errors import IllPosed, IllPosedWarning, InvalidArgument, InvalidType, NotConverged, NotConvergedWarning
from wellposed.landscape._model import (
    Equilibria,
    Key,
    agreement_of,
    distances,
    proved_unique,
    random_start,
    rows_of,
    without_proof,
)
from wellposed.landscape._predictor import Index, Predictor
from wellposed.landscape.record import CellStatus
from wellposed.solve import Solution


@dataclass(frozen=True)
class Measured:
    """The loss (NaN unless VALID, UNCHECKED or NOT_PROVED), evaluations and failed part of
    samples."""

    value: float
    status: CellStatus
    num_steps: float
    failed: float = 0.0


@dataclass(frozen=True)
class Checks:
    """How equilibria are found and checked: the options of `surface` with these names."""

    warm_start: bool
    num_starts: int
    probes: int | None
    agreement: float | None
    batch_size: int | None

    def __post_init__(self) -> None:
        if isinstance(self.num_starts, bool) or not isinstance(self.num_starts, int) or self.num_starts < 0:
            raise InvalidArgument(
                f"The 'num_starts' parameter of surface must be an integer of at least 0. Got {self.num_starts!r} instead."
            )
        for name, value in (("probes", self.probes), ("batch_size", self.batch_size)):
            if value is not None:
                check_positive_integer("surface", name, value)
        if self.agreement is not None:
            check_interval("surface", "agreement", self.agreement, low=0.0, high=1.0, closed="neither")


class PointLoss:
    """loss(model(X), y) at the present parameters, inside `preserved` and `watched`.

    Args:
        model, loss, X, y: As in `surface`.
        checks: How equilibria are checked.
        shape: Of the grid.
        seed: Of the random starts and of the probed samples; each point has its draw, by its
            number.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        X: Any,
        y: Any,
        *,
        checks: Checks,
        shape: tuple[int, ...],
        seed: int,
    ) -> None:
        self.model, self.loss, self.X, self.y, self.checks, self.seed = model, loss, X, y, checks, seed
        self.n, self.columns = len(X), shape[-1]
        self.probes = self.n if checks.probes is None else min(checks.probes, self.n)
        self.chunks = torch.arange(self.n).split(checks.batch_size or max(self.n, 1))
        self.equilibria = Equilibria(model)
        self._predictor = Predictor(self.columns)
        self._suspects = torch.empty(0, dtype=torch.int64)  # samples that had several equilibria at some point

    def __call__(self, index: tuple[int, ...]) -> Measured:
        """The loss at the present parameters, which are those of the point `index`."""
        place: Index = (0, index[0]) if len(index) == 1 else (index[0], index[1])
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error", NotConvergedWarning)
            warnings.simplefilter("error", IllPosedWarning)
            try:
                return self._judged(place)
            except (IllPosed, IllPosedWarning):
                return self._lost(CellStatus.ILL_POSED)
            except NotConvergedWarning:
                return self._lost(CellStatus.NOT_CONVERGED)
            except NotConverged as error:
                solution = error.solution
                part = math.nan if solution is None else float((~solution.converged).sum()) / self.n
                return self._lost(CellStatus.NOT_CONVERGED, failed=part)

    def _judged(self, place: Index) -> Measured:
        """The measurement; without the model's own bound where that proves nothing."""
        try:
            return self._measured(place)
        except (IllPosed, IllPosedWarning):
            with without_proof(self.model):
                found = self._measured(place)
        if found.status in (CellStatus.VALID, CellStatus.UNCHECKED):
            return replace(found, status=CellStatus.NOT_PROVED)
        return found

    @staticmethod
    def _lost(status: CellStatus, *, num_steps: float = math.nan, failed: float = math.nan) -> Measured:
        """A point without an equilibrium; no other solve starts from it."""
        return Measured(math.nan, status, num_steps, failed)

    def _measured(self, place: Index) -> Measured:
        prediction = self._first(place)
        found = self.equilibria.found
        steps = _mean_steps(found)
        status, failed = CellStatus.VALID, 0.0
        if self.equilibria.layers and not proved_unique(self.model):
            if not found or self.checks.num_starts == 0:
                status = CellStatus.UNCHECKED
            else:
                failed, extra = self._strayed(found, place[0] * self.columns + place[1])
                steps += extra
        if failed > 0:
            return self._lost(CellStatus.NOT_UNIQUE, num_steps=steps, failed=failed)
        if self.checks.warm_start:
            self._predictor.keep(place, {key: solution.value for key, solution in found.items()})
        value = self._scalar(self.loss(prediction, self.y))
        if not math.isfinite(value):
            return Measured(math.nan, CellStatus.NOT_FINITE, steps)
        return Measured(value, status, steps)

    def _first(self, place: Index) -> Any:
        """The prediction, from a warm start if there is one; if that fails, from zeros."""
        starts = self._predictor.predict(place, 1 if place[0] % 2 == 0 else -1)
        if starts:
            try:
                return self._forward(starts)
            except (NotConverged, NotConvergedWarning):
                pass
        return self._forward(None)

    def _forward(self, starts: dict[Key, Any] | None) -> Any:
        self.equilibria.begin(starts)
        parts = [self.model(_part(self.X, rows)) for rows in self.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _strayed(self, found: dict[Key, Solution], number: int) -> tuple[float, float]:
        """The part of the checked samples that other starts led elsewhere, and its cost."""
        generator = torch.Generator().manual_seed((self.seed + number) % 2**63)
        drawn = torch.randperm(self.n, generator=generator)[: self.probes]
        rows = torch.cat((drawn, self._suspects)).unique()
        expected = self._of_samples(found, rows) if len(rows) < self.n else None
        part = expected is not None
        if expected is None:
            expected = {key: one.value for key, one in found.items()}
        extra = 0.0
        for _ in range(self.checks.num_starts):
            starts = {key: random_start(value, generator) for key, value in expected.items()}
            if part:
                self.equilibria.begin(starts)
                self.model(_part(self.X, rows))
            else:
                self._forward(starts)
            again = self.equilibria.found
            extra += _mean_steps(again) * (len(rows) / self.n if part else 1.0)
            # a call that did not come again cannot be compared, so nothing is known of its samples
            if any(key not in again for key in expected):
                return 1.0, extra
            apart = {key: self._apart(key, value, again[key]) for key, value in expected.items()}
            failed = max(float(strayed.double().mean()) for strayed in apart.values())
            if failed > 0:
                if part:
                    self._suspect(rows, apart)
                return failed, extra
        return 0.0, extra

    def _of_samples(self, found: dict[Key, Solution], rows: Tensor) -> dict[Key, Any] | None:
        """What these samples alone should give; None if calls and samples do not correspond."""
        calls = [sum(layer == number for layer, _ in found) for number in range(len(self.equilibria.layers))]
        chunks = self.chunks
        if any(count % len(chunks) for count in calls):
            return None
        pieces: dict[Key, list[Any]] = {}
        for (layer, call), one in sorted(found.items(), key=lambda item: item[0]):
            each = calls[layer] // len(chunks)
            chunk = chunks[call // each]
            if len(one.status) != len(chunk):
                return None
            here = rows[(rows >= chunk[0]) & (rows <= chunk[-1])] - chunk[0]
            pieces.setdefault((layer, call % each), []).append(rows_of(one.value, here))
        return {key: _joined(parts) for key, parts in pieces.items()}

    def _suspect(self, rows: Tensor, apart: dict[Key, Tensor]) -> None:
        """Samples with several equilibria here are checked at all points that follow."""
        found = torch.stack([strayed.cpu() for strayed in apart.values()]).any(dim=0)
        self._suspects = torch.cat((rows[found], self._suspects)).unique()[: self.probes]

    def _apart(self, key: Key, expected: Any, again: Solution) -> Tensor:
        """(samples,) which of one call have two different results."""
        layer = self.equilibria.layers[key[0]]
        limit = agreement_of(layer, again.residual.dtype) if self.checks.agreement is None else self.checks.agreement
        return ~(distances(expected, again.value) <= limit)

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


def _joined(parts: list[Any]) -> Any:
    """Samples of several chunks as one state."""
    if len(parts) == 1:
        return parts[0]
    return rebuild(parts[0], [torch.cat(pieces) for pieces in zip(*map(leaves, parts), strict=True)])


def _mean_steps(found: dict[Key, Solution]) -> float:
    """Evaluations a sample, all layers together."""
    total = sum(float(one.num_steps.sum()) for one in found.values())
    samples: dict[int, int] = {}
    for (layer, _), one in found.items():
        samples[layer] = samples.get(layer, 0) + len(one.status)
    return total / max(samples.values()) if samples else 0.0
