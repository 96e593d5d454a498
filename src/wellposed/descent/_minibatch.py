"""Minibatch training: one step and one epoch, for estimators, runs and papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from wellposed.nn import EquilibriumLayer

__all__ = ["TOTALS", "MinibatchStep", "World", "epoch", "solves"]

#: What is summed over the batches of an epoch.
TOTALS = ("loss", "items", "equilibrium_steps", "solved", "unconverged")


@dataclass(frozen=True)
class World:
    """The processes that train one model together.

    Attributes:
        rank: The number of this one; 0 writes the files.
        size: The number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def part(self, rows: Tensor) -> Tensor:
        """The rows that this process works on; possibly none."""
        return rows if self.size == 1 else rows.tensor_split(self.size)[self.rank]

    def add(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(numbers, op=ReduceOp.SUM)
        return numbers

    def add_gradients(self, model: nn.Module) -> None:
        """Replaces every gradient by its sum over the processes; None stays None if all have None.

        `DistributedDataParallel` would do it during the backward pass. But when it is freed after
        its process group (as after an exception, whose traceback holds it), its destructor may
        deadlock: it joins gloo's threads and holds the interpreter's lock that they wait for.
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
        """Waits for all processes."""
        self.add(torch.zeros(1))

    def agree(self, code: int) -> int:
        """The code of the first process."""
        if self.size == 1:
            return code
        said = torch.tensor([code])
        torch.distributed.broadcast(said, src=0)
        return int(said)


@dataclass(frozen=True)
class MinibatchStep:
    """One step of an optimizer on the mean loss of a batch.

    Attributes:
        model, optimizer: What is trained, and by what.
        objective: (x, y) of a batch -> the sum of the loss over its items, with a graph, and the
            number of items (samples, pixels).
        world: The processes; each works on a part of every batch, and gradients are added up.
        clip: Greatest norm of the gradient, or None.
        project: Is called after the step, e.g. to keep the model well-posed.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Callable[[Tensor, Tensor], tuple[Tensor, float]]
    world: World = World()
    clip: float | None = None
    project: Callable[[], None] | None = None

    def __call__(self, X: Tensor, y: Tensor, rows: Tensor, *further: float) -> Tensor | None:
        """Takes a step on these rows.

        Args:
            X, y: All inputs and targets. rows: The batch.
            further: Numbers that are summed over the processes too.

        Returns:
            Sums as in `TOTALS`, then `further`; None if the loss or a gradient is not finite, and
            then the parameters stay.
        """
        mine = self.world.part(rows)
        self.model.train()
        self.optimizer.zero_grad()
        total, local = None, [0.0] * len(TOTALS)
        if len(mine):  # empty with more processes than samples
            total, items = self.objective(X[mine.to(X.device)], y[mine.to(y.device)])
            local = [float(total.detach()), items, *solves(self.model)]
        sums = self.world.add(torch.tensor([*local, *further], dtype=torch.float64))
        if not math.isfinite(float(sums[0])):
            return None
        if total is not None:
            (total / max(float(sums[1]), 1.0)).backward()
        self.world.add_gradients(self.model)
        if not all(bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None):
            return None
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        if self.project is not None:
            self.project()
        return sums


def epoch(step: Callable[[Tensor], Tensor | None], batches: Iterable[Tensor], totals: list[float]) -> Iterator[Tensor | None]:
    """Takes a step on each batch; adds its sums to `totals` and yields them. None is the last."""
    for rows in batches:
        sums = step(rows)
        if sums is not None:
            totals[:] = [a + b for a, b in zip(totals, sums.tolist(), strict=False)]
        yield sums
        if sums is None:
            return


def solves(model: nn.Module, *, adjoint: bool = False) -> tuple[float, float, float]:
    """Evaluations, samples and failures of the last solves for equilibria, or for adjoints."""
    steps = solved = failed = 0.0
    for module in model.modules():
        if isinstance(module, EquilibriumLayer):
            solution = module.last_adjoint if adjoint else module.last_solution
            if solution is not None:
                steps += float(solution.num_steps.sum())
                solved += solution.num_steps.numel()
                failed += float((~solution.converged).sum())
    return steps, solved, failed
