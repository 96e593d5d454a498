"""A model whose parameters are moved and restored, and the solves inside its forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellposed._tree import Layout, map_leaves
from wellposed.errors import IllPosed, InvalidArgument, InvalidType
from wellposed.linalg import spectral_norm_upper
from wellposed.nn import DenseCell, EquilibriumLayer, MonotoneClassifier
from wellposed.nn.families import is_theory_network, may_be_ill_posed
from wellposed.nn.layer import DEFAULT_RTOL
from wellposed.solve import Solution


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
    """Evaluation mode; failed solves raise `NotConverged`. Restores modes, policies, records."""
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
    """Ignores the bounds of contractions inside; raises `IllPosed` if that would change nothing."""
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
    """As `strict`; also restores parameters and buffers, bit for bit."""
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


#: Which layer, and its how many-th call since `Equilibria.begin`.
Key = tuple[int, int]


class Equilibria:
    """Records every call of the equilibrium layers of a model, and sets where their solves start.

    Attributes:
        layers: The layers; calls of their method `solve` do not count.
        found: By call, what the last forward pass found.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = equilibrium_layers(model)
        self.found: dict[Key, Solution] = {}
        self._starts: dict[Key, Any] = {}
        self._calls = [0] * len(self.layers)

    def begin(self, starts: dict[Key, Any] | None = None) -> None:
        """Before a forward pass; `starts` sets where some of its calls start."""
        self.found, self._starts, self._calls = {}, starts or {}, [0] * len(self.layers)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Hooks are in place inside."""
        handles = []
        try:
            for number, layer in enumerate(self.layers):
                handles.append(layer.register_forward_pre_hook(self._before(number), with_kwargs=True))
                handles.append(layer.register_forward_hook(self._after(number)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, number: int) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            start = self._starts.get((number, self._calls[number]))
            if start is None:
                return None
            x = args[0] if args else kwargs["x"]
            return (x, start), {}

        return hook

    def _after(self, number: int) -> Any:
        def hook(layer: EquilibriumLayer, args: Any, output: Any) -> None:
            if layer.last_solution is not None:
                self.found[number, self._calls[number]] = layer.last_solution
            self._calls[number] += 1

        return hook


def random_start(value: Any, generator: torch.Generator) -> Any:
    """Standard normal, scaled to the root mean square of each sample's equilibrium."""
    layout = Layout.of(value, "z")
    rows = layout.flatten(value)
    size = torch.linalg.vector_norm(rows, dim=1, keepdim=True) / math.sqrt(max(rows.shape[1], 1))
    size = torch.where(size > 0, size, torch.ones_like(size))
    noise = torch.randn(rows.shape, generator=generator, dtype=rows.dtype, device=generator.device)
    return layout.unflatten(noise.to(rows.device) * size)


def distances(a: Any, b: Any) -> Tensor:
    """(batch,) |a - b| / max(|a|, |b|), sample by sample; 0 where both are 0."""
    layout = Layout.of(a, "z")
    rows_a, rows_b = layout.flatten(a), layout.flatten(b)
    size = torch.maximum(torch.linalg.vector_norm(rows_a, dim=1), torch.linalg.vector_norm(rows_b, dim=1))
    gap = torch.linalg.vector_norm(rows_a - rows_b, dim=1)
    return torch.where(gap == 0, torch.zeros_like(gap), gap / size)


def agreement_of(layer: EquilibriumLayer, dtype: torch.dtype) -> float:
    r"""The distance up to which two results count as one: the root of the layer's tolerance.

    With residuals of `rtol` two results of a map that contracts by q differ by up to about 2
    rtol/(1 - q); the root allows 1 - q as small as 2 sqrt(rtol).
    """
    rtol = DEFAULT_RTOL[dtype] if layer.rtol is None else layer.rtol
    return math.sqrt(max(rtol, torch.finfo(dtype).eps))


def rows_of(value: Any, rows: Tensor) -> Any:
    """Some samples of a state."""
    return map_leaves(lambda leaf: leaf[rows], value)


def proved_unique(model: nn.Module) -> bool:
    """Whether all equilibria at the present parameters are proved to be unique.

    By its own bound of a contraction factor (`contraction_upper`), by a monotone construction, or
    by |W| < 1 of a `DenseCell` with an activation that does not expand.
    """
    proved = set()
    for module in model.modules():
        layer = getattr(module, "layer", None)
        if isinstance(layer, EquilibriumLayer) and _owner_proves(module):
            proved.add(layer)
        if isinstance(module, EquilibriumLayer) and isinstance(module.cell, DenseCell):
            with torch.no_grad():
                if spectral_norm_upper(module.cell.recurrent()) * module.cell.activation.lipschitz < 1:
                    proved.add(module)
    return all(layer in proved for layer in equilibrium_layers(model))


def _owner_proves(module: nn.Module) -> bool:
    if isinstance(module, MonotoneClassifier):  # by type: it declares no theory
        return True
    if is_theory_network(module) and module.theory.margin is not None:
        return True
    bound = getattr(module, "contraction_upper", None)
    return callable(bound) and bound() < 1
