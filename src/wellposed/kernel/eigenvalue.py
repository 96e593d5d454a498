"""The least eigenvalue of a tangent kernel, with an error bar and a rigorous lower bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed._memory import available_memory
from wellposed.errors import InvalidArgument
from wellposed.kernel._closed_form import ClosedFormMethod
from wellposed.kernel._method import TOTAL, KernelLayout, KernelMethod, check_option
from wellposed.kernel._storage import write_block
from wellposed.kernel.empirical import choose_method
from wellposed.kernel.operator import TangentKernel
from wellposed.linalg import least_eigenvalue_lower, least_singular_value_lower
from wellposed.linalg.directed import down, exponent_of, ldexp, ldexp_down, ldexp_up
from wellposed.linalg.verified_cholesky import least_eigenvalue_lower_by_cholesky, shifted_factor
from wellposed.nn.tangent import GramProduct

METHODS = ("auto", "dense", "cholesky", "lanczos")
#: Up to here a dense eigendecomposition takes a second or two.
DENSE_SIZE = 1000
#: Matrices of n^2 float64 that the Cholesky method holds at once: kernel, shifted copy, factor.
CHOLESKY_MATRICES = 3
#: Lanczos steps between two looks at the residual.
_CHECK_EVERY = 5


@dataclass(frozen=True)
class LeastEigenvalue:
    """The least eigenvalue of a kernel.

    Attributes:
        value: The approximation, a Rayleigh quotient (so not below the least eigenvalue, up to
            rounding) except for the dense method, where it is the eigensolver's.
        lower: Rigorous lower bound on the least eigenvalue; see `least_eigenvalue` for what it
            accounts for.
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

    "auto" takes the first whose size fits: dense up to n = 1000, Cholesky where three (n, n)
    matrices fit into the memory. The bound for a matrix is by Cholesky where the value is by
    Lanczos.

    What the bound is about. For a *matrix* argument: the matrix as stored. For a *model*: the
    kernel that its features (closed form) or gradients (generic), as computed, have in exact
    arithmetic. The products are made in float64 whatever the dtype of the model, an upper bound of
    their rounding error is subtracted (sum_t |c_t| gamma_k ||a_t|| ||b_t||, see `rounding_upper`),
    and the bound is at least 0, since that kernel is a Gram matrix. Not covered is how far the
    features are from those of the exact equilibrium: that is up to the tolerance of the model's
    solves.

    Args:
        model: As in `tangent_kernel`; or an (n, n) kernel, symmetric up to rounding.
        X: (n, ...) inputs; None with a kernel.
        method: See above.
        max_steps: Products that "lanczos" may take; as many vectors are held. If they do not
            suffice the error bar is large, not wrong.
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
    chosen = choose_method(model, X, dtype=torch.float64, function="least_eigenvalue")
    method = _choose(method, chosen.size * chosen.outputs, memory, chosen.device)
    if method == "lanczos":
        kernel = TangentKernel.of_method(chosen)
        diagonal = kernel.diagonal()
        _check_finite(diagonal)
        lower = structural_lower(chosen) if isinstance(chosen, ClosedFormMethod) else 0.0
        return _of_operator(kernel, exponent_of(diagonal), lower, max_steps)
    K = _dense(chosen).cpu()
    _check_finite(K)
    return _of_matrix(K, method, max_steps, rounding=chosen.rounding_upper(float(K.trace())), floor=0.0)


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


def _dense(chosen: KernelMethod) -> Tensor:
    layout = KernelLayout()
    K = torch.empty(chosen.shape(layout), dtype=chosen.dtype, device=chosen.device)
    with torch.no_grad():
        for block in chosen.blocks(layout):
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
    """`exponent`: of the largest entry, by which products are divided so that their squares stay in
    range."""

    def product(v: Tensor) -> Tensor:
        return ldexp((kernel @ v.to(kernel.device)).cpu(), -exponent)

    q = extreme_eigenvector(product, kernel.shape[0], largest=False, max_steps=max_steps)
    image = product(q)
    value = float(q @ image)
    error = float(torch.linalg.vector_norm(image - value * q))
    return LeastEigenvalue(ldexp_up(value, exponent), lower, ldexp_up(error, exponent), "lanczos")


