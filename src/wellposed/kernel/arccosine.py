"""The Gram matrix of one layer of infinitely many random ReLU units."""

from __future__ import annotations

import math

from torch import Tensor

from wellposed.kernel._angle import angles, sine_defect
from wellposed.kernel._samples import check_samples, symmetric

__all__ = ["relu_gram"]


def relu_gram(X: Tensor, X2: Tensor | None = None) -> Tensor:
    r"""E[relu(X w) relu(X2 w)^T] for w ~ N(0, I): the arc-cosine kernel of order 1 [cho2009].

        G_ij = |x_i| |x_j| (sin theta + (pi - theta) cos theta) / (2 pi),     theta the angle between x_i and x_j,

    the G-infinity of `SkipDEQ` [gao2022], where |x| = 1 gives Q(x_i . x_j)/2 with the Q of [ling2022, eq. 11]. Any norms, zero
    rows and (anti)parallel rows included. The angle is right to a few eps, absolutely. So entries are right to a few
    eps, relatively, except for nearly antiparallel rows: there an entry is about |x_i| |x_j| phi^3/(6 pi), phi = pi - theta,
    and its relative error a few eps/phi, because the rows of norm 1 are rounded. Differentiable. Costs O(n n2 d).

    Args:
        X: (n, d) samples, float32 or float64.
        X2: (n2, d) other samples; X if None.

    Returns:
        (n, n2).

    Example:
        >>> import torch
        >>> from wellposed.kernel import relu_gram
        >>> relu_gram(torch.eye(2, dtype=torch.float64)) * 2 * torch.pi
        tensor([[3.1416, 1.0000],
                [1.0000, 3.1416]], dtype=torch.float64)
    """
    X, X2 = check_samples(X, X2, "relu_gram")
    norm, norm2, _, phi = angles(X, X2)
    return symmetric(norm * norm2 * (sine_defect(phi) / (2 * math.pi)), X, X2)
