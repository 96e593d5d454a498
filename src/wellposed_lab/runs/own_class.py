"""A network of the user's own class, named by its import path in a configuration.

Importing a class runs the code of its module. A configuration or a run may come from a stranger, so
nothing here imports unless the caller allows it.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.nn import AbstractCell, EquilibriumLayer
from wellposed.nn.own import import_class, instantiate, is_cell, state_shape

__all__ = ["OwnNetwork", "own_network"]


class OwnNetwork(nn.Module):
    """A module of the user, with a linear read-out if it is a cell.

    Args:
        body: (n, ...) -> features, or outputs if there is no head.
        head: Of flattened features, or None.
        squeeze: Whether (n, 1) outputs become (n,).
    """

    def __init__(self, body: nn.Module, head: nn.Module | None, *, squeeze: bool) -> None:
        super().__init__()
        self.body, self.head, self.squeeze = body, head, squeeze

    def forward(self, x: Tensor) -> Tensor:
        """(n, ...) -> (n,) for numbers, (n, classes) for classes."""
        output: Tensor = self.body(x)
        if self.head is not None:
            output = self.head(output.flatten(1))
        return output.squeeze(1) if self.squeeze and output.dim() == 2 and output.shape[1] == 1 else output


def own_network(
    path: str,
    arguments: dict[str, Any],
    shape: tuple[int, ...],
    classes: int,
    width: int,
    *,
    allow_code: bool,
    seed: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    solver_kwargs: dict[str, Any],
) -> nn.Module:
    """The network of `model.class`.

    A class whose forward takes (z, x) is a cell: it becomes an `EquilibriumLayer` with a linear
    read-out. One whose forward takes x is a whole network. Of in_features, width, classes,
    generator and dtype it is given what its constructor takes.

    Args:
        path: The import path. arguments: Further keywords of the constructor, checked.
        shape: Of one input. classes: Of a classifier; 0 for numbers, of which the class is given 1.
        width: Of the state.
        allow_code: Whether the class may be imported, which runs its module.
        seed: Of a class that draws from torch's global generator.
        generator, dtype: Of the parameters.
        solver_kwargs: Of the layer of a cell.
    """
    if not allow_code:
        raise InvalidArgument(
            f"model.class names code to run, {path!r}, and a configuration or a run from someone else could name any. Nothing "
            "was imported. If you trust it, give --allow-code to train --resume, sweep --resume, certify or landscape; "
            "report never imports, and prove takes no class."
        )
    features = math.prod(shape)
    offered = {"in_features": features, "width": width, "classes": max(classes, 1), "generator": generator, "dtype": dtype}
    with _folder_on_path(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = import_class(path)
        module = instantiate(made, arguments, offered, where="model.arguments", shape=(features, width)).to(dtype)
        if not is_cell(module):
            return OwnNetwork(module, None, squeeze=classes == 0)
        options: dict[str, Any] = {}
        if not isinstance(module, AbstractCell):
            options = {"state_shape": state_shape(module, shape, width, dtype)}
        layer = EquilibriumLayer(module, **options, **solver_kwargs)
        with torch.no_grad():
            size = EquilibriumLayer(module, **options, on_failure="ignore", max_steps=1)(torch.zeros(1, *shape, dtype=dtype))
        head = nn.Linear(size.flatten(1).shape[1], max(classes, 1), dtype=dtype)
    return OwnNetwork(layer, head, squeeze=classes == 0)


@contextlib.contextmanager
def _folder_on_path() -> Iterator[None]:
    """The present folder among the places of imports, as for `python -m`."""
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
