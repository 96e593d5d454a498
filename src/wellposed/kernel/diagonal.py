"""The tangent kernel of an implicit layer that starts diagonal, at infinite width."""

from __future__ import annotations

import math

from torch import Tensor

from wellposed.kernel._angle import angles, sine_defect
from wellposed.kernel._samples import check_positive, check_samples, symmetric

__all__ = ["diagonal_limit"]


def diagonal_limit(X: Tensor, gamma0: float, X2: Tensor | None = None) -> Tensor:
    r"""The limit of the tangent kernel of `ImplicitOnlyDEQ(init="diagonal")`, in which only A is trained.

        H_ij = gamma0^2 * |x_i| |x_j| Q(cos theta)/2 * (pi - theta)/(2 pi)

    With gamma = gamma0/sqrt(m) and A diagonal the recurrence disappears from the limit, z_i -> relu(W^T x_i), and the adjoints
    become the masked read-out, so that H = (gamma^2/m) (P P^T) o (Z Z^T) is a product of two averages [gao2023, Section 5.2].
    The paper names the limit without a closed form, for |x| = 1; ReLU is homogeneous, so other norms only scale it.

    Args:
        X: (n, d) samples.
        gamma0: The factor in gamma = gamma0/sqrt(m), above 0.
        X2: (n2, d) other samples; X if None.

    Returns:
        (n, n2).
    """
    X, X2 = check_samples(X, X2, "diagonal_limit")
    gamma0 = check_positive(gamma0, "diagonal_limit", "gamma0")
    norm, norm2, _, phi = angles(X, X2)
    H = gamma0**2 * norm * norm2 * (sine_defect(phi) / (2 * math.pi)) * (phi / (2 * math.pi))
    return symmetric(H, X, X2)
