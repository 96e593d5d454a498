"""How much of an estimated spectral radius rounding may have made: condition numbers of eigenvalues."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

__all__ = ["Product", "SpectralRadiusEstimate", "eigenvalue_condition", "growth"]

Product = Callable[[np.ndarray], np.ndarray]
# Relative uncertainty up to which an estimate is called reliable.
_RELIABLE = 1e-3


class SpectralRadiusEstimate(float):
    r"""An estimate of a spectral radius: a float that knows how much of it rounding may have made.

    An eigenvalue of condition number k moves by up to `k ||E||` when the matrix changes by a small `E`. A nilpotent
    shift of 200 units in a random basis has the radius 0, and floating point finds 0.8: there k is 1e14.

    Attributes:
        condition: Of the eigenvalue: `1/|<y, x>|` with its unit left and right eigenvectors; 1 for normal matrices.
            Of a function without a transpose only a lower bound of the condition number of its eigenvectors is known,
            the largest `||A^k v||/(rho^k ||v||)` seen.
        uncertainty: `condition` times the norm of what rounding and the stopping rule may have changed in A.
        judged: Whether the transpose was known, so that the condition number is one and not a lower bound.
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
        """Whether the uncertainty is at most 0.001 of the value; None if nothing speaks against it and it was not judged."""
        if not self.uncertainty <= _RELIABLE * float(self):
            return False
        return True if self.judged else None

    def __repr__(self) -> str:
        return f"SpectralRadiusEstimate({float(self)!r}, uncertainty={self.uncertainty:.1e}, reliable={self.reliable})"


def eigenvalue_condition(matrix: np.ndarray, value: complex, start: np.ndarray) -> float:
    """1/|<y, x>| of the unit eigenvectors of an eigenvalue, by inverse iteration from one start for both."""
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


def growth(product: Product, start: np.ndarray, rho: float, steps: int) -> float:
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
