"""Gram matrices of infinitely wide ReLU layers in closed form, and what kernels at infinite width
check of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.kernel._angle import angles, equilibrium_angles, sine_defect
from wellposed.kernel._method import TOTAL, slices

#: Rows and columns of blocks: the dozen matrices that an entry takes fit into the cache.
BLOCK = 256


def relu_gram(X: Tensor, X2: Tensor | None = None) -> Tensor:
    r"""E[relu(X w) relu(X2 w)^T] for w ~ N(0, I): the arc-cosine kernel of order 1 [cho2009].

        G_ij = |x_i| |x_j| (sin theta + (pi - theta) cos theta) / (2 pi),     theta the angle between x_i and x_j,

    the G-infinity of `SkipDEQ` [gao2022], where |x| = 1 gives Q(x_i . x_j)/2 with the Q of
    [ling2022, eq. 11]. Any norms, zero rows and (anti)parallel rows included. The angle is right to
    a few eps, absolutely. So entries are right to a few eps, relatively, except for nearly
    antiparallel rows: there an entry is about |x_i| |x_j| phi^3/(6 pi), phi = pi - theta, and its
    relative error a few eps/phi, because the rows of norm 1 are rounded. Differentiable. Costs O(n
    n2 d).

    Args:
        X: (n, d) samples, float32 or float64.
        X2: (n2, d) other samples; X if None.

    Returns:
        (n, n2).

    Examples:
        >>> import torch
        >>> from wellposed.kernel import relu_gram
        >>> relu_gram(torch.eye(2, dtype=torch.float64)) * 2 * torch.pi
        tensor([[3.1416, 1.0000],
                [1.0000, 3.1416]], dtype=torch.float64)
    """
    X, X2 = check_samples(X, X2, "relu_gram")

    def gram(X: Tensor, X2: Tensor) -> dict[str, Tensor]:
        norm, norm2, _, phi = angles(X, X2)
        return {TOTAL: symmetric(norm * norm2 * (sine_defect(phi) / (2 * math.pi)), X, X2)}

    return by_blocks(gram, X, X2)[TOTAL]


def population_gram(X: Tensor, weight_variance: float | Tensor, X2: Tensor | None = None) -> Tensor:
    r"""K, the limit of Z Z^T/m for the equilibria z = relu(W z + U x) of `GaussianDEQ` as its width
    m grows.

    With W_ij ~ N(0, 2 s/m), U_ij ~ N(0, 2/d) and s = `weight_variance`, K solves

        L = s K + X X^T/d,        K_ij = sqrt(L_ii L_jj) Q(L_ij / sqrt(L_ii L_jj))                            (1)

    Its diagonal is K_ii = |x_i|^2/(d (1 - s)), and off it K_ij = sqrt(K_ii K_jj) Q(c) with one
    scalar equation per pair,

        c = s Q(c) + (1 - s) cos(x_i, x_j)                                                                  (2)

    [ling2022, Definition 1 and eq. 14]. The paper has |x_i| = sqrt(d); norms only scale the result.
    (2) is solved to rounding by Newton's method in 1 - c, which cannot fail for s < 1; the
    convergence theory of the finite network asks s < 1/8. First derivatives with respect to X, X2
    and s (if s is a tensor). Costs O(n n2 d).

    Args:
        X: (n, d) samples, float32 or float64.
        weight_variance: s in [0, 1), a number or a tensor of one.
        X2: (n2, d) other samples; X if None.

    Returns:
        (n, n2). Compare it with `model.equilibrium(X) @ model.equilibrium(X2).T / m`.

    Examples:
        >>> import torch, wellposed as wp
        >>> X = torch.eye(2, dtype=torch.float64)
        >>> K = wp.kernel.population_gram(X, 0.08)
        >>> round(K[0, 0].item(), 6) == round(1 / (2 * (1 - 0.08)), 6)  # |x|^2/(d (1 - s))
        True
    """
    X, X2 = check_samples(X, X2, "population_gram")
    s = check_fraction(weight_variance, "population_gram", "weight_variance")

    def gram(X: Tensor, X2: Tensor) -> dict[str, Tensor]:
        norm, norm2, _, phi = equilibrium_angles(angles(X, X2), s)
        return {TOTAL: symmetric(norm * norm2 * (sine_defect(phi) / (math.pi * X.shape[1] * (1 - s))), X, X2)}

    return by_blocks(gram, X, X2, s)[TOTAL]


def population_gram_layers(X: Tensor, weight_variance: float, num_layers: int, *, X2: Tensor | None = None) -> Tensor:
    r"""K^(0) = 0, K^(1), ..., the Gram matrices of [ling2022, Definition 1], layer after layer.

        rho_l = (1 - s^l)/(1 - s),    cos_l = (1 - 1/rho_l) Q(cos_(l-1)) + (1/rho_l) cos(x_i, x_j)
        K^(l)_ij = |x_i| |x_j|/d rho_l Q(cos_l)

    [ling2022, eqs. 12 and 13]; the paper prints 1/rho_(l-1) in (13), which is 1/0 in the first
    layer; rho_l is what Definition 1 gives. K^(l) tends to `population_gram` with error O(n l s^l),
    s being the paper's sigma_w^2, where its Theorem 3 claims O(n sqrt(l) sigma_w^l). Carries no
    gradient.

    Args:
        X: (n, d) samples.
        weight_variance: s in [0, 1).
        num_layers: The last l, at least 0.
        X2: (n2, d) other samples; X if None.

    Returns:
        (num_layers + 1, n, n2), indexed by l.

    Examples:
        >>> import torch, wellposed as wp
        >>> X = torch.eye(2, dtype=torch.float64)
        >>> K = wp.kernel.population_gram_layers(X, 0.08, num_layers=12)
        >>> K.shape, torch.allclose(K[-1], wp.kernel.population_gram(X, 0.08))
        (torch.Size([13, 2, 2]), True)
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


