"""Solving z = f(z), every sample by itself. Start reading at `_fixed_point.py`, then `_iterate.py`: the loop."""

from wellposed.solve._closing import judge
from wellposed.solve._failure import apply_policy, check_policy, user_level
from wellposed.solve._fixed_point import as_solution, check_options, fixed_point
from wellposed.solve._function_map import FunctionMap
from wellposed.solve._map import AbstractMap
from wellposed.solve._outcome import Outcome, Tolerance
from wellposed.solve._solution import Solution
from wellposed.solve._transforms import TransformedOutcome, concrete, iterate_transformed, transforms_active
from wellposed.solve.anderson import Anderson
from wellposed.solve.auto import Auto
from wellposed.solve.broyden import Broyden
from wellposed.solve.loop import iterate
from wellposed.solve.newton import NewtonKrylov
from wellposed.solve.picard import Picard
from wellposed.solve.solver import (
    AbstractSolver,
    AbstractWatch,
    Point,
    Step,
    check_interval,
    check_positive_integer,
)
from wellposed.solve.splitting import (
    AbstractSplitMap,
    AbstractSplitting,
    DouglasRachford,
    ForwardBackward,
    PeacemanRachford,
    TunedStep,
)

__all__ = [
    "AbstractMap",
    "AbstractSolver",
    "AbstractSplitMap",
    "AbstractSplitting",
    "AbstractWatch",
    "Anderson",
    "Auto",
    "Broyden",
    "DouglasRachford",
    "ForwardBackward",
    "FunctionMap",
    "NewtonKrylov",
    "Outcome",
    "PeacemanRachford",
    "Picard",
    "Point",
    "Solution",
    "Step",
    "Tolerance",
    "TransformedOutcome",
    "TunedStep",
    "apply_policy",
    "as_solution",
    "check_interval",
    "check_options",
    "check_policy",
    "check_positive_integer",
    "concrete",
    "fixed_point",
    "iterate",
    "iterate_transformed",
    "judge",
    "transforms_active",
    "user_level",
]