def extreme_eigenvector(
    product: Callable[[Tensor], Tensor], size: int, *, largest: bool, max_steps: int, rtol: float = 1e-10
) -> Tensor:
    """(n,) unit Ritz vector of the least (or largest) Ritz value, by Lanczos' method.

    All vectors are kept and orthogonalized twice against each other, (steps, n) of memory: without
    that a converged end of the spectrum comes back as copies. Stops at a residual below `rtol`
    times the norm.

    Args:
        product: v -> A v for a symmetric float64 A, on the CPU. size: n.
        largest: Which end. max_steps: Most products.
        rtol: Relative to the largest |Ritz value|.
    """
    steps = min(max_steps, size)
    Q = torch.empty(steps, size, dtype=torch.float64)
    start = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # any; the same every time
    Q[0] = start / start.norm()
    T = torch.zeros(steps, steps, dtype=torch.float64)
    k = 0
    for k in range(steps):
        w = product(Q[k])
        T[k, k] = w @ Q[k]
        for _ in range(2):
            w = w - Q[: k + 1].mT @ (Q[: k + 1] @ w)
        beta = float(w.norm())
        done = k + 1 == steps
        if done or k % _CHECK_EVERY == _CHECK_EVERY - 1 or beta == 0.0:
            values, vectors = torch.linalg.eigh(T[: k + 1, : k + 1])
            end = -1 if largest else 0
            scale = float(values.abs().max())
            if done or beta * abs(float(vectors[k, end])) <= rtol * scale or beta <= 2.0**-52 * scale:
                q = Q[: k + 1].mT @ vectors[:, end]
                return q / q.norm()
        Q[k + 1] = w / beta
        T[k, k + 1] = T[k + 1, k] = beta
    raise AssertionError("the last step returns")


def structural_lower(chosen: ClosedFormMethod) -> float:
    r"""Lower bound on the least eigenvalue of the kernel of a batch with itself, from its features
    alone; at least 0.

    For positive semi-definite A and B, Schur's product theorem gives lambda_min(A o B) >= min_i
    A_ii lambda_min(B), since A o (B - lambda_min(B) I) is positive semi-definite and A o I =
    diag(A). A factor with equal names on both sides is F F^T, with least eigenvalue sigma_min(F)^2,
    or 0 with more samples than columns. A parameter whose products are all of that kind, with
    positive coefficients, adds the sum of its bounds; any other adds 0, since its part is a Gram
    matrix.
    """
    features, _ = chosen.sides
    known: dict[str, tuple[float, float]] = {}
    total = 0.0
    for terms in chosen.terms.values():
        if all(term.coefficient > 0 and all(a == b for a, b in term.factors) for term in terms):
            total += sum(_of_product(term, features, known) for term in terms)
    return _at_least_0(total)


def _of_product(term: GramProduct, features: Mapping[str, Tensor], known: dict[str, tuple[float, float]]) -> float:
    names = [name for name, _ in term.factors]
    for name in names:
        if name not in known:
            known[name] = (_least_square(features[name]), _least_gram_eigenvalue(features[name]))
    # Each factor in turn is the one whose eigenvalue is used; the others give their least diagonal entry.
    bounds = [
        known[chosen][1] * math.prod(known[name][0] for j, name in enumerate(names) if j != i) for i, chosen in enumerate(names)
    ]
    return _at_least_0(term.coefficient * max(bounds))


def _least_square(F: Tensor) -> float:
    """Lower bound on min_i ||F_i||^2; the sum of k squares has relative error at most gamma_k."""
    k = F.shape[1] + 2
    squares = float(F.double().square().sum(dim=1).min())
    return _at_least_0(
        squares * (1.0 - 2.0 * k * torch.finfo(torch.float64).eps) - k * torch.finfo(torch.float64).smallest_normal
    )


def _least_gram_eigenvalue(F: Tensor) -> float:
    """Lower bound on lambda_min(F F^T)."""
    return _at_least_0(least_singular_value_lower(F) ** 2) if F.shape[0] <= F.shape[1] else 0.0


def _at_least_0(value: float) -> float:
    """A little less than a product of lower bounds, in spite of its rounding and of underflow;
    finite, and at least 0."""
    return max(0.0, down(value) - torch.finfo(torch.float64).smallest_normal)
