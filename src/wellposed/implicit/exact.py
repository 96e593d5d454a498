"""The exact gradient, by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wellposed._tree import Layout
from wellposed.errors import AdjointNotConverged, AdjointNotConvergedWarning, InvalidType, WellposedError
from wellposed.implicit._captured import Substitution, record
from wellposed.implicit._gradient import AbstractGradient, Context
from wellposed.implicit._linear_system import solve_linear
from wellposed.implicit._pullback import AbstractPullback, AbstractStructuredMap, JacobianPullback, WholePullback
from wellposed.implicit._transformed import report, solve_transformed, with_tail
from wellposed.implicit._uncompiled import uncompiled
from wellposed.linalg import AbstractLinearSolver
from wellposed.solve import (
    AbstractMap,
    AbstractSolver,
    AbstractSplitting,
    Auto,
    FunctionMap,
    Outcome,
    Solution,
    Tolerance,
    apply_policy,
    as_solution,
    iterate_transformed,
    transforms_active,
)
from wellposed.solve._closing import solve_and_close
from wellposed.status import Status

__all__ = ["ImplicitGradient"]


@dataclass(frozen=True)
class ImplicitGradient(AbstractGradient):
    r"""Exact gradient of an equilibrium, through one linear solve.

    At z = f(z) with Jacobian J = df/dz, an incoming cotangent v becomes the u solving

        (I - J)^T u = v                                                                (1)

    and autograd carries u into whatever f depends on. This is Theorem 1 of [bai2019], with I - J where the paper writes -J_g
    (there g(z) = f(z) - z). The solution u of (1) is itself an equilibrium,
    of u -> v + J^T u, and is differentiated in the same way: derivatives of every order exist.

    Holds when I - J is invertible at z. Costs one vector-Jacobian product per step of the linear solve; memory does not
    depend on the number of steps. The linear solve has its own per-sample status (`layer.last_adjoint`) and obeys the
    `on_failure` of the layer; where it meets NaN or infinity the gradient is NaN, never zero. Cotangents batched by
    `torch.func.vmap` are solved by plain iteration: `layer.last_adjoint` is None then, and the gradient NaN where that fails.

    Args:
        linear_solver: Solves (1): a solver of linear systems (`GMRES` needs only invertibility; `Neumann` also needs the
            spectral radius of J below 1, which a monotone map does *not* promise), or a solver of fixed points for
            u = v + J^T u. None takes `Auto()`, which begins with plain (Neumann) steps and ends with GMRES if it must. A
            splitting such as `PeacemanRachford()` serves first derivatives of cells that know their resolvent, with the
            factorization of the forward solve; derivatives of higher order take `Auto()` then.
        rtol: Relative tolerance of (1); None takes that of the forward solve.
        max_steps: Bound on the products; None takes that of the forward solve.
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

    def attach(self, f: AbstractMap, outcome: Outcome, context: Context) -> Tensor:
        z_star = outcome.value.detach()
        if isinstance(f, AbstractStructuredMap) and outcome.image is not None:
            return _StructuredRoot.apply(_Linear(self, f, context), z_star, outcome.image, *f.inputs())
        return _attach(self, f, z_star, context)

    def transformed(self, f: AbstractMap, start: Tensor, context: Context) -> Tensor:
        return with_tail(f, solve_transformed(f, start, context), context)

    def solve(self, pullback: AbstractPullback, v: Tensor, context: Context, start: Tensor | None = None) -> Tensor:
        """(batch, features) the solution of u = rhs(v) + A u; reports it and applies the policy.

        Args:
            pullback: The system.
            v: (batch, features) the cotangent.
            context: Tolerance and policy.
            start: (batch, features) where a solver of fixed points begins; a linear solver begins at 0 in any case.
        """
        rtol = context.tolerance.rtol if self.rtol is None else self.rtol
        max_steps = context.max_steps if self.max_steps is None else self.max_steps
        scale = _safe_scale(v)
        rhs = pullback.rhs(v if scale is None else v / scale)
        solver = Auto() if self.linear_solver is None else self.linear_solver
        if isinstance(solver, AbstractLinearSolver):
            solution = solve_linear(solver, pullback, rhs, rtol=rtol, max_steps=max_steps)
            coupled = bool(solution.note) and v.shape[0] > 1
        else:
            adjoint = pullback.as_map(rhs, v if scale is None else v / scale)
            options: dict[str, Any] = {"tolerance": Tolerance(rtol, 0.0), "max_steps": max_steps}
            # f(0) = rhs is known, so the first evaluation is free, and a zero for all entries will do.
            if start is None:
                outcome = solve_and_close(adjoint, rhs.new_zeros(()).expand_as(rhs), solver, first=rhs, **options)
            else:
                outcome = solve_and_close(adjoint, start if scale is None else start / scale, solver, **options)
            solution = as_solution(outcome, Layout.of(rhs, "u"))
            coupled = outcome.coupled
        if coupled:  # once more as one system: there the scale is one number for all rows
            return self._solve_as_one(pullback, v, context)
        u: Tensor = solution.value
        context.report(solution)
        apply_policy(
            solution,
            context.on_failure,
            who="backward of the equilibrium (linear_solver of ImplicitGradient)",
            solver=solver,
            rtol=rtol,
            atol=0.0,
            max_steps=max_steps,
            counts=context.counts,
            error=AdjointNotConverged,
            warning=AdjointNotConvergedWarning,
        )
        lost = solution.status == Status.NOT_FINITE
        if bool(lost.any()):
            # a sample that nobody asks about has the solution 0, whatever its Jacobian is
            asked = (v != 0).any(dim=1)
            u = torch.where(lost.unsqueeze(1), torch.where(asked, torch.nan, 0.0).to(u.dtype).unsqueeze(1), u)
        return u if scale is None else u * scale

    def _solve_as_one(self, pullback: AbstractPullback, v: Tensor, context: Context) -> Tensor:
        """The same for rows that depend on each other: one system, and one scale for all rows."""
        seen: list[Solution] = []

        def report(solution: Solution | None) -> None:
            assert solution is not None  # no transform is active here
            seen.append(solution)
            context.report(solution)

        whole = WholePullback(pullback, v.shape)
        u = self.solve(whole, v.reshape(1, -1), replace(context, report=report)).reshape(v.shape)
        if bool(seen[-1].converged.all()):  # else it may be the solver that is wrong
            context.found_coupled(seen[-1])
        return u