def diagonal_limit(X: Tensor, gamma0: float, X2: Tensor | None = None) -> Tensor:
    r"""The limit of the tangent kernel of `ImplicitOnlyDEQ(init="diagonal")`, in which only A is
    trained.

        H_ij = gamma0^2 * |x_i| |x_j| Q(cos theta)/2 * (pi - theta)/(2 pi)

    With gamma = gamma0/sqrt(m) and A diagonal the recurrence disappears from the limit, z_i ->
    relu(W^T x_i), and the adjoints become the masked read-out, so that H = (gamma^2/m) (P P^T) o (Z
    Z^T) is a product of two averages [gao2023, Section 5.2]. The paper names the limit without a
    closed form, for |x| = 1; ReLU is homogeneous, so other norms only scale it.

    Args:
        X: (n, d) samples.
        gamma0: The factor in gamma = gamma0/sqrt(m), above 0.
        X2: (n2, d) other samples; X if None.

    Returns:
        (n, n2).

    Examples:
        >>> import torch, wellposed as wp
        >>> wp.kernel.diagonal_limit(torch.eye(2, dtype=torch.float64), gamma0=1.0).round(decimals=4).tolist()
        [[0.25, 0.0398], [0.0398, 0.25]]
    """
    X, X2 = check_samples(X, X2, "diagonal_limit")
    gamma0 = check_positive(gamma0, "diagonal_limit", "gamma0")
    norm, norm2, _, phi = angles(X, X2)
    H = gamma0**2 * norm * norm2 * (sine_defect(phi) / (2 * math.pi)) * (phi / (2 * math.pi))
    return symmetric(H, X, X2)


