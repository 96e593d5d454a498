"""Whether a network is the one that a name stands for, but for its weights.

Names, shapes and dtypes of the weights alone do not say it: a Lipschitz bound, a tolerance or the
`forward` of a subclass are not among them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.nn import EquilibriumLayer

_BASE = frozenset(vars(nn.Module()))
#: What may differ: notes about a network, and what is done when no equilibrium is found.
_FREE = ("card", "on_failure")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def check_same(network: nn.Module, twin: nn.Module, what: str, remedy: str) -> None:
    """Raises unless both have the same modules, settings and fixed tensors.

    Args:
        network: What is compared.
        twin: Made by the library. It gets the mode of the network, training or evaluation.
        what, remedy: Begin and end of the error.
    """
    twin.train(network.training)
    for place, seen, expected in _differences(network, twin):
        raise InvalidArgument(f"{what}: {place} is {seen!s:.80}, expected {expected!s:.80}. {remedy}")


def check_fixed(tensors: dict[str, Tensor], twin: nn.Module, what: str, error: Any, remedy: str) -> None:
    """Raises unless the tensors have the buffers of the twin, not trained, to rounding."""
    for key, expected in twin.named_buffers():
        seen = tensors.get(key)
        if seen is not None and seen.shape == expected.shape and not _close(seen, expected):
            away = float((seen.double() - expected.double()).abs().max())
            raise error(f"{what}: {key[:60]}, which is not trained, differs by up to {away:.2g}, expected 0. {remedy}")


def check_output(network: nn.Module, twin: nn.Module, shape: tuple[int, ...], what: str, remedy: str) -> None:
    """Raises unless both give the same output to rounding, for one input of this shape.

    Args:
        network: Left as it is.
        twin: Has the weights of the network; set to evaluation.
        shape, what, remedy: As above.
    """
    first = next(network.parameters())
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=first.dtype).to(first.device)
    outputs = []
    for model in (copy.deepcopy(network), twin.to(first.device)):
        model.eval()
        for part in model.modules():
            if isinstance(part, EquilibriumLayer):
                part.on_failure = "ignore"
        with torch.no_grad():
            outputs.append(model(x))
    if not _close(*outputs):
        away = float((outputs[0] - outputs[1]).abs().max())
        raise InvalidArgument(f"{what}: its output differs from that of the stored network by {away:.2g}, expected 0. {remedy}")


def _differences(network: nn.Module, twin: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Place, value seen and value expected."""
    parts, wanted = dict(network.named_modules()), dict(twin.named_modules())
    for name in (*wanted, *parts):
        here = f"its part {name}" if name else "its class"
        seen, expected = (type(found[name]) if name in found else None for found in (parts, wanted))
        if seen is not expected:
            yield here, getattr(seen, "__name__", "nothing"), getattr(expected, "__name__", "nothing")
            continue
        part, other = parts[name], wanted[name]
        if any(getattr(part, hooks) for hooks in _HOOKS):
            yield f"{here} with a forward hook", "changed by it", "no hook"
        yield from _settings(part, other, f"{name}." if name else "")


def _settings(part: nn.Module, other: nn.Module, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    ours, theirs = vars(part), vars(other)
    for key in theirs:
        if key in _BASE or key in _FREE or key.startswith("_"):
            continue
        if key not in ours or not _equal(ours[key], theirs[key]):
            yield prefix + key, repr(ours[key]) if key in ours else "nothing", repr(theirs[key])
    for key in ours.keys() - theirs.keys() - _BASE:
        if hasattr(type(part), key):
            yield prefix + key, "set on the object", "that of its class"


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and _close(a, b)
    return type(a) is type(b) and (bool(a == b) or repr(a) == repr(b))


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal to rounding; what is not finite must be so in both."""
    if not b.is_floating_point():
        return torch.equal(a.cpu(), b.cpu())
    a, b = a.cpu(), b.cpu()
    finite = b[torch.isfinite(b)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=64 * torch.finfo(b.dtype).eps * scale, equal_nan=True)
