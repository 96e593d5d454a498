"""Measurements along a path of parameters, cheap because little changes from one to the next."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wellposed.certify._directed import down, up, vector_norm_upper
from wellposed.certify._measure import Measurement, check_data, measure
from wellposed.linalg import least_singular_value_lower
from wellposed.linalg.verified_cholesky import norm_upper_by_test
from wellposed.nn import AbstractNetwork, MonotoneDEQ, SkipDEQ

__all__ = ["IncrementalMeasure"]

#: How much of sigma_min, and of 1 - |R|, may be lost to the distance from the reference before it is decomposed again.
_LOSS = 0.05


class IncrementalMeasure:
    r"""Rigorous bounds with a singular value decomposition only now and then.

    By Weyl's inequality sigma_min(F) >= sigma_min(F_0) - |F - F_0|_F and |F| <= |F_0| + |F - F_0|_F, where F_0 are the features
    that were last decomposed; likewise for the recurrent matrix. The equilibria are those that training has found anyway; how
    far they may be from the exact ones is measured and bounded.

    Args:
        X: (n, d). y: (n,).
        plain_flow: Whether the plain gradient flow is all that will be asked about. That needs about e |F| <= sigma_min(F)^2,
            so nothing is decomposed while it is far from true; the bounds given then are loose, and still bounds.
    """

    def __init__(self, model: AbstractNetwork, X: Tensor, y: Tensor, *, plain_flow: bool = False) -> None:
        self._X, self._y = check_data(model, X, y)
        self._plain_flow = plain_flow
        self._reference: Tensor | None = None
        self._least = self._norm = 0.0
        self._R: Tensor | None = None
        self._R_norm = 0.0
        self._X_norm = norm_upper_by_test(self._X)
        self.decompositions = 0

    def __call__(self, model: AbstractNetwork, at: Any) -> Measurement | str:
        """The measurement at the present parameters.

        Args:
            model: The network.
            at: The `Linearised` that training has found there, or None to solve for it.
        """
        vectors = None if at is None else (at.value, at.adjoint)
        monotone = isinstance(model, MonotoneDEQ)
        return measure(
            model, self._X, self._y, at=vectors, known=self._known, norm_upper=lambda R: self._recurrent_norm(R, monotone)
        )

    def _recurrent_norm(self, R: Tensor, monotone: bool) -> float:
        """Upper bound of |R|. What a contraction divides by is 1 - |R|, so that decides how much may be lost."""
        drift = float("inf") if self._R is None else vector_norm_upper(R - self._R)
        if drift > _LOSS * (self._R_norm if monotone else 1.0 - self._R_norm):
            self._R, self._R_norm, drift = R.clone(), norm_upper_by_test(R), 0.0
            self.decompositions += 1
        return up(self._R_norm + drift)

    def _known(self, twin: AbstractNetwork, Z: Tensor, C: Tensor, z_error: float) -> dict[str, float]:
        skip = isinstance(twin, SkipDEQ)
        F = torch.cat([Z, C], dim=1) if skip else Z
        error = 2 * z_error if skip else z_error
        drift = self._drift(F)
        if self._plain_flow:
            estimate = _least_estimate(F)
            if self._is_far(twin, Z, C, F, estimate):
                loose = up(vector_norm_upper(F) + error)
                bounds = {"F_least": 0.0, "Z_least": 0.0, "F_norm": loose, "Z_norm": loose, "X_norm": self._X_norm}
                return bounds | {"F_least_estimate": estimate}
        if drift > _LOSS * self._least:
            # a copy: F may be the very tensor that training goes on with
            self._reference, self._norm = F.clone(), norm_upper_by_test(F)
            self._least = least_singular_value_lower(F) if F.shape[0] <= F.shape[1] else 0.0
            self.decompositions += 1
            drift = 0.0
        least = max(0.0, down(self._least - drift - error))
        norm = up(self._norm + drift + error)
        bounds = {"F_least": least, "F_norm": norm, "Z_norm": norm, "X_norm": self._X_norm}  # |Z| <= |F|
        return bounds if skip else bounds | {"Z_least": least}

    def _is_far(self, twin: AbstractNetwork, Z: Tensor, C: Tensor, F: Tensor, estimate: float) -> bool:
        """Whether no certificate is in sight. A guess that decides about cost alone.

        With R >= e/s, the bound on how far features move is at least R |F| (over sqrt(width) for `SkipDEQ`, whose parameters
        are that much larger), and must stay below s.
        """
        e = float(torch.linalg.vector_norm(twin.readout(Z, C) - self._y))
        reach = float(torch.linalg.vector_norm(F)) / math.sqrt(min(F.shape))  # at most |F|
        scale = twin.gamma / math.sqrt(twin.width) if isinstance(twin, SkipDEQ) else 1.0
        return e * reach * scale > estimate**2

    def _drift(self, F: Tensor) -> float:
        if self._reference is None:
            return float("inf")
        return vector_norm_upper(F - self._reference)


def _least_estimate(F: Tensor) -> float:
    """sigma_min(F) from the eigenvalues of F F^T: cheap, and right only down to about 1e-8 |F|."""
    if F.shape[0] > F.shape[1]:
        return 0.0
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(F @ F.t())[0])))
