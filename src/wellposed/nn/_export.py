"""export: an equilibrium layer as a plain module of a fixed number of steps, for deployment."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wellposed._checks import check_positive_integer, check_tolerances
from wellposed._torch import apart, eager, watched
from wellposed._tree import LOW_PRECISION, Layout, leaves, map_leaves, map_tensors
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn._any_cell import zero_state
from wellposed.nn.cell import AbstractCell, DenseCell
from wellposed.nn.layer import DEFAULT_RTOL, EquilibriumLayer
from wellposed.solve._closing import RANDOM
from wellposed.solve._samples import RUNAWAY_LIMIT

#: Past steps that accelerated iteration keeps.
MEMORY = 5
#: Multiple of eps that is added to the diagonal of their Gram matrix, relative to it.
REGULARIZATION = 10.0
#: A relative residual below this many eps is rounding.
STILL = 4.0
#: Accelerated steps are taken if plain ones are this many times as many; their own work is not free.
WORTH = 3.0
#: Steps are exported with this reserve, since other inputs may need more than the example.
RESERVE = 1.25


@eager
def export(
    layer: EquilibriumLayer, x: Any, steps: int | None = None, *, rtol: float | None = None, z0: Any = None
) -> nn.Module:
    r"""A plain module x -> (z, residual) that takes a fixed number of steps of the cell.

    It has no loop that depends on values, so it passes `torch.export`, `torch.jit.trace` and
    `torch.onnx.export`, and the ONNX file runs without torch. The steps are plain, z <- f(z), or,
    where these need too many, those of Anderson's method (its small linear systems written out).
    Which of them, and how many, is measured with the example x. Another input may need more steps:
    the residual, measured at the z that is returned, shows it. The batch may have another size
    later.

        >>> import torch, wellposed as wp
        >>> layer = wp.EquilibriumLayer(wp.nn.DenseCell(4, 16, wp.nn.Tanh()))
        >>> x = torch.randn(8, 4)
        >>> plain = wp.export(layer, x)
        >>> z, residual = plain(x)
        >>> bool((residual <= 1e-6).all())
        True

    The module holds a copy of the cell in evaluation mode, with the present values of its
    parameters; parametrizations (`Spectral`, `constrain`, weight norms) are computed once and
    replaced by their value. A function is used unchanged, with all that it refers to: make it a
    module if its values or its mode may change. Low precision is lifted to float32.

    Args:
        layer: Of any cell that `torch.export` can trace: no Python branch on values of z or x.
        x: An example input, as for the layer.
        steps: Evaluations of the cell, the last of which measures the residual. None takes what the
            slowest sample of x needs for `rtol`, and a quarter more.
        rtol: Tolerance that x must meet; None takes that of the layer, and none if `steps` are
            given.
        z0: An example start; then the module is called with (x, z0). It is needed if z is a
            structure.

    Returns:
        A module `module(x) -> (z, residual)`, residual (batch,) being |f(z) - z| / |f(z)|. Its
        attributes `steps` and `accelerated` say what was chosen.
    """
    if not isinstance(layer, EquilibriumLayer):
        raise InvalidType(
            f"export needs an EquilibriumLayer; got {type(layer).__name__}. In a larger model export its layers one by one and "
            "put the results in their places."
        )
    if steps is not None:
        check_positive_integer("export", "steps", steps)
    if rtol is not None:
        check_tolerances(rtol=rtol, atol=0.0, max_steps=1)
    with torch.no_grad(), apart():
        checked, start, *_ = layer._bind(x, z0)
        checked(start)  # says what is wrong with a cell, an input or a start, as the layer does
        module = _FixedSteps(layer, z0 is not None)
        inputs = (x,) if z0 is None else (x, z0)
        f, start, _ = module.bind(*inputs)
        if watched(f, start)[1]:
            raise InvalidArgument(f"export: {RANDOM}")
        if steps is None:
            own = DEFAULT_RTOL[start.dtype] if layer.rtol is None else layer.rtol
            _choose(module, f, start, own if rtol is None else rtol, layer.max_steps)
        else:
            plain, fast = (float(_worst(_residuals(f, start, steps, m)[-1])) for m in (0, MEMORY))
            module.steps, module.accelerated = steps, not plain <= 10 * fast
            reached = fast if module.accelerated else plain
            if rtol is not None and not reached <= rtol:
                raise InvalidArgument(
                    f"export: after steps={steps} the largest residual at the example x is {reached:.1e} > rtol={rtol:.0e}. "
                    "Give more steps, or steps=None to have them counted."
                )
        _check_trace(module, inputs)
    return module.eval().requires_grad_(False)


class _FixedSteps(nn.Module):
    """The exported module; see `export`."""

    def __init__(self, layer: EquilibriumLayer, with_start: bool) -> None:
        super().__init__()
        # solutions of past passes hold tensors with a graph, which cannot be copied
        self.cell = _frozen(layer.cell)
        self.coupled, self.with_start = layer.coupled, with_start
        self._state_shape = layer._state_shape
        self.steps, self.accelerated = 1, False

    def forward(self, x: Any, z0: Any = None) -> tuple[Any, Tensor]:
        """(z, residual) at x."""
        f, z, layout = self.bind(x, z0)
        for step in _steps(f, z, self.steps, MEMORY if self.accelerated else 0):
            z, fz = step
        state = layout.unflatten(z.reshape(-1, sum(layout.sizes)))
        residual = _relative(fz - z, fz)
        return state, residual.expand(leaves(state)[0].shape[0]) if self.coupled else residual

    def bind(self, x: Any, z0: Any = None) -> tuple[Callable[[Tensor], Tensor], Tensor, Layout]:
        """The map of rows, its start, and the layout of a state."""
        x = map_tensors(_lifted, x)
        cell = self.cell
        if z0 is None:
            z0 = (
                x.new_zeros(cell.state_shape(x)) if isinstance(cell, AbstractCell) else zero_state(x, self._state_shape).clone()
            )
        z0 = map_leaves(_lifted, z0)
        layout = Layout.of(z0, "z0")
        start, bound = layout.flatten(z0), cell.bind(x).tracked if isinstance(cell, AbstractCell) else None

        def f(rows: Tensor) -> Tensor:
            return bound(rows) if bound is not None else layout.flatten(cell(layout.unflatten(rows), x))

        if not self.coupled:
            return f, start, layout
        features = sum(layout.sizes)  # the batch is one row
        return lambda row: f(row.reshape(-1, features)).reshape(1, -1), start.reshape(1, -1), layout

    def extra_repr(self) -> str:
        return f"steps={self.steps}, accelerated={self.accelerated}"


def _steps(f: Callable[[Tensor], Tensor], z: Tensor, steps: int, memory: int) -> Any:
    """Yields (z, f(z)) `steps` times: plain steps, or those of Anderson's method.

    With g = f(z) - z, the next z is f(z) less the combination of its past differences that makes g
    least. A sample whose residual is rounding stays.
    """
    differences: Tensor | None = None  # (batch, 2, memory, features) of g and of f(z), newest first
    before: Tensor | None = None
    for count in range(steps):
        fz = f(z)
        yield z, fz
        if count + 1 == steps:
            return
        if memory == 0:
            z = fz
            continue
        g = fz - z
        now = torch.stack((g, fz), dim=1)
        if before is None:
            z = fz
        else:
            new = (now - before).unsqueeze(2)
            differences = new if differences is None else torch.cat((new, differences[:, :, : memory - 1]), dim=2)
            moving = _relative(g, fz).unsqueeze(1) > STILL * torch.finfo(z.dtype).eps
            past = differences[:, 0]
            gamma = _solve_small(past @ past.mT, past @ g.unsqueeze(2))
            z = torch.where(moving, fz - (gamma * differences[:, 1]).sum(dim=1), z)
        before = now


def _solve_small(A: Tensor, b: Tensor) -> Tensor:
    """(batch, k, 1) the regularized solution of A y = b, by Gauss-Jordan elimination.

    A (batch, k, k) is a Gram matrix, so no row need be exchanged. ONNX has no linear solve.
    """
    k = A.shape[1]
    identity = torch.eye(k, dtype=A.dtype, device=A.device)
    tiny = torch.finfo(A.dtype).tiny
    M = torch.cat((A + identity * (REGULARIZATION * torch.finfo(A.dtype).eps * A + tiny), b), dim=2)
    for i in range(k):
        row = M[:, i : i + 1] / M[:, i : i + 1, i : i + 1]
        M = M - (M[:, :, i : i + 1] - identity[:, i : i + 1]) * row
    return M[:, :, k:]


def _relative(g: Tensor, fz: Tensor) -> Tensor:
    """(batch,) |g| / |f(z)|."""
    scale = torch.maximum(g.abs().amax(dim=1, keepdim=True), fz.abs().amax(dim=1, keepdim=True))
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # so that no square overflows or vanishes
    r, s = (g / scale).square().sum(dim=1).sqrt(), (fz / scale).square().sum(dim=1).sqrt()
    return torch.where(r > 0, r / s, torch.where(torch.isnan(r), r, torch.zeros_like(r)))


def _residuals(f: Any, z: Tensor, steps: int, memory: int, until: float = 0.0) -> list[Tensor]:
    """The relative residuals after every step, until the largest is at most `until`."""
    found: list[Tensor] = []
    for point, fz in _steps(f, z, steps, memory):
        found.append(_relative(fz - point, fz))
        if not _worst(found[-1]) > until:
            break
    return found


def _worst(residual: Tensor) -> Tensor:
    """The largest; NaN counts as infinite; 0 of an empty batch."""
    return residual.nan_to_num(torch.inf).max() if residual.numel() else residual.new_zeros(())


def _choose(module: _FixedSteps, f: Any, start: Tensor, rtol: float, most: int) -> None:
    """Sets the kind and the number of steps by what the example needs."""
    needed, best = {}, torch.inf
    for memory in (MEMORY, 0):
        found = _residuals(f, start, most, memory, until=rtol)
        last = float(_worst(found[-1]))
        best = min(best, *(float(_worst(r)) for r in found))
        if last <= rtol:
            needed[memory] = len(found)
    if not needed:
        raise InvalidArgument(
            f"export: neither plain nor accelerated steps bring the residual at the example x to rtol={rtol:.0e} within "
            f"max_steps={most} of the layer; the least seen is {best:.1e}. Give a looser rtol or steps=, or constrain the cell."
        )
    plain, fast = needed.get(0, torch.inf), needed.get(MEMORY, torch.inf)
    module.accelerated = plain > WORTH * fast
    module.steps = int(RESERVE * (fast if module.accelerated else plain)) + 1
    _check_size(list(_steps(f, start, module.steps, MEMORY if module.accelerated else 0)))


def _check_size(run: list[tuple[Tensor, Tensor]]) -> None:
    """Raises where |f(z) - z| is small relative to |f(z)| only because z grew, as for z + 1."""
    r = torch.stack([torch.linalg.vector_norm(fz - z, dim=1) for z, fz in run])
    s = torch.stack([torch.linalg.vector_norm(fz, dim=1) for _, fz in run])
    fallen = r[-1] + 8 * torch.finfo(s.dtype).eps * s[-1] <= 0.5 * r.amax(dim=0)
    if bool(((s[-1] > RUNAWAY_LIMIT * s[0]) & ~fallen).any()):
        raise InvalidArgument(
            f"export: at the example x the state grows, to |z| = {float(s[-1].max()):.1e}, and |f(z) - z| does not fall: the "
            "cell may have no equilibrium. Constrain it, e.g. with Spectral(bound=0.95)."
        )


def _frozen(cell: Any) -> Any:
    """A copy of a cell for evaluation, with constants in the place of parametrizations."""
    if not isinstance(cell, nn.Module):
        return cell
    try:
        frozen = copy.deepcopy(cell).eval()
    except Exception as error:
        raise InvalidArgument(f"export: the cell cannot be copied: {error}") from error
    for part in frozen.modules():
        if isinstance(part, DenseCell) and part.weight is not None:
            W = part.recurrent().detach()
            part.weight = None
            for name in ("A", "B"):
                part._parameters.pop(name, None)
            part.W = nn.Parameter(W)
    for part in list(frozen.modules()):
        if parametrize.is_parametrized(part):
            _replace_parametrizations(part)
    low = any(p.dtype in LOW_PRECISION for p in frozen.parameters())
    return frozen.float() if low else frozen


def _replace_parametrizations(part: nn.Module) -> None:
    """Puts values in the place of parametrizations.

    `remove_parametrizations` would take the attribute from the class, which the original shares.
    """
    values = {name: getattr(part, name).detach() for name in part.parametrizations}  # type: ignore[union-attr]  # a ModuleDict here
    part.__class__ = type(part).__bases__[0]
    del part.parametrizations
    for name, value in values.items():
        part.register_parameter(name, nn.Parameter(value))


def _lifted(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


def _check_trace(module: _FixedSteps, inputs: tuple[Any, ...]) -> None:
    """Raises if `torch.export` cannot trace one evaluation of the cell."""
    (one := copy.copy(module)).steps = 1
    try:
        torch.export.export(one, inputs, strict=False)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise InvalidArgument(
            f"export: the cell cannot be traced, {type(error).__name__}: {first} A cell that branches on the values of z or x, "
            "or leaves torch, has no fixed graph: write the branch with torch.where."
        ) from error
