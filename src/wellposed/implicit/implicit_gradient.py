"""The exact gradient, by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wellposed._torch import full_precision, inside_a_mode, is_legacy_batched, transforms_active
from wellposed._tree import Array, to_host
from wellposed.errors import InvalidType, WellposedError
from wellposed.implicit._captured import as_seen_inside
from wellposed.implicit._linear import solve_linear
from wellposed.implicit._second_order import adjoint_map, correction
from wellposed.implicit._transformed import iterate_transformed, report, solve_transformed, with_tail
from wellposed.implicit.adjoint import (
    AbstractPullback,
    AbstractStructuredMap,
    JacobianPullback,
    WholePullback,
    check_same_map,
    record,
)
from wellposed.implicit.gradient import AbstractGradient
from wellposed.linalg.linear_solver import AbstractLinearSolver
from wellposed.solve._samples import Outcome
from wellposed.solve.auto import Auto
from wellposed.solve.map import AbstractMap
from wellposed.solve.solution import SolveOptions, as_solution
from wellposed.solve.solver import AbstractSolver, Tolerance
from wellposed.solve.splitting import AbstractSplitting
from wellposed.status import Status

_AUTO = Auto()


@dataclass(frozen=True)
class ImplicitGradient(AbstractGradient):
    r"""Exact gradient of an equilibrium, through one linear solve.

    At z = f(z) with Jacobian J = df/dz, an incoming cotangent v becomes the u solving

        (I - J)^T u = v                                                                (1)

    and autograd carries u into all that f depends on. This is Theorem 1 of [bai2019], with I - J
    where the paper writes -J_g (there g(z) = f(z) - z). The solution u of (1) is itself an
    equilibrium, of u -> v + J^T u, and is differentiated in the same way: derivatives of every
    order exist.

    Holds when I - J is invertible at z. Costs one vector-Jacobian product per step of the linear
    solve; memory does not depend on the number of steps. The linear solve has its own per-sample
    status (`layer.last_adjoint`) and obeys the `on_failure` of the layer; where it meets NaN or
    infinity, or there is no equilibrium, the gradient is NaN, never zero. Cotangents batched by
    `torch.func.vmap` take plain iteration: `last_adjoint` is None then, and failures give NaN.

    Args:
        linear_solver: Solves (1): a solver of linear systems (`GMRES` needs only invertibility;
            `Neumann` also needs the spectral radius of J below 1, which a monotone map does *not*
            promise), or a solver of fixed points for u = v + J^T u. None takes `Auto()`, which
            begins with plain (Neumann) steps and ends with GMRES if necessary. A splitting such as
            `PeacemanRachford()` serves first derivatives of cells that have a resolvent, with the
            factorization of the forward solve; derivatives of higher order take `Auto()` then.
        rtol: Relative tolerance of (1); None takes that of the forward solve.
        max_steps: Bound on the products; None takes that of the forward solve (`DenseSolve()` then
            takes all its columns). The last one confirms the answer of a solver of linear systems,
            so there are 2 at least; up to 2 more follow a failure. `num_steps` counts all.
    """

    linear_solver: AbstractLinearSolver | AbstractSolver | None = None
    rtol: float | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.linear_solver, (AbstractLinearSolver, AbstractSolver, type(None))):
            raise InvalidType(
                "The 'linear_solver' parameter of ImplicitGradient must be a solver such as GMRES() or Auto(), or None. "
                f"Got {self.linear_solver!r} instead."
            )

    def attach(self, f: AbstractMap, outcome: Outcome, options: SolveOptions) -> Tensor:
        z_star, f = outcome.value.detach(), as_seen_inside(f) if inside_a_mode() else f
        if isinstance(f, AbstractStructuredMap) and outcome.image is not None:
            return _StructuredRoot.apply(_Adjoint(self, f, options), z_star, outcome.image, *f.inputs())
        return _attach(self, f, z_star, options, recorded=outcome.recorded, plain_factor=outcome.plain_factor)

    def transformed(self, f: AbstractMap, start: Tensor, options: SolveOptions) -> Tensor:
        return with_tail(f, solve_transformed(f, start, options), options)

    def options(self, forward: SolveOptions) -> SolveOptions:
        """Those of the linear solve, given those of the forward one."""
        solver = self.linear_solver if isinstance(self.linear_solver, AbstractSolver) else _AUTO
        tolerance = Tolerance(forward.tolerance.rtol if self.rtol is None else self.rtol, 0.0)
        max_steps = forward.max_steps if self.max_steps is None else self.max_steps
        owner = "backward of the equilibrium (linear_solver of ImplicitGradient)"
        return SolveOptions(solver, tolerance, max_steps, forward.on_failure, owner, forward.record, forward.shape)

    @property
    def cold(self) -> ImplicitGradient:
        """The same for another system, such as that of a second derivative."""
        return self

    def solve(
        self, pullback: AbstractPullback, v: Tensor, forward: SolveOptions, start: Tensor | None = None, first: Any = None
    ) -> Tensor:
        """(batch, features) the solution of u = rhs(v) + A u; records it and applies the policy.

        Args:
            pullback: The system. v: (batch, features) the cotangent.
            forward: The options of the forward solve.
            start: (batch, features) where a solver of fixed points begins; a linear solver begins
                at 0. first: (batch, features) rhs(v) + A start, if it is known.
        """
        options = self.options(forward)
        found = self._solve(pullback, v, options, start, first)
        if found is None:  # rows depend on each other: one system, and one scale for all rows
            found = self._solve(WholePullback(pullback, v.shape), v.reshape(1, -1), replace(options, shape=v.shape), None)
            assert found is not None
            if found[1]:  # else the solver may be wrong
                options.report_coupling()
        return found[0].reshape(v.shape)

    def _solve(
        self, pullback: AbstractPullback, v: Tensor, options: SolveOptions, start: Tensor | None, first: Tensor | None = None
    ) -> tuple[Tensor, bool] | None:
        """The solution of one system, and whether it converged; None if rows are coupled."""
        scale = _safe_scale(v)
        scaled = v if scale is None else v / scale
        rhs = pullback.rhs(scaled)
        linear = self.linear_solver if isinstance(self.linear_solver, AbstractLinearSolver) else None
        if linear is not None:
            bound: dict[str, Any] = {"max_steps": options.max_steps, "strict": self.max_steps is not None}
            solution = solve_linear(linear, pullback, rhs, rtol=options.tolerance.rtol, **bound)
            coupled = bool(solution.note) and v.shape[0] > 1
        else:
            adjoint = pullback.as_map(rhs, scaled)
            # f(0) = rhs is known, so the first evaluation is free, and one zero stands for all entries.
            if start is None:
                outcome = options.run(adjoint, rhs.new_zeros(()).expand_as(rhs), first=rhs)
            else:
                first = first if scale is None or first is None else first / scale
                outcome = options.run(adjoint, start if scale is None else start / scale, first=first)
            if options.keep_adjoint(outcome):  # the usual case
                return outcome.value if scale is None else outcome.value * scale, True
            solution, coupled = as_solution(outcome), outcome.coupled
        if coupled:
            return None
        options.finish_adjoint(solution, linear)
        u: Tensor = solution.value
        lost = solution.status.codes == Status.NOT_FINITE
        if bool(lost.any()):
            # a sample with the cotangent 0 has the solution 0 for every Jacobian
            asked = (v != 0).any(dim=1)
            u = torch.where(lost.unsqueeze(1), torch.where(asked, torch.nan, 0.0).to(u.dtype).unsqueeze(1), u)
        return u if scale is None else u * scale, bool(solution.converged.all())


@dataclass(frozen=True, eq=False)
class _Adjoint:
    """The linear systems at one equilibrium, for a backward pass."""

    gradient: ImplicitGradient
    f: AbstractMap
    options: SolveOptions
    captured: Sequence[Tensor] = ()
    plain_factor: Array | None = None  # of the solve

    def general(self) -> _Adjoint:
        """The same for the general form (I - J)^T u = v, by `Auto` instead of a splitting."""
        if not isinstance(self.gradient.linear_solver, AbstractSplitting):
            return self
        return replace(self, gradient=replace(self.gradient, linear_solver=None))

    def solve(self, z: Tensor, v: Tensor, fz: Tensor) -> Tensor:
        """(I - J)^-T v, differentiable if a graph is being made."""
        if transforms_active():  # a batch of cotangents under vmap, e.g. is_grads_batched=True
            transposed = torch.func.vjp(self.f.tracked, z.detach())[1]
            options = self.gradient.options(self.options)
            budget: dict[str, Any] = {"tolerance": options.tolerance, "max_steps": options.max_steps}
            outcome = iterate_transformed(lambda u: v + transposed(u)[0], v, **budget)
            if options.record is not None:
                options.record.adjoint = None  # what is known of it lives on the levels of the transforms
            report(outcome, options, backward=True)
            return torch.where(outcome.done.unsqueeze(1), outcome.value, torch.nan)
        with full_precision(z.device.type):
            with torch.no_grad():
                jacobian = self.f.jacobian(z.detach())
                check_same_map(jacobian.value, fz)
                pullback = JacobianPullback(self.f, z.detach(), jacobian, self.plain_factor)
                u_star = self.gradient.solve(pullback, v.detach(), self.options)
            if not torch.is_grad_enabled():
                return u_star
            return _attach(self.gradient.cold, adjoint_map(self.f, z, v, u_star), u_star, self.options, self.captured)


def _attach(
    gradient: ImplicitGradient,
    f: AbstractMap,
    z_star: Tensor,
    options: SolveOptions,
    captured: Sequence[Tensor] | None = None,
    recorded: tuple[Tensor, int] | None = None,
    plain_factor: Array | None = None,
) -> Tensor:
    """z* with the graph of f, recorded once, and the implicit derivative between the two."""
    known = f.inputs()
    # all that autograd sees of f in a first derivative
    fz, captured, f = record(f, z_star, known, recorded) if captured is None else (f.tracked(z_star), captured, f)
    f.forget()
    if fz.numel() and not fz.requires_grad:
        return z_star.clone()  # f uses nothing that has a gradient, and as in torch the answer says so
    return _Root.apply(fz, z_star, _Adjoint(gradient, f, options, captured, plain_factor), *known, *captured)


class _Root(torch.autograd.Function):
    """f(z*) -> z*: the identity up to the residual, whose derivative is (I - J)^-1.

    `extras` are the tensors that f depends on. First derivatives reach them through the graph of
    f(z*); second ones need a correction.
    """

    @staticmethod
    def forward(ctx: Any, fz: Tensor, z_star: Tensor, adjoint: _Adjoint, *extras: Tensor) -> Tensor:
        ctx.adjoint = adjoint  # no `setup_context`: torch would read the signature at every call, some per cent of a solve
        z = z_star.clone()
        ctx.save_for_backward(z, fz, *extras)
        ctx.set_materialize_grads(False)
        return z

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[3:]
        if v is None:
            return None, None, None, *(None for _ in needed)
        _check_batching(v)
        z, fz, *extras = ctx.saved_tensors
        u = ctx.adjoint.solve(z, v, fz.detach())
        if torch.is_grad_enabled() and any(needed):
            with full_precision(z.device.type):
                return u, None, None, *correction(ctx.adjoint.f, z, u, extras, needed, fz)
        return u, None, None, *(None for _ in needed)


class _StructuredRoot(torch.autograd.Function):
    """(W, c, ...) -> z* for a map with closed-form derivatives."""

    @staticmethod
    def forward(ctx: Any, adjoint: _Adjoint, z_star: Tensor, fz: Tensor, *inputs: Tensor) -> Tensor:
        ctx.adjoint = adjoint
        z = z_star.clone()  # the caller may change its own in place
        ctx.save_for_backward(z, fz, *inputs)
        ctx.set_materialize_grads(False)
        return z

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[3:]
        if v is None:
            return None, None, None, *(None for _ in needed)
        _check_batching(v)
        z, fz, *inputs = ctx.saved_tensors  # also checks that they were not changed since
        adjoint, f = ctx.adjoint, ctx.adjoint.f
        making_graph = torch.is_grad_enabled()
        if making_graph or transforms_active():
            u = adjoint.general().solve(z, v, fz)
            # The partial derivatives with z held: z itself depends on the inputs, their aliases stand for the rest.
            with torch.enable_grad(), full_precision(z.device.type):
                aliases = [x.view_as(x) for x in inputs]
                wanted = [x for x, need in zip(aliases, needed, strict=True) if need]
                image = f.with_inputs(*aliases).tracked(z if making_graph else z.detach())
                products = iter(torch.autograd.grad(image, wanted, u, create_graph=making_graph, allow_unused=True))
            return None, None, None, *(next(products) if need else None for need in needed)
        with full_precision(z.device.type):
            u = adjoint.gradient.solve(f.pullback(fz), v, adjoint.options)
            return None, None, None, *f.cotangents(u, z, needed)


def _check_batching(v: Tensor) -> None:
    if is_legacy_batched(v):
        raise WellposedError(
            "torch.autograd.grad(is_grads_batched=True) and functional.jacobian(vectorize=True) batch cotangents in a way that "
            "iterative solves cannot follow. Use torch.func.jacrev or torch.func.vmap instead, or vectorize=False."
        )


def _safe_scale(v: Tensor) -> Tensor | None:
    """(batch, 1) powers of two that bring rows to size 1; None if no square can vanish."""
    if v.numel() == 0:
        return None
    norms = to_host(torch.linalg.vector_norm(v, dim=1))
    if norms.min() > 1e-12 and norms.max() < 1e12:  # the usual case
        return None
    largest = v.abs().amax(dim=1, keepdim=True)
    ordinary = ((largest > 1e-12) & (largest < 1e12)) | (largest == 0) | ~largest.isfinite()
    if bool(ordinary.all()):
        return None
    _, exponent = torch.frexp(torch.where(ordinary, 1.0, largest))
    return torch.ldexp(torch.ones_like(largest), exponent - 1)  # 2^128 would be infinite in float32
