"""A certificate with a verdict for every sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wellposed.certify.certificate import Certificate, Verdict

_NUMBERS = ("error_bound", "gradient_error", "parameter_error", "input_error", "radius")


def _none() -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class LocalCertificate(Certificate):
    """What is proved about the equilibrium of each sample, at the z that the layer finds.

    All numbers are about the map of the stored weights and of x in exact arithmetic. For a layer
    with coupled rows they are about the whole batch, and the same for every row.

    Attributes:
        verdicts: (batch,) CERTIFIED: exactly one equilibrium lies in a ball around z, or around a
            point near it. VIOLATED: the sample has two different equilibria, proved; the bounds are
            then about the one near z. UNDECIDED: `reasons` says why.
        error_bound: (batch,) float64 upper bounds of |z - z*|, Euclidean; infinite where nothing is
            proved.
        gradient_error: (batch,) upper bounds of |u - u*|/|v| for all cotangents v: u solves
            (I - J)^T u = v with the derivative J at z, u* with that at z*. What the solver of the
            adjoint leaves comes on top. Infinite where a part of the cell that depends on z is
            hidden from derivatives (detach, no_grad), or a hook of the cell may change them.
        parameter_error: (batch,) the same for the gradient with respect to all parameters together,
            as they enter the cell (of a parametrization, what it gives): |g - g*|/|v|. Infinite
            where the derivative is too large to be bounded, above a million entries, or not known.
        input_error: (batch,) the same for the gradient with respect to x.
        radius: (batch,) every entry of z may change by this, and there is still exactly one
            equilibrium; 0 if that is proved only in a ball without z.
        reasons: (batch,) why a sample is undecided; empty if it is not.
    """

    verdicts: tuple[Verdict, ...] = ()
    error_bound: Tensor = field(default_factory=_none, compare=False)
    gradient_error: Tensor = field(default_factory=_none, compare=False)
    parameter_error: Tensor = field(default_factory=_none, compare=False)
    input_error: Tensor = field(default_factory=_none, compare=False)
    radius: Tensor = field(default_factory=_none, compare=False)
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        plain = super().to_dict()
        for name in _NUMBERS:
            numbers = getattr(self, name).tolist()
            plain[name] = [number if math.isfinite(number) else str(number) for number in numbers]
        plain["verdicts"] = [verdict.value for verdict in self.verdicts]
        plain["reasons"] = list(self.reasons)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> LocalCertificate:
        own = {*_NUMBERS, "verdicts", "reasons"}
        base = Certificate.from_dict({name: value for name, value in plain.items() if name not in own})
        numbers = {name: torch.tensor([float(number) for number in plain[name]], dtype=torch.float64) for name in _NUMBERS}
        verdicts = tuple(map(Verdict, plain["verdicts"]))
        return cls(**{**vars(base), **numbers, "verdicts": verdicts, "reasons": tuple(plain["reasons"])})
