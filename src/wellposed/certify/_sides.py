"""Bounds from the other side: what refutes a hypothesis instead of proving it."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.certify._directed import down, up
from wellposed.linalg.scaling import ldexp_down, ldexp_up, scaled

__all__ = ["least_singular_value_upper", "spectral_norm_lower"]

_UNIT = 2.0**-53


def spectral_norm_lower(M: Tensor) -> float:
    """Lower bound of |M|: |M v|/|v| for the singular vector v that was computed, less the rounding of the product.

    Args:
        M: (m, k) finite.
    """
    M, exponent = scaled(M.detach().double().cpu())
    v = torch.linalg.svd(M, full_matrices=False).Vh[0]
    return max(0.0, ldexp_down(down((_norm(M @ v) - _rounding(M, v)) / _norm(v)), exponent))


def least_singular_value_upper(Z: Tensor) -> float:
    """Upper bound of sigma_min(Z) over its n <= m rows: |Z^T u|/|u| for the singular vector u that was computed.

    Args:
        Z: (n, m) finite, n <= m.
    """
    Z, exponent = scaled(Z.detach().double().cpu())
    u = torch.linalg.svd(Z, full_matrices=False).U[:, -1]
    return ldexp_up(up((_norm(Z.t() @ u) + _rounding(Z, u)) / _norm(u)), exponent)


def _norm(v: Tensor) -> float:
    return float(torch.linalg.vector_norm(v))


def _rounding(M: Tensor, v: Tensor) -> float:
    """|fl(M v) - M v| <= gamma_k |M|_F |v| (Chapter 3 of [higham2002]), doubled: far more than underflow takes from norms."""
    return 2 * (max(M.shape) + 4) * _UNIT * _norm(M) * _norm(v)
