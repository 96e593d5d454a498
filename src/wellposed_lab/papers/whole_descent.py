"""Gradient descent whose result may be stored: an interruption is not a result."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wellposed.descent import History, Stop, descend

__all__ = ["whole_descent"]


def whole_descent(model: Any, X: Tensor, y: Tensor, **options: Any) -> History:
    """As `descend`, but an interruption ends the task.

    `descend` returns what it has when it is interrupted. An experiment would keep that as the
    result of the task, and a run that continues would take it for a whole one.

    Args:
        model, X, y: As in `descend`.
        options: As in `descend`.
    """
    history = descend(model, X, y, **options)
    if history.stop is Stop.INTERRUPTED:
        raise KeyboardInterrupt
    return history