class _Linear:
    """The linear systems at one equilibrium: what a backward pass calls."""

    def __init__(self, gradient: ImplicitGradient, f: AbstractMap, context: Context, captured: Sequence[Tensor] = ()) -> None:
        self.gradient, self.f, self.context, self.captured = gradient, f, context, captured

    def general(self) -> _Linear:
        """The same for the system in its general form (I - J)^T u = v, which a splitting cannot solve: `Auto` does."""
        if not isinstance(self.gradient.linear_solver, AbstractSplitting):
            return self
        return _Linear(replace(self.gradient, linear_solver=None), self.f, self.context, self.captured)

    def adjoint(self, z: Tensor, v: Tensor, fz: Tensor) -> Tensor:
        """(I - J)^-T v, differentiable if a graph is being made."""
        if transforms_active():  # a batch of cotangents under vmap, e.g. is_grads_batched=True
            return self._adjoint_transformed(z, v)
        with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
            jacobian = self.f.jacobian(z.detach())
            self._check_same_map(jacobian, fz)
            pullback = JacobianPullback(self.f, z.detach(), jacobian=jacobian)
            u_star = self.gradient.solve(pullback, v.detach(), self.context)
        return self.differentiable(z, v, u_star) if torch.is_grad_enabled() else u_star

    def _adjoint_transformed(self, z: Tensor, v: Tensor) -> Tensor:
        transposed = torch.func.vjp(self.f.tracked, z.detach())[1]
        rtol = self.context.tolerance.rtol if self.gradient.rtol is None else self.gradient.rtol
        max_steps = self.context.max_steps if self.gradient.max_steps is None else self.gradient.max_steps
        context = replace(self.context, tolerance=Tolerance(rtol, 0.0), max_steps=max_steps)
        outcome = iterate_transformed(
            lambda u: v + transposed(u)[0], v, tolerance=context.tolerance, max_steps=context.max_steps
        )
        self.context.report(None)  # what is known there lives on the levels of the transforms
        report(outcome, context, backward=True)
        return torch.where(outcome.done.unsqueeze(1), outcome.value, torch.nan)

    def differentiable(self, z: Tensor, v: Tensor, u_star: Tensor) -> Tensor:
        """u with a graph: the equilibrium of u -> v + J^T u, differentiated by the same rule."""
        recorded: list[Tensor] = []  # f(z), z, and the other inputs of f

        def step(u: Tensor, v: Tensor, z: Tensor, *inputs: Tensor) -> Tensor:
            if not recorded or any(a is not b for a, b in zip(recorded[1:], (z, *inputs), strict=True)):
                with torch.enable_grad():
                    recorded[:] = [self.f.with_inputs(*inputs).tracked(z), z, *inputs]
            (product,) = torch.autograd.grad(recorded[0], z, u, create_graph=True, allow_unused=True)
            return v if product is None else v + product

        with torch.autocast(z.device.type, enabled=False):
            adjoint = FunctionMap(step, Layout.of(u_star, "u"), (v, z, *self.f.inputs()))
            return _attach(self.gradient, adjoint, u_star, self.context, self.captured)

    def correction(self, z: Tensor, u: Tensor, extras: list[Tensor], needed: tuple[bool, ...]) -> list[Tensor | None]:
        """What a second derivative needs beyond the graph of f(z*), which was recorded with z* held.

        (df/dtheta)^T u at the living z minus the same at the held z: zero, but not so its derivative. The gates keep the
        engine from going on through z, and through what f depends on, to what those depend on.
        """
        count = len(self.f.inputs())
        gates = [_Gate() for _ in range(len(extras) + 1)]
        with torch.autocast(z.device.type, enabled=False):
            living = [
                # A captured leaf depends on nothing else and may stay where f finds it.
                _Pass.apply(x, gate) if x.requires_grad and (i < count or x.grad_fn is not None) else x
                for i, (x, gate) in enumerate(zip(extras, gates, strict=False))
            ]
            f = self.f.with_inputs(*living[:count])
            with Substitution(extras, living):
                difference = uncompiled(lambda: f.tracked(_Pass.apply(z, gates[-1])) - f.tracked(z.detach()))
            wanted = [x for x, need in zip(living, needed, strict=True) if need]
            for gate in gates:
                gate.open = False
            products = iter(torch.autograd.grad(difference, wanted, u, create_graph=True, allow_unused=True))
            for gate in gates:
                gate.open = True
        return [next(products) if need else None for need in needed]

    def _check_same_map(self, jacobian: Any, fz: Tensor) -> None:
        """Backward must differentiate the map that forward solved."""
        now = getattr(jacobian, "value", fz)
        finite = torch.where(fz.isfinite(), fz, 0.0)  # a NaN in a row says nothing about the rest of it
        scale = finite.abs().amax(dim=1, keepdim=True) if fz.shape[1] else fz
        same = (now - fz).abs() <= 1e3 * torch.finfo(fz.dtype).eps * scale
        if not bool((same | ~fz.isfinite()).all()):
            raise WellposedError(
                "backward of the equilibrium: f gives another value at the equilibrium than it did in the forward pass. A "
                "parameter was changed in place between forward and backward (call backward before optimizer.step()), or f "
                "is random (make noise such as dropout constant within a solve)."
            )


