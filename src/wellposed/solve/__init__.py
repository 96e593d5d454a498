"""Solving z = f(z), every sample by itself. Read `_fixed_point.py`, then `loop.py`."""

from wellposed.solve._fixed_point import fixed_point
from wellposed.solve._root import root
from wellposed.solve.anderson import Anderson
from wellposed.solve.auto import Auto
from wellposed.solve.broyden import Broyden
from wellposed.solve.map import AbstractMap
from wellposed.solve.newton import NewtonKrylov
from wellposed.solve.solution import Solution
from wellposed.solve.solver import AbstractSolver, AbstractSwitchingRule, Picard, Point, Step
from wellposed.solve.splitting import (
    AbstractSplitMap,
    AbstractSplitting,
    DouglasRachford,
    ForwardBackward,
    PeacemanRachford,
)
from wellposed.solve.tuned_step import TunedStep

__all__ = [
    "AbstractMap",
    "AbstractSolver",
    "AbstractSplitMap",
    "AbstractSplitting",
    "AbstractSwitchingRule",
    "Anderson",
    "Auto",
    "Broyden",
    "DouglasRachford",
    "ForwardBackward",
    "NewtonKrylov",
    "PeacemanRachford",
    "Picard",
    "Point",
    "Solution",
    "Step",
    "TunedStep",
    "fixed_point",
    "root",
]
