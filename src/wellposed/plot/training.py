"""Losses of training, measured against certified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from wellposed.plot._figure import COLORS, array, new_figure, record_of

__all__ = ["losses"]


def losses(histories: Any, *, rates: Mapping[str, float] | None = None) -> Any:
    r"""The loss of one or several runs, solid; dashed what their certificate promised: loss_0 q^(2k) or loss_0 e^(-2 q t).

    Args:
        histories: A `History` or its record, or a dictionary of them by name.
        rates: Certified rates q by name, for runs that do not carry a certificate.
    """
    single = hasattr(histories, "to_dict") or "rows" in histories
    named = {"loss": histories} if single else histories
    figure = new_figure(6.0, 3.8)
    ax = figure.subplots()
    horizontal = "step"
    for i, (name, one) in enumerate(named.items()):
        record = record_of(one, "history", ("kind", "rows", "certificate"))
        flow = record["kind"] == "flow"
        horizontal = "time" if flow else "step"
        k = array([row[horizontal] for row in record["rows"]])
        loss = array([row["loss"] for row in record["rows"]])
        color = COLORS[i % len(COLORS)]
        ax.plot(k, np.where(loss > 0, loss, np.nan), color=color, linewidth=1.6, label=f"{name}, measured")
        rate = _rate(record, name, rates)
        if rate is not None:
            log = np.log(loss[0]) + (
                -2 * rate * k if flow else 2 * k * np.log(rate) if rate > 0 else np.where(k > 0, -np.inf, 0)
            )
            ax.plot(k, np.exp(log), "--", color=color, linewidth=1.2, label=f"{name}, certified bound")
    ax.set(xlabel=horizontal, ylabel="loss", yscale="log")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return figure


def _rate(record: Mapping[str, Any], name: str, rates: Mapping[str, float] | None) -> float | None:
    if rates is not None and name in rates:
        return float(rates[name])
    certificate = record["certificate"]
    rate = None if certificate is None else certificate.get("rate")
    return None if rate is None else float(rate)