def _attach(
    gradient: ImplicitGradient,
    f: AbstractMap,
    z_star: Tensor,
    context: Context,
    captured: Sequence[Tensor] | None = None,
) -> Tensor:
    """z* with the graph of f, recorded once, and the implicit derivative between the two."""
    known = f.inputs()
    if captured is None:
        fz, captured = record(f.tracked, z_star, known)  # all that autograd will see of f in a first derivative
    else:
        fz = f.tracked(z_star)
    f.forget()
    return _Root.apply(fz, z_star, _Linear(gradient, f, context, captured), *known, *captured)


class _Gate:
    """Whether derivatives may pass now."""

    open = True


class _Pass(torch.autograd.Function):
    """The identity, with a gate for derivatives."""

    @staticmethod
    def forward(x: Tensor, gate: _Gate) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.gate = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> tuple[Tensor | None, None]:
        return (v if ctx.gate.open else None), None


class _Root(torch.autograd.Function):
    """f(z*) -> z*: the identity up to the residual, whose derivative is (I - J)^-1.

    `extras` are what f depends on. First derivatives reach them through the graph of f(z*); second ones need a correction.
    """

    @staticmethod
    def forward(fz: Tensor, z_star: Tensor, linear: _Linear, *extras: Tensor) -> Tensor:
        return z_star.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        fz, _, ctx.linear, *extras = inputs
        ctx.save_for_backward(output, fz, *extras)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[3:]
        if v is None:
            return None, None, None, *(None for _ in needed)
        _check_batching(v)
        z, fz, *extras = ctx.saved_tensors
        u = ctx.linear.adjoint(z, v, fz.detach())
        if torch.is_grad_enabled() and any(needed):
            return u, None, None, *ctx.linear.correction(z, u, extras, needed)
        return u, None, None, *(None for _ in needed)


