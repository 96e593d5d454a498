"""wellposed: equilibrium networks with verified convergence."""

import importlib as _importlib
import typing as _typing

# the packages are attributes, as in `wp.nn`, but `from wellposed import *` does not bring them
from wellposed import convex, data, descent, errors, implicit, kernel, landscape, linalg, nn, plot, solve  # noqa: F401
from wellposed.certify import Certificate, CertificateMonitor, Verdict, generalization_bound, suggest
from wellposed.certify import package as certify
from wellposed.convex import DeepOptEq, OptEq
from wellposed.descent import History, descend, flow

# the rarer errors are attributes too, so that `except wp.RunLocked` works
from wellposed.errors import (  # noqa: F401
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
from wellposed.implicit import (
    ImplicitGradient,
    JacobianFree,
    PhantomGradient,
    ReversibleGradient,
    UnrolledGradient,
    attach_gradient,
)
from wellposed.kernel import TangentKernel, least_eigenvalue, tangent_kernel
from wellposed.linalg import GMRES, BiCGStab, DenseSolve, Neumann
from wellposed.nn import EquilibriumLayer, GaussianDEQ, ImplicitOnlyDEQ, MonotoneDEQ, SkipDEQ, export
from wellposed.prove import Proof, Verification, verify
from wellposed.prove import package as prove
from wellposed.references import cite
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
    root,
)
from wellposed.status import Status

__version__ = "0.1.0"

#: Public too, but imported at the first use: scikit-learn is optional, and conformance tests are for test files.
_ESTIMATORS = ("EquilibriumClassifier", "EquilibriumRegressor")
_LAZY = ("imaging", "sklearn", "tasks", "testing")
#: Former names and where their content is now.
_MOVED = {"experiments": "wellposed_lab.papers", "train": "wellposed.descent (full batch) and wellposed_lab.runs (minibatches)"}

__all__ = [
    "Anderson",
    "Auto",
    "BiCGStab",
    "Broyden",
    "Certificate",
    "CertificateMonitor",
    "DeepOptEq",
    "DenseSolve",
    "DouglasRachford",
    "EquilibriumLayer",
    "ForwardBackward",
    "GMRES",
    "GaussianDEQ",
    "History",
    "IllPosed",
    "ImplicitGradient",
    "ImplicitOnlyDEQ",
    "InvalidArgument",
    "InvalidType",
    "JacobianFree",
    "MonotoneDEQ",
    "Neumann",
    "NewtonKrylov",
    "NotConverged",
    "OptEq",
    "PeacemanRachford",
    "PhantomGradient",
    "Picard",
    "Proof",
    "ReversibleGradient",
    "SkipDEQ",
    "Solution",
    "Status",
    "TangentKernel",
    "TunedStep",
    "UnrolledGradient",
    "Verdict",
    "Verification",
    "WellposedError",
    "attach_gradient",
    "certify",
    "cite",
    "descend",
    "export",
    "fixed_point",
    "flow",
    "generalization_bound",
    "least_eigenvalue",
    "prove",
    "root",
    "suggest",
    "tangent_kernel",
    "verify",
]


if _typing.TYPE_CHECKING:  # a type checker sees the names themselves, so that it finds misspelt ones
    from wellposed import imaging, sklearn, tasks, testing  # noqa: F401
    from wellposed.sklearn import EquilibriumClassifier, EquilibriumRegressor  # noqa: F401
else:

    def __getattr__(name: str) -> _typing.Any:
        if name in _LAZY:
            return _importlib.import_module(f"wellposed.{name}")
        if name in _ESTIMATORS:
            return getattr(_importlib.import_module("wellposed.sklearn"), name)
        if name == "Dense":
            raise AttributeError("wellposed.Dense is now wellposed.DenseSolve.")
        if name in _MOVED:
            hint = f"; its content is now in {_MOVED[name]}"
        else:  # not for names such as __path__, which Python itself asks for
            near = "" if name.startswith("_") else errors.did_you_mean(name, __dir__())
            hint = f".{near}" if near else ""
        # with an `obj`, or Python would add the same suggestion to a traceback once more
        raise AttributeError(f"module 'wellposed' has no attribute {name!r}{hint}", name=name, obj=None)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ESTIMATORS, *_LAZY})
