"""The state of an optimizer from a checkpoint: exactly the options and slots that an optimizer of this kind has."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wellposed.train._checkpoint_record import is_number, need

__all__ = ["check_optimizer"]


def check_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], slots: dict[int, dict[str, Any]], steps: int
) -> None:
    """Raises `WrongRecord` unless groups and slots are those of an optimizer of this kind, options and parameters.

    A parameter that never had a gradient has no slots; all others have those that one step on a small parameter makes. Of the
    options only the step size changes along a run.

    Args:
        optimizer: The one that is to be restored.
        groups: Its options, from the record.
        slots: Its numbers and tensors by parameter.
        steps: How many were taken.
    """
    own = optimizer.state_dict()["param_groups"]
    need(len(groups) == len(own), "optimizer.groups")
    for group, mine in zip(groups, own, strict=True):
        need(set(group) == set(mine) and group["params"] == mine["params"], "optimizer.groups")
        for name, value in mine.items():
            same = _is_step_size(group[name]) if name == "lr" else _is_equal(group[name], value)
            need(same, f"optimizer.groups.{name}")
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in slots.items():
        need(index < len(parameters), f"optimizer/{index}")
        parameter, group = parameters[index]
        expected = _slots(optimizer, group, parameter)
        for name in sorted(values.keys() | expected.keys()):
            good = name in values and name in expected and _fits(values[name], expected[name], parameter)
            need(good and _is_in_range(name, values[name]), f"optimizer/{index}/{name}")
    stateless = all(not _slots(optimizer, group, parameter) for parameter, group in parameters)
    need(slots or steps == 0 or stateless, "optimizer")


def _slots(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """By name what one step of an optimizer of this kind keeps about a parameter of shape (2,)."""
    small = torch.zeros(2, dtype=parameter.dtype, requires_grad=True)
    small.grad = torch.zeros_like(small)
    twin = type(optimizer)([{**group, "params": [small]}])  # type: ignore[call-arg]  # the abstract class wants defaults, its kinds have them
    twin.step()
    return dict(twin.state[small])


def _fits(value: Any, expected: Any, parameter: Tensor) -> bool:
    """Whether a slot of the parameter can have this value, where the small one has the expected value."""
    if not isinstance(expected, Tensor):
        return is_number(value)
    shape = parameter.shape if expected.dim() else expected.shape
    return isinstance(value, Tensor) and value.shape == shape and value.is_floating_point()


def _is_in_range(name: str, value: Any) -> bool:
    if name == "step":
        count = float(value)
        return math.isfinite(count) and count >= 0 and count == int(count)
    return name != "exp_avg_sq" or not bool((value < 0).any())


def _is_step_size(value: Any) -> bool:
    return is_number(value) and math.isfinite(value) and value >= 0


def _is_equal(value: Any, own: Any) -> bool:
    """Whether an option is the optimizer's own; JSON makes lists of tuples, and of whole numbers what they are."""
    if isinstance(own, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(own) and all(map(_is_equal, value, own))
    if isinstance(own, float):
        return is_number(value) and value == own
    return type(value) is type(own) and value == own