class _StructuredRoot(torch.autograd.Function):
    """(W, c, ...) -> z* for a map that knows its own derivatives."""

    @staticmethod
    def forward(ctx: Any, linear: _Linear, z_star: Tensor, fz: Tensor, *inputs: Tensor) -> Tensor:
        ctx.linear = linear
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
        z, fz, *inputs = ctx.saved_tensors  # also checks that nobody changed them since
        linear, f = ctx.linear, ctx.linear.f
        making_graph = torch.is_grad_enabled()
        if making_graph or transforms_active():
            linear = linear.general()
            u = linear.adjoint(z, v, fz)
            # The partial derivatives with z held: z itself depends on the inputs, their aliases stand for the rest.
            with torch.enable_grad(), torch.autocast(z.device.type, enabled=False):
                aliases = [x.view_as(x) for x in inputs]
                wanted = [x for x, need in zip(aliases, needed, strict=True) if need]
                image = f.with_inputs(*aliases).tracked(z if making_graph else z.detach())
                products = iter(torch.autograd.grad(image, wanted, u, create_graph=making_graph, allow_unused=True))
            return None, None, None, *(next(products) if need else None for need in needed)
        with torch.autocast(z.device.type, enabled=False):
            u = linear.gradient.solve(f.pullback(fz), v, linear.context)
            return None, None, None, *f.cotangents(u, z, needed)


def _check_batching(v: Tensor) -> None:
    if torch._C._functorch.is_legacy_batchedtensor(v):
        raise WellposedError(
            "torch.autograd.grad(is_grads_batched=True) and functional.jacobian(vectorize=True) batch cotangents in a way that "
            "iterative solves cannot follow. Use torch.func.jacrev or torch.func.vmap instead, or vectorize=False."
        )


def _safe_scale(v: Tensor) -> Tensor | None:
    """(batch, 1) powers of two that bring rows to size 1, or None if all squares are far from under- and overflow already."""
    if v.shape[1] == 0:
        return None
    largest = torch.linalg.vector_norm(v, ord=torch.inf, dim=1, keepdim=True)
    ordinary = ((largest > 1e-12) & (largest < 1e12)) | (largest == 0) | ~largest.isfinite()
    if bool(ordinary.all()):
        return None
    _, exponent = torch.frexp(torch.where(ordinary, 1.0, largest))
    return torch.ldexp(torch.ones_like(largest), exponent - 1)  # 2^128 would be infinite in float32
