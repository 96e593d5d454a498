"""Training by few plain steps, which a penalty keeps near an equilibrium."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wellposed._torch import apart, eager, require_values
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
    recorded: int | None = None,
    groups: Tensor | None = None,
) -> tuple[Any, Tensor]:
    r"""The state z after `steps` plain steps, and how far it is from an equilibrium, with graphs.

    For training that costs a fixed number of evaluations, less than a solve and its adjoint:

        loss = criterion(head(z), y) + weight * penalty,    penalty = mean |z - z'|^2/|z|^2

    with z' before the last step, z = f(z'). The gradients of both are those of the last `recorded`
    steps: *inexact*, as that of `PhantomGradient`. Nothing but the penalty makes the steps
    converge: it makes f contract so much that they nearly do, and then `layer(x)` in evaluation
    finds an equilibrium at which the head is right too. In contrast to `jacobian_penalty` it needs
    neither a second derivative nor another evaluation. `layer.last_solution` is z' with its
    residual (one above the tolerance is not reported as a failure here). `benchmarks/recipe.py`
    compares.

        >>> import torch, wellposed as wp
        >>> layer, head = wp.EquilibriumLayer(wp.nn.DenseCell(4, 16)), torch.nn.Linear(16, 1)
        >>> z, penalty = wp.nn.truncated(layer, torch.randn(8, 4))
        >>> (head(z).square().mean() + 10.0 * penalty).backward()

    Args:
        layer: The layer; its solver and its gradient are not used.
        x, z0, groups: As for the layer.
        steps: Plain steps from z0. recorded: How many of the last ones are differentiated; half of
            them if None.
    """
    if not isinstance(layer, EquilibriumLayer):
        raise InvalidType(f"truncated needs an EquilibriumLayer; got {type(layer).__name__}.")
    require_values("truncated", "Call the layer itself.")
    few = UnrolledGradient(steps, recorded)  # which checks them
    recorded = -(-steps // 2) if recorded is None else recorded
    device_type = first_tensor(x).device.type
    mixed = torch.is_autocast_enabled(device_type)
    with torch.autocast(device_type, enabled=False):
        f, start, layout, options = layer._bind(x, z0, groups, mixed=mixed)
        rows = start
        with torch.no_grad(), apart():
            for _ in range(steps - recorded):
                rows = f.tracked(rows)
        rows = before = rows.detach()
        for _ in range(recorded):
            before, rows = rows, f.tracked(rows)
        outcome = iterate(f, before.detach(), Picard(), tolerance=options.tolerance, max_steps=1, first=rows.detach())
        outcome.steps.fill_(steps)
        unseen = SolveRecord()  # few steps are not a solve that failed
        layer.last_solution = replace(options, on_failure="ignore", record=unseen).judge(outcome, layout, f, by=few)
        square = rows.detach().square().sum(1).clamp(min=torch.finfo(rows.dtype).tiny)
        penalty = ((rows - before).square().sum(1) / square).mean()
        z = layout.unflatten(f.rows(rows) if f.regroups else rows)
    low = layout.dtype in LOW_PRECISION and not mixed
    return map_leaves(lambda leaf: leaf.to(layout.dtype), z) if low else z, penalty