def check_samples(X: Tensor, X2: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """(n, d) and (n2, d) samples in rows, finite, not empty, of one dtype and device; X2 is X if it
    was None."""
    _check_rows(X, f"{name}: X")
    if X2 is None:
        return X, X
    _check_rows(X2, f"{name}: X2")
    if X2.shape[1] != X.shape[1]:
        raise InvalidArgument(
            f"{name}: X2 must have as many columns as X: expected (n2, {X.shape[1]}), got {tuple(X2.shape)}. Samples are rows."
        )
    if X2.dtype != X.dtype or X2.device != X.device:
        raise InvalidArgument(
            f"{name}: X2 must have the dtype and device of X ({X.dtype}, {X.device}), got {X2.dtype}, {X2.device}."
            " Use X2.to(X)."
        )
    return X, X2


def symmetric(K: Tensor, X: Tensor, X2: Tensor) -> Tensor:
    """K (..., n, n2) made exactly symmetric if X2 is X: vectorized functions round by an entry's
    place in memory."""
    return (K + K.mT) / 2 if X2 is X else K


def by_blocks(
    function: Callable[[Tensor, Tensor], dict[str, Tensor]], X: Tensor, X2: Tensor, *others: object
) -> dict[str, Tensor]:
    """function(X, X2), its matrices (n, n2) formed in blocks that stay in the cache: at n = 2000 in
    a fourth of the time, half of it because one set of samples needs only half of the blocks. In
    one piece where something has a gradient.

    Args:
        function: Entry by entry a function of two samples.
        X, X2: (n, d) and (n2, d) samples; X2 is X for one set of them.
        others: What `function` depends on too, if it may have a gradient.
    """
    graph = any(isinstance(value, Tensor) and value.requires_grad for value in (X, X2, *others))
    if (torch.is_grad_enabled() and graph) or max(len(X), len(X2)) <= BLOCK:
        return function(X, X2)
    result: dict[str, Tensor] = {}
    for rows in slices(len(X), BLOCK):
        for columns in slices(len(X2), BLOCK):
            if X2 is X and columns.start > rows.start:
                continue
            A = X[rows]
            for name, block in function(A, A if X2 is X and rows == columns else X2[columns]).items():
                if name not in result:
                    result[name] = block.new_empty(len(X), len(X2))
                result[name][rows, columns] = block
                if X2 is X and rows != columns:
                    result[name][columns, rows] = block.mT
    return result


def check_fraction(value: float | Tensor, name: str, parameter: str) -> Any:
    """A number in [0, 1): the variance at which the equilibrium of the limit exists. A tensor of
    one number stays a tensor, for its gradient."""
    if not 0.0 <= _number(value) < 1.0:
        raise InvalidArgument(
            f"{name}: '{parameter}' must be a number in [0, 1), got {value!r}. At 1 the population equilibrium ceases to exist."
        )
    return value if isinstance(value, Tensor) else float(value)


def check_positive(value: float | Tensor, name: str, parameter: str, *, or_zero: bool = False) -> float:
    """A finite number above 0 (or from 0)."""
    number = _number(value)
    if not math.isfinite(number) or number < 0.0 or (number == 0.0 and not or_zero):
        expected = "at least 0" if or_zero else "above 0"
        raise InvalidArgument(f"{name}: '{parameter}' must be a finite number {expected}, got {value!r}.")
    return number


def _number(value: object) -> float:
    """NaN for what is not a number or a tensor of one."""
    if isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point():
        return float(value.detach())
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _check_rows(X: Tensor, what: str) -> None:
    if not isinstance(X, Tensor):
        raise InvalidType(f"{what} must be a tensor, got {type(X).__name__}. Use torch.as_tensor(...).")
    if X.ndim != 2 or 0 in X.shape:
        raise InvalidArgument(
            f"{what} must be (n, d) with n, d >= 1, got {tuple(X.shape)}. Samples are rows; use X[None] for one."
        )
    if X.dtype not in (torch.float32, torch.float64):
        raise InvalidArgument(f"{what} must be float32 or float64, got {X.dtype}. Use X.double().")
    finite = torch.isfinite(X).all(dim=1)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise InvalidArgument(f"{what} has {int((~finite).sum())} rows with NaN or infinity (first: row {row}). Remove them.")
