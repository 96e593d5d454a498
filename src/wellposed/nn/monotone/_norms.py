"""Upper bounds of the norms of many small matrices at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["largest_norm_upper"]

#: |G^(2^k)|_F^(1/2^k) exceeds the norm of G by a factor of at most n^(1/2^(k+1)): 4 % for n = 100 and k = 5.
SQUARINGS = 5


def largest_norm_upper(M: Tensor) -> float:
    r"""An upper bound of the largest spectral norm in a batch, by squaring G = M^H M:

        |M|^2 = |G| <= |G^(2^k)|_F^(2^-k)

    Products are in double precision; each squaring, divided by its Frobenius norm first, errs by at most 4 (n + 2) u in that
    norm (Chapter 3 of [higham2002], complex arithmetic), and a root halves relative errors as often as squaring doubled
    them, so the sum of all is below 8 (k + 2)(n + 2) u of the result, which is added.

    Args:
        M: (batch, n, k) real or complex.
    """
    M = M.detach().to(torch.complex128 if M.is_complex() else torch.float64)
    if M.numel() == 0:
        return 0.0
    if M.shape[1] < M.shape[2]:
        M = M.mH  # the smaller Gram matrix
    G = M.mH @ M
    n = max(M.shape[1], M.shape[2])
    size = torch.linalg.vector_norm(G, dim=(1, 2))
    log = torch.zeros_like(size)
    for k in range(SQUARINGS):
        safe = torch.where(size > 0, size, 1.0)
        log = log + safe.log() / 2**k
        G = G / safe[:, None, None]
        G = G @ G
        size = torch.linalg.vector_norm(G, dim=(1, 2))
    log = log + torch.where(size > 0, size, 1.0).log() / 2**SQUARINGS
    nonzero = torch.linalg.vector_norm(M, dim=(1, 2)) > 0
    if not bool(nonzero.any()):
        return 0.0
    slack = 1.0 + 8 * (SQUARINGS + 2) * (n + 2) * 2.0**-53
    # No more than the Frobenius norm, which bounds too.
    upper = math.exp(float(log[nonzero].max()) / 2)
    return min(upper, float(torch.linalg.vector_norm(M, dim=(1, 2)).max())) * slack
