"""The Gram matrix of equilibrium features at infinite width, and the layers that lead to it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument
from wellposed.kernel._angle import angles, equilibrium_angles, sine_defect
from wellposed.kernel._samples import check_fraction, check_samples, symmetric

__all__ = ["population_gram", "population_gram_layers"]


def population_gram(X: Tensor, weight_variance: float, X2: Tensor | None = None) -> Tensor:
    r"""K, the limit of Z Z^T/m for the equilibria z = relu(W z + U x) of `GaussianDEQ` as its width m grows.

    With W_ij ~ N(0, 2 s/m), U_ij ~ N(0, 2/d) and s = `weight_variance`, K solves

        L = s K + X X^T/d,        K_ij = sqrt(L_ii L_jj) Q(L_ij / sqrt(L_ii L_jj))                            (1)

    Its diagonal is K_ii = |x_i|^2/(d (1 - s)), and off it K_ij = sqrt(K_ii K_jj) Q(c) with one scalar equation per pair,

        c = s Q(c) + (1 - s) cos(x_i, x_j)                                                                  (2)

    [ling2022, Definition 1 and eq. 14]. The paper has |x_i| = sqrt(d); norms only scale the result. (2) is solved to rounding
    by Newton's method in 1 - c, which cannot fail for s < 1; the convergence theory of the finite network asks s < 1/8.
    First derivatives with respect to X and X2. Costs O(n n2 d).

    Args:
        X: (n, d) samples, float32 or float64.
        weight_variance: s in [0, 1).
        X2: (n2, d) other samples; X if None.

    Returns:
        (n, n2). Compare it with `model.equilibrium(X) @ model.equilibrium(X2).T / m`.
    """
    X, X2 = check_samples(X, X2, "population_gram")
    s = check_fraction(weight_variance, "population_gram", "weight_variance")
    norm, norm2, _, phi = equilibrium_angles(angles(X, X2), s)
    return symmetric(norm * norm2 * (sine_defect(phi) / (math.pi * X.shape[1] * (1 - s))), X, X2)


def population_gram_layers(X: Tensor, weight_variance: float, num_layers: int, *, X2: Tensor | None = None) -> Tensor:
    r"""K^(0) = 0, K^(1), ..., the Gram matrices of [ling2022, Definition 1], layer after layer.

        rho_l = (1 - s^l)/(1 - s),    cos_l = (1 - 1/rho_l) Q(cos_(l-1)) + (1/rho_l) cos(x_i, x_j)
        K^(l)_ij = |x_i| |x_j|/d rho_l Q(cos_l)

    [ling2022, eqs. 12 and 13]; the paper prints 1/rho_(l-1) in (13), which is 1/0 in the first layer; rho_l is what
    Definition 1 gives. K^(l) tends to `population_gram` with error O(n l s^l), s being the paper's sigma_w^2, where its
    Theorem 3 claims O(n sqrt(l) sigma_w^l). Carries no gradient.

    Args:
        X: (n, d) samples.
        weight_variance: s in [0, 1).
        num_layers: The last l, at least 0.
        X2: (n2, d) other samples; X if None.

    Returns:
        (num_layers + 1, n, n2), indexed by l.
    """
    X, X2 = check_samples(X, X2, "population_gram_layers")
    s = check_fraction(weight_variance, "population_gram_layers", "weight_variance")
    if not isinstance(num_layers, int) or num_layers < 0:
        raise InvalidArgument(f"population_gram_layers: 'num_layers' must be an integer of at least 0, got {num_layers!r}.")
    norm, norm2, theta_0, phi_0 = (part.detach() for part in angles(X, X2))
    scale = norm * norm2 / X.shape[1]
    K = X.new_zeros(num_layers + 1, *scale.shape)
    theta, phi, rho = theta_0, phi_0, 0.0
    for layer in range(1, num_layers + 1):
        rho = 1.0 + s * rho
        # 1 - cos and 1 + cos of the new angle, each a sum of non-negative terms: nothing cancels near 0 or pi.
        versine = 2 * torch.sin(theta / 2) ** 2 - sine_defect(theta) / math.pi  # 1 - Q
        apart = (1 - 1 / rho) * versine + 2 * torch.sin(theta_0 / 2) ** 2 / rho
        together = (1 - 1 / rho) * (1 + sine_defect(phi) / math.pi) + 2 * torch.sin(phi_0 / 2) ** 2 / rho
        theta = 2 * torch.atan2(apart.clamp(min=0.0).sqrt(), together.sqrt())
        phi = 2 * torch.atan2(together.sqrt(), apart.clamp(min=0.0).sqrt())
        K[layer] = scale * rho * (sine_defect(phi) / math.pi)
    return symmetric(K, X, X2)
