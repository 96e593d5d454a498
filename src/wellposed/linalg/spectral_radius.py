"""The spectral radius, estimated by Arnoldi's method."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType, NotConverged

Product = Callable[[np.ndarray], np.ndarray]
# Relative uncertainty up to which an estimate is called reliable.
_RELIABLE = 1e-3

# Up to these sizes all eigenvalues are computed (a tenth of a second) and none can be missed; for a function
# the matrix takes one product per column, so it pays off only where Arnoldi would need about as many.
_DENSE_MATRIX = 512
_DENSE_FUNCTION = 128
# Up to this the dense matrix (seconds, at 32 MB) is the fallback when ARPACK does not converge.
_FALLBACK_DENSE = 2000
# Krylov vectors kept. Twice ARPACK's default: on spectra with a dense edge the restarts lose much less.
_NUM_VECTORS = 40
# Ritz residual relative to the modulus; smaller ones cost products that an estimate does not need.
_TOLERANCE = 1e-10


class SpectralRadiusEstimate(float):
    r"""An estimate of a spectral radius: a float with a bound of its rounding error.

    An eigenvalue of condition number k moves by up to `k ||E||` when the matrix changes by a small
    `E`. A nilpotent shift of 200 units in a random basis has the radius 0, and floating point finds
    0.8: there k is 1e14.

    Attributes:
        condition: Of the eigenvalue: `1/|<y, x>|` with its unit left and right eigenvectors; 1 for
            normal matrices. Of a function without a transpose only a lower bound of the condition
            number of its eigenvectors is known, the largest `||A^k v||/(rho^k ||v||)` seen.
        uncertainty: `condition` times the norm of what rounding and the stopping rule may have
            changed in A.
        judged: Whether the transpose was known, so that the condition number is one and not a lower
            bound.
    """

    condition: float
    uncertainty: float
    judged: bool

    def __new__(cls, value: float, condition: float, uncertainty: float, judged: bool = True) -> SpectralRadiusEstimate:
        self = super().__new__(cls, value)
        self.condition, self.uncertainty, self.judged = condition, uncertainty, judged
        return self

    def __getnewargs__(self) -> tuple[float, float, float, bool]:  # type: ignore[override]  # a float's own has one
        return float(self), self.condition, self.uncertainty, self.judged

    @property
    def reliable(self) -> bool | None:
        """Whether the uncertainty is at most 0.001 of the value; None if that was not judged."""
        if not self.uncertainty <= _RELIABLE * float(self):
            return False
        return True if self.judged else None

    def __repr__(self) -> str:
        return f"SpectralRadiusEstimate({float(self)!r}, uncertainty={self.uncertainty:.1e}, reliable={self.reliable})"


def spectral_radius_estimate(
    A: Tensor | Callable[[Tensor], Tensor],
    *,
    size: int | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    max_restarts: int = 300,
    transposed: Callable[[Tensor], Tensor] | None = None,
) -> SpectralRadiusEstimate:
    r"""Estimate `rho(A) = max |lambda_i(A)|` by restarted Arnoldi (ARPACK [lehoucq1998]).

    An *estimate*: it proves nothing. Arnoldi may miss an eigenvalue whose eigenvector is nearly
    absent from the start. Eigenvalues of a matrix far from normal move a lot under rounding: then
    the value says that it is not `reliable`, as for a nilpotent shift. For a proof use
    `spectral_norm_upper`, as `rho(A) <= ||A||`. Complex pairs are found (power iteration would
    be: on 0.9 times a rotation it never settles): all eigenvalues of a real Hessenberg matrix are
    taken, with modulus.

    Matrices up to size 512, and functions up to 128, have all their eigenvalues computed. When
    ARPACK does not converge (many eigenvalues of nearly the largest modulus, as in a cyclic shift)
    the dense matrix is used up to size 2000. Costs some dozens to some hundred products.

    Args:
        A: (n, n) real matrix, or a function mapping a flat (n,) tensor `v` to the flat (n,) tensor
            `A v`.
        size: `n`; needed with a function, and not allowed with a matrix.
        dtype: Of the tensors given to the function; its precision limits that of the estimate.
            Matrices are converted to float64.
        device: Of the tensors given to the function.
        generator: Draws the start vector. By default a new one with seed 0, so that equal calls
            give equal results. The global random state is never touched.
        max_restarts: Restarts allowed to ARPACK.
        transposed: With a function: `v -> A^T v`, by which the estimate is judged, at about twice
            the products.

    Returns:
        The estimate: a float with the attributes `condition`, `uncertainty`, `judged` and
        `reliable`.

    Raises:
        NotConverged: ARPACK failed and the matrix is too large to be treated as dense.

    Examples:
        >>> import torch, wellposed as wp
        >>> rotation = 0.9 * torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
        >>> rho = wp.linalg.spectral_radius_estimate(rotation)
        >>> round(rho, 6), rho.reliable
        (0.9, True)
    """
    if isinstance(A, Tensor):
        if size is not None:
            raise InvalidArgument("spectral_radius_estimate: size is for functions; a matrix has its own. Omit it.")
        matrix = _checked_matrix(A)
        n = len(matrix)
        if n <= _DENSE_MATRIX:
            return _dense_radius(matrix)
        start = _start_vector(n, generator)
        rho = _arnoldi_radius(lambda v: matrix @ v, start, _TOLERANCE, max_restarts, lambda v: matrix.T @ v)
        if rho is None and n <= _FALLBACK_DENSE:
            rho = _dense_radius(matrix)
    else:
        n = _checked_size(A, size)
        product = _numpy_product(A, n, dtype, device)
        start = _start_vector(n, generator)
        # Products rounded to `dtype` cannot give smaller Ritz residuals; ARPACK would wait for them in vain.
        tolerance = max(_TOLERANCE, 10.0 * torch.finfo(dtype).eps)
        left = None if transposed is None else _numpy_product(transposed, n, dtype, device)
        rho = None if n <= _DENSE_FUNCTION else _arnoldi_radius(product, start, tolerance, max_restarts, left)
        if rho is None and n <= _FALLBACK_DENSE:
            rho = _dense_radius(np.stack([product(e) for e in np.eye(n)], axis=1))
    if rho is None:
        raise NotConverged(
            f"spectral_radius_estimate: ARPACK did not converge within max_restarts={max_restarts} for size "
            f"{n}; many eigenvalues may share the largest modulus. Raise max_restarts, or pass a dense "
            f"matrix of size at most {_FALLBACK_DENSE}."
        )
    return rho


def _dense_radius(matrix: np.ndarray) -> SpectralRadiusEstimate:
    scale = float(np.abs(matrix).max())
    if scale == 0.0:
        return SpectralRadiusEstimate(0.0, 1.0, 0.0)
    matrix = matrix / scale  # so that no square overflows or vanishes
    values = np.linalg.eigvals(matrix)
    top = values[np.abs(values).argmax()]
    rounding = len(matrix) * np.finfo(np.float64).eps * float(np.linalg.norm(matrix))
    condition = _eigenvalue_condition(matrix, top, _start_vector(len(matrix), None))
    return SpectralRadiusEstimate(scale * float(abs(top)), condition, scale * condition * rounding)


def _arnoldi_radius(
    product: Product, start: np.ndarray, tolerance: float, max_restarts: int, transposed: Product | None
) -> SpectralRadiusEstimate | None:
    """The largest modulus of an eigenvalue, None if ARPACK did not converge."""
    if not product(start).any():  # a random vector is in the kernel only if the matrix is zero; ARPACK calls that an error
        return SpectralRadiusEstimate(0.0, 1.0, 0.0)
    right = _largest(product, start, tolerance, max_restarts, 1)
    if right is None:
        return None
    values, x = right
    rho = float(np.abs(values[0]))
    if transposed is None:
        condition = _growth(product, start, rho, _NUM_VECTORS)
    else:
        # two on the left: of eigenvalues +-rho, or a complex pair, the other one may come first
        left = _largest(transposed, start, tolerance, max_restarts, 2)
        Y = np.zeros_like(x) if left is None else left[1]
        cosine = max(float(np.abs(Y.conj().T @ x).max()), float(np.abs(Y.T @ x).max()))
        condition = 1.0 / cosine if cosine > 0 else np.inf
    return SpectralRadiusEstimate(rho, condition, condition * tolerance * rho, transposed is not None)


def _eigenvalue_condition(matrix: np.ndarray, value: complex, start: np.ndarray) -> float:
    """1/|<y, x>| of the unit eigenvectors of an eigenvalue, by inverse iteration."""
    from scipy.linalg import LinAlgWarning, lu_factor, lu_solve  # here: SciPy takes longer to import than the library

    n = len(matrix)
    shift = value + np.finfo(np.float64).eps * np.linalg.norm(matrix)  # or the matrix would be singular
    x = y = start / np.linalg.norm(start)
    with np.errstate(all="ignore"), warnings.catch_warnings():  # what overflows has an infinite condition number
        warnings.simplefilter("ignore", LinAlgWarning)
        factors = lu_factor(matrix - shift * np.eye(n))
        for _ in range(2):
            x, y = lu_solve(factors, x, check_finite=False), lu_solve(factors, y, trans=2, check_finite=False)
            x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
        angle = abs(np.vdot(y, x))
    return 1.0 / float(angle) if angle > 0 else np.inf


def _growth(product: Product, start: np.ndarray, rho: float, steps: int) -> float:
    """The largest |A^k v|/(rho^k |v|) for k up to `steps`, at least 1."""
    v, log_size, largest = start / np.linalg.norm(start), 0.0, 0.0
    for _ in range(steps):
        v = product(v)
        size = float(np.linalg.norm(v))
        if size == 0.0 or rho == 0.0:
            return float(np.exp(largest)) if rho > 0 else np.inf
        v, log_size = v / size, log_size + np.log(size / rho)
        largest = max(largest, log_size)
    return float(np.exp(min(largest, 700.0)))


def _largest(
    product: Product, start: np.ndarray, tolerance: float, max_restarts: int, count: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Largest eigenvalues with unit eigenvectors as columns; None if ARPACK did not converge."""
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigs  # here: SciPy takes longer to import than the library

    n = len(start)
    # In an invariant subspace ARPACK draws a new vector; newer versions of SciPy let us fix the seed.
    seeded: dict[str, Any] = {"rng": np.random.default_rng(0)} if "rng" in inspect.signature(eigs).parameters else {}
    operator = LinearOperator((n, n), matvec=product, dtype=np.float64)
    options: dict[str, Any] = {"v0": start, "tol": tolerance, "maxiter": max_restarts, **seeded}
    try:
        values, vectors = eigs(operator, k=count, ncv=_NUM_VECTORS, which="LM", **options)
    except ArpackError:  # and its subclass ArpackNoConvergence
        return None
    return values, vectors / np.linalg.norm(vectors, axis=0)


