"""What a run uses of the machine: processes, threads, signals; and the record of the machine."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wellposed._io import open_plain
from wellposed.descent._minibatch import MinibatchStep
from wellposed.errors import InvalidArgument
from wellposed_lab.runs.losses import residual_weight

if TYPE_CHECKING:
    from wellposed_lab.runs.config_sections import LossSection, RunSection
    from wellposed_lab.runs.losses import AbstractLoss

__all__ = ["Interruption", "Step", "World", "environment", "git_head", "joined", "largest_product", "on_threads", "threads_for"]

#: A step of an optimizer on (X, y, rows, *further).
Step = Callable[..., Tensor | None]
NEEDED = "Training in several processes, run.precision and run.accumulate need Lightning Fabric"
START = "Start by torchrun, which sets these variables, or unset WORLD_SIZE for one process."
#: Products of fewer floating point operations run on one thread. A product of 1e8 takes 1 to 4 ms on one thread, so a second
#: thread saves at most 2 ms. Where other processes use the same cores, threads wait for each other in every product, 24 ms and
#: more (measured on two busy cores: 0.39 ms became 24 ms at 1.7e7 operations, 2.2 ms became 65 ms at 6.7e7).
SMALL = 1e8
PACKAGES = ("wellposed", "torch", "numpy", "scipy", "scikit-learn", "safetensors", "pyarrow")
#: Bytes that are read of a file of git; packed references of a large repository have some hundred kilobytes.
_LONGEST = 4 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REFERENCE = re.compile(r"refs(/[A-Za-z0-9_+@-][A-Za-z0-9_.+@-]*)+")


class World:
    """The processes that train one model together: one, and in `runs.fabric` several.

    Attributes:
        rank: The number of this process; 0 writes the files.
        size: The number of processes.
        device: Where this process computes; None is `run.device`.
        grace: Seconds that SIGTERM leaves to a step; None leaves any time.
    """

    rank, size = 0, 1
    device: torch.device | None = None
    grace: float | None = None

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def part(self, rows: Tensor) -> Tensor:
        """The rows that this process works on; possibly none."""
        return rows

    def add(self, numbers: Tensor) -> Tensor:
        """The sum over all processes."""
        return numbers

    def wait(self) -> None:
        """Waits for all processes."""

    def agree(self, code: int) -> int:
        """The code of the first process."""
        return code

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: AbstractLoss, clip: float | None, section: LossSection
    ) -> Step:
        """One step of the optimizer on (X, y, rows, *further), as `MinibatchStep` takes it."""
        if section.penalty or residual_weight(model, section.residual):
            from wellposed_lab.runs.penalty import objective  # only here: most runs have none

            return MinibatchStep(model, optimizer, objective(model, loss, section), clip)
        return MinibatchStep(model, optimizer, lambda x, y: (loss.total(model(x), y), loss.count(y)), clip)


@contextmanager
def joined(options: RunSection | None = None) -> Iterator[World]:
    """The processes of torchrun while the context is open; one process without torchrun.

    Args:
        options: Section `run` of the configuration; its defaults if not given.
    """
    size = _world_size()
    if options is not None and options.devices > 1 and "WORLD_SIZE" not in os.environ:
        raise InvalidArgument(
            f"run.devices={options.devices} needs {options.devices} processes: `wellposed train` or torchrun starts them."
        )
    if options is not None and options.strategy == "fsdp" and size == 1:
        raise InvalidArgument(
            "run.strategy=fsdp spreads a model over several processes; use run.devices=2 or more, torchrun, or ddp."
        )
    if size == 1 and (options is None or (options.precision == "full" and options.accumulate == 1)):
        yield World()
        return
    if size > 1:
        _check_variables(size)
    from wellposed_lab.runs.fabric import fabric_world  # only here: one process needs no Fabric

    with fabric_world(options, size) as world:
        yield world


def _world_size() -> int:
    """The number of processes that train together: WORLD_SIZE, or 1 if it is not set."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not _is_count(text) or int(text) < 1:
        raise InvalidArgument(f"WORLD_SIZE must be the number of processes, at least 1; got {text!r}. {START}")
    return int(text)


