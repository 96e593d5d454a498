"""Linear algebra: rigorous bounds, operators, and solvers that need only products."""

from wellposed.linalg.bounds import least_eigenvalue_lower, least_singular_value_lower, spectral_norm_upper
from wellposed.linalg.direct import batched_solve
from wellposed.linalg.jacobian import AbstractJacobian, Jacobian
from wellposed.linalg.krylov import GMRES, AbstractLinearSolver, BiCGStab, Dense, LinearSolution, Neumann
from wellposed.linalg.norm_test import norm_is_below, norm_upper_by_test
from wellposed.linalg.spectral_radius import SpectralRadiusEstimate, spectral_radius_estimate

__all__ = [
    "AbstractJacobian",
    "AbstractLinearSolver",
    "BiCGStab",
    "Dense",
    "GMRES",
    "Jacobian",
    "LinearSolution",
    "Neumann",
    "SpectralRadiusEstimate",
    "batched_solve",
    "least_eigenvalue_lower",
    "least_singular_value_lower",
    "norm_is_below",
    "norm_upper_by_test",
    "spectral_norm_upper",
    "spectral_radius_estimate",
]
