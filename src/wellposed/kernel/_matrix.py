"""What may be the matrix of a kernel machine, and what comes with it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType


def check_kernel(H: Tensor) -> None:
    if not isinstance(H, Tensor):
        raise InvalidType(f"KernelMachine: H must be a tensor, got {type(H).__name__}.")
    if H.ndim != 2 or H.shape[0] != H.shape[1] or H.numel() == 0:
        raise InvalidArgument(f"KernelMachine: H must be (n, n) with n >= 1, got {tuple(H.shape)}.")
    if H.dtype not in (torch.float32, torch.float64):
        raise InvalidArgument(f"KernelMachine: H must be float32 or float64, got {H.dtype}. Use H.double().")
    check_like(H, H, "KernelMachine: H")
    asymmetry, size = float((H - H.T).detach().abs().max()), float(H.detach().abs().max())
    if asymmetry > math.sqrt(torch.finfo(H.dtype).eps) * size:
        raise InvalidArgument(
            f"KernelMachine: H must be symmetric, and max |H - H^T| = {asymmetry:.1e} next to entries of up to {size:.1e}."
        )


def check_like(value: object, H: Tensor, what: str) -> None:
    if not isinstance(value, Tensor):
        raise InvalidType(f"{what} must be a tensor, got {type(value).__name__}.")
    if value.dtype != H.dtype or value.device != H.device:
        raise InvalidArgument(
            f"{what} must have the dtype and device of H ({H.dtype}, {H.device}), got {value.dtype}, {value.device}."
        )
    if not torch.isfinite(value).all():
        raise InvalidArgument(f"{what} has {int((~torch.isfinite(value)).sum())} entries that are NaN or infinite.")


def kernels_of_new(cross: Tensor | None, diagonal: Tensor | None, eigenvalues: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Kernels (p, n) of new with training inputs and (p,) of new ones with themselves, checked;
    those of the training inputs, from the eigendecomposition, if there are none."""
    if cross is None and diagonal is None:
        H = (V * eigenvalues) @ V.T
        return H, H.diagonal()
    if cross is None or diagonal is None:
        raise InvalidArgument("KernelMachine: give both cross (p, n) and diagonal (p,), or neither for the training inputs.")
    check_like(cross, V, "KernelMachine: cross")
    check_like(diagonal, V, "KernelMachine: diagonal")
    if cross.ndim != 2 or cross.shape[1] != len(V) or diagonal.shape != cross.shape[:1]:
        raise InvalidArgument(
            f"KernelMachine: cross must be (p, {len(V)}) and diagonal (p,); got {tuple(cross.shape)} and"
            f" {tuple(diagonal.shape)}."
        )
    if bool((diagonal < 0).any()):
        least = float(diagonal.detach().min())
        raise InvalidArgument(
            f"KernelMachine: diagonal must be at least 0, the kernel of an input with itself; got {least:.1e}."
        )
    return cross, diagonal
