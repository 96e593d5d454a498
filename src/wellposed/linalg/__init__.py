"""Linear algebra: rigorous bounds, operators, and solvers that need only products."""

from typing import Any

from wellposed.linalg.bounds import least_eigenvalue_lower, least_singular_value_lower, spectral_norm_upper
from wellposed.linalg.direct import DenseSolve
from wellposed.linalg.jacobian import AbstractJacobian, Jacobian
from wellposed.linalg.krylov import GMRES, BiCGStab, Neumann
from wellposed.linalg.linear_solver import AbstractLinearSolver, LinearSolution
from wellposed.linalg.spectral_radius import spectral_radius_estimate

__all__ = [
    "AbstractJacobian",
    "AbstractLinearSolver",
    "BiCGStab",
    "DenseSolve",
    "GMRES",
    "Jacobian",
    "LinearSolution",
    "Neumann",
    "least_eigenvalue_lower",
    "least_singular_value_lower",
    "spectral_norm_upper",
    "spectral_radius_estimate",
]


def __getattr__(name: str) -> Any:
    if name == "Dense":
        raise AttributeError("wellposed.linalg.Dense is now wellposed.linalg.DenseSolve.")
    raise AttributeError(f"module 'wellposed.linalg' has no attribute {name!r}")
