"""What may be the matrix of a kernel machine, and what comes with it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType


def check_kernel(H: Tensor) -> Tensor:
    """A copy of H, exactly symmetric; raises unless it is symmetric up to rounding and finite."""
    if not isinstance(H, Tensor):
        raise InvalidType(f"KernelMachine: H must be a tensor, got {type(H).__name__}.")
    if H.ndim != 2 or H.shape[0] != H.shape[1] or H.numel() == 0:
        raise InvalidArgument(f"KernelMachine: H must be (n, n) with n >= 1, got {tuple(H.shape)}.")
    if H.dtype not in (torch.float32, torch.float64):
        raise InvalidArgument(f"KernelMachine: H must be float32 or float64, got {H.dtype}. Use H.double().")
    check_like(H, H, "KernelMachine: H")
    asymmetry, size = _largest(H.detach() - H.detach().T), _largest(H.detach())
    if asymmetry > math.sqrt(torch.finfo(H.dtype).eps) * size:
        raise InvalidArgument(
            f"KernelMachine: H must be symmetric, and max |H - H^T| = {asymmetry:.1e} next to entries of up to {size:.1e}."
        )
    return (H + H.T) / 2 if asymmetry > 0 or H.requires_grad else H.clone()


def _largest(A: Tensor) -> float:
    """max |A_ij|, in one pass without a copy."""
    low, high = A.aminmax()
    return max(abs(float(low)), abs(float(high)))


def check_like(value: object, H: Tensor, what: str) -> None:
    if not isinstance(value, Tensor):
        raise InvalidType(f"{what} must be a tensor, got {type(value).__name__}.")
    if value.dtype != H.dtype or value.device != H.device:
        raise InvalidArgument(
            f"{what} must have the dtype and device of H ({H.dtype}, {H.device}), got {value.dtype}, {value.device}."
        )
    if value.numel() and not all(math.isfinite(float(bound)) for bound in value.detach().aminmax()):
        raise InvalidArgument(f"{what} has {int((~torch.isfinite(value)).sum())} entries that are NaN or infinite.")


def check_cross(cross: Tensor, like: Tensor) -> None:
    """Raises unless `cross` is a kernel (p, n) of new with training inputs; `like` is (n, ...)."""
    check_like(cross, like, "KernelMachine: cross")
    if cross.ndim != 2 or cross.shape[1] != len(like):
        raise InvalidArgument(
            f"KernelMachine: cross must be (p, {len(like)}), new by training inputs; got {tuple(cross.shape)}. Is it"
            " transposed?"
        )


def check_new(cross: Tensor | None, diagonal: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Kernels (p, n) of new with training inputs and (p,) of new ones with themselves, checked;
    `like` is (n, ...)."""
    if cross is None or diagonal is None:
        raise InvalidArgument("KernelMachine: give both cross (p, n) and diagonal (p,), or neither for the training inputs.")
    check_like(cross, like, "KernelMachine: cross")
    check_like(diagonal, like, "KernelMachine: diagonal")
    if cross.ndim != 2 or cross.shape[1] != len(like) or diagonal.shape != cross.shape[:1]:
        raise InvalidArgument(
            f"KernelMachine: cross must be (p, {len(like)}) and diagonal (p,); got {tuple(cross.shape)} and"
            f" {tuple(diagonal.shape)}."
        )
    if bool((diagonal < 0).any()):
        least = float(diagonal.detach().min())
        raise InvalidArgument(
            f"KernelMachine: diagonal must be at least 0, the kernel of an input with itself; got {least:.1e}."
        )
    return cross, diagonal


def check_start(start: tuple[Tensor, Tensor], cross: Tensor, *, of_training: bool) -> None:
    """Raises unless `start` has covariances (n, n) of training inputs and (p, n), as `cross` is, of
    new with training inputs; both are the same if the new ones are the training inputs."""
    for value in start:
        check_like(value, cross, "KernelMachine: start")
    (K, K_cross), n = start, cross.shape[1]
    if K.shape != (n, n) or K_cross.shape != cross.shape:
        raise InvalidArgument(
            f"KernelMachine: start must be of shapes {(n, n)} and {tuple(cross.shape)}, as H and cross are;"
            f" got {tuple(K.shape)} and {tuple(K_cross.shape)}."
        )
    if not of_training:
        return
    difference, size = _largest(K.detach() - K_cross.detach()), _largest(K.detach())
    if difference > math.sqrt(torch.finfo(K.dtype).eps) * size:
        raise InvalidArgument(
            f"KernelMachine: on the training inputs both covariances of start are the same, and these differ by"
            f" {difference:.1e} next to entries of up to {size:.1e}. Pass start=(K, K), or cross and diagonal."
        )
    if bool((K.diagonal() < 0).any()):
        least = float(K.detach().diagonal().min())
        raise InvalidArgument(f"KernelMachine: the diagonal of start must be at least 0, variances; got {least:.1e}.")


def nonnegative(variance: Tensor, diagonal: Tensor, sizes: Callable[[], Tensor]) -> Tensor:
    """A variance without what rounding puts below 0.

    Raises where it is below by more than the root of the rounding unit of its terms: then the
    kernels are not those of one covariance, and 0 would be a false certainty.

    Args:
        variance: (..., p).
        diagonal: (p,) its first term.
        sizes: Computes (..., p), the sum of the sizes of all terms.
    """
    found, part = variance.detach(), math.sqrt(torch.finfo(variance.dtype).eps)
    if bool((found < -part * diagonal.detach()).any()) and bool((found < -part * sizes().detach()).any()):
        raise InvalidArgument(
            f"KernelMachine: the variance of a new input would be {float(found.min()):.1e}, so H, cross and diagonal are not"
            " of one kernel. Compute all of them with the same kernel."
        )
    return variance.clamp(min=0.0)


def sizes_of_terms(diagonal: Tensor, cross: Tensor, weights: Tensor, trace: Tensor) -> Tensor:
    """k(x, x) + 2 |w| |k(x)| + |w|^2 trace(H) for the weights w (..., p, n) of predictions."""
    w = torch.linalg.vector_norm(weights, dim=-1)
    return diagonal + 2 * w * torch.linalg.vector_norm(cross, dim=-1) + w**2 * trace
