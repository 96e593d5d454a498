"""What can be wrong with a cell of the user's own, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from wellposed._tree import leaves
from wellposed.errors import InvalidArgument
from wellposed.nn.cell import AbstractCell

__all__ = ["check_norms", "check_state_shape", "explaining"]

#: What torch's errors over shapes and dtypes have in common.
ABOUT_SHAPES = re.compile("shape|size|dimension|dtype|mat1|channels|type")


def check_state_shape(cell: Any, shape: Any) -> None:
    if shape is None:
        return
    if isinstance(cell, AbstractCell):
        raise InvalidArgument(
            f"{type(cell).__name__} tells the shape of its state itself; state_shape={shape!r} has no effect."
        )
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise InvalidArgument(f"state_shape must be a tuple of integers such as (width,), without the batch; got {shape!r}.")


def check_norms(cell: nn.Module, *, coupled: bool) -> None:
    for name, module in cell.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if module.training and module.track_running_stats:
            raise InvalidArgument(
                f"The cell holds {type(module).__name__} ({name!r}), whose running statistics change with every evaluation. "
                "Use GroupNorm or LayerNorm inside a cell (BatchNorm before and after the layer is fine), call eval() on it, "
                "or give it track_running_stats=False and the layer coupled=True."
            )
        if not coupled and (module.training or not module.track_running_stats):
            raise InvalidArgument(
                f"The cell holds {type(module).__name__} ({name!r}), which mixes the samples of a batch. Give the layer "
                "coupled=True, which solves the batch as one sample, or use GroupNorm or LayerNorm inside a cell."
            )


def explaining(
    function: Callable[..., Any], state: Any, *, given: bool, state_shape: tuple[int, ...] | None
) -> Callable[..., Any]:
    """The function; if its very first call fails over shapes or dtypes, where those of z came from is said."""
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves(state))
    dtypes = ", ".join(sorted({str(leaf.dtype) for leaf in leaves(state)}))
    if given:
        said = f"the given z0, {shapes} of {dtypes}: {{}}. z0 must have the shapes and dtype of what the cell returns."
    elif state_shape is not None:
        said = (
            f"z of shape {shapes} by state_shape={state_shape}: {{}}. It must be that of what the cell returns, less the batch."
        )
    else:
        said = (
            f"z of the shape of x, {shapes}, which is the default: {{}}. "
            "If the state has another shape, give state_shape=(width,) to the layer, or a start z0 to the call."
        )
    called = False

    def explained(z: Any, x: Any) -> Any:
        nonlocal called
        if called:
            return function(z, x)
        called = True
        try:
            return function(z, x)
        except RuntimeError as error:
            if given and not ABOUT_SHAPES.search(str(error)):
                raise
            raise InvalidArgument(f"cell(z, x) failed with {said.format(error)}") from error

    return explained
