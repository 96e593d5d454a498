"""attach_gradient: derivatives of an equilibrium that was found in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wellposed._checks import Policy, check_policy, check_tolerances, shown
from wellposed._torch import eager, require_values
from wellposed._tree import LOW_PRECISION, Layout, map_leaves
from wellposed.errors import InvalidType
from wellposed.implicit.gradient import AbstractGradient, AbstractUnrolled
from wellposed.implicit.implicit_gradient import ImplicitGradient
from wellposed.solve._fixed_point import check_args, check_options
from wellposed.solve.auto import Auto
from wellposed.solve.map import FunctionMap
from wellposed.solve.solution import SolveOptions, judge
from wellposed.solve.solver import Tolerance

#: Relative tolerance of the linear solve, as of a layer without a tolerance.
ADJOINT_RTOL = {torch.float32: 1e-6, torch.float64: 1e-12}


@eager
def attach_gradient(
    f: Callable[..., Any],
    z: Any,
    args: tuple[Any, ...] = (),
    *,
    gradient: AbstractGradient | None = None,
    rtol: float = 1e-3,
    atol: float = 1e-6,
    max_steps: int = 200,
    on_failure: Policy = "warn",
) -> Any:
    r"""An equilibrium z = f(z, *args) that was found elsewhere, with its implicit derivatives.

    The value is z. Its gradient reaches all that f depends on, tensors in `args` and captured ones
    such as parameters, by the implicit function theorem: see `ImplicitGradient`. A derivative at a
    z that is not an equilibrium is wrong by about the residual, so f is evaluated and a z that does
    not meet the tolerance is reported. For a root of F give f = z - F(z).

        >>> import torch, wellposed as wp
        >>> a = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
        >>> F = lambda z, a: z**2 - a
        >>> z = wp.root(F, torch.ones_like(a), args=(a.detach(),)).value
        >>> wp.attach_gradient(lambda z, a: z - F(z, a), z, (a,)).sum().backward()
        >>> a.grad  # 1 / (2 sqrt(2))
        tensor([[0.3536]], dtype=torch.float64)

    Args:
        f: `f(z, *args)` of the same structure and shapes as z.
        z: The equilibrium: a tensor or a structure of tensors, batch first.
        args: Further arguments of f, batch first if they follow their samples.
        gradient: `ImplicitGradient()` if not given. Its linear solve has the tolerance 1e-6 in
            float32 and 1e-12 in float64 unless it says otherwise.
        rtol, atol: z is an equilibrium if |f(z) - z| <= max(rtol |f(z)|, atol).
        max_steps: Products that the linear solve may take.
        on_failure: "raise", "warn" or "ignore", for a z that is not an equilibrium and for the
            linear solve of the backward pass.
    """
    gradient = ImplicitGradient() if gradient is None else gradient
    if not isinstance(gradient, AbstractGradient) or isinstance(gradient, AbstractUnrolled):
        raise InvalidType(
            "The 'gradient' parameter of attach_gradient must be a gradient mode at an equilibrium, such as ImplicitGradient() "
            f"or PhantomGradient(); got {shown(gradient)}."
        )
    check_options(f, Auto())
    check_args(f, args)
    check_tolerances(rtol=rtol, atol=atol, max_steps=max_steps)
    check_policy(on_failure)
    require_values("attach_gradient", "Inside them use EquilibriumLayer instead.")
    layout = Layout.of(z, "z")
    mixed = torch.is_autocast_enabled(layout.device.type)
    with torch.autocast(layout.device.type, enabled=False):
        rows = layout.flatten(z).detach().to(layout.compute_dtype)
        bound = FunctionMap(f, layout, args, low_precision=mixed)
        options = SolveOptions(Auto(), Tolerance(rtol, atol), max_steps, on_failure, "attach_gradient")
        outcome = judge(bound, rows, options.tolerance, 1)
        options.judge(outcome, layout, bound, by=_NotAnEquilibrium())
        if torch.is_grad_enabled():
            exact = Tolerance(ADJOINT_RTOL[rows.dtype], 0.0)
            rows = gradient.attach(bound, outcome, SolveOptions(Auto(), exact, max_steps, on_failure, "attach_gradient"))
        attached = layout.unflatten(rows)
    low = layout.dtype in LOW_PRECISION
    return map_leaves(lambda leaf: leaf.to(layout.dtype), attached) if low else attached


class _NotAnEquilibrium:
    """What to try when the z that was given does not solve z = f(z)."""

    def advice(self, status: Any, rate: float) -> str:
        return (
            "The z that was given is not an equilibrium of f: solve further, e.g. with fixed_point(f, z), or check f and args."
        )
