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
    """Everything this package raises on purpose.

    Examples:
        >>> import wellposed as wp
        >>> try:
        ...     wp.Picard(damping=2.0)
        ... except wp.WellposedError as error:
        ...     print(error)
        The 'damping' parameter of Picard must be a float in (0, 1]. Got 2.0 instead.
    """


class InvalidArgument(WellposedError, ValueError):
    """A value, shape, dtype or option that cannot work; the message says which and what would.

    Examples:
        >>> import wellposed as wp
        >>> wp.nn.Spectral(bound=1.5)
        Traceback (most recent call last):
            ...
        wellposed.errors.InvalidArgument: The 'bound' parameter of Spectral must be ... in (0, 1)...
    """


class InvalidType(WellposedError, TypeError):
    """An object of the wrong kind.

    Examples:
        >>> import torch, wellposed as wp
        >>> wp.fixed_point(3.0, torch.zeros(2, 1))
        Traceback (most recent call last):
            ...
        wellposed.errors.InvalidType: f must be callable; got float.
    """


class MissingPackage(WellposedError, ImportError):
    """An optional package is not installed; the message says how to install it.

    Examples:
        >>> import wellposed as wp
        >>> issubclass(wp.errors.MissingPackage, ImportError)  # `except ImportError` catches it
        True
    """


class RunError(WellposedError, RuntimeError):
    """A run directory cannot be used or written; what was written before is still there.

    Examples:
        >>> import tempfile, wellposed as wp
        >>> try:
        ...     wp.verify(tempfile.mkdtemp())  # an empty folder
        ... except wp.errors.RunError as error:
        ...     print("proof.json" in str(error))
        True
    """


class RunLocked(RunError):
    """Another process is training in the run directory.

    Examples:
        >>> import pathlib, tempfile, wellposed as wp
        >>> from wellposed_lab.runs.run_files import RunLock
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> lock = RunLock(folder)  # as `wellposed train` does
        >>> try:
        ...     RunLock(folder)
        ... except wp.errors.RunLocked as error:
        ...     print("is in use by process" in str(error))
        True
        >>> lock.release()
    """


class CheckpointRefused(RunError):
    """A checkpoint is truncated, damaged, or belongs to another model, configuration or program.

    Examples:
        >>> import tempfile, wellposed as wp
        >>> try:
        ...     wp.tasks.load("sudoku", tempfile.mkdtemp())  # an empty folder
        ... except wp.errors.CheckpointRefused as error:
        ...     print(str(error)[:34])
        The weights of 'sudoku' are not in
    """


class IllPosed(WellposedError, RuntimeError):
    """No proof of exactly one equilibrium, and the policy was `on_ill_posed="raise"`.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(4, 32, weight_variance=2.0)
        >>> try:
        ...     model(torch.ones(3, 4))
        ... except wp.IllPosed as error:
        ...     print("nothing proves that an equilibrium exists" in str(error))
        True
    """


class NotConverged(WellposedError, RuntimeError):
    """A solve failed for some samples and the policy was `on_failure="raise"`.

    Attributes:
        solution: The `Solution` with per-sample status and the best value found; nothing is lost.

    Examples:
        >>> import torch, wellposed as wp
        >>> try:
        ...     wp.fixed_point(lambda z: 2 * z + 1, torch.zeros(3, 1), wp.Picard(), on_failure="raise")
        ... except wp.NotConverged as error:
        ...     print(error.solution.status)
        StatusArray(DIVERGED: 3)
    """

    def __init__(self, message: str, solution: Any = None) -> None:
        super().__init__(message)
        self.solution = solution


