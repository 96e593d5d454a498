r"""Why there is no proof for `MonotoneDEQ` yet: the number that is too large.

With R = (1 - m) I - A^T A + B - B^T a change of the parameters enters R with the factor k = sqrt(4
|A|^2 + 4), and R is curved: R''[d, d] = -2 dA^T dA. The bound of the curvature of the loss becomes

    M = B' + sqrt(B'^2 + A'^2) + 2 |sum r_i p_i z_i^T|,
    A' = tau |r| sqrt(k^2 |Z|^2 + |X|^2),    B' = k max |p_i| A',    tau = 1/(1 - omega).

A step of descent may spread two iterates by the factor 1 + eta M, which has to stay near 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.kernel import tangent_kernel
from wellposed.linalg import spectral_norm_upper
from wellposed.linalg.verified_cholesky import norm_upper_by_test, symmetric_part_upper
from wellposed.nn.families import AbstractNetwork
from wellposed.prove.error_free import norm_up, rows_up


def curvature_at_start(model: AbstractNetwork, X: Tensor, y: Tensor) -> tuple[float, float, float]:
    """eta, eta M and |r|^2/2 at the start, where R is that of `MonotoneDEQ`."""
    with torch.no_grad():
        point = model.linearise(X)
        Z, P = point.value, point.adjoint
        r = model.readout(Z, model.injection(X)) - y
        eta = 1.0 / float(torch.linalg.eigvalsh(tangent_kernel(model, X))[-1])
        tau = 1.0 / (1.0 - symmetric_part_upper(model.recurrent().contiguous()))
        A = next(model.parameters())
        k = math.sqrt(4 * norm_upper_by_test(A) ** 2 + 4)
        linear = tau * norm_up(r) * math.hypot(k * spectral_norm_upper(Z), spectral_norm_upper(X))
        quadratic = k * float(rows_up(P).max()) * linear
        M = quadratic + math.hypot(quadratic, linear) + 2 * spectral_norm_upper((P * r.unsqueeze(1)).T @ Z)
    return eta, eta * M, float(r.square().sum()) / 2
