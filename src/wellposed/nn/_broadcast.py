"""An input that was broadcast over the batch by mistake."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from wellposed.errors import WellposedWarning
from wellposed.solve._failure import user_level


def warn_of_broadcast(x: Tensor, z: Tensor, state_shape: tuple[int, ...]) -> None:
    """Warns if x seems to have no batch dimension, or `state_shape` seems to include it.

    Either is possible on purpose, so shapes alone decide nothing: all samples must also have the
    same equilibrium, other than 0, up to rounding, for inputs that differ by more than a hundredth.

    Args:
        x: The input of a layer.
        z: (batch, features) the equilibria.
        state_shape: Of the layer.
    """
    flat = x.dim() == 1 and x.is_floating_point()
    if z.shape[0] != x.shape[0] or x.shape[0] < 2 or not (flat or state_shape[:1] == x.shape[:1]):
        return
    if _vary(z.detach(), 100 * torch.finfo(z.dtype).eps) or not bool((z != 0).any()) or not _vary(x.detach(), 1e-2):
        return
    if flat:
        problem = f"x has the shape {tuple(x.shape)}, which is one number for each sample"
        advice = "If it is one sample, give x.unsqueeze(0)."
    else:
        problem = f"state_shape={state_shape} begins with the size of the batch"
        advice = "Give the shape of the state of one sample, without the batch."
    warnings.warn(
        f"EquilibriumLayer: all {x.shape[0]} samples have the same equilibrium for different inputs, and {problem}. {advice}",
        WellposedWarning,
        stacklevel=user_level(),
    )


def _vary(rows: Tensor, part: float) -> bool:
    """Whether rows differ from the first by more than a part of the largest entry, or are NaN."""
    if rows.is_floating_point() and bool((rows[1] - rows[0]).abs().amax() > part * torch.linalg.vector_norm(rows, torch.inf)):
        return True  # the usual case, without a copy
    rows = rows if rows.is_complex() else rows.double()
    return not bool(((rows - rows[:1]).abs() <= part * rows.abs().amax()).all())
