"""What may enter a kernel: a module and one or two finite batches, samples first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument, InvalidType, did_you_mean

__all__ = ["check_batches", "check_model", "check_option", "trained_parameters"]


def check_model(model: Any, function: str) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidType(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}. Wrap a function in one.")


def check_batches(X: Any, X2: Any, function: str) -> None:
    """X and, unless it is None, X2: tensors of at least one sample, finite, of equal kind."""
    _check_batch(X, "X", function)
    if X2 is None:
        return
    _check_batch(X2, "X2", function)
    seen = [(tuple(batch.shape[1:]), batch.dtype, batch.device) for batch in (X, X2)]
    for what, first, second in zip(("samples of the shape", "the dtype", "the device"), *seen, strict=True):
        if first != second:
            raise InvalidArgument(f"{function}: X2 must have {what} of X, {first}; got {second}.")


def _check_batch(X: Any, name: str, function: str) -> None:
    if not isinstance(X, Tensor):
        raise InvalidType(f"{function}: {name} must be a torch.Tensor, got {type(X).__name__}. Use torch.as_tensor.")
    if X.dim() == 0 or X.numel() == 0:
        raise InvalidArgument(
            f"{function}: {name} must hold at least one sample, samples first, got shape {tuple(X.shape)}. "
            "For a single sample give shape (1, features)."
        )
    if X.is_complex():
        raise InvalidArgument(f"{function}: {name} must be real, got {X.dtype}. Give real and imaginary parts as features.")
    if X.is_floating_point() and not bool(torch.isfinite(X).all()):
        row = int((~torch.isfinite(X)).flatten(1 if X.dim() > 1 else 0).nonzero()[0, 0])
        raise InvalidArgument(
            f"{function}: {name} must be finite, got NaN or infinity in row {row}. Clean or drop that sample."
        )


def check_option(value: Any, known: tuple[str, ...], name: str, function: str) -> None:
    if value not in known:
        hint = did_you_mean(value, known) if isinstance(value, str) else ""
        raise InvalidArgument(f"{function}: {name} must be one of {', '.join(map(repr, known))}; got {value!r}.{hint}")


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name; a parameter used twice appears once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
