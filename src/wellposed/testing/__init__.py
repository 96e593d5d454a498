"""Conformance tests to inherit, and problems with exact solutions."""

from wellposed.testing.cells import CellConformance, GradientConformance
from wellposed.testing.families import FamilyConformance
from wellposed.testing.linear_solvers import LinearSolverConformance
from wellposed.testing.problems import PROBLEMS
from wellposed.testing.solvers import SolverConformance

__all__ = [
    "CellConformance",
    "FamilyConformance",
    "GradientConformance",
    "LinearSolverConformance",
    "PROBLEMS",
    "SolverConformance",
]
