"""A model that is moved about and comes back as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellposed.errors import IllPosed, InvalidArgument, InvalidType
from wellposed.nn import EquilibriumLayer
from wellposed.nn.families import may_be_ill_posed

__all__ = ["check_rows", "equilibrium_layers", "move", "preserved", "strict", "trained", "without_proof"]


def trained(model: Any) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name; raises if there are none."""
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise InvalidArgument(
            f"{type(model).__name__} has no parameter that requires a gradient, so its loss has no landscape. "
            "Set requires_grad on those that should move."
        )
    return parameters


def check_rows(X: Any, y: Any) -> None:
    """Raises unless y has as many rows as X: a loss may broadcast, and mean something else."""
    if isinstance(X, (Tensor, np.ndarray)) and isinstance(y, (Tensor, np.ndarray)) and y.ndim > 0 and len(y) != len(X):
        raise InvalidArgument(f"X and y must have one row for each sample; got {len(X)} rows of X and {len(y)} of y.")


def equilibrium_layers(model: nn.Module) -> list[EquilibriumLayer]:
    """The equilibrium layers of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, EquilibriumLayer)]


def move(
    parameters: Mapping[str, Tensor], origin: Mapping[str, Tensor], steps: Sequence[tuple[float, Mapping[str, Tensor]]]
) -> None:
    """Writes origin + sum of coefficient * direction into the parameters."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            value = origin[name]
            for coefficient, direction in steps:
                value = torch.add(value, direction[name], alpha=coefficient)
            parameter.copy_(value)


@contextmanager
def strict(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, and a solve that fails raises `NotConverged`; modes, policies and records come back."""
    modes = [(module, module.training) for module in model.modules()]
    layers = [(layer, layer.on_failure, layer.last_solution, layer.last_adjoint) for layer in equilibrium_layers(model)]
    try:
        model.eval()
        for layer, *_ in layers:
            layer.on_failure = "raise"
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for layer, policy, solution, adjoint in layers:
            layer.on_failure, layer.last_solution, layer.last_adjoint = policy, solution, adjoint


@contextmanager
def without_proof(model: nn.Module) -> Iterator[None]:
    """Inside, a network evaluates also where its own bound does not prove an equilibrium; raises `IllPosed` if none does so."""
    policies = [(module, module.on_ill_posed) for module in model.modules() if may_be_ill_posed(module)]
    if all(policy == "ignore" for _, policy in policies):
        raise IllPosed("The model refuses, and no network in it has a policy for that.")
    try:
        for module, _ in policies:
            module.on_ill_posed = "ignore"
        yield
    finally:
        for module, policy in policies:
            module.on_ill_posed = policy


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """As `strict`; and whatever happens inside, parameters and buffers are afterwards what they were, bit for bit."""
    parameters = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with strict(model):
            yield
    finally:
        with torch.no_grad():
            for parameter, value in parameters:
                parameter.copy_(value)
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                module._buffers[name] = buffer
