"""The exact gradient of the steps taken, with memory that does not depend on their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wellposed._checks import check_interval, check_positive_integer
from wellposed._torch import apart, graph_edge, require_values, uncompiled
from wellposed.errors import WellposedError
from wellposed.implicit._captured import Substitution, as_seen_inside
from wellposed.implicit._second_order import Gate, Pass
from wellposed.implicit.adjoint import record
from wellposed.implicit.gradient import AbstractUnrolled
from wellposed.implicit.implicit_gradient import _check_batching
from wellposed.solve._samples import relative
from wellposed.solve.map import AbstractMap
from wellposed.solve.solution import Solution, SolveOptions
from wellposed.solve.solver import advice
from wellposed.status import Status, StatusArray

#: What is said if the steps, reversed, do not end at the start.
DRIFTED = (
    "Reversed steps missed the start, and the gradient is wrong by a part of about that residual: rounding errors grow by "
    "1/(1 - damping) or more a step. Take fewer steps or float64, or use UnrolledGradient() or ImplicitGradient()."
)


@dataclass(frozen=True)
class ReversibleGradient(AbstractUnrolled):
    r"""Takes `steps` reversible steps from the start, with the exact gradient of these steps.

    Two states, both z0 at first, take turns [mccallum2025]: with t the damping,

        y' = (1 - t) y + t f(z),    z' = (1 - t) z + t f(y'),                           (1)

    and the value is the last z'. Backward solves (1) for the states before each step,

        z = (z' - t f(y'))/(1 - t),    y = (y' - t f(z))/(1 - t),                       (2)

    so that memory does not depend on `steps`. Each step costs two evaluations in forward, and two
    recorded ones with their products in backward. As with `UnrolledGradient` the solver of the
    layer is not used while a graph is made, and the status shows a depth too small for the
    tolerance. The gradient is that of (1), exact up to the rounding errors of (2). It is the
    gradient of the equilibrium only as far as the steps have converged.

    (2) undoes a contraction: rounding errors grow by 1/(1 - t) or more in each step. Therefore both
    states are float64, also if f computes in float32. Backward ends where forward began, so the
    error is measured: `layer.last_adjoint` has the distance of the reversed start from the true one
    as its `absolute_residual`. A sample has failed, as `on_failure` says, if its `residual`, that
    distance over |z| times what is left of the cotangent there, exceeds `rtol`: an estimate, to
    first order and mostly from above, of the relative error of the gradient. Derivatives of higher
    order, and those of `torch.func`, record all steps.

    Args:
        steps: Steps (1), of two evaluations each.
        damping: t, in (0, 1). Steps with a small t converge slowly; steps with a large t are
            reversed with large errors.
        rtol: The estimate at which a sample has failed; None takes the square root of the rounding
            unit of f, 1.5e-8 in float64 and 3.5e-4 in float32.

    Examples:
        >>> import torch, wellposed as wp
        >>> layer = wp.EquilibriumLayer(lambda z, x: 0.2 * z + x, gradient=wp.ReversibleGradient(steps=20), rtol=1e-3)
        >>> x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
        >>> layer(x).sum().backward()
        >>> round(x.grad.item(), 4), layer.last_adjoint.status
        (1.25, StatusArray(CONVERGED: 1))
    """

    steps: int
    damping: float = 0.5
    rtol: float | None = None

    def __post_init__(self) -> None:
        check_positive_integer("ReversibleGradient", "steps", self.steps)
        check_interval("ReversibleGradient", "damping", self.damping, low=0.0, high=1.0, closed="neither")
        if self.rtol is not None:
            check_interval("ReversibleGradient", "rtol", self.rtol, low=0.0, closed="left")

    @property
    def evaluations(self) -> int:
        return 2 * self.steps

    def unroll(self, f: AbstractMap, z: Tensor, options: SolveOptions) -> Tensor:
        f = as_seen_inside(f)
        known = f.inputs()
        first, captured, f = record(f, z.detach(), known)
        f.forget()
        value: Tensor = _Reversible.apply(self, f, options, first.detach(), z, *known, *captured)
        return value

    def transformed(self, f: AbstractMap, start: Tensor, options: SolveOptions) -> Tensor:
        return self.follow(f.tracked, start)[1].to(start.dtype)

    def follow(self, f: Callable[[Tensor], Tensor], start: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """y and z after all steps (1), in float64; `first` is f(start), if it is known."""
        y = z = start.double()
        for _ in range(self.steps):
            fz = f(z.to(start.dtype)) if first is None else first
            y = (1 - self.damping) * y + self.damping * fz.double()
            z = (1 - self.damping) * z + self.damping * f(y.to(start.dtype)).double()
            first = None
        return y, z

    def finish(
        self, errors: Sequence[Tensor], scale: Tensor, cotangents: Sequence[Tensor], v: Tensor, options: SolveOptions
    ) -> None:
        """Judges how far from the start reversed steps ended: the adjoint of the layer.

        Args:
            errors: (batch, features) of y and z at the start.
            scale: (batch, features) the last z.
            cotangents: (batch, features) of y and z at the start. v: That of the last z.
        """
        error, cotangent = (torch.stack([_norm(part) for part in parts]).amax(0) for parts in (errors, cotangents))
        residual = relative(error, _norm(scale)) * relative(cotangent, _norm(v))
        rtol = torch.finfo(v.dtype).eps ** 0.5 if self.rtol is None else self.rtol
        codes = torch.where(residual <= rtol, int(Status.CONVERGED), int(Status.DIVERGED))
        codes = torch.where(residual.isfinite(), codes, int(Status.NOT_FINITE))
        residual, error = residual.to(v.dtype), error.to(v.dtype)
        steps, rate = torch.full_like(codes, self.evaluations), torch.full_like(residual, torch.nan)
        note = "" if bool((codes == int(Status.CONVERGED)).all()) else DRIFTED
        solution = Solution(sum(cotangents), residual, error, steps, StatusArray(codes), rate, note=note)
        replace(options, owner="backward of ReversibleGradient").finish_adjoint(solution, None)

    def advice(self, status: Status, rate: float) -> str:
        if status is Status.MAX_STEPS:
            return "ReversibleGradient(steps=...) sets its depth: raise it, loosen rtol, or use ImplicitGradient()."
        return advice(status, rate)


class _Reversible(torch.autograd.Function):
    """(start, what f depends on) -> z after the steps."""

    @staticmethod
    def forward(
        ctx: Any, mode: ReversibleGradient, f: AbstractMap, options: SolveOptions, first: Tensor, start: Tensor, *extras: Tensor
    ) -> Tensor:
        with apart():
            y, z = mode.follow(f.tracked, start, first)  # bit for bit what backward evaluates
        ctx.mode, ctx.f, ctx.options = mode, f, options
        ctx.save_for_backward(start, y, z, *extras)
        ctx.set_materialize_grads(False)
        return z.to(start.dtype, copy=True)  # the caller may change its own in place

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[4:]
        if v is None:
            return None, None, None, None, *(None for _ in needed)
        _check_batching(v)
        require_values("backward of ReversibleGradient", "Put the transform around the layer, e.g. torch.func.jacrev.")
        start, y, z, *extras = ctx.saved_tensors
        making_graph = torch.is_grad_enabled()
        with torch.autocast(z.device.type, enabled=False), nullcontext() if making_graph else apart():
            parts = _Parts(ctx.f, [start, *extras], needed, making_graph)
            if making_graph:
                products = parts.derivative(lambda f, start: ctx.mode.follow(f.tracked, start)[1].to(v.dtype), v)
            else:
                products = _reverse(ctx.mode, parts, (y, z), v, ctx.options)
        return None, None, None, None, *products


class _Parts:
    """Stand-ins for the start and for what f depends on, which derivatives do not pass beyond.

    If x was made of W and f uses both, each has its cotangent: were both in one graph, that of x
    would be counted in that of W as well.

    Args:
        f: The map.
        tensors: The start, the inputs of f, and what it has captured. needed: Which of these have a
            cotangent.
        making_graph: Whether the stand-ins are differentiable functions of the tensors.
    """

    def __init__(self, f: AbstractMap, tensors: list[Tensor], needed: tuple[bool, ...], making_graph: bool) -> None:
        self._gates, count = [Gate() for _ in tensors], len(f.inputs())
        self._needed, self._making_graph = needed, making_graph

        def stand_in(x: Tensor, gate: Gate, need: bool) -> Tensor:
            if not need:
                return x.detach()
            return Pass.apply(x, gate) if making_graph else x.detach().requires_grad_()

        self.free = [
            # a captured leaf depends on nothing else and stays where f finds it
            x if i > count and x.grad_fn is None else stand_in(x, gate, need)
            for i, (x, gate, need) in enumerate(zip(tensors, self._gates, needed, strict=True))
        ]
        self.start, self.f = self.free[0], f.with_inputs(*self.free[1 : count + 1])
        behind = [i for i in range(count + 1, len(tensors)) if tensors[i].grad_fn is not None]
        self._captured = [tensors[i] for i in behind], [self.free[i] for i in behind]
        self._used = {graph_edge(x) for i, x in enumerate(tensors) if i in behind and needed[i]}

    def recorded(self, f: Callable[[AbstractMap], Tensor]) -> Tensor:
        """f of the map, with a graph that ends at the stand-ins."""
        with torch.enable_grad():
            if not self._captured[0]:
                return f(self.f)
            with Substitution(*self._captured) as substitution:
                value = uncompiled(lambda: f(self.f))
        if not substitution.used.issuperset(self._used):
            raise WellposedError(
                "backward of ReversibleGradient: f does not use a tensor that it used in the forward pass, such as a weight "
                "kept by parametrize.cached() that is computed anew now. Call backward inside the same parametrize.cached(), "
                "or give f the same tensors as in the forward pass."
            )
        return value

    def products(self, value: Tensor, u: Tensor, more: Sequence[Tensor] = ()) -> list[Tensor | None]:
        """The cotangents of `more`, and of tensors that need one, for that of a value, u."""
        wanted = [*more, *(x for x, need in zip(self.free, self._needed, strict=True) if need)]
        for gate in self._gates:
            gate.open = False
        options: dict[str, Any] = {"create_graph": self._making_graph, "retain_graph": True, "allow_unused": True}
        found = list(torch.autograd.grad(value, wanted, u, **options)) if value.requires_grad else [None] * len(wanted)
        for gate in self._gates:
            gate.open = True
        rest = iter(found[len(more) :])
        return [*found[: len(more)], *(next(rest) if need else None for need in self._needed)]

    def derivative(self, f: Callable[[AbstractMap, Tensor], Tensor], v: Tensor) -> list[Tensor | None]:
        """The cotangents of all tensors for the cotangent v of f(map, start)."""
        return self.products(self.recorded(lambda inner: f(inner, self.start)), v)


def _reverse(
    mode: ReversibleGradient, parts: _Parts, last: tuple[Tensor, Tensor], v: Tensor, options: SolveOptions
) -> list[Tensor | None]:
    """The cotangents of start and tensors, by steps from the last states back to the start."""
    t, dtype, start = mode.damping, v.dtype, parts.start.detach()
    totals: list[Tensor | None] = [None for _ in parts.free]

    def pulled(state: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """f(state), and J^T u; adds the cotangents of the tensors to the totals."""
        point = state.to(dtype, copy=True).requires_grad_()
        value = parts.recorded(lambda f: f.tracked(point))
        product, *others = parts.products(value, u.to(dtype), [point])
        for i, other in enumerate(others):
            known = totals[i]
            totals[i] = known if other is None else other if known is None else known + other
        return value.detach().double(), torch.zeros_like(u) if product is None else product

    (y, z), y_bar, z_bar = last, torch.zeros_like(last[0]), v.double()
    for _ in range(mode.steps):
        fy, product = pulled(y, t * z_bar)  # z' = (1 - t) z + t f(y')
        z, y_bar = (z - t * fy) / (1 - t), y_bar + product
        fz, product = pulled(z, t * y_bar)  # y' = (1 - t) y + t f(z)
        y, z_bar, y_bar = (y - t * fz) / (1 - t), (1 - t) * z_bar + product, (1 - t) * y_bar
    mode.finish((y - start, z - start), last[1], (y_bar, z_bar), v, options)
    totals[0] = (y_bar + z_bar).to(dtype) if parts.start.requires_grad else None
    return totals


def _norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1)
