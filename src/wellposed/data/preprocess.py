"""From images to the inputs that the papers train on."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import InvalidArgument

__all__ = ["NORMS", "choose", "normalise", "part_parallel", "pixels"]

NORMS = ("unit", "sqrt_d")
#: Rows whose cosine is nearer to 1 or -1 than this count as parallel.
PARALLEL = 1e-10
#: Relative size of what is added to the later one of two parallel rows.
NUDGE = 1e-3


def choose(y: np.ndarray, classes: tuple[int, ...], n: int | None, rng: np.random.Generator) -> np.ndarray:
    """Indices of n samples, the same number of each class (the first ones get one more), in random order."""
    pools = [rng.permutation(np.flatnonzero(y == c)) for c in classes]
    if n is None:
        return rng.permutation(np.concatenate(pools))
    wanted = [n // len(classes) + (i < n % len(classes)) for i in range(len(classes))]
    for c, pool, number in zip(classes, pools, wanted, strict=True):
        if len(pool) < number:
            raise InvalidArgument(f"{number} samples of class {c} are wanted for n={n}, but there are {len(pool)}; lower n.")
    return rng.permutation(np.concatenate([pool[:number] for pool, number in zip(pools, wanted, strict=True)]))


def pixels(images: np.ndarray, *, grey: bool, size: int | None) -> Tensor:
    """(n, H, W) or (n, H, W, 3) uint8 -> (n, channels, h, w) in [0, 1]; grey by luminance, resized with antialiasing."""
    x = torch.from_numpy(np.ascontiguousarray(images)).to(torch.float64) / 255
    x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2)
    if grey and x.shape[1] == 3:
        x = (x * torch.tensor([0.299, 0.587, 0.114], dtype=x.dtype).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)
    if size is not None and tuple(x.shape[2:]) != (size, size):
        x = torch.nn.functional.interpolate(x, (size, size), mode="bilinear", antialias=True, align_corners=False).clamp(0, 1)
    return x


def normalise(X: Tensor, norm: str) -> Tensor:
    """(n, d) rows of Euclidean norm 1 ("unit") or sqrt(d) ("sqrt_d")."""
    length = torch.linalg.vector_norm(X, dim=1, keepdim=True)
    if bool((length == 0).any()):
        zero = int((length == 0).nonzero()[0, 0])
        raise InvalidArgument(f"Sample {zero} is zero, so it has no direction to scale to norm={norm!r}; leave norm out.")
    return X / length * (1.0 if norm == "unit" else math.sqrt(X.shape[1]))


def part_parallel(X: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
    """(n, d) without parallel rows, and how many there were: the later of two gets a little noise and keeps its norm."""
    length = torch.linalg.vector_norm(X, dim=1, keepdim=True)
    U = X / length
    C = (U @ U.t()).abs().tril(-1)
    later = (C > 1 - PARALLEL).any(dim=1)
    if not bool(later.any()):
        return X, 0
    noise = torch.randn(X.shape, generator=generator, dtype=X.dtype)
    noise = noise / torch.linalg.vector_norm(noise, dim=1, keepdim=True) * NUDGE
    moved = U + noise * later.unsqueeze(1)
    moved = moved / torch.linalg.vector_norm(moved, dim=1, keepdim=True) * length
    return torch.where(later.unsqueeze(1), moved, X), int(later.sum())
