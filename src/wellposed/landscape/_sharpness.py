"""How sharp a minimum is: trace and top of the Hessian."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed.errors import InvalidArgument
from wellposed.landscape.hessian import HessianProduct, hessian_eigenvalues

__all__ = ["Sharpness", "TraceEstimate", "hessian_trace", "sharpness"]


@dataclass(frozen=True)
class TraceEstimate:
    """value: The mean over probes. standard_error: Of that mean, NaN for one probe. probes: How many."""

    value: float
    standard_error: float
    probes: int


def hessian_trace(product: HessianProduct, *, probes: int = 32, generator: torch.Generator | None = None) -> TraceEstimate:
    r"""tr H = E[s^T H s] over random signs s [hutchinson1989]: unbiased, variance 2 (|H|_F^2 - sum_i H_ii^2) a probe.

    Args:
        product: The Hessian.
        probes: How many s; one product each.
        generator: By default a new one with seed 0.
    """
    check_positive_integer("hessian_trace", "probes", probes)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    seen = []
    for _ in range(probes):
        signs = torch.randint(2, (product.size,), generator=generator, device=generator.device)
        s = (2 * signs - 1).to(product.gradient)
        seen.append(float(s @ product(s)))
    values = torch.tensor(seen, dtype=torch.float64)
    error = float(values.std()) / math.sqrt(probes) if probes > 1 else math.nan
    return TraceEstimate(float(values.mean()), error, probes)


@dataclass(frozen=True)
class Sharpness:
    """Curvature at a point.

    Attributes:
        loss, gradient_norm: There; at a minimum the latter is about 0.
        trace, trace_standard_error: Of the Hessian, by Hutchinson's estimate.
        eigenvalues: The largest, in descending order. residuals: |H v - lambda v| of each.
        parameters: How many there are.
    """

    loss: float
    gradient_norm: float
    trace: float
    trace_standard_error: float
    eigenvalues: tuple[float, ...]
    residuals: tuple[float, ...]
    parameters: int

    def to_dict(self) -> dict[str, Any]:
        """Plain Python."""
        plain = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Sharpness:
        """What `to_dict` wrote."""
        if wrong := set(cls.__dataclass_fields__) ^ set(record):
            raise InvalidArgument(f"This is no sharpness: fields {sorted(wrong)} are missing or unknown.")
        fields: dict[str, Any] = dict(record)
        fields |= {name: tuple(fields[name]) for name in ("eigenvalues", "residuals")}
        return cls(**fields)

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict())


def sharpness(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    X: Any,
    y: Any,
    *,
    num_eigenvalues: int = 2,
    probes: int = 32,
    generator: torch.Generator | None = None,
) -> Sharpness:
    """Trace and largest eigenvalues of the Hessian of loss(model(X), y) at the model's present parameters.

    Args:
        model, loss, X, y: As in `surface`.
        num_eigenvalues: How many of the largest.
        probes: Of the trace.
        generator: Of the probes and the start vector; by default a new one with seed 0.
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    product = HessianProduct(model, loss, X, y)
    trace = hessian_trace(product, probes=probes, generator=generator)
    spectrum = hessian_eigenvalues(product, num=num_eigenvalues, generator=generator)
    return Sharpness(
        loss=product.loss,
        gradient_norm=float(product.gradient.norm()),
        trace=trace.value,
        trace_standard_error=trace.standard_error,
        eigenvalues=tuple(spectrum.values.tolist()),
        residuals=tuple(spectrum.residuals.tolist()),
        parameters=product.size,
    )
