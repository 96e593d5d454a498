"""The solves inside a model's forward pass: where they begin, what they found, whether that is all there is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._tree import Layout, map_leaves
from wellposed.landscape._model import equilibrium_layers
from wellposed.linalg import spectral_norm_upper
from wellposed.nn import DenseCell, EquilibriumLayer, MonotoneClassifier
from wellposed.nn.families import is_theory_network
from wellposed.nn.layer import DEFAULT_RTOL
from wellposed.solve import Solution

__all__ = ["Equilibria", "Key", "agreement_of", "distances", "proved_unique", "random_start"]

#: Which layer, and its how many-th call since `Equilibria.begin`.
Key = tuple[int, int]


class Equilibria:
    """Sees every call of every equilibrium layer of a model and may tell it where to begin.

    Args:
        model: Its layers are found once; calls of them count, not of their method `solve`.

    Attributes:
        layers: The layers.
        found: By call, what the last forward pass found.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = equilibrium_layers(model)
        self.found: dict[Key, Solution] = {}
        self._starts: dict[Key, Any] = {}
        self._calls = [0] * len(self.layers)

    def begin(self, starts: dict[Key, Any] | None = None) -> None:
        """Before a forward pass: forgets what was found.

        Args:
            starts: By call, where to begin; calls that are not in it begin where the model says.
        """
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
    """Standard normal, scaled to the root mean square of each sample's equilibrium: of its size, but anywhere."""
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
    r"""The distance up to which two results of a layer count as one: the square root of its tolerance.

    With residuals of `rtol` two results of a map that contracts by q differ by up to about 2 rtol/(1 - q); the root allows
    1 - q as small as 2 sqrt(rtol).
    """
    rtol = DEFAULT_RTOL[dtype] if layer.rtol is None else layer.rtol
    return math.sqrt(max(rtol, torch.finfo(dtype).eps))


def rows_of(value: Any, rows: Tensor) -> Any:
    """Some samples of a state."""
    return map_leaves(lambda leaf: leaf[rows], value)


def proved_unique(model: nn.Module) -> bool:
    """Whether every equilibrium of the model, at its present parameters, is proved to be the only one.

    By its own bound of a contraction factor (`contraction_upper`), by a monotone construction, or by |W| < 1 of a `DenseCell`
    with an activation that does not expand.
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
