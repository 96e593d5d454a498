"""wellposed: equilibrium networks that never lie to you."""

from wellposed import certify, convex, data, errors, implicit, kernel, linalg, nn, solve, train
from wellposed.certify import Certificate, CertificateMonitor, Verdict, generalization_bound, suggest
from wellposed.convex import DeepOptEq, OptEq
from wellposed.errors import (
    AdjointNotConverged,
    AdjointNotConvergedWarning,
    DivergedWarning,
    IllPosed,
    IllPosedWarning,
    InvalidArgument,
    InvalidType,
    MissingPackage,
    NotConverged,
    NotConvergedWarning,
    WellposedError,
    WellposedWarning,
)
from wellposed.implicit import ImplicitGradient, JacobianFree, PhantomGradient, UnrolledGradient
from wellposed.kernel import TangentKernel, least_eigenvalue, tangent_kernel
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
    TunedStep,
    fixed_point,
)
from wellposed.status import Status
from wellposed.train import History, descend, flow

__version__ = "0.1.0.dev0"

__all__ = [
    "AdjointNotConverged",
    "AdjointNotConvergedWarning",
    "Anderson",
    "Auto",
    "BiCGStab",
    "Broyden",
    "Certificate",
    "CertificateMonitor",
    "DeepOptEq",
    "Dense",
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
    "errors",
    "fixed_point",
    "flow",
    "generalization_bound",
    "implicit",
    "kernel",
    "least_eigenvalue",
    "linalg",
    "nn",
    "solve",
    "suggest",
    "tangent_kernel",
    "train",
]
