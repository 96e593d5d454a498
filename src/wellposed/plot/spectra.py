"""Spectra of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from wellposed.errors import InvalidArgument
from wellposed.plot._figure import COLORS, array, new_figure

__all__ = ["spectrum"]


def spectrum(eigenvalues: Any, *, lower_bounds: Mapping[str, float] | None = None) -> Any:
    """Eigenvalues in descending order on a logarithmic scale; those that are not positive are counted, not hidden.

    Args:
        eigenvalues: (n,) of one kernel, or a dictionary of them by name. A matrix is not accepted: compute its eigenvalues.
        lower_bounds: Proved lower bounds of the least eigenvalue by name, drawn as dashed lines.
    """
    named = eigenvalues if isinstance(eigenvalues, Mapping) else {"eigenvalues": eigenvalues}
    figure = new_figure(6.0, 3.8)
    ax = figure.subplots()
    for i, (name, values) in enumerate(named.items()):
        if hasattr(values, "detach"):
            values = values.detach().cpu().numpy()
        numbers = np.sort(array(values))[::-1]
        if numbers.ndim != 1:
            raise InvalidArgument(f"spectrum needs the (n,) eigenvalues of {name}; got shape {array(values).shape}.")
        color = COLORS[i % len(COLORS)]
        positive = numbers > 0
        hidden = int((~positive).sum())
        label = f"{name} ({hidden} not positive)" if hidden else name
        ax.plot(np.arange(1, len(numbers) + 1)[positive], numbers[positive], ".-", color=color, markersize=3, label=label)
        bound = None if lower_bounds is None else lower_bounds.get(name)
        if bound is not None and bound > 0:
            ax.axhline(bound, color=color, linestyle="--", linewidth=1, label=f"{name}, proved lower bound of the least")
    ax.set(xlabel="number", ylabel="eigenvalue", yscale="log")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return figure
