"""Training by few plain steps, which a penalty keeps near an equilibrium."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wellposed._torch import eager, require_values
from wellposed._tree import LOW_PRECISION, first_tensor, map_leaves
from wellposed.errors import InvalidType
from wellposed.implicit import UnrolledGradient
from wellposed.nn.layer import EquilibriumLayer
from wellposed.solve._record import SolveRecord
from wellposed.solve.loop import iterate
from wellposed.solve.solver import Picard


@eager
def truncated(
    layer: EquilibriumLayer,
    x: Any,
    z0: Any = None,
    *,
    steps: int = 8,
    recorded: int = 2,
    groups: Tensor | None = None,
) -> tuple[Any, Tensor]:
    r"""The state z after `steps` plain steps, and how far it is from an equilibrium, with graphs.

    For training that costs a fixed number of evaluations, less than a solve and its adjoint:

        loss = criterion(head(z), y) + weight * penalty,    penalty = mean |f(z) - z|^2/|f(z)|^2

    The gradient of z is that of the last `recorded` steps: *inexact*, as that of `PhantomGradient`.
    Nothing else would make the steps converge. The penalty, whose gradient is taken with z held
    fixed, makes f contract so much that they nearly do, and then `layer(x)` in evaluation finds an
    equilibrium at which the head is right too. In contrast to `jacobian_penalty` it needs no second
    derivative: one recorded evaluation, which also measures `layer.last_solution` (a residual above
    the tolerance is not reported as a failure here). `benchmarks/recipe.py` compares.

        >>> import torch, wellposed as wp
        >>> layer, head = wp.EquilibriumLayer(wp.nn.DenseCell(4, 16)), torch.nn.Linear(16, 1)
        >>> z, penalty = wp.nn.truncated(layer, torch.randn(8, 4))
        >>> (head(z).square().mean() + 3.0 * penalty).backward()

    Args:
        layer: The layer; its solver and its gradient are not used.
        x, z0, groups: As for the layer.
        steps: Plain steps from z0. recorded: How many of the last ones are differentiated.
    """
    if not isinstance(layer, EquilibriumLayer):
        raise InvalidType(f"truncated needs an EquilibriumLayer; got {type(layer).__name__}.")
    require_values("truncated", "Call the layer itself.")
    few = UnrolledGradient(steps, recorded)
    device_type = first_tensor(x).device.type
    mixed = torch.is_autocast_enabled(device_type)
    with torch.autocast(device_type, enabled=False):
        f, start, layout, options = layer._bind(x, z0, groups, mixed=mixed)
        rows = few.unroll(f, start, options)
        held = rows.detach()
        image = f.tracked(held)
        one = {"tolerance": options.tolerance, "max_steps": 1, "first": image.detach()}
        outcome = iterate(f, held, Picard(), **one)  # type: ignore[arg-type]
        outcome.steps.fill_(steps + 1)
        apart = SolveRecord()  # few steps are not a solve that failed
        layer.last_solution = replace(options, on_failure="ignore", record=apart).judge(outcome, layout, f, by=few)
        square = image.detach().square().sum(1).clamp(min=torch.finfo(image.dtype).tiny)
        penalty = ((image - held).square().sum(1) / square).mean()
        z = layout.unflatten(f.rows(rows) if f.regroups else rows)
    low = layout.dtype in LOW_PRECISION and not mixed
    return map_leaves(lambda leaf: leaf.to(layout.dtype), z) if low else z, penalty
