"""Minibatch training: one step and one epoch, for estimators, runs and papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed.nn import EquilibriumLayer

__all__ = ["TOTALS", "MinibatchStep", "epoch", "has_finite_gradients", "solves"]

#: What is summed over the batches of an epoch.
TOTALS = ("loss", "items", "equilibrium_steps", "solved", "unconverged")


@dataclass(frozen=True)
class MinibatchStep:
    """One step of an optimizer on the mean loss of a batch.

    Attributes:
        model, optimizer: What is trained, and by what.
        objective: (x, y) of a batch -> the sum of the loss over its items, with a graph, and the
            number of items (samples, pixels).
        clip: Greatest norm of the gradient, or None.
        project: Is called after the step, e.g. to keep the model well-posed.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Callable[[Tensor, Tensor], tuple[Tensor, float]]
    clip: float | None = None
    project: Callable[[], None] | None = None

    def __call__(self, X: Tensor, y: Tensor, rows: Tensor, *further: float) -> Tensor | None:
        """Takes a step on these rows.

        Args:
            X, y: All inputs and targets. rows: The batch.
            further: Numbers that follow the sums.

        Returns:
            Sums as in `TOTALS`, then `further`; None if the loss or a gradient is not finite, and
            then the parameters stay.
        """
        self.model.train()
        self.optimizer.zero_grad()
        total, items = self.objective(X[rows.to(X.device)], y[rows.to(y.device)])
        sums = torch.tensor([float(total.detach()), items, *solves(self.model), *further], dtype=torch.float64)
        if not math.isfinite(float(sums[0])):
            return None
        (total / max(items, 1.0)).backward()
        if not has_finite_gradients(self.model):
            return None
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        if self.project is not None:
            self.project()
        return sums


def has_finite_gradients(model: nn.Module) -> bool:
    """Whether every gradient is finite; a parameter without one does not count."""
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


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