def _check_variables(size: int) -> None:
    """Raises unless the variables that torchrun sets are there and fit each other."""
    rank = os.environ.get("RANK")
    if rank is None:
        raise InvalidArgument(f"WORLD_SIZE is {size} and RANK is not set. {START}")
    if not _is_count(rank) or int(rank) >= size:
        raise InvalidArgument(f"RANK must be the number of this process, 0 to {size - 1}; got {rank!r}. {START}")
    if missing := [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise InvalidArgument(f"WORLD_SIZE is {size} and {missing[0]} is not set. {START}")


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 9


class Interruption:
    """While the context is open, Ctrl-C and SIGTERM set `asked`: training ends after a step.

    A second signal interrupts at once.

    Args:
        grace: Seconds that SIGTERM leaves, then SIGALRM ends the process; None leaves any time.
    """

    def __init__(self, grace: float | None = None) -> None:
        self.asked, self._grace = False, grace
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._grace is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self._grace is not None and number == signal.SIGTERM:
            signal.setitimer(signal.ITIMER_REAL, self._grace)


@contextmanager
def on_threads(count: int | None = None) -> Iterator[int]:
    """Sets the number of threads of torch while the context is open; gives the number before."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def largest_product(model: nn.Module, shape: tuple[int, ...], batch: int) -> float:
    """Floating point operations of the largest product of a batch with one parameter.

    A matrix multiplies every sample once, a kernel of a convolution every pixel. `shape` is that of
    one input.
    """
    pixels = math.prod(shape[1:])
    matrices = (parameter for parameter in model.parameters() if parameter.dim() >= 2)
    return max((2.0 * batch * m.numel() * (pixels if m.dim() > 2 else 1) for m in matrices), default=0.0)


def threads_for(model: nn.Module, X: Tensor, *, batch: int | None = None, available: int | None = None) -> int:
    """The number of threads for a network: 1 if its largest product is small, else `available`.

    Args:
        model: The network.
        X: (n, *shape) inputs.
        batch: Samples in a batch; all if not given.
        available: For large products; the present number of torch if not given.
    """
    product = largest_product(model, tuple(X.shape[1:]), len(X) if batch is None else batch)
    return 1 if product < SMALL else available or torch.get_num_threads()


def environment(seed: int, threads: int | str) -> dict[str, Any]:
    """Versions, machine, threads, seed, command line and git commits; no other program is run."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions,
        "platform": _platform(),
        "processors": os.cpu_count(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
        "threads": threads,
        "processes": _world_size(),
        "seed": seed,
        "command": sys.argv,
        "git": {"source": _commit(Path(__file__).parent), "working_directory": _commit(Path())},
    }


def _commit(folder: Path) -> dict[str, str] | None:
    commit = git_head(folder)
    return None if commit is None else {"commit": commit}


def _platform() -> str:
    """System, release, machine and C library; `platform.platform` would run a program."""
    if not hasattr(os, "uname"):
        return sysconfig.get_platform()
    name = os.uname()
    return "-".join(part for part in (name.sysname, name.release, name.machine, "".join(platform.libc_ver())) if part)


def git_head(folder: Path) -> str | None:
    """The commit of the repository that contains a folder; None without one.

    Git is not run: it runs programs that a repository's configuration names (`core.fsmonitor`), and
    a run directory of unknown origin may contain one.
    """
    try:
        repository = _repository(folder.absolute())
        if repository is None:
            return None
        head = _text(repository / "HEAD").strip()
        if head.startswith("ref: "):
            head = _commit_of(repository, head.removeprefix("ref: "))
    except (OSError, ValueError):  # ValueError: not text, or not a path
        return None
    return head if _COMMIT.fullmatch(head) else None


def _repository(folder: Path) -> Path | None:
    """The folder with HEAD: `.git` here or above, or the one that a file `.git` names."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        if git.is_dir():
            return git
        if git.is_file():
            said = _text(git).strip()
            return place / said.removeprefix("gitdir: ") if said.startswith("gitdir: ") else None
    return None


def _commit_of(repository: Path, reference: str) -> str:
    """The commit of a branch with a plain name; else an empty text."""
    if not _REFERENCE.fullmatch(reference):
        return ""
    common = repository
    if (repository / "commondir").is_file():  # of a worktree
        common = repository / _text(repository / "commondir").strip()
    for place in (repository, common):
        if (place / reference).is_file():
            return _text(place / reference).strip()
    for line in _text(common / "packed-refs").splitlines():
        commit, _, name = line.partition(" ")
        if name == reference:
            return commit
    return ""


def _text(path: Path) -> str:
    """The text of a regular file of limited size; links are not followed."""
    with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
        content = file.read(_LONGEST + 1)
    return content.decode("ascii") if len(content) <= _LONGEST else ""
