"""EquilibriumLayer: a cell, a solver and a gradient mode held together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._eager import eager
from wellposed._tree import LOW_PRECISION, Layout, leaves, map_leaves
from wellposed.errors import InvalidArgument, InvalidType, WellposedError
from wellposed.implicit import AbstractGradient, AbstractStructuredMap, Context, ImplicitGradient, UnrolledGradient
from wellposed.nn._shape_hint import check_norms, check_state_shape, explaining
from wellposed.nn.cell import AbstractCell
from wellposed.solve import (
    AbstractMap,
    AbstractSolver,
    Auto,
    FunctionMap,
    Outcome,
    Solution,
    Tolerance,
    apply_policy,
    as_solution,
    check_options,
    check_policy,
    transforms_active,
)
from wellposed.solve._closing import solve_and_close
from wellposed.solve._failure import report_coupling
from wellposed.solve._unhooked import unhooked
from wellposed.solve._whole_batch import WholeBatch

__all__ = ["EquilibriumLayer", "Linearised"]

#: Tolerance by dtype of the solve when none is given.
DEFAULT_RTOL = {torch.float32: 1e-6, torch.float64: 1e-12}


@dataclass(frozen=True)
class Linearised:
    """An equilibrium with its adjoint.

    Attributes:
        f: The map, without a graph.
        value: (batch, features) z.
        image: (batch, features) f(z).
        adjoint: (batch, features) the solution u of the map's adjoint system; for `DenseMap` the masked adjoint p.
        solution, adjoint_solution: How the two solves went.
    """

    f: AbstractStructuredMap
    value: Tensor
    image: Tensor
    adjoint: Tensor
    solution: Solution
    adjoint_solution: Solution


class EquilibriumLayer(nn.Module):
    r"""The equilibrium z = cell(z, x) as a differentiable layer.

        >>> import torch, wellposed as wp
        >>> layer = wp.EquilibriumLayer(wp.nn.DenseCell(4, 16))
        >>> layer(torch.randn(8, 4)).shape
        torch.Size([8, 16])

    Args:
        cell: `cell(z, x)`, a module or a function, row-wise, of the structure and shapes of z. An `AbstractCell` such as
            `DenseCell` is solved with in-place products and closed-form adjoints.
        solver: `Auto()` if not given.
        gradient: `ImplicitGradient()` if not given.
        on_failure: "raise", "warn" or "ignore", for the equilibrium and for the linear solve of backward.
        rtol: Tolerance on |f(z) - z| / |f(z)| of every sample; None takes 1e-6 in float32 and 1e-12 in float64.
        atol: Absolute tolerance on |f(z) - z|.
        max_steps: Evaluations of the cell that a sample may take part in.
        state_shape: Trailing shape of z for a cell that does not tell it, e.g. `(width,)`; None takes that of x.
        coupled: Rows depend on each other (nodes of a graph, batch statistics): the batch has one equilibrium, and is one
            sample to the solver, forward and backward. Rows that depend on each other are also found without being told,
            with a `CoupledRowsWarning`, at the price of some evaluations.

    Attributes:
        last_solution: The `Solution` of the last forward pass. Its `num_steps` are the evaluations of the solve; those that
            record the cell at the equilibrium for the gradient come on top.
        last_adjoint: The `Solution` of the last linear solve of a backward pass. Both are None after a pass inside transforms
            of `torch.func`, which hide it; a failure there is counted all the same.
        failure_counts: How many solves failed, by direction and status. With `on_failure="warn"` only the first of each kind
            gives a warning.
    """

    def __init__(
        self,
        cell: Callable[..., Any],
        solver: AbstractSolver | None = None,
        gradient: AbstractGradient | None = None,
        *,
        on_failure: str = "warn",
        rtol: float | None = None,
        atol: float = 0.0,
        max_steps: int = 200,
        state_shape: tuple[int, ...] | None = None,
        coupled: bool = False,
    ) -> None:
        super().__init__()
        solver = Auto() if solver is None else solver
        gradient = ImplicitGradient() if gradient is None else gradient
        check_options(cell, solver, (), 0.0 if rtol is None else rtol, atol, max_steps, name="cell")
        check_policy(on_failure)
        if not isinstance(gradient, AbstractGradient):
            hint = " Choices are objects: give ImplicitGradient()." if isinstance(gradient, (str, type)) else ""
            raise InvalidType(f"gradient must be a gradient mode such as ImplicitGradient(); got {gradient!r}.{hint}")
        check_state_shape(cell, state_shape)
        self.cell, self.solver, self.gradient = cell, solver, gradient
        self.on_failure, self.rtol, self.atol, self.max_steps = on_failure, rtol, atol, max_steps
        self._state_shape, self.coupled = state_shape, coupled
        self._found_coupled: dict[bool, bool] = {}  # by training mode: batch statistics couple rows in one of them only
        self.failure_counts: Counter[str] = Counter()
        self.last_solution: Solution | None = None
        self.last_adjoint: Solution | None = None

    @eager
    def forward(self, x: Any, z0: Any = None) -> Any:
        """z* with a graph.

        Args:
            x: The input: a tensor or a structure of tensors, batch first.
            z0: The start; zeros if not given.
        """
        device_type = _first_tensor(x).device.type
        mixed = torch.is_autocast_enabled(device_type)
        with torch.autocast(device_type, enabled=False):
            f, start, layout = self._bind(x, z0, mixed=mixed)
            shape = start.shape
            if self._solves_as_one() and shape[0] > 0:
                f, start = WholeBatch(f, shape), start.reshape(1, -1)
            tolerance = self._tolerance(start.dtype)
            context = self._context(tolerance, shape)
            if transforms_active():
                self.last_solution = self.last_adjoint = None  # what is known there lives on the levels of the transforms
                rows = self.gradient.transformed(f, start, context)
            elif torch.is_grad_enabled():
                rows, outcome = self.gradient.run(f, start, lambda z: self._solve(f, z, tolerance, keep_image=True), context)
                self._judge(outcome, layout, tolerance)
            else:
                outcome = self._solve(f, start, tolerance)
                rows = outcome.value.clone()  # the caller may change it; the record stays what it was
                self._judge(outcome, layout, tolerance)
            if not transforms_active() and not bool(outcome.g_norm.isfinite().all()):
                # where f was finite nowhere there is no best value: a start of zeros must not pass for an answer
                rows = torch.where(outcome.g_norm.isfinite().unsqueeze(1), rows, torch.nan)
            z = layout.unflatten(rows.reshape(shape))
        low = layout.dtype in LOW_PRECISION and not mixed
        return map_leaves(lambda leaf: leaf.to(layout.dtype), z) if low else z

    @eager
    def solve(self, x: Any, z0: Any = None, *, record: bool = False) -> Solution:
        """The equilibrium without a graph, with all that is known about it.

        Args:
            x: The input.
            z0: The start; zeros if not given.
            record: Keep the residuals of all steps in `Solution.history`.
        """
        if transforms_active():
            raise WellposedError(
                "EquilibriumLayer.solve decides by values, which torch.func transforms hide. Inside them call the layer itself."
            )
        device_type = _first_tensor(x).device.type
        mixed = torch.is_autocast_enabled(device_type)
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            f, start, layout = self._bind(x, z0, mixed=mixed)
            if self._solves_as_one() and start.shape[0] > 0:
                f, start = WholeBatch(f, start.shape), start.reshape(1, -1)
            tolerance = self._tolerance(start.dtype)
            return self._judge(self._solve(f, start, tolerance, record=record), layout, tolerance)

    @eager
    def linearise(self, x: Tensor, v: Tensor, *, z0: Tensor | None = None, u0: Tensor | None = None) -> Linearised:
        r"""The equilibrium and its adjoint for the cotangents v, without a graph.

        Only for a cell whose map knows its own adjoint, and the exact gradient.

        Args:
            x: The input.
            v: (batch, features), or what expands to it: the cotangent of z of every sample.
            z0: (batch, features) the start of the equilibrium; zeros if not given.
            u0: (batch, features) the start of the adjoint; zeros if not given.
        """
        if not isinstance(self.gradient, ImplicitGradient):
            raise InvalidType(f"linearise solves the exact adjoint; it needs ImplicitGradient(), not {self.gradient!r}.")
        if transforms_active():
            raise WellposedError(
                "EquilibriumLayer.linearise decides by values, which torch.func transforms hide. Call it outside of them."
            )
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            f, start, layout = self._bind(x, z0)
            if not isinstance(f, AbstractStructuredMap):
                raise InvalidType(f"linearise needs a cell that knows its adjoint, such as DenseCell; got {self.cell!r}.")
            tolerance = self._tolerance(start.dtype)
            outcome = self._solve(f, start, tolerance, keep_image=True)
            solution = self._judge(outcome, layout, tolerance)
            context = self._context(tolerance, start.shape)
            image = f(outcome.value) if outcome.image is None else outcome.image
            cotangent = v.to(start.dtype).expand_as(outcome.value)
            u = self.gradient.solve(f.pullback(image), cotangent, context, u0)
        assert self.last_adjoint is not None
        return Linearised(f, outcome.value, image, u, solution, self.last_adjoint)

    def _solves_as_one(self) -> bool:
        return self.coupled or self._found_coupled.get(self.training, False)

    def _context(self, tolerance: Tolerance, shape: torch.Size) -> Context:
        def report(solution: Solution | None) -> None:
            if solution is not None and len(solution.status) != shape[0]:
                solution = solution.as_batch(shape)
            self.last_adjoint = solution

        return Context(tolerance, self.max_steps, self.on_failure, report, self._note_coupling, self.failure_counts)

    def _note_coupling(self, solution: Solution) -> None:
        """The rows were found to depend on each other: later solves begin with the batch as one sample."""
        if not self._solves_as_one():
            self._found_coupled[self.training] = True
            report_coupling(self.on_failure, who="EquilibriumLayer")

    def _bind(self, x: Any, z0: Any, *, mixed: bool = False) -> tuple[AbstractMap, Tensor, Layout]:
        """The map of rows, its start, and the layout of the state as the caller sees it."""
        if isinstance(self.cell, AbstractCell):
            shape = self.cell.state_shape(x)
            # one zero for all entries: the start is only read
            state = torch.zeros((), dtype=x.dtype, device=x.device).expand(shape) if z0 is None else z0
            layout = self._check_start(state, shape, x.dtype)
            f: AbstractMap = self.cell.bind(x)
        else:
            state = self._zeros(x) if z0 is None else z0
            layout = Layout.of(state, "z0")
            function, x = self._function(x)
            if layout.dtype not in LOW_PRECISION:
                function = explaining(function, state, given=z0 is not None, state_shape=self._state_shape)
            f = FunctionMap(function, layout, (x,), low_precision=mixed)
        return f, layout.flatten(state).to(layout.compute_dtype), layout

    @staticmethod
    def _check_start(state: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """The layout of the state of a cell that tells its shape, for a start that fits."""
        layout = replace(Layout.of(state, "z0"), dtype=dtype)
        if not isinstance(state, Tensor) or tuple(state.shape) != tuple(shape):
            seen = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise InvalidArgument(f"z0 must have the shape of the state, {tuple(shape)}; got {seen}.")
        if state.dtype != dtype and state.dtype != layout.compute_dtype:
            raise InvalidType(f"z0 must have the dtype of the state, {dtype}; got {state.dtype}.")
        return layout

    def _zeros(self, x: Any) -> Tensor:
        tensor = _first_tensor(x)
        if self._state_shape is None and not isinstance(x, Tensor):
            raise InvalidArgument("x is a structure, so the shape of z is unknown: give z0, or state_shape to the layer.")
        if tensor.dim() == 0:
            raise InvalidArgument("x must be batch first, but has no dimension. For one sample give shape (1, features).")
        shape = tensor.shape if self._state_shape is None else (tensor.shape[0], *self._state_shape)
        floating = [leaf.dtype for leaf in leaves(x) if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point]
        if not floating:
            raise InvalidType(
                f"x must be real floating point; got {tensor.dtype}, in which z cannot start. Convert it, e.g. with "
                ".to(torch.float32), or give z0 if the cell wants such an x."
            )
        return torch.zeros(shape, dtype=floating[0], device=tensor.device)

    def _function(self, x: Any) -> tuple[Callable[..., Any], Any]:
        """The cell and its input; a module gets both in float32 where they are of low precision."""
        cell = self.cell
        if not isinstance(cell, nn.Module) or isinstance(cell, torch.jit.ScriptModule):
            return cell, x
        check_norms(cell, coupled=self.coupled)
        bound = _Bound(cell)
        return bound, map_leaves(lambda leaf: _lifted(leaf) if isinstance(leaf, Tensor) else leaf, x)

    def _tolerance(self, dtype: torch.dtype) -> Tolerance:
        return Tolerance(DEFAULT_RTOL[dtype] if self.rtol is None else self.rtol, self.atol)

    def _solve(
        self, f: AbstractMap, z: Tensor, tolerance: Tolerance, *, record: bool = False, keep_image: bool = False
    ) -> Outcome:
        with torch.no_grad(), unhooked():
            first = f.at_zero() if isinstance(f, AbstractStructuredMap) and _is_zero(z) else None
            return solve_and_close(
                f,
                z.detach(),
                self.solver,
                tolerance=tolerance,
                max_steps=self.max_steps,
                first=first,
                record=record,
                keep_image=keep_image and isinstance(f, AbstractStructuredMap),
            )

    def _judge(self, outcome: Outcome, layout: Layout, tolerance: Tolerance) -> Solution:
        if outcome.value.shape[0] != layout.batch:
            outcome = outcome.as_batch(torch.Size((layout.batch, sum(layout.sizes))))
        self.last_solution = as_solution(outcome, layout)
        if outcome.coupled:
            self._note_coupling(self.last_solution)
        apply_policy(
            self.last_solution,
            self.on_failure,
            who="EquilibriumLayer",
            solver=self.gradient if isinstance(self.gradient, UnrolledGradient) else self.solver,
            rtol=tolerance.rtol,
            atol=tolerance.atol,
            max_steps=self.max_steps,
            counts=self.failure_counts,
        )
        return self.last_solution

    def extra_repr(self) -> str:
        return f"solver={self.solver!r}, gradient={self.gradient!r}, on_failure={self.on_failure!r}"


class _Bound:
    """A module with the parameters and buffers that it has now, in float32 if they are of low precision.

    Backward evaluates the cell again, and by then others may be in their place: `torch.func.functional_call` puts the
    module's own ones back as soon as the forward pass is over.
    """

    def __init__(self, cell: nn.Module) -> None:
        self._cell = cell
        tensors = {**dict(cell.named_parameters()), **dict(cell.named_buffers())}
        self._tensors = {name: _lifted(tensor) for name, tensor in tensors.items()}
        self._as_it_is = all(self._tensors[name] is tensor for name, tensor in tensors.items())
        self._places = [
            (place, name, tensor)
            for module in cell.modules()
            for place in (module._parameters, module._buffers)
            for name, tensor in place.items()
        ]

    def __call__(self, z: Any, x: Any) -> Any:
        if self._as_it_is and all(place.get(name) is tensor for place, name, tensor in self._places):
            return self._cell(z, x)
        return torch.func.functional_call(self._cell, self._tensors, (z, x))


def _lifted(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


def _is_zero(z: Tensor) -> bool:
    """Whether a start is 0; the default one is a single number seen everywhere, and is read once."""
    return not bool((z if any(z.stride()) else z[:1, :1]).any())


def _first_tensor(x: Any) -> Tensor:
    for leaf in leaves(x):
        if isinstance(leaf, Tensor):
            return leaf
    raise InvalidType(f"x must be a tensor or a structure of tensors, batch first; got {type(x).__name__}.")