class AdjointNotConverged(NotConverged):
    """The linear solve of a backward pass failed and the policy was `on_failure="raise"`.

    Examples:
        >>> import torch, wellposed as wp
        >>> gradient = wp.ImplicitGradient(wp.Neumann(), max_steps=2)
        >>> layer = wp.EquilibriumLayer(lambda z, x: 0.9 * z + x, gradient=gradient, on_failure="raise")
        >>> z = layer(torch.ones(1, 1, requires_grad=True))
        >>> try:
        ...     z.sum().backward()
        ... except wp.errors.AdjointNotConverged as error:
        ...     print(error.solution.status)
        StatusArray(MAX_STEPS: 1)
    """


class WellposedWarning(UserWarning):
    """Every warning this package gives.

    Examples:
        >>> import warnings, torch, wellposed as wp
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", wp.errors.WellposedWarning)
        ...     solution = wp.fixed_point(lambda z: 2 * z + 1, torch.zeros(3, 1), wp.Picard())
        >>> solution.status
        StatusArray(DIVERGED: 3)
    """


class CoupledRowsWarning(WellposedWarning):
    """Rows of a batch were found to depend on each other; the batch was solved as one sample.

    Examples:
        >>> import warnings, torch, wellposed as wp
        >>> A, x = torch.diag(torch.ones(4), -1), torch.eye(5, 1)  # a chain: row i depends on row i - 1
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     solution = wp.fixed_point(lambda z, x: 0.9 * (A @ z) + x, torch.zeros(5, 1), args=(x,))
        >>> [w.category.__name__ for w in caught], solution.converged.all().item()
        (['CoupledRowsWarning'], True)
    """


class DivergedWarning(WellposedWarning):
    """The loss became NaN or infinite, or exploded; the parameters before that were restored.

    Examples:
        >>> import warnings, torch, wellposed as wp
        >>> model, X = torch.nn.Linear(1, 1), torch.ones(1, 1)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     history = wp.descend(model, X, X, step_size=1e3, steps=100)
        >>> [w.category.__name__ for w in caught], history.stop
        (['DivergedWarning'], <Stop.DIVERGED: 'diverged'>)
    """


class IllPosedWarning(WellposedWarning):
    """No proof of exactly one equilibrium, and the policy was `on_ill_posed="warn"`.

    Examples:
        >>> import warnings, torch, wellposed as wp
        >>> model = wp.GaussianDEQ(4, 32, weight_variance=2.0, on_ill_posed="warn", on_failure="ignore")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     solution = model.solve(torch.ones(3, 4))
        >>> [w.category.__name__ for w in caught]
        ['IllPosedWarning']
    """


class NotConvergedWarning(WellposedWarning):
    """A solve failed for some samples and the policy was `on_failure="warn"`.

    Examples:
        >>> import warnings, torch, wellposed as wp
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     solution = wp.fixed_point(lambda z: 2 * z + 1, torch.zeros(3, 1), wp.Picard())
        >>> [w.category.__name__ for w in caught]
        ['NotConvergedWarning']
    """


class AdjointNotConvergedWarning(NotConvergedWarning):
    """The linear solve of a backward pass failed and the policy was `on_failure="warn"`.

    Examples:
        >>> import warnings, torch, wellposed as wp
        >>> gradient = wp.ImplicitGradient(wp.Neumann(), max_steps=2)
        >>> layer = wp.EquilibriumLayer(lambda z, x: 0.9 * z + x, gradient=gradient)
        >>> z = layer(torch.ones(1, 1, requires_grad=True))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     z.sum().backward()
        >>> [w.category.__name__ for w in caught]
        ['AdjointNotConvergedWarning']
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` if some known word is near, else an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def how_to_install(extra: str) -> str:
    """The end of a sentence about a missing package: how to install it, first as README does.

    In the source tree the constraints keep pip from fetching another torch.
    """
    return (
        f"pip install -c constraints.txt '.[{extra}]' in the source tree (a released version: pip install 'wellposed[{extra}]')"
    )


def required(module: str, why: str, *, extra: str) -> Any:
    """An optional module, imported; without it `MissingPackage`, with `why` and what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(f"{why}; install it with: {how_to_install(extra)}.") from error
