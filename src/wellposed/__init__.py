"""wellposed: equilibrium networks that never lie to you."""

import importlib as _importlib
from typing import Any as _Any

from wellposed import convex, data, descent, errors, implicit, kernel, landscape, linalg, nn, plot, solve
from wellposed.certify import Certificate, CertificateMonitor, Verdict, generalization_bound, suggest
from wellposed.certify import package as certify
from wellposed.convex import DeepOptEq, OptEq
from wellposed.descent import History, descend, flow
from wellposed.errors import (
    AdjointNotConverged,
    AdjointNotConvergedWarning,
    CheckpointRefused,
    CoupledRowsWarning,
    DivergedWarning,
    IllPosed,
    IllPosedWarning,
    InvalidArgument,
    InvalidType,
    MissingPackage,
    NotConverged,
    NotConvergedWarning,
    RunError,
    RunLocked,
    WellposedError,
    WellposedWarning,
)
from wellposed.implicit import ImplicitGradient, JacobianFree, PhantomGradient, UnrolledGradient
from wellposed.kernel import TangentKernel, least_eigenvalue, tangent_kernel
from wellposed.linalg import GMRES, BiCGStab, DenseSolve, Neumann
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
    TunedStep,
    fixed_point,
)
from wellposed.status import Status

__version__ = "0.1.0.dev0"

#: Public too, but loaded when asked for: they need scikit-learn, and `from wellposed import *` must not.
_ESTIMATORS = ("EquilibriumClassifier", "EquilibriumRegressor")

__all__ = [
    "AdjointNotConverged",
    "AdjointNotConvergedWarning",
    "Anderson",
    "Auto",
    "BiCGStab",
    "Broyden",
    "Certificate",
    "CertificateMonitor",
    "CheckpointRefused",
    "CoupledRowsWarning",
    "DeepOptEq",
    "DenseSolve",
    "DivergedWarning",
    "DouglasRachford",
    "EquilibriumLayer",
    "ForwardBackward",
    "GMRES",
    "GaussianDEQ",
    "History",
    "IllPosed",
    "IllPosedWarning",
    "ImplicitGradient",
    "ImplicitOnlyDEQ",
    "InvalidArgument",
    "InvalidType",
    "JacobianFree",
    "MissingPackage",
    "MonotoneDEQ",
    "Neumann",
    "NewtonKrylov",
    "NotConverged",
    "NotConvergedWarning",
    "OptEq",
    "PeacemanRachford",
    "PhantomGradient",
    "Picard",
    "RunError",
    "RunLocked",
    "SkipDEQ",
    "Solution",
    "Status",
    "TangentKernel",
    "TunedStep",
    "UnrolledGradient",
    "Verdict",
    "WellposedError",
    "WellposedWarning",
    "certify",
    "convex",
    "data",
    "descend",
    "descent",
    "errors",
    "fixed_point",
    "flow",
    "generalization_bound",
    "implicit",
    "kernel",
    "landscape",
    "least_eigenvalue",
    "linalg",
    "nn",
    "plot",
    "solve",
    "suggest",
    "tangent_kernel",
]


def __getattr__(name: str) -> _Any:
    if name == "sklearn" or name in _ESTIMATORS:
        estimators = _importlib.import_module("wellposed.sklearn")
        return estimators if name == "sklearn" else getattr(estimators, name)
    if name == "Dense":
        raise AttributeError("wellposed.Dense is now wellposed.DenseSolve.")
    raise AttributeError(f"module 'wellposed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ESTIMATORS, "sklearn"})
