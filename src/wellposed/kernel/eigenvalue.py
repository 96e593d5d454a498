"""The least eigenvalue of a tangent kernel, with an error bar and a rigorous lower bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.kernel._blocks import TOTAL, AbstractRoad, Layout
from wellposed.kernel._hadamard import ClosedRoad
from wellposed.kernel._inputs import check_option
from wellposed.kernel._lanczos import extreme_eigenvector
from wellposed.kernel._memory import available_memory
from wellposed.kernel._storage import write_block
from wellposed.kernel._structural import structural_lower
from wellposed.kernel.empirical import choose_road
from wellposed.kernel.operator import TangentKernel
from wellposed.linalg import least_eigenvalue_lower
from wellposed.linalg.scaling import exponent_of, ldexp, ldexp_down, ldexp_up
from wellposed.linalg.verified_cholesky import least_eigenvalue_lower_by_cholesky, shifted_factor

__all__ = ["LeastEigenvalue", "least_eigenvalue"]

METHODS = ("auto", "dense", "cholesky", "lanczos")
#: Up to here a dense eigendecomposition takes a second or two.
DENSE_SIZE = 1000
#: Matrices of n^2 float64 that the Cholesky road holds at once: kernel, shifted copy, factor.
CHOLESKY_MATRICES = 3


@dataclass(frozen=True)
class LeastEigenvalue:
    """The least eigenvalue of a kernel.

    Attributes:
        value: The approximation, a Rayleigh quotient (so not below the least eigenvalue, up to rounding) except for the dense
            method, where it is the eigensolver's.
        lower: Rigorous lower bound on the least eigenvalue; see `least_eigenvalue` for what it accounts for.
        error: |K q - value q| for the unit vector q found: some eigenvalue is that near to `value`.
        method: "dense", "cholesky" or "lanczos".
    """

    value: float
    lower: float
    error: float
    method: str


def least_eigenvalue(
    model: nn.Module | Tensor, X: Tensor | None = None, *, method: str = "auto", max_steps: int = 300, memory: int | None = None
) -> LeastEigenvalue:
    r"""lambda_min of the tangent kernel of a model on X, or of a kernel matrix.

    | method | value | lower bound | cost |
    | --- | --- | --- | --- |
    | "dense" | symmetric eigensolver | what the eigenvectors leave unexplained (`linalg.bounds`) | O(n^3), large |
    | "cholesky" | Lanczos on the inverse | Cholesky of K - c I, checked (`linalg.verified_cholesky`) | O(n^3), small |
    | "lanczos" | Lanczos on products K v | Schur's product theorem, from the features; else 0 | no n^2 memory |

    "auto" takes the first whose size fits: dense up to n = 1000, Cholesky where three (n, n) matrices fit into the memory. The
    bound for a matrix is by Cholesky where the value is by Lanczos.

    What the bound is about. For a *matrix* argument: the matrix as stored. For a *model*: the kernel that its features (closed
    form) or gradients (generic), as computed, have in exact arithmetic. The products are made in float64 whatever the dtype of
    the model, an upper bound of their rounding error is subtracted (sum_t |c_t| gamma_k ||a_t|| ||b_t||, see `rounding_upper`),
    and the bound is at least 0, since that kernel is a Gram matrix. Not covered is how far the features are from those of the
    exact equilibrium: that is up to the tolerance of the model's solves.

    Args:
        model: As in `tangent_kernel`; or an (n, n) kernel, symmetric up to rounding.
        X: (n, ...) inputs; None with a kernel.
        method: See above.
        max_steps: Products that "lanczos" may take; as many vectors are held. If they do not suffice the error bar is large,
            not wrong.
        memory: Bytes that "auto" may use; what is available if not given.
    """
    check_option(method, METHODS, "method", "least_eigenvalue")
    if isinstance(model, Tensor):
        if X is not None:
            raise InvalidArgument("least_eigenvalue: a kernel matrix needs no X. Give a model and X, or the matrix alone.")
        K = _checked_kernel(model)
        method = _choose(method, K.shape[0], memory, K.device)
        return _of_matrix(K, method, max_steps, rounding=0.0, floor=-math.inf)
    if X is None:
        raise InvalidArgument("least_eigenvalue: X is missing. Give a model and X, or a kernel matrix alone.")
    road = choose_road(model, X, dtype=torch.float64, function="least_eigenvalue")
    method = _choose(method, road.size * road.outputs, memory, road.device)
    if method == "lanczos":
        kernel = TangentKernel.of_road(road)
        diagonal = kernel.diagonal()
        _check_finite(diagonal)
        lower = structural_lower(road) if isinstance(road, ClosedRoad) else 0.0
        return _of_operator(kernel, exponent_of(diagonal), lower, max_steps)
    K = _dense(road).cpu()
    _check_finite(K)
    return _of_matrix(K, method, max_steps, rounding=road.rounding_upper(float(K.trace())), floor=0.0)


def _choose(method: str, size: int, memory: int | None, device: torch.device) -> str:
    if method == "auto":
        have = available_memory(device) if memory is None else memory
        fits = have is None or CHOLESKY_MATRICES * 8 * size**2 <= have
        method = "dense" if size <= DENSE_SIZE and fits else "cholesky" if fits else "lanczos"
    return method


def _checked_kernel(K: Tensor) -> Tensor:
    if not K.is_floating_point() or K.dim() != 2 or K.shape[0] != K.shape[1] or K.numel() == 0:
        raise InvalidArgument(
            f"least_eigenvalue: a kernel must be a square real matrix, got shape {tuple(K.shape)} and {K.dtype}."
        )
    A = K.detach().to("cpu", torch.float64)
    _check_finite(A)
    # halves: the difference of two large entries may overflow
    asymmetry, largest = 2.0 * float((A / 2.0 - A.mT / 2.0).abs().max()), float(A.abs().max())
    allowed = min(100.0 * torch.finfo(K.dtype).eps * math.sqrt(K.shape[0]), 1e-2)
    if asymmetry > allowed * largest:
        raise InvalidArgument(
            f"least_eigenvalue: a kernel must be symmetric up to rounding, got max|K - K^T| = {asymmetry:.3g} with "
            f"max|K| = {largest:.3g}. Pass (K + K.T)/2 if that is meant."
        )
    return A


def _check_finite(K: Tensor) -> None:
    if not bool(torch.isfinite(K).all()):
        raise InvalidArgument("least_eigenvalue: the kernel has NaN or infinite entries. Look for the step that produced them.")


def _dense(road: AbstractRoad) -> Tensor:
    layout = Layout()
    K = torch.empty(road.shape(layout), dtype=road.dtype, device=road.device)
    with torch.no_grad():
        for block in road.blocks(layout):
            write_block(K, block.parts[TOTAL], block.rows, block.columns, symmetric=True)
    return K[0]


def _of_matrix(K: Tensor, method: str, max_steps: int, *, rounding: float, floor: float) -> LeastEigenvalue:
    """`rounding` is subtracted from the bound, which is at least `floor`."""
    largest = float(K.abs().max())
    if largest == 0.0:
        return LeastEigenvalue(0.0, max(floor, -rounding), 0.0, method)
    if not 2.0**-300 <= largest <= 2.0**300:
        # Scaled by a power of two, exactly: no square overflows, and underflow does not matter beside the largest entry.
        exponent = -math.frexp(largest)[1]
        rounding, low = ldexp_up(rounding, exponent), ldexp_down(floor, exponent)
        found = _of_matrix(ldexp(K, exponent), method, max_steps, rounding=rounding, floor=low)
        value, error = (ldexp_up(x, -exponent) for x in (found.value, found.error))
        return LeastEigenvalue(value, max(floor, ldexp_down(found.lower, -exponent)), error, method)
    if method == "dense":
        values, vectors = torch.linalg.eigh(K)
        q, value, lower = vectors[:, 0], float(values[0]), least_eigenvalue_lower(K)
        result = LeastEigenvalue(value, lower, _residual(K, q, value), method)
    else:
        # The bound is for an exactly symmetric matrix; the lower triangle decides, and the rest is subtracted.
        S = (K + K.mT) / 2
        asymmetry = float(torch.linalg.vector_norm(K - K.mT)) / 2 * (1 + 2.0**-20) + 2.0**-52 * float(
            torch.linalg.vector_norm(K)
        )
        if method == "cholesky":
            q = _smallest_by_inverse(S)
        else:
            q = extreme_eigenvector(lambda v: S @ v, S.shape[0], largest=False, max_steps=max_steps)
        value = float(q @ (S @ q))
        lower = least_eigenvalue_lower_by_cholesky(S, value) - (asymmetry if not torch.equal(S, K) else 0.0)
        result = LeastEigenvalue(value, lower, _residual(S, q, value), method)
    lowered = result.lower - rounding
    lowered -= abs(lowered) * 2.0**-52
    return LeastEigenvalue(result.value, max(floor, lowered), result.error, method)


def _residual(K: Tensor, q: Tensor, value: float) -> float:
    return float(torch.linalg.vector_norm(K @ q - value * q))


def _smallest_by_inverse(S: Tensor) -> Tensor:
    """An eigenvector of the least eigenvalue, by Lanczos on (S + shift I)^(-1)."""
    shift = 2.0**-50 * float(S.diagonal().abs().sum()) + 2.0**-1000
    factor = shifted_factor(S, shift)
    while factor is None:  # an indefinite matrix was given
        shift *= 16.0
        factor = shifted_factor(S, shift)
    L = factor
    return extreme_eigenvector(
        lambda v: torch.cholesky_solve(v[:, None], L)[:, 0], S.shape[0], largest=True, max_steps=100, rtol=1e-14
    )


def _of_operator(kernel: TangentKernel, exponent: int, lower: float, max_steps: int) -> LeastEigenvalue:
    """`exponent`: of the largest entry, by which products are divided so that their squares stay in range."""

    def product(v: Tensor) -> Tensor:
        return ldexp((kernel @ v.to(kernel.device)).cpu(), -exponent)

    q = extreme_eigenvector(product, kernel.shape[0], largest=False, max_steps=max_steps)
    image = product(q)
    value = float(q @ image)
    error = float(torch.linalg.vector_norm(image - value * q))
    return LeastEigenvalue(ldexp_up(value, exponent), lower, ldexp_up(error, exponent), "lanczos")
