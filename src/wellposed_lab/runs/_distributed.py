"""One process, or several under torchrun, with the same arithmetic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from wellposed.errors import InvalidArgument

__all__ = ["World", "joined", "world_size"]

#: The first process may spend this long on a certificate while the others wait.
PATIENCE = timedelta(hours=12)
_START = "Start by torchrun, which sets these variables, or unset WORLD_SIZE for one process."


@dataclass(frozen=True)
class World:
    """The processes that train one model together.

    Attributes:
        rank: The number of this one; 0 writes the files.
        size: How many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def part(self, rows: Tensor) -> Tensor:
        """The rows that this process works on; some get one more than others, and there may be none."""
        return rows if self.size == 1 else rows.tensor_split(self.size)[self.rank]

    def add(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(numbers, op=ReduceOp.SUM)
        return numbers

    def add_gradients(self, model: nn.Module) -> None:
        """Every gradient becomes its sum over the processes; what no process has a gradient of keeps none.

        `DistributedDataParallel` would do it while the backward pass runs, but where it is freed after its process group (as
        after an exception, whose traceback holds it) torch's own destructor deadlocks now and then: it joins gloo's threads
        while it holds the interpreter's lock that they wait for.
        """
        if self.size == 1:
            return
        trained = [p for p in model.parameters() if p.requires_grad]
        somewhere = self.add(torch.tensor([p.grad is not None for p in trained], dtype=torch.int64))
        for parameter, count in zip(trained, somewhere.tolist(), strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                parameter.grad = self.add(parameter.grad.contiguous())

    def wait(self) -> None:
        """Until all processes are here."""
        self.add(torch.zeros(1))

    def agree(self, code: int) -> int:
        """What the first process says, for all."""
        if self.size == 1:
            return code
        said = torch.tensor([code])
        torch.distributed.broadcast(said, src=0)
        return int(said)


@contextmanager
def joined() -> Iterator[World]:
    """The world that torchrun made, as long as the context is open; a world of one process without it."""
    size = world_size()
    if size == 1:
        yield World()
        return
    _check_variables(size)
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        raise InvalidArgument("This torch has no distributed training with gloo; start one process, without torchrun.")
    try:
        torch.distributed.init_process_group("gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:  # no such host or port, or one that is taken
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise InvalidArgument(f"The other processes could not be joined ({reason}). {_START}") from error
    try:
        yield World(torch.distributed.get_rank(), torch.distributed.get_world_size())
    finally:
        torch.distributed.destroy_process_group()


def world_size() -> int:
    """How many processes train together: WORLD_SIZE, or 1 if it is not set."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not _is_count(text) or int(text) < 1:
        raise InvalidArgument(f"WORLD_SIZE must be the number of processes, at least 1; got {text!r}. {_START}")
    return int(text)


def _check_variables(size: int) -> None:
    """Raises unless the variables that torchrun sets are there and fit each other."""
    rank = os.environ.get("RANK")
    if rank is None:
        raise InvalidArgument(f"WORLD_SIZE is {size} and RANK is not set. {_START}")
    if not _is_count(rank) or int(rank) >= size:
        raise InvalidArgument(f"RANK must be the number of this process, 0 to {size - 1}; got {rank!r}. {_START}")
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise InvalidArgument(f"WORLD_SIZE is {size} and {missing[0]} is not set. {_START}")


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 9
