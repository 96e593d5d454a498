"""Solve `A x = b`, for a batch, given only `v -> A v`: the solvers of the files beside this one."""

from __future__ import annotations

from wellposed.linalg.bicgstab import BiCGStab
from wellposed.linalg.dense_solve import Dense
from wellposed.linalg.gmres import GMRES
from wellposed.linalg.linear_solver import AbstractLinearSolver, LinearSolution, Matvec
from wellposed.linalg.neumann import Neumann

__all__ = ["AbstractLinearSolver", "BiCGStab", "Dense", "GMRES", "LinearSolution", "Matvec", "Neumann"]
