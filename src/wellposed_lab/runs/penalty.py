"""What training adds to the loss: a penalty on the Jacobian, or on the residual of few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.nn import EquilibriumLayer, jacobian_penalty
from wellposed_lab.runs.losses import AbstractLoss, residual_weight

if TYPE_CHECKING:
    from wellposed_lab.runs.config_sections import LossSection

__all__ = ["noted_inputs", "objective", "penalty_of"]

Objective = Callable[[Tensor, Tensor], tuple[Tensor, float]]
Inputs = list[tuple[EquilibriumLayer, Any]]


def objective(model: nn.Module, loss: AbstractLoss, section: LossSection) -> Objective:
    """(x, y) -> the sum of the loss over a batch and its number of items.

    The gradient of the sum has that of the penalty, but not its value: losses stay comparable.
    """
    weight, few = section.penalty, residual_weight(model, section.residual)
    if weight and few:
        raise InvalidArgument(
            f"loss.penalty={weight:g} is for equilibria, and {type(model).__name__} trains by few steps. Set loss.residual=0, "
            "or omit loss.penalty."
        )

    def total(x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        if few:
            output, penalty = model.regularized(x, weight=few)  # type: ignore[operator]
        else:
            with noted_inputs(model) as inputs:
                output = model(x)
            penalty = weight * penalty_of(inputs)
        count = loss.count(y)
        return loss.total(output, y) + count * (penalty - penalty.detach()), count

    return total


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
