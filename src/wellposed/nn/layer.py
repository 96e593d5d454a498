"""EquilibriumLayer: a cell, a solver and a gradient mode held together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellposed._checks import Policy, check_policy, check_state_shape, check_tolerances, shown
from wellposed._torch import apart, eager, full_precision, require_values, transforms_active
from wellposed._tree import LOW_PRECISION, Layout, first_tensor, map_leaves, to_device, to_host
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.implicit import AbstractGradient, ImplicitGradient
from wellposed.implicit._lost import without_lost
from wellposed.implicit.adjoint import AbstractStructuredMap
from wellposed.implicit.gradient import AbstractUnrolled, Linearised
from wellposed.implicit.warm_start import WarmStart, begin
from wellposed.nn._any_cell import bind_function, zero_state
from wellposed.nn._broadcast import warn_of_broadcast
from wellposed.nn.cell import AbstractCell
from wellposed.solve._fixed_point import check_options, in_groups
from wellposed.solve._record import SolveRecord
from wellposed.solve._samples import Outcome
from wellposed.solve._whole_batch import WholeBatch, as_one
from wellposed.solve.auto import Auto
from wellposed.solve.map import AbstractMap
from wellposed.solve.solution import Solution, SolveOptions, judge, read_record
from wellposed.solve.solver import AbstractSolver, Tolerance

DEFAULT_RTOL = {torch.float32: 1e-6, torch.float64: 1e-12}  #: By dtype of the solve, when none is given.


class EquilibriumLayer(nn.Module):
    r"""The equilibrium z = cell(z, x) as a differentiable layer.

        >>> import torch, wellposed as wp
        >>> layer = wp.EquilibriumLayer(wp.nn.DenseCell(4, 16))
        >>> layer(torch.randn(8, 4)).shape
        torch.Size([8, 16])

    Args:
        cell: `cell(z, x)`, a module or a function, row-wise, of the structure and shapes of z. An
            `AbstractCell` such as `DenseCell` has in-place products and closed-form adjoints.
        solver, gradient: `Auto()` and `ImplicitGradient()` if not given.
        on_failure: "raise", "warn" or "ignore", for the solves of forward and backward.
        rtol: Tolerance on |f(z) - z| / |f(z)|; None takes 1e-6 in float32 and 1e-12 in float64.
        atol: Absolute tolerance on |f(z) - z|.
        max_steps: Evaluations of the cell that a sample may take part in.
        state_shape: Shape of z without the batch, for a function or module; None takes that of x.
        coupled: Rows depend on each other (nodes of a graph, batch statistics): the batch has one
            equilibrium and is one sample to the solver. Without it they are found where they
            change an answer, with a `CoupledRowsWarning` and some more evaluations.

    Attributes:
        last_solution, last_adjoint: The `Solution` of the last forward pass, and of the last linear
            solve of a backward pass. `num_steps` is of the solve: a gradient may take a few more.
            None after transforms of `torch.func`, which hide it; failures there count too.
        failure_counts: How many solves failed, by direction and cause; each is warned of once.
    """

    def __init__(
        self,
        cell: Callable[..., Any],
        solver: AbstractSolver | None = None,
        gradient: AbstractGradient | None = None,
        *,
        on_failure: Policy = "warn",
        rtol: float | None = None,
        atol: float = 0.0,
        max_steps: int = 200,
        state_shape: tuple[int, ...] | None = None,
        coupled: bool = False,
    ) -> None:
        super().__init__()
        solver = Auto() if solver is None else solver
        gradient = ImplicitGradient() if gradient is None else gradient
        check_options(cell, solver, name="cell", coupled=coupled)
        check_tolerances(rtol=0.0 if rtol is None else rtol, atol=atol, max_steps=max_steps)
        check_policy(on_failure)
        if not isinstance(gradient, AbstractGradient):
            hint = " Choices are objects: give ImplicitGradient()." if isinstance(gradient, (str, type)) else ""
            raise InvalidType(f"gradient must be a gradient mode such as ImplicitGradient(); got {shown(gradient)}.{hint}")
        check_state_shape(state_shape, cell, own=isinstance(cell, AbstractCell))
        self.cell, self.solver, self.gradient = cell, solver, gradient
        self.on_failure, self.rtol, self.atol, self.max_steps = on_failure, rtol, atol, max_steps
        self._state_shape, self.coupled = state_shape, coupled or getattr(cell, "couples_rows", False)
        self._record = SolveRecord()

    @property
    def last_solution(self) -> Solution | None:
        return read_record(self._record, "solution")

    @last_solution.setter
    def last_solution(self, solution: Solution | None) -> None:
        self._record.solution = solution

    @property
    def last_adjoint(self) -> Solution | None:
        return read_record(self._record, "adjoint")

    @last_adjoint.setter
    def last_adjoint(self, solution: Solution | None) -> None:
        self._record.adjoint = solution

    @property
    def failure_counts(self) -> Counter[str]:
        return self._record.failures

    @eager
    def forward(
        self,
        x: Any,
        z0: Any = None,
        groups: Tensor | None = None,
        *,
        states: int | Sequence[int] | None = None,
        warm_start: WarmStart | None = None,
    ) -> Any:
        """z* with a graph.

        Args:
            x: The input: a tensor or a structure of tensors, batch first.
            z0: The start; zeros if not given.
            groups: (rows,) the index of the group of each row, as for `fixed_point`: one
                equilibrium, status and residual per group, e.g. per graph of a batch of graphs.
            states: Return a list of states on the way, the last of which is z*: how many, or after
                which numbers of evaluations; see `wellposed.nn.trajectory`.
            warm_start: `cache[index]` of an `EquilibriumCache`: start at the last equilibrium of
                each sample (not at z0, which only new samples take), and the adjoint at the last
                adjoint. Values and statuses are measured as without.
        """
        if states is not None:
            from wellposed.nn._trajectory import trajectory  # which needs the layer

            if warm_start is not None:
                raise InvalidArgument("states begin at z0 and cannot be found from a warm start; give only one of the two.")
            return trajectory(self, x, z0, states=states, groups=groups)
        device_type = first_tensor(x).device.type
        mixed = torch.is_autocast_enabled(device_type)
        with full_precision(device_type):
            f, start, layout, options = self._bind(x, z0, groups, warm_start, mixed=mixed)
            if transforms_active():
                self.last_solution = self.last_adjoint = None  # known only on the levels of the transforms
                rows = self.gradient.transformed(f, start, options)
            else:
                rows = self._equilibrium(f, start, layout, options, warm_start)
                if self._state_shape and isinstance(x, Tensor) and (x.dim() == 1 or x.shape[:1] == self._state_shape[:1]):
                    warn_of_broadcast(x, rows, self._state_shape)
            z = layout.unflatten(f.rows(rows) if f.regroups else rows)
        low = layout.dtype in LOW_PRECISION and not mixed
        return map_leaves(lambda leaf: leaf.to(layout.dtype), z) if low else z

    def _equilibrium(
        self, f: AbstractMap, start: Tensor, layout: Layout, options: SolveOptions, warm: WarmStart | None
    ) -> Tensor:
        """(batch, features) z*, with a graph if one is being made."""
        tracked = torch.is_grad_enabled()
        gradient = self.gradient if warm is None else warm.gradient(self.gradient)
        unrolled = gradient if tracked and isinstance(gradient, AbstractUnrolled) else None
        if unrolled is not None:
            rows = unrolled.unroll(f, start, options)
            outcome = judge(f, rows.detach(), options.tolerance, unrolled.evaluations + 1)
        else:
            graph = tracked and isinstance(gradient, ImplicitGradient) and not isinstance(f, AbstractStructuredMap)
            outcome = self._solve(f, start, options, keep_image=tracked, graph=graph)
            if tracked and outcome.coupled:
                whole = replace(options, shape=start.shape)
                rows = gradient.attach(WholeBatch(f, start.shape), as_one(outcome), whole).reshape(start.shape)
            else:
                # without a graph a copy: the caller may change it, and the record must not change
                rows = gradient.attach(f, outcome, options) if tracked else outcome.value.clone()
        finite = np.isfinite(to_host(outcome.g_norm))
        options.keep(outcome, layout, f, by=unrolled)
        if warm is not None:
            warm.keep(outcome)
        # where f was finite at no point there is no best value: a start of zeros is not an answer
        return rows if finite.all() else without_lost(rows, to_device(~finite, rows.device))

    @eager
    def solve(
        self,
        x: Any,
        z0: Any = None,
        groups: Tensor | None = None,
        *,
        record: bool = False,
        warm_start: WarmStart | None = None,
    ) -> Solution:
        """The equilibrium without a graph, with its residuals and statuses.

        Args:
            x, z0, groups, warm_start: As for `forward`.
            record: Keep the residuals of all steps in `Solution.history`.
        """
        require_values("EquilibriumLayer.solve", "Inside them call the layer itself.")
        device_type = first_tensor(x).device.type
        mixed = torch.is_autocast_enabled(device_type)
        with torch.no_grad(), apart(), full_precision(device_type):
            f, start, layout, options = self._bind(x, z0, groups, warm_start, mixed=mixed)
            outcome = self._solve(f, start, options, record=record)
            solution = options.judge(outcome, layout, f)
            if warm_start is not None:
                warm_start.keep(outcome)
            return solution

    @eager
    def linearise(self, x: Tensor, v: Tensor, *, z0: Tensor | None = None, u0: Tensor | None = None) -> Linearised:
        r"""Equilibrium and adjoint without a graph, for a closed-form adjoint and exact gradient.

        Args:
            x: The input.
            v: (batch, features), or what expands to it: the cotangent of z of every sample.
            z0, u0: (batch, features) the starts of equilibrium and adjoint; zeros if not given.
        """
        if not isinstance(self.gradient, ImplicitGradient):
            raise InvalidType(f"linearise solves the exact adjoint; it needs ImplicitGradient(), not {self.gradient!r}.")
        require_values("EquilibriumLayer.linearise", "Call it outside of them.")
        with torch.no_grad(), apart(), full_precision(x.device.type):
            f, start, layout, options = self._bind(x, z0, whole=False)
            if not isinstance(f, AbstractStructuredMap):
                raise InvalidType(f"linearise needs a cell with a known adjoint, such as DenseCell; got {self.cell!r}.")
            outcome = self._solve(f, start, options, keep_image=True)
            solution = options.judge(outcome, layout, f)
            image = f(outcome.value) if outcome.image is None else outcome.image
            u = self.gradient.solve(f.pullback(image), v.to(start.dtype).expand_as(outcome.value), options, u0)
        assert self.last_adjoint is not None
        return Linearised(f, outcome.value, image, u, solution, self.last_adjoint)

    def _bind(
        self, x: Any, z0: Any, groups: Tensor | None = None, warm: Any = None, *, mixed: bool = False, whole: bool = True
    ) -> tuple[AbstractMap, Tensor, Layout, SolveOptions]:
        """The map of rows, of groups or of the `whole` batch; start, layout and options."""
        if isinstance(self.cell, AbstractCell):
            if self.cell._forward_hooks or self.cell._forward_pre_hooks or self.cell.overridden:
                raise InvalidArgument(
                    f"{type(self.cell).__name__} is solved by its `bind`: a forward hook (also of prune and of the old "
                    "spectral_norm) or a `forward` of a subclass would be ignored. Wrap the cell in a module of your own."
                )
            shape = self.cell.state_shape(x)
            other: Any = getattr(self.cell, "state_dtype", None)
            dtype = x.dtype if other is None else other(x)
            # one zero for all entries: the start is only read
            state = torch.zeros((), dtype=dtype, device=first_tensor(x).device).expand(shape) if z0 is None else z0
            layout = self._check_start(state, shape, dtype)
            f: AbstractMap = self.cell.bind(x)
        else:
            state = zero_state(x, self._state_shape, groups) if z0 is None else z0
            layout = Layout.of(state, "z0")
            costs = self._record.costs[self.training]
            origin: dict[str, Any] = {"given": z0 is not None, "state_shape": self._state_shape, "costs": costs}
            f = bind_function(self.cell, x, state, layout, mixed=mixed, coupled=self.coupled, **origin)
        start = layout.flatten(state).to(layout.compute_dtype)
        self._record.training = self.training
        tolerance = Tolerance(DEFAULT_RTOL[start.dtype] if self.rtol is None else self.rtol, self.atol)
        coupled = self.training in self._record.coupled or (self.coupled and groups is None)
        if groups is not None:
            f, start = in_groups(f, start, groups)
        rows = start.shape if whole and layout.batch > 0 and coupled else None
        options = SolveOptions(self.solver, tolerance, self.max_steps, self.on_failure, "EquilibriumLayer", self._record, rows)
        if rows is not None:
            f, start = WholeBatch(f, rows), start.reshape(1, -1)
        return f, start if warm is None else begin(warm, start, layout, groups), layout, options

    @staticmethod
    def _solve(
        f: AbstractMap,
        z: Tensor,
        options: SolveOptions,
        *,
        record: bool = False,
        keep_image: bool = False,
        graph: bool = False,
    ) -> Outcome:
        with torch.no_grad(), nullcontext() if graph else apart():
            if not isinstance(f, AbstractStructuredMap):
                return options.run(f, z.detach(), record=record, graph=graph)
            # the default start is a single zero for all entries, which is read once
            first = None if bool((z if any(z.stride()) else z[:1, :1]).any()) else f.at_zero()
            return options.run(f, z.detach(), first=first, record=record, keep_image=keep_image)

    @staticmethod
    def _check_start(state: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """The layout of a start that has the shape and dtype of the state of the cell."""
        if not isinstance(state, Tensor) or state.shape != torch.Size(shape):
            seen = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise InvalidArgument(f"z0 must have the shape of the state, {tuple(shape)}; got {seen}.")
        layout = replace(Layout.of(state, "z0"), dtype=dtype)
        if state.dtype not in (dtype, layout.compute_dtype):
            raise InvalidType(f"z0 must have the dtype of the state, {dtype}; got {state.dtype}.")
        return layout

    def extra_repr(self) -> str:
        names = "solver gradient rtol atol max_steps on_failure coupled".split()
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names) + f", state_shape={self._state_shape}"
