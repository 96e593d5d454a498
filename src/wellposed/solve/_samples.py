"""The samples of one run: the active ones, when each is measured, and all results."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

#: Steps of a stage after which switching rules judge a sample: early, then ever more rarely.
JUDGED_AT = frozenset(5 * 2**k for k in range(20))
#: Steps at which every sample is measured.
FIXED = frozenset({0}) | JUDGED_AT
#: The part of the predicted steps that is taken before the next measurement: predictions err, and a
#: step too many costs more than a measurement too early.
PART = 0.95
#: The first measurement is not later than this: a nilpotent or very small W is done by then.
FIRST = 3
#: A residual is not expected to fall by more than this in a step.
FASTEST = 10.0
#: Two evaluations of a row that differ by more roundings of its largest entry are not the same.
ROUNDINGS = 32.0
#: Buffers kept for the next solve. A solve uses four; a second solve inside a cell may use as many.
MOST_KEPT = 8
#: What an outcome holds per sample, besides values.
NUMBERS = ("g_norm", "f_norm", "steps", "codes", "rate")

_local = threading.local()


@dataclass
class ActiveSamples:
    """Samples that are still being solved: their present point, and the best point of each."""

    index: Tensor  # (rows,) which samples of the whole batch
    z: Tensor
    fz: Tensor
    evaluations: Tensor  # (rows,)
    first_r: Tensor  # (rows,) |f(z) - z| and |f(z)| at the start of the run
    first_s: Tensor
    worst_r: Tensor  # (rows,) the largest |f(z) - z| at which the sample was judged
    best_z: Tensor
    best_r: Tensor  # (rows,) |f(z) - z| and |f(z)| there
    best_s: Tensor
    best_f: Tensor | None  # f(best_z), if it is kept

    @classmethod
    def at_start(cls, z: Tensor, fz: Tensor, keep_image: bool) -> ActiveSamples:
        """All samples of z, with f evaluated once."""
        batch = z.shape[0]
        once = torch.ones(batch, dtype=torch.int64, device=z.device)
        unknown = torch.full((batch,), torch.inf, dtype=z.dtype, device=z.device)
        index, worst = torch.arange(batch, device=z.device), torch.zeros_like(unknown)
        best_f = fz if keep_image else None
        return cls(index, z, fz, once, unknown, unknown, worst, z, unknown, unknown, best_f)

    def take(self, rows: Tensor) -> ActiveSamples:
        """Some of the rows; a tensor in two fields is copied once."""
        taken: dict[int, Any] = {id(None): None}
        parts: dict[str, Any] = {}
        for name, value in vars(self).items():
            if id(value) not in taken:
                taken[id(value)] = value.index_select(0, rows)
            parts[name] = taken[id(value)]
        return ActiveSamples(**parts)

    @staticmethod
    def cat(parts: list[ActiveSamples]) -> ActiveSamples:
        """All samples of the parts, in the order of the batch."""
        columns = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
        whole: dict[str, Any] = {name: None if v[0] is None else torch.cat(v) for name, v in columns.items()}
        samples = ActiveSamples(**whole)
        return samples.take(samples.index.argsort())

    def keep_worst(self, r: Tensor, due: Tensor | None) -> None:
        """Remembers the largest residual at which each sample was judged."""
        worst = torch.maximum(self.worst_r, r)
        self.worst_r = worst if due is None else torch.where(due, worst, self.worst_r)

    def keep_first(self, r: Tensor, s: Tensor) -> None:
        """Remembers the norms at the start of the run, through all its stages."""
        self.first_s = torch.where(self.first_r.isinf(), s, self.first_s)
        self.first_r = torch.where(self.first_r.isinf(), r, self.first_r)

    def keep_best(self, r: Tensor, s: Tensor, better: Tensor, idle: Tensor | None) -> None:
        """Remembers the present points that are better than any before, except idle rows."""
        if bool((better if idle is None else better | idle).all()):  # by reference: no copy
            self.best_z, self.best_r, self.best_s = self.z, r, s
            self.best_f = None if self.best_f is None else self.fz
            return
        self.best_z = torch.where(better.unsqueeze(1), self.z, self.best_z)
        if self.best_f is not None:
            self.best_f = torch.where(better.unsqueeze(1), self.fz, self.best_f)
        self.best_r = torch.where(better, r, self.best_r)
        self.best_s = torch.where(better, s, self.best_s)


@dataclass
class Outcome:
    """Results of all samples, filled while samples leave the loop.

    Attributes:
        value: (batch, features).
        g_norm, f_norm: (batch,) |f(z) - z| and |f(z)| at `value`.
        steps: (batch,) evaluations.
        codes: (batch,) of `Status`.
        rate: (batch,) mean factor by which |f(z) - z| changed per evaluation.
        image: (batch, features) f at `value`, if kept.
        history: [(samples, their evaluations, their relative residuals)] in time order, if
            recorded.
        coupled: Rows were found to depend on each other, and the batch was solved as one sample.
        note: A sentence if an evaluation at `value` did not confirm the answer; else empty.
    """

    value: Tensor
    g_norm: Tensor
    f_norm: Tensor
    steps: Tensor
    codes: Tensor
    rate: Tensor
    image: Tensor | None = None
    history: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    coupled: bool = False
    note: str = ""

    @classmethod
    def like(cls, z: Tensor, keep_image: bool) -> Outcome:
        """An outcome to be filled for the samples of z."""
        batch = z.shape[0]
        real = [torch.full((batch,), torch.nan, dtype=z.dtype, device=z.device) for _ in range(3)]
        whole = [torch.zeros(batch, dtype=torch.int64, device=z.device) for _ in range(2)]
        value = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        image = torch.empty_like(value) if keep_image else None
        return cls(value, real[0], real[1], whole[0], whole[1], real[2], image)

    def as_batch(self, shape: torch.Size) -> Outcome:
        """From one sample that is a whole batch: every row has the status of the batch."""
        rows = torch.arange(shape[0], device=self.value.device)
        history = [(rows, steps.expand(shape[0]), r.expand(shape[0])) for _, steps, r in self.history]
        image = None if self.image is None else self.image.reshape(shape)
        numbers = {name: getattr(self, name).expand(shape[0]).clone() for name in NUMBERS}
        return replace(self, value=self.value.reshape(shape), image=image, history=history, **numbers)

    def as_one(self) -> Outcome:
        """The inverse of `as_batch`."""
        numbers = {name: getattr(self, name)[:1] for name in NUMBERS}
        return replace(self, value=self.value.reshape(1, -1), image=None, history=[], **numbers)


class ResidualSchedule:
    """The steps at which the samples of one stage are measured.

    A residual costs three passes over the state, about a fifth of a product of 500 units. Plain
    steps of a map that is `steady` are therefore taken without one where it could decide nothing.
    All samples are measured at fixed steps; in between, each at the step that its own residuals
    predict, so its answer does not depend on its neighbours.

    Args:
        rows: How many samples.
        device: Their device.
        ahead: Whether steps may be taken without a measurement; if not, all are due at every step.
    """

    def __init__(self, rows: int, device: torch.device, *, ahead: bool) -> None:
        self._ahead = ahead
        self._due = torch.zeros(rows if ahead else 0, dtype=torch.int64, device=device)
        self._before: tuple[Tensor, Tensor] | None = None  # (rows,) step and residual of the last measurement

    def due(self, count: int) -> Tensor | None:
        """(rows,) bool: the samples judged after `count` steps; None for all."""
        return None if not self._ahead or count in FIXED else self._due <= count

    def update(self, count: int, r: Tensor, target: Tensor, due: Tensor | None) -> None:
        """Sets the next measurement of the samples that were due.

        Args:
            count: Steps taken.
            r: (rows,) residuals. target: (rows,) those at which a sample is done.
            due: From `due(count)`.
        """
        if not self._ahead:
            return
        now = torch.full_like(self._due, count)
        if self._before is None:
            # no factor is known yet: measure a near start soon, and maps that end after a few steps
            first = (torch.log(r / target) / math.log(FASTEST)).nan_to_num(nan=1.0, posinf=1.0).clamp(1, FIRST)
            self._before, self._due = (now, r), now + first.to(torch.int64)
            return
        then, before = self._before
        per_step = torch.log(r / before) / (now - then)  # log of the factor
        wanted = PART * torch.log(target / r) / per_step
        # NaN, a factor of 1 or more, or a target already met: measure again at once
        more = torch.where((per_step < 0) & (wanted > 1), wanted, 1.0).clamp_max(1e6).to(torch.int64)
        if due is None:
            self._before, self._due = (now, r), now + more
        else:
            self._before = torch.where(due, now, then), torch.where(due, r, before)
            self._due = torch.where(due, now + more, self._due)

    def next_due(self, count: int, idle: Tensor | None) -> int:
        """The first step from `count` on at which a sample is due.

        Args:
            count: Steps taken, the last of them not yet measured.
            idle: (rows,) samples that have left already, or None.
        """
        if not self._ahead:
            return count
        due = self._due if idle is None else self._due[~idle]
        last = max(count, int(due.min())) if due.shape[0] else count
        return next((step for step in range(count, last) if step in FIXED), last)

    def take(self, rows: Tensor) -> None:
        """Keeps only these rows."""
        if self._ahead:
            self._due = self._due[rows]
            self._before = None if self._before is None else (self._before[0][rows], self._before[1][rows])


def take_buffer(like: Tensor) -> Tensor:
    """A buffer of the shape, dtype and device of `like`, with arbitrary content.

    A fresh tensor of a few megabytes costs a page fault for every 4 KiB on a processor, some per
    cent of a short solve. Buffers of one solve are kept for the next one of the same thread: a few,
    of the size asked for last. (Allocators of other devices do this.)
    """
    kept = _kept()
    for i, buffer in enumerate(kept):
        if buffer.shape == like.shape and buffer.dtype == like.dtype and buffer.device == like.device:
            return kept.pop(i)
    kept.clear()  # their size is no longer used
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def give_buffer(buffer: Tensor) -> None:
    """Returns a buffer; one made in inference mode could not be written to outside."""
    kept = _kept()
    if buffer.device.type == "cpu" and not buffer.is_inference() and len(kept) < MOST_KEPT:
        kept.append(buffer)


def _kept() -> list[Tensor]:
    if not hasattr(_local, "kept"):
        _local.kept = []
    kept: list[Tensor] = _local.kept
    return kept


def smallest_norm(dtype: torch.dtype) -> float:
    """Norms below have lost digits to underflow."""
    return float(torch.finfo(dtype).tiny) ** 0.5 * 1e3


def scaled_norm(v: Tensor) -> Tensor:
    """(batch,) norms of rows of any size: each is divided by its largest entry first."""
    largest = torch.linalg.vector_norm(v, torch.inf, dim=1) if v.shape[1] else v.new_zeros(v.shape[0])
    scale = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    return torch.linalg.vector_norm(v / scale.unsqueeze(1), dim=1) * scale


def relative(g_norm: Tensor, f_norm: Tensor) -> Tensor:
    """|f(z) - z| / |f(z)|, 0 where both are 0."""
    return torch.where(g_norm == 0, torch.zeros_like(g_norm), g_norm / f_norm)


def differs(a: Tensor, b: Tensor) -> Tensor:
    """(batch,) whether rows differ beyond rounding; False where b is not finite."""
    if b.shape[1] == 0:
        return torch.zeros(b.shape[0], dtype=torch.bool, device=b.device)
    scale = torch.where(b.isfinite(), b, 0.0).abs().amax(dim=1, keepdim=True)
    same = (a - b).abs() <= ROUNDINGS * torch.finfo(b.dtype).eps * scale
    return ~(same | ~b.isfinite()).all(dim=1)
