"""The Hessian of a loss: products, largest eigenvalues, trace, directions of curvature."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed.errors import InvalidArgument, NotConverged
from wellposed.landscape._model import check_rows, strict, trained
from wellposed.landscape.directions import unflatten

#: Up to this many parameters the whole Hessian is formed: a product a column, and no eigenvalue can
#: be missed.
DENSE_SIZE = 64


class HessianProduct:
    r"""v -> H v, the Hessian of loss(model(X), y) in the trained parameters, by <gradient, v>.

    Each product costs one more backward pass through the gradient, which is recorded once.
    Equilibria are differentiated twice by the implicit function theorem (`ImplicitGradient`); at
    kinks of a ReLU the second derivative is that of the piece that autograd picks. Solves that fail
    raise `NotConverged`.

    The graph of the gradient is that of the parameters at construction; make a new one after they
    change.

    Args:
        model: Any module, evaluated in evaluation mode.
        loss: `loss(model(X), y)`, one number.
        X, y: The data.

    Attributes:
        size: Number of trained parameters. loss: The value. gradient: (size,).
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], X: Any, y: Any) -> None:
        check_rows(X, y)
        self._model = model
        self._parameters = list(trained(model).values())
        with strict(model), torch.enable_grad():
            value = loss(model(X), y)
            parts = torch.autograd.grad(value, self._parameters, create_graph=True, allow_unused=True)
        zeros = [torch.zeros_like(p) for p in self._parameters]
        self._gradient = torch.cat(
            [(zero if part is None else part).reshape(-1) for part, zero in zip(parts, zeros, strict=True)]
        )
        self.size = self._gradient.numel()
        self.loss = float(value.detach())
        self.gradient = self._gradient.detach()

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradient."""
        return self._gradient.dtype

    def __call__(self, v: Tensor) -> Tensor:
        """(size,) -> (size,) H v, without a graph."""
        if tuple(v.shape) != (self.size,):
            raise InvalidArgument(f"HessianProduct takes a vector of shape ({self.size},); got {tuple(v.shape)}.")
        if not self._gradient.requires_grad:
            return torch.zeros_like(v)
        with strict(self._model):
            parts = torch.autograd.grad(
                self._gradient, self._parameters, v.to(self._gradient), retain_graph=True, allow_unused=True
            )
        rows = [torch.zeros_like(p) if part is None else part for part, p in zip(parts, self._parameters, strict=True)]
        return torch.cat([row.detach().reshape(-1) for row in rows]).to(v.dtype)

    def dense(self) -> Tensor:
        """(size, size) H, one product a column."""
        eye = torch.eye(self.size, dtype=self.dtype, device=self._gradient.device)
        return torch.stack([self(e) for e in eye], dim=1)


@dataclass(frozen=True, eq=False)
class HessianSpectrum:
    """Some of the largest eigenvalues.

    Attributes:
        values: (k,) in descending order. vectors: (k, size) unit eigenvectors.
        residuals: (k,) |H v - lambda v|; some true eigenvalue lies that near to each value.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor


