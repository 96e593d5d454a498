"""One step of minibatch training, and an evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wellposed.nn import EquilibriumLayer
from wellposed_lab.runs._distributed import World
from wellposed_lab.runs.losses import AbstractLoss

if TYPE_CHECKING:
    from wellposed_lab.runs.config import Config

__all__ = ["TOTALS", "Trainee"]

#: Samples at once in evaluations, unless the batches are larger.
EVALUATED_AT_ONCE = 1024
#: What is summed over the batches of an epoch.
TOTALS = ("loss", "items", "equilibrium_steps", "solved", "unconverged")


@dataclass
class Trainee:
    """A model with all that a step needs.

    Attributes:
        model: The model.
        optimizer, loss, config, world: As in `fit`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: AbstractLoss
    config: Config
    world: World

    def step(self, X: Tensor, y: Tensor, rows: Tensor, rate: float, *, interrupted: bool) -> Tensor | None:
        """Sums as in `TOTALS` and a sign of interruption, over all processes; None, and no step, if the loss is not finite."""
        mine = self.world.part(rows)
        self.model.train()
        self.optimizer.zero_grad()
        x, target = X[mine.to(X.device)], y[mine.to(y.device)]
        total, local = None, [0.0] * len(TOTALS)
        if len(mine):  # with more processes than samples some have nothing to do
            total = self.loss.total(self.model(x), target)
            local = [float(total.detach()), self.loss.count(target), *self._solves()]
        sums = self.world.add(torch.tensor([*local, float(interrupted)], dtype=torch.float64))
        if not math.isfinite(float(sums[0])):
            return None
        if total is not None:
            (total / max(float(sums[1]), 1.0)).backward()
        self.world.add_gradients(self.model)
        if self.config.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return sums

    def _solves(self) -> tuple[float, float, float]:
        """Evaluations, samples and failures of the equilibrium solves of the last forward pass."""
        steps = solved = failed = 0.0
        for module in self.model.modules():
            if isinstance(module, EquilibriumLayer) and module.last_solution is not None:
                solution = module.last_solution
                steps += float(solution.num_steps.sum())
                solved += solution.num_steps.numel()
                failed += float((~solution.converged).sum())
        return steps, solved, failed

    @torch.no_grad()
    def evaluate(self, X: Tensor, y: Tensor) -> dict[str, float]:
        """The loss and the measures on a part, all processes together."""
        self.model.eval()
        size = max(EVALUATED_AT_ONCE, self.config.run.batch_size or 0)
        sums: Tensor | None = None
        for rows in self.world.part(torch.arange(len(X))).split(size):
            x, target = X[rows.to(X.device)], y[rows.to(y.device)]
            output = self.model(x)
            head = torch.tensor([float(self.loss.total(output, target)), self.loss.count(target)], dtype=torch.float64)
            part = torch.cat([head, self.loss.tally(output, target).cpu()])
            sums = part if sums is None else sums + part
        if sums is None:  # fewer samples than processes
            output, target = self.model(X[:1]), y[:1]
            sums = torch.zeros(2 + len(self.loss.tally(output, target)), dtype=torch.float64)
        self.world.add(sums)
        count = int(sums[1])
        return {"loss": float(sums[0]) / max(count, 1), **self.loss.measures(sums[2:], count)}
