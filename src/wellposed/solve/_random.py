"""Whether f draws random numbers: there is no equation to solve if it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["RANDOM", "UNREPEATED", "random_state", "watched"]

RANDOM = (
    "f is random: it draws random numbers, or gives another value at the same point, so there is no equation to solve. Make "
    "noise such as dropout constant within a solve, or call eval()."
)
UNREPEATED = (
    "f may be random: the state of torch's random generator changed while f was evaluated, and no evaluation was left to find "
    "out whether f draws random numbers or another thread does. Raise max_steps."
)


def random_state(device: torch.device) -> Tensor:
    """The state of the generator that f would draw from on this device, if it draws; other threads draw from it too."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def watched(f: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, bool]:
    """f(z), and whether f itself drew random numbers of torch, whatever other threads do."""
    with _Draws() as draws:
        value = f(z)
    return value, draws.seen


class _Draws(TorchDispatchMode):
    """Notes whether an operation of this thread depends on the seed. Costs some microseconds an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
