"""Supervision along the trajectory: states on the way to the equilibrium, and a loss of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wellposed._checks import check_interval, shown
from wellposed._torch import apart, eager, require_values
from wellposed._tree import LOW_PRECISION, map_leaves
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.implicit import AbstractGradient, JacobianFree
from wellposed.implicit.gradient import AbstractUnrolled
from wellposed.nn.layer import EquilibriumLayer
from wellposed.solve.loop import iterate


@eager
def trajectory(
    layer: EquilibriumLayer,
    x: Any,
    z0: Any = None,
    *,
    states: int | Sequence[int] = 3,
    groups: Tensor | None = None,
    gradient: AbstractGradient | None = None,
) -> list[Any]:
    r"""States on the way to the equilibrium, each with a graph; the last is the equilibrium itself.

    A loss on all of them keeps a network good also where its solve is cut short, and steadies its
    training [bai2022b]: see `correction_loss`. The last state is `layer(x)`, with the gradient of
    the layer and its record. The others cost, together, at most one more solve. With the default
    gradient, `layer(x, states=3)` is the same.

        >>> import torch, wellposed as wp
        >>> layer = wp.EquilibriumLayer(wp.nn.DenseCell(4, 16, wp.nn.Tanh()))
        >>> states = wp.nn.trajectory(layer, torch.randn(8, 4), states=3)
        >>> [tuple(z.shape) for z in states]
        [(8, 16), (8, 16), (8, 16)]

    Args:
        layer: The layer.
        x, z0, groups: As for the layer.
        states: How many states, at equal numbers of evaluations up to those of the slowest sample,
            fewer if that takes fewer; or the numbers of evaluations after which states are taken,
            rising, to which the equilibrium is added. The solver starts anew at each, with an
            empty memory.
        gradient: Of the states before the last: `JacobianFree()` if not given, one recorded step.
    """
    if not isinstance(layer, EquilibriumLayer):
        raise InvalidType(f"trajectory needs an EquilibriumLayer; got {type(layer).__name__}.")
    gradient = JacobianFree() if gradient is None else gradient
    if not isinstance(gradient, AbstractGradient) or isinstance(gradient, AbstractUnrolled):
        raise InvalidType(f"The states of a trajectory take a gradient such as JacobianFree(); got {shown(gradient)}.")
    if isinstance(layer.gradient, AbstractUnrolled):
        mode = type(layer.gradient).__name__
        raise InvalidArgument(f"A layer with {mode} has no solve to take states from; use another gradient.")
    require_values("trajectory", "Call the layer itself.")
    last = layer(x, z0, groups)
    solution = layer.last_solution
    assert solution is not None
    marks = _marks(states, int(solution.num_steps.max()) if len(solution.status) else 1)
    found = []
    device = solution.residual.device.type
    with torch.autocast(device, enabled=False):
        f, z, layout, options = layer._bind(x, z0, groups)
        spent = 0
        for mark in marks:
            part = replace(options, max_steps=mark - spent, on_failure="ignore", record=None)
            with torch.no_grad(), apart():  # what the last of the evaluations gave is the state
                outcome = iterate(f, z.detach(), part.solver, tolerance=part.tolerance, max_steps=mark - spent, keep_image=True)
            assert outcome.image is not None
            z, spent = outcome.image, mark
            outcome = replace(outcome, value=z, image=None)
            rows = gradient.attach(f, outcome, part) if torch.is_grad_enabled() else z
            state = layout.unflatten(f.rows(rows) if f.regroups else rows)
            low = layout.dtype in LOW_PRECISION
            found.append(map_leaves(lambda leaf: leaf.to(layout.dtype), state) if low else state)
    return [*found, last]


def correction_loss(loss: Callable[..., Tensor], states: Sequence[Any], *args: Any, gamma: float = 0.8) -> Tensor:
    r"""sum_k gamma^(n-1-k) loss(z_k, *args) over the n states of a `trajectory`, [bai2022b].

    The equilibrium, which is the last state, has weight 1. torchdeq's `fp_correction` with its
    default weights is the same sum.

        >>> import torch, wellposed as wp
        >>> z = [torch.tensor(3.0), torch.tensor(1.0)]
        >>> wp.nn.correction_loss(lambda z, y: (z - y) ** 2, z, torch.tensor(0.0), gamma=0.5)
        tensor(5.5000)

    Args:
        loss: `loss(z, *args)`, a number; put the read-out of the network into it.
        states: As `trajectory` returns them.
        args: Further arguments of the loss, such as targets.
        gamma: In (0, 1].
    """
    check_interval("correction_loss", "gamma", gamma, low=0.0, high=1.0)
    if not states:
        raise InvalidArgument("correction_loss needs at least one state; got none.")
    terms = [gamma ** (len(states) - 1 - k) * loss(z, *args) for k, z in enumerate(states)]
    return torch.stack(terms).sum()


def _marks(states: Any, total: int) -> list[int]:
    """Evaluations after which states are taken, before the equilibrium."""
    if isinstance(states, int) and not isinstance(states, bool) and states >= 1:
        return sorted({max(total * k // states, 1) for k in range(1, states)} if total >= states else set(range(1, total)))
    marks = list(states) if isinstance(states, Sequence) and not isinstance(states, str) else []
    rising = all(type(m) is int and m >= 1 for m in marks) and all(a < b for a, b in zip(marks, marks[1:], strict=False))
    if not marks or not rising:
        raise InvalidArgument(
            f"states must be an integer of at least 1, or rising numbers of evaluations; got {shown(states)}."
        )
    return marks