def _start_vector(n: int, generator: torch.Generator | None) -> np.ndarray:
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    start = torch.randn(n, generator=generator, dtype=torch.float64, device=generator.device)
    return start.cpu().numpy()


def _numpy_product(
    A: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype, device: torch.device | str
) -> Callable[[np.ndarray], np.ndarray]:
    def product(v: np.ndarray) -> np.ndarray:
        # A copy: ARPACK hands out views of its workspace, which A might keep or change.
        out = A(torch.tensor(v.reshape(n), dtype=dtype, device=device))
        if out.shape != (n,):
            raise InvalidArgument(
                f"spectral_radius_estimate: A(v) must be flat with size={n} entries like v, got shape "
                f"{tuple(out.shape)}. Flatten it inside A."
            )
        result = out.detach().to(device="cpu", dtype=torch.float64).numpy()
        if not np.isfinite(result).all():
            raise InvalidArgument(
                "spectral_radius_estimate: A(v) gave NaN or infinite entries for a finite v. Check A where it is taken."
            )
        return result

    return product


def _checked_matrix(A: Tensor) -> np.ndarray:
    if A.ndim != 2 or A.shape[0] != A.shape[1] or A.numel() == 0:
        raise InvalidArgument(
            "spectral_radius_estimate: A must be a square matrix with at least one row, got shape "
            f"{tuple(A.shape)}. Call once per matrix of a batch."
        )
    if not A.is_floating_point():
        raise InvalidArgument(
            f"spectral_radius_estimate: A must be real with a floating-point dtype, got {A.dtype}. Convert "
            "integers with A.double(); complex matrices are not supported."
        )
    matrix = A.detach().to(device="cpu", dtype=torch.float64).numpy()
    if not np.isfinite(matrix).all():
        raise InvalidArgument(
            f"spectral_radius_estimate: A must be finite, got {int((~np.isfinite(matrix)).sum())} entries "
            "that are NaN or infinite."
        )
    return matrix


def _checked_size(A: object, size: int | None) -> int:
    if not callable(A):
        raise InvalidType(
            f"spectral_radius_estimate: A must be a square torch.Tensor or a function v -> A v, got {type(A).__name__}."
        )
    if not isinstance(size, int) or size < 1:
        raise InvalidArgument(
            f"spectral_radius_estimate: with a function A, size must be the positive length of v, got size={size!r}."
        )
    return size
