"""Any module or function as a cell: its start, its map, and errors that name the cause."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._torch import BatchNorm
from wellposed._tree import LOW_PRECISION, Layout, leaves, map_tensors
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.solve._graph_data import tensor_of_rows
from wellposed.solve.map import FunctionMap

#: Words of torch's errors about shapes and dtypes, and of those where a tensor is no tuple or dict.
ABOUT_SHAPES = re.compile("shape|size|dimension|dtype|mat1|channels|type")
ABOUT_DTYPES, ABOUT_PARTS = re.compile("dtype|scalar type|[Ii]nput type"), re.compile("to unpack|data type 'str'")


def zero_state(x: Any, state_shape: tuple[int, ...] | None, groups: Any = None) -> Tensor:
    """The start for the input x: one zero for all entries, of the shape `state_shape`, or of x.

    Args:
        x: A tensor, or a structure; then `tensor_of_rows` gives the rows, or `groups`.
        state_shape: Of the layer. groups: As for the layer.
    """
    tensor = x if isinstance(x, Tensor) else tensor_of_rows(x, groups)
    if state_shape is None and not isinstance(x, Tensor):
        raise InvalidArgument("x is a structure, so the shape of z is unknown: give z0, or state_shape to the layer.")
    if tensor.dim() == 0:
        raise InvalidArgument("x must be batch first, but has no dimension. For one sample give shape (1, features).")
    shape = tensor.shape if state_shape is None else (tensor.shape[0], *state_shape)
    tensors = (tensor, *(leaf for leaf in leaves(x) if isinstance(leaf, Tensor)))
    floating = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
    if not floating:
        raise InvalidType(
            f"x must be floating point, real or complex; got {tensor.dtype}, in which z cannot start. Convert it, e.g. by "
            ".to(torch.float32), or give z0 if the cell needs this x."
        )
    return torch.zeros((), dtype=floating[0], device=tensor.device).expand(shape)


def with_shape_hint(
    function: Callable[..., Any], state: Any, *, given: bool, state_shape: tuple[int, ...] | None
) -> Callable[..., Any]:
    """The function; if its first call fails, the error says where the shape of z came from."""
    called = False

    def explained(z: Any, x: Any) -> Any:
        nonlocal called
        if called:
            return function(z, x)
        called = True
        try:
            return function(z, x)
        except (TypeError, ValueError) as error:
            if not given and ABOUT_PARTS.search(str(error)):
                several = "If the state is several tensors, give their start: layer(x, (a, b)), or a dict of them."
                raise InvalidArgument(f"cell(z, x) failed with one tensor z: {error}. {several}") from error
            if "positional argument" not in str(error):
                raise
            raise InvalidType(f"A cell is a module or function of two arguments, cell(z, x): {error}.") from error
        except IndexError as error:  # often z is too short, as with edges that name nodes which it does not have
            if given or isinstance(x, Tensor):
                raise
            raise InvalidArgument(f"cell(z, x) failed with {_origin(state, x, given, state_shape, error)}") from error
        except RuntimeError as error:
            if given and not ABOUT_SHAPES.search(str(error)):
                raise
            if not given and ABOUT_DTYPES.search(str(error)):
                raise InvalidArgument(
                    f"cell(z, x) failed with z of {_dtypes(state)}, the dtype of x: {error}. Convert x to the dtype of the "
                    "cell's parameters, or the cell to that of x, e.g. by cell.double()."
                ) from error
            raise InvalidArgument(f"cell(z, x) failed with {_origin(state, x, given, state_shape, error)}") from error

    return explained


def _dtypes(state: Any) -> str:
    return ", ".join(sorted({str(leaf.dtype) for leaf in leaves(state)}))


def _origin(state: Any, x: Any, given: bool, state_shape: tuple[int, ...] | None, error: Exception) -> str:
    """Where the shape of z came from, the error of the cell, and what to do."""
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves(state))
    if given:
        return f"the given z0, {shapes} of {_dtypes(state)}: {error}. z0 must have the shapes and dtype of f(z, x)."
    if state_shape is not None:
        wanted = "It must be that of f(z, x) less the batch, and x must fit the cell."
        if not isinstance(x, Tensor):
            wanted = (
                f"It must be that of f(z, x) less the batch. z has as many rows as the tensor {tuple(tensor_of_rows(x).shape)} "
                "of x; if they should be those of another tensor, such as the nodes, put the nodes first, or give z0."
            )
        return f"z of shape {shapes} by state_shape={state_shape}: {error}. {wanted}"
    return (
        f"z of the shape of x, {shapes}, which is the default: {error}. "
        "If the state has another shape, give state_shape=(width,) to the layer, or a start z0 to the call."
    )


def bind_function(
    cell: Callable[..., Any],
    x: Any,
    state: Any,
    layout: Layout,
    *,
    given: bool,
    state_shape: tuple[int, ...] | None,
    mixed: bool,
    coupled: bool,
    costs: dict[Any, float],
) -> FunctionMap:
    """The map z -> cell(z, x) of a module or function; a module gets low precision in float32.

    Args:
        cell: `cell(z, x)`. x: Its input.
        state, layout: A start, and its layout. costs: As for `FunctionMap`.
        given: Whether the caller gave the start. state_shape: Of the layer.
        mixed: Whether autocast is active. coupled: Whether rows may depend on each other.
    """
    function = cell
    if isinstance(cell, nn.Module) and not isinstance(cell, torch.jit.ScriptModule):
        check_norms(cell, coupled=coupled)
        function, x = _BoundModule(cell), map_tensors(_lifted, x)
    if layout.dtype not in LOW_PRECISION:
        function = with_shape_hint(function, state, given=given, state_shape=state_shape)
    return FunctionMap(function, layout, (x,), low_precision=mixed, costs=costs)


class _BoundModule:
    """A module with its present parameters and buffers, in float32 if they are of low precision.

    Backward evaluates the cell again, when others may be in their place:
    `torch.func.functional_call` restores the module's own ones at the end of the forward pass.
    """

    def __init__(self, cell: nn.Module) -> None:
        self._cell = cell
        self._places = [
            (place, name, f"{prefix}.{name}" if prefix else name, tensor)
            for prefix, module in cell.named_modules()
            for place in (module._parameters, module._buffers)
            for name, tensor in place.items()
        ]
        self._unchanged = all(tensor is None or tensor.dtype not in LOW_PRECISION for *_, tensor in self._places)
        self._tensors = {} if self._unchanged else self._by_name()

    def _by_name(self) -> dict[str, Tensor]:
        once = {id(tensor): (path, tensor) for _, _, path, tensor in reversed(self._places) if tensor is not None}
        return {path: _lifted(tensor) for path, tensor in once.values()}  # tied ones under one name

    def __call__(self, z: Any, x: Any) -> Any:
        if self._unchanged:
            for place, name, _, tensor in self._places:  # at every evaluation: twice as fast as `all` of a generator
                if place.get(name) is not tensor:
                    break
            else:
                return self._cell(z, x)
        self._tensors = self._tensors or self._by_name()
        return torch.func.functional_call(self._cell, self._tensors, (z, x))


def _lifted(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


def check_norms(cell: nn.Module, *, coupled: bool) -> None:
    for name, module in cell.named_modules():
        if not isinstance(module, BatchNorm):
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
