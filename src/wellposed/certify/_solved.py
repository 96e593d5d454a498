"""A float64 copy of a model with accurate equilibria, and whether its solves have succeeded."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument

#: Of the equilibria, in float64.
_RTOL, _MAX_STEPS = 1e-12, 2000


def precise_copy(model: Any) -> Any:
    """A copy in float64 whose equilibria are found to 1e-12, or to what the model itself asks for
    if that is less."""
    twin = copy.deepcopy(model).double().cpu()
    layer = twin.layer
    layer.rtol = _RTOL if layer.rtol is None else min(layer.rtol, _RTOL)
    layer.max_steps, layer.on_failure = max(layer.max_steps, _MAX_STEPS), "ignore"
    return twin


def check_solved(twin: Any, numbers: Tensor) -> None:
    """Raises where a solve has failed: then there are no predictions, and no kernel."""
    for kind, solution in (("equilibria", twin.layer.last_solution), ("adjoints", twin.layer.last_adjoint)):
        if solution is not None and not bool(solution.converged.all()):
            failed = int((~solution.converged).sum())
            raise InvalidArgument(
                f"generalization_bound: {failed} of {len(solution.converged)} {kind} did not converge, so the predictions and "
                "the kernel are not known. Make the network well-posed (a contraction, or monotone), or give it more max_steps."
            )
    if not bool(torch.isfinite(numbers).all()):
        raise InvalidArgument(
            "generalization_bound: the predictions or the kernel leave the range of float64. "
            "Rescale the inputs or the parameters."
        )
