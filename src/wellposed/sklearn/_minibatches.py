"""Minibatch descent for estimators: Adam, a step back into the ball of contractions, and an account of every solve."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from wellposed.nn import EquilibriumLayer
from wellposed.sklearn._families import contracting

__all__ = ["Account", "Ball", "epoch", "unconverged"]

#: Contractions are kept at most here, so that equilibria stay unique and solves stay short.
BOUND = 0.95


@dataclass
class Account:
    """What an epoch was like.

    Attributes:
        loss: Mean over the samples, each at the parameters that its batch saw.
        solves: Equilibria asked for. failed: Those, and adjoints, that did not converge.
        finite: Whether every loss and gradient was; if not, the step was not taken and the epoch ended.
    """

    loss: float = 0.0
    solves: int = 0
    failed: int = 0
    finite: bool = True


class Ball:
    """|R| <= 0.95 for the networks that are well-posed because they contract.

    After a step, a recurrent matrix outside of the ball is scaled back to its surface. One decomposition serves until the
    matrix may have left: |R| <= |R_0| + |R - R_0|_F.
    """

    def __init__(self, model: nn.Module) -> None:
        self._networks = contracting(model)
        self._known: list[tuple[Tensor, float] | None] = [None] * len(self._networks)

    @torch.no_grad()
    def keep(self) -> None:
        """Scales back what is outside."""
        for index, (network, parameter) in enumerate(self._networks):
            known, R = self._known[index], network.recurrent()
            if known is not None and known[1] + float((R - known[0]).norm()) <= BOUND:
                continue
            upper = network.contraction_upper()
            if upper > BOUND:
                parameter.mul_(BOUND / upper)
                upper = BOUND
            self._known[index] = (network.recurrent().clone(), upper)


def epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Tensor, Tensor], Tensor],
    data: tuple[Tensor, Tensor],
    *,
    batch_size: int,
    random: np.random.RandomState,
) -> Account:
    """One pass over the data, in place.

    Args:
        model: Of it the parameters that require a gradient are trained.
        optimizer: Of these.
        loss: (outputs, targets) -> the mean over the samples.
        data: (n, d) inputs and (n,) targets.
        batch_size: Samples a step.
        random: Of the order.
    """
    X, y = data
    account, ball = Account(), Ball(model)
    model.train()
    for rows in torch.from_numpy(random.permutation(len(X))).split(batch_size):
        optimizer.zero_grad()
        value = loss(model(X[rows]), y[rows])
        account.solves += len(rows)
        account.failed += unconverged(model)
        if not math.isfinite(float(value.detach())):
            account.finite = False
            break
        value.backward()
        account.failed += unconverged(model, adjoint=True)
        if not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
            account.finite = False
            break
        optimizer.step()
        ball.keep()
        account.loss += float(value.detach()) * len(rows) / len(X)
    return account


def unconverged(model: nn.Module, *, adjoint: bool = False) -> int:
    """How many equilibria, or adjoints, of the last pass did not converge."""
    failed = 0
    for module in model.modules():
        if isinstance(module, EquilibriumLayer):
            solution = module.last_adjoint if adjoint else module.last_solution
            failed += 0 if solution is None else int((~solution.converged).sum())
    return failed
