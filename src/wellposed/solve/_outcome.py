"""When a sample is done, what is kept of it, and the norms by which both are decided."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

__all__ = ["Outcome", "Tolerance", "relative", "scaled_norm"]

#: What an outcome holds per sample, besides values.
NUMBERS = ("g_norm", "f_norm", "steps", "codes", "rate")


@dataclass(frozen=True)
class Tolerance:
    """A sample is done when |f(z) - z| <= max(rtol |f(z)|, atol)."""

    rtol: float
    atol: float

    def target(self, f_norm: Tensor) -> Tensor:
        """(batch,) the |f(z) - z| at which a sample is done."""
        target = f_norm * self.rtol
        return target.clamp_min_(self.atol) if self.atol > 0 else target


@dataclass
class Outcome:
    """Per-sample results, filled as samples leave.

    Attributes:
        value: (batch, features).
        g_norm, f_norm: (batch,) |f(z) - z| and |f(z)| at `value`.
        steps: (batch,) evaluations.
        codes: (batch,) of `Status`.
        rate: (batch,) mean factor by which |f(z) - z| changed per evaluation.
        image: (batch, features) f at `value`, if kept.
        history: [(samples, their evaluations, their relative residuals)] in order of time, if recorded.
        coupled: Rows were found to depend on each other, and the batch was solved as one sample.
        note: What an evaluation at `value` showed, if it did not confirm the answer: a sentence, else empty.
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

    def as_batch(self, shape: torch.Size) -> Outcome:
        """The outcome of one sample that is a whole batch: every row has the verdict of the batch."""
        rows = torch.arange(shape[0], device=self.value.device)
        history = [(rows, steps.expand(shape[0]), r.expand(shape[0])) for _, steps, r in self.history]
        image = None if self.image is None else self.image.reshape(shape)
        numbers = {name: getattr(self, name).expand(shape[0]).clone() for name in NUMBERS}
        return replace(self, value=self.value.reshape(shape), image=image, history=history, **numbers)

    def as_one(self) -> Outcome:
        """The inverse of `as_batch`."""
        numbers = {name: getattr(self, name)[:1] for name in NUMBERS}
        return replace(self, value=self.value.reshape(1, -1), image=None, history=[], **numbers)

    @classmethod
    def like(cls, z: Tensor, keep_image: bool) -> Outcome:
        """An outcome to be filled for the samples of z."""
        batch = z.shape[0]
        real = [torch.full((batch,), torch.nan, dtype=z.dtype, device=z.device) for _ in range(3)]
        whole = [torch.zeros(batch, dtype=torch.int64, device=z.device) for _ in range(2)]
        value = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        image = torch.empty_like(value) if keep_image else None
        return cls(value, real[0], real[1], whole[0], whole[1], real[2], image)


def scaled_norm(v: Tensor) -> Tensor:
    """(batch,) norms of rows, whatever their size: each is divided by its largest entry first."""
    largest = torch.linalg.vector_norm(v, torch.inf, dim=1) if v.shape[1] else v.new_zeros(v.shape[0])
    scale = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    return torch.linalg.vector_norm(v / scale.unsqueeze(1), dim=1) * scale


def relative(g_norm: Tensor, f_norm: Tensor) -> Tensor:
    """|f(z) - z| / |f(z)|, 0 where both are 0."""
    return torch.where(g_norm == 0, torch.zeros_like(g_norm), g_norm / f_norm)
