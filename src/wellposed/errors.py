"""The tree of errors and warnings.

Exception
└── WellposedError                 everything this package raises on purpose
    ├── InvalidArgument            (also ValueError) a value, shape, dtype or option is wrong
    ├── InvalidType                (also TypeError) an object of the wrong kind
    ├── MissingPackage             (also ImportError) an optional package is not installed
    ├── RunError                   (also RuntimeError) a run directory cannot be used
    │   ├── RunLocked              another process trains there
    │   └── CheckpointRefused      a checkpoint is damaged, or belongs to something else
    ├── IllPosed                   (also RuntimeError) no proof of an equilibrium (on_ill_posed)
    └── NotConverged               (also RuntimeError) a solve failed and on_failure="raise"
        └── AdjointNotConverged    the same, for the linear solve inside backward
UserWarning
└── WellposedWarning
    ├── CoupledRowsWarning         rows depend on each other; the batch was one sample
    ├── DivergedWarning            a loss became NaN or infinite, or exploded
    ├── IllPosedWarning            no proof of an equilibrium, on_ill_posed="warn"
    └── NotConvergedWarning        a solve failed and on_failure="warn"
        └── AdjointNotConvergedWarning the same, for the linear solve inside backward
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "AdjointNotConverged",
    "AdjointNotConvergedWarning",
    "CheckpointRefused",
    "CoupledRowsWarning",
    "DivergedWarning",
    "IllPosed",
    "IllPosedWarning",
    "InvalidArgument",
    "InvalidType",
    "MissingPackage",
    "NotConverged",
    "NotConvergedWarning",
    "RunError",
    "RunLocked",
    "WellposedError",
    "WellposedWarning",
]


class WellposedError(Exception):
    """Everything this package raises on purpose."""


class InvalidArgument(WellposedError, ValueError):
    """A value, shape, dtype or option that cannot work; the message says which and what would."""


class InvalidType(WellposedError, TypeError):
    """An object of the wrong kind."""


class MissingPackage(WellposedError, ImportError):
    """An optional package is not installed; the message says how to install it."""


class RunError(WellposedError, RuntimeError):
    """A run directory cannot be used or written; what was written before is still there."""


class RunLocked(RunError):
    """Another process is training in the run directory."""


class CheckpointRefused(RunError):
    """A checkpoint is truncated, damaged, or belongs to another model, configuration or program."""


class IllPosed(WellposedError, RuntimeError):
    """No proof of exactly one equilibrium, and the policy was `on_ill_posed="raise"`."""


class NotConverged(WellposedError, RuntimeError):
    """A solve failed for some samples and the policy was `on_failure="raise"`.

    Attributes:
        solution: The `Solution` with per-sample status and the best value found; nothing is lost.
    """

    def __init__(self, message: str, solution: Any = None) -> None:
        super().__init__(message)
        self.solution = solution


class AdjointNotConverged(NotConverged):
    """The linear solve of a backward pass failed and the policy was `on_failure="raise"`."""


class WellposedWarning(UserWarning):
    """Every warning this package gives."""


class CoupledRowsWarning(WellposedWarning):
    """Rows of a batch were found to depend on each other; the batch was solved as one sample."""


class DivergedWarning(WellposedWarning):
    """The loss became NaN or infinite, or exploded; the parameters before that were restored."""


class IllPosedWarning(WellposedWarning):
    """No proof of exactly one equilibrium, and the policy was `on_ill_posed="warn"`."""


class NotConvergedWarning(WellposedWarning):
    """A solve failed for some samples and the policy was `on_failure="warn"`."""


class AdjointNotConvergedWarning(NotConvergedWarning):
    """The linear solve of a backward pass failed and the policy was `on_failure="warn"`."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` if some known word is near, else an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def how_to_install(extra: str) -> str:
    """The end of a sentence about a missing package: how to install it, also in a clone.

    In a clone the constraints keep pip from fetching another torch.
    """
    return f"pip install 'wellposed[{extra}]' (in a clone of the repository: pip install -c constraints.txt -e '.[{extra}]')"


def required(module: str, why: str, *, extra: str) -> Any:
    """An optional module, imported; without it `MissingPackage`, with `why` and what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(f"{why}; install it with: {how_to_install(extra)}.") from error
