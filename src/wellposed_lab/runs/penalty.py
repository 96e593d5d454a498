"""The Jacobian penalty of the equilibria of a network, whatever its layers are fed with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.nn import EquilibriumLayer, jacobian_penalty
from wellposed_lab.runs.losses import AbstractLoss

__all__ = ["noted_inputs", "penalised", "penalty_of"]

Objective = Callable[[Tensor, Tensor], tuple[Tensor, float]]
Inputs = list[tuple[EquilibriumLayer, Any]]


def penalised(model: nn.Module, loss: AbstractLoss, weight: float) -> Objective:
    """(x, y) -> the sum of the loss over a batch and its number of items.

    The gradient of the sum has that of the penalty, but not its value: losses stay comparable.
    """

    def objective(x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        with noted_inputs(model) as inputs:
            total, count = loss.total(model(x), y), loss.count(y)
        penalty = weight * count * penalty_of(inputs)
        return total + (penalty - penalty.detach()), count

    return objective


@contextmanager
def noted_inputs(model: nn.Module) -> Iterator[Inputs]:
    """Notes every equilibrium layer that is evaluated in this context, with its input."""
    found: Inputs = []
    layers = [module for module in model.modules() if isinstance(module, EquilibriumLayer)]
    if not layers:
        raise InvalidArgument("loss.penalty is for networks with an EquilibriumLayer; this one has none. Omit it.")
    hooks = [layer.register_forward_hook(lambda layer, args, _: found.append((layer, args[0]))) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def penalty_of(inputs: Inputs) -> Tensor:
    """The sum of `jacobian_penalty` at the last equilibria; draws from torch's own generator."""
    total = torch.zeros(())
    for layer, x in inputs:
        assert layer.last_solution is not None
        total = total + jacobian_penalty(layer.cell, layer.last_solution.value, x)
    return total