def hessian_eigenvalues(
    product: HessianProduct,
    *,
    num: int = 2,
    rtol: float = 1e-6,
    max_restarts: int = 100,
    generator: torch.Generator | None = None,
) -> HessianSpectrum:
    r"""The `num` algebraically largest eigenvalues by restarted Lanczos (ARPACK [lehoucq1998]).

    Small Hessians are formed as a whole. Lanczos may miss copies of a multiple eigenvalue; the
    residuals bound how far each value is from some eigenvalue, not that none was missed.

    Args:
        product: The Hessian.
        num: How many, fewer than there are parameters.
        rtol: Relative accuracy asked of ARPACK.
        max_restarts: Before `NotConverged` is raised.
        generator: Of the start vector; by default a new one with seed 0.
    """
    check_positive_integer("hessian_eigenvalues", "num", num)
    if num >= product.size:
        raise InvalidArgument(f"hessian_eigenvalues needs num below the number of parameters, {product.size}; got {num}.")
    if product.size <= DENSE_SIZE:
        H = product.dense().double().cpu()
        values, vectors = np.linalg.eigh(((H + H.mT) / 2).numpy())
    else:
        from scipy.sparse.linalg import (  # here: SciPy takes longer to import than the library
            ArpackError,
            LinearOperator,
            eigsh,
        )

        generator = torch.Generator().manual_seed(0) if generator is None else generator
        start = torch.randn(product.size, generator=generator, dtype=torch.float64, device=generator.device).cpu().numpy()
        operator = LinearOperator((product.size, product.size), matvec=_numpy(product), dtype=np.float64)
        tolerance = max(rtol, 10 * torch.finfo(product.dtype).eps)
        try:
            values, vectors = eigsh(operator, k=num, which="LA", v0=start, tol=tolerance, maxiter=max_restarts)
        except ArpackError as error:
            raise NotConverged(
                f"hessian_eigenvalues: ARPACK gave up after max_restarts={max_restarts} ({error}). "
                f"Raise it, or loosen rtol={rtol:.0e}."
            ) from error
    # copies: an array of one entry counts as contiguous with its negative stride, which torch does
    # not take
    top = torch.from_numpy(values[::-1][:num].copy())
    rows = torch.from_numpy(vectors.T[::-1][:num].copy())
    images = torch.stack([product(row.to(product.dtype)).double().cpu() for row in rows])
    residuals = torch.linalg.vector_norm(images - top.unsqueeze(1) * rows, dim=1)
    return HessianSpectrum(top, rows, residuals)


def hessian_directions(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    X: Any,
    y: Any,
    *,
    num: int = 2,
    generator: torch.Generator | None = None,
) -> list[dict[str, Tensor]]:
    """Unit directions of the largest curvature, the largest first.

    Args:
        model, loss, X, y: As in `surface`.
        num: How many.
        generator: Of the start vector.
    """
    spectrum = hessian_eigenvalues(HessianProduct(model, loss, X, y), num=num, generator=generator)
    vectors = spectrum.vectors
    # The sign of an eigenvector is free; the largest entry is made positive so that a picture can
    # be repeated.
    vectors = vectors * vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True)).sign()
    return [unflatten(vector, trained(model)) for vector in vectors]


def _numpy(product: HessianProduct) -> Callable[[np.ndarray], np.ndarray]:
    def of(v: np.ndarray) -> np.ndarray:
        image = product(torch.tensor(v.reshape(-1), dtype=product.dtype))
        result: np.ndarray = image.double().cpu().numpy()
        if not np.isfinite(result).all():
            raise InvalidArgument("The Hessian product has NaN or infinite entries; look at the loss and its gradient first.")
        return result

    return of


@dataclass(frozen=True)
class TraceEstimate:
    """The mean over probes, its standard error (NaN for one probe), and the number of probes."""

    value: float
    standard_error: float
    probes: int


def hessian_trace(product: HessianProduct, *, probes: int = 32, generator: torch.Generator | None = None) -> TraceEstimate:
    r"""tr H = E[s^T H s] over random signs s [hutchinson1989]: unbiased, variance 2
    (|H|_F^2 - sum_i H_ii^2) a probe.

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
            raise InvalidArgument(f"This is not a sharpness: fields {sorted(wrong)} are missing or unknown.")
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
    """Trace and largest eigenvalues of the Hessian of loss(model(X), y).

    Args:
        model, loss, X, y: As in `surface`.
        num_eigenvalues: How many of the largest.
        probes: Of the trace.
        generator: Of the probes and the start vector; by default a new one with seed 0.

    Examples:
        >>> import torch, wellposed as wp
        >>> model, X = torch.nn.Linear(3, 1, bias=False), torch.diag(torch.tensor([3.0, 2.0, 1.0]))
        >>> result = wp.landscape.sharpness(model, lambda y, t: (y - t).square().sum() / 2, X, torch.ones(3, 1))
        >>> [round(value, 3) for value in result.eigenvalues]  # the squares of 3 and 2
        [9.0, 4.0]
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
