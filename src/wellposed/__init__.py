"""wellposed: equilibrium networks that never lie to you."""

from wellposed import errors, implicit, linalg, nn, solve
from wellposed.errors import (
    AdjointNotConverged,
    AdjointNotConvergedWarning,
    IllPosed,
    IllPosedWarning,
    InvalidArgument,
    InvalidType,
    NotConverged,
    NotConvergedWarning,
    WellposedError,
    WellposedWarning,
)
from wellposed.implicit import ImplicitGradient, JacobianFree, PhantomGradient, UnrolledGradient
from wellposed.linalg import GMRES, BiCGStab, Dense, Neumann
from wellposed.nn import EquilibriumLayer, GaussianDEQ, ImplicitOnlyDEQ, MonotoneDEQ, SkipDEQ
from wellposed.solve import (
    Anderson,
    Auto,
    Broyden,
    DouglasRachford,
    ForwardBackward,
    NewtonKrylov,
    PeacemanRachford,
    Picard,
    Solution,
    fixed_point,
)
from wellposed.status import Status

__version__ = "0.1.0.dev0"

__all__ = [
    "AdjointNotConverged",
    "AdjointNotConvergedWarning",
    "Anderson",
    "Auto",
    "BiCGStab",
    "Broyden",
    "Dense",
    "DouglasRachford",
    "EquilibriumLayer",
    "ForwardBackward",
    "GMRES",
    "GaussianDEQ",
    "IllPosed",
    "IllPosedWarning",
    "ImplicitGradient",
    "ImplicitOnlyDEQ",
    "InvalidArgument",
    "InvalidType",
    "JacobianFree",
    "MonotoneDEQ",
    "Neumann",
    "NewtonKrylov",
    "NotConverged",
    "NotConvergedWarning",
    "PeacemanRachford",
    "PhantomGradient",
    "Picard",
    "SkipDEQ",
    "Solution",
    "Status",
    "UnrolledGradient",
    "WellposedError",
    "WellposedWarning",
    "errors",
    "fixed_point",
    "implicit",
    "linalg",
    "nn",
    "solve",
]
