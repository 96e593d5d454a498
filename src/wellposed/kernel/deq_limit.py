"""The tangent kernel of an infinitely wide equilibrium network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument
from wellposed.kernel._angle import angles, equilibrium_angles, sine_defect
from wellposed.kernel._method import TOTAL
from wellposed.kernel._population import Function, population
from wellposed.kernel._stack import WideLayer, layers_of, stack_parts
from wellposed.kernel.wide_limits import by_blocks, check_fraction, check_positive, check_samples, symmetric
from wellposed.nn.activations import ReLU


def deq_ntk(
    X: Tensor,
    X2: Tensor | None = None,
    *,
    weight_variance: float | Tensor,
    input_variance: float = 1.0,
    bias_variance: float = 0.0,
    readout_variance: float = 1.0,
    activation: Function = ReLU(),  # noqa: B008 (frozen, so it may be shared)
    width: int | None = None,
    ntk_parametrization: bool = False,
    by_parameter: bool = False,
    before: Sequence[WideLayer] = (),
    after: Sequence[WideLayer] = (),
) -> Any:
    r"""The limit of `tangent_kernel(GaussianDEQ(d, m, weight_variance=s), X)/m` as the width m
    grows.

    The network is y = a . z, z = f(W z + U x + b), with independent normal entries of variances

        W: 2 s/m,    U: 2 input_variance/d,    b: 2 bias_variance,    a: readout_variance/m                        (1)

    for every activation (the 2 is ReLU's). The defaults are those of `GaussianDEQ` [ling2022,
    Assumption 1], which has no b. At finite width H = G + (P P^T) o (G + X X^T), G = Z Z^T, with
    the masked adjoints p = D (a + W^T p). In the limit G/m is K, the root of its own equation
    (`population_gram`), and with k_ij = E[f'(u_i) f'(u_j)] there the equation of p becomes

        Pi = k o (readout_variance + 2 s Pi),     so     Pi = readout_variance k/(1 - 2 s k)                            (2)

    entrywise, because a and W^T p act as fresh noise [feng2023]. Then H/m tends to

        K (from a)  +  Pi o K (from W)  +  Pi o X X^T/m (from U)  +  Pi/m (from b)                                       (3)

    whose last two vanish; `width=m` keeps them. ReLU has a closed form, k = (pi - theta)/(2 pi),
    for s < 1, and first derivatives by X and by s. Other activations are expanded in Hermite
    polynomials with coefficients from quadrature, in float64. They must satisfy 2 s E[f'(u)^2] < 1.
    A kink at 0 is allowed; a warning says how much it may have cost nearly parallel samples.

    Args:
        X: (n, d) samples, float32 or float64.
        X2: (n2, d) other samples; X if None.
        weight_variance: s in (1), at least 0: a number, or for its gradient a tensor of one.
        input_variance: Above 0.
        bias_variance: At least 0; with 0 the network has no b.
        readout_variance: At least 0; with 0 only the read-out contributes, as for a network that
            starts at a = 0.
        activation: f, one of `wp.nn`'s or any elementwise function of a tensor that autograd can
            differentiate.
        width: Keep the terms of order 1/m for this m.
        ntk_parametrization: The kernel of the network whose parameters are standard normal and
            multiplied by the roots of (1), as in [feng2023]: readout_variance K + Pi o (2 s K + 2
            input_variance X X^T/d + 2 bias_variance), not divided by m.
        by_parameter: Return the parts of (3) as a dict with the keys "W", "U", "a" (and "b", if
            there is one), and "before.0.V", "before.0.b" and so on for dense layers.
        before, after: Dense layers between x and the equilibrium, and between it and the read-out,
            of the same width m. The kernel then has no gradient, and angles below 1e-8 between
            samples count as 0.

    Returns:
        (n, n2), or a dict of matrices.

    Examples:
        >>> import torch, wellposed as wp
        >>> X = torch.eye(4, dtype=torch.float64)
        >>> K = wp.kernel.deq_ntk(X, weight_variance=0.08)
        >>> K.shape, bool(torch.linalg.eigvalsh(K)[0] > 0)
        (torch.Size([4, 4]), True)
    """
    X, X2 = check_samples(X, X2, "deq_ntk")
    check: dict[str, tuple[float | Tensor, bool]]
    check = {"input_variance": (input_variance, False), "bias_variance": (bias_variance, True)}
    check |= {"readout_variance": (readout_variance, True), "weight_variance": (weight_variance, True)}
    for parameter, (value, or_zero) in check.items():
        check_positive(value, "deq_ntk", parameter, or_zero=or_zero)
    if width is not None and (not isinstance(width, int) or isinstance(width, bool) or width < 1):
        raise InvalidArgument(f"deq_ntk: 'width' must be a positive integer or None, got {width!r}.")
    if width is not None and ntk_parametrization:
        raise InvalidArgument(
            f"deq_ntk: with ntk_parametrization=True no term depends on the width, got width={width}. Leave it out."
        )
    if before or after:
        _check_no_gradient("only the kernel of an equilibrium alone is differentiable", X, X2, weight_variance)
        equilibrium = WideLayer(activation, input_variance, bias_variance)
        layers = layers_of(before, equilibrium, float(weight_variance), after)
        parts = stack_parts(X, X2, layers, readout_variance, width=width, ntk=ntk_parametrization)
        return parts if by_parameter else sum(parts.values(), torch.zeros_like(parts["a"]))
    variances = {"input_variance": input_variance, "bias_variance": bias_variance}

    def parts_of(X: Tensor, X2: Tensor, K: Tensor, k: Tensor) -> dict[str, Tensor]:
        K, k = symmetric(K, X, X2), symmetric(k, X, X2)
        Pi = readout_variance * k / (1 - 2 * weight_variance * k)
        if ntk_parametrization:
            of_W, of_U, of_b = 2 * weight_variance, 2 * input_variance / X.shape[1], 2 * bias_variance
            of_a = readout_variance
        else:
            of_W, of_U, of_b, of_a = 1.0, *(2 * [0.0 if width is None else 1 / width]), 1.0
        parts = {"W": of_W * Pi * K, "U": of_U * Pi * symmetric(X @ X2.T, X, X2), "a": of_a * K}
        if bias_variance > 0:
            parts["b"] = of_b * Pi
        return parts if by_parameter else {TOTAL: sum(parts.values(), torch.zeros_like(K))}

    if isinstance(activation, ReLU):

        def block(A: Tensor, B: Tensor) -> dict[str, Tensor]:
            return parts_of(A, B, *_relu_population(A, B, weight_variance, **variances))

        parts = by_blocks(block, X, X2, weight_variance)
    else:
        parts = parts_of(X, X2, *_population(activation, X, X2, s=weight_variance, **variances))
    return parts if by_parameter else parts[TOTAL]


def _relu_population(
    X: Tensor, X2: Tensor, s: float | Tensor, *, input_variance: float, bias_variance: float
) -> tuple[Tensor, Tensor]:
    """E[f f] and E[f' f'] for ReLU, closed but for one scalar equation per pair."""
    s = check_fraction(s, "deq_ntk", "weight_variance")
    d = X.shape[1]
    rows = _with_bias(X, input_variance, bias_variance)
    columns = rows if X2 is X else _with_bias(X2, input_variance, bias_variance)
    norm, norm2, _, phi = equilibrium_angles(angles(rows, columns), s)
    return norm * norm2 * (sine_defect(phi) / (math.pi * d * (1 - s))), phi / (2 * math.pi)


def _with_bias(X: Tensor, input_variance: float, bias_variance: float) -> Tensor:
    """Rows whose products are d (input_variance x_i.x_j/d + bias_variance): a bias is one more
    input."""
    X = math.sqrt(input_variance) * X
    if bias_variance == 0:
        return X
    return torch.cat([X, X.new_full((X.shape[0], 1), math.sqrt(bias_variance * X.shape[1]))], dim=1)


def _population(
    activation: Function, X: Tensor, X2: Tensor, *, s: float | Tensor, input_variance: float, bias_variance: float
) -> tuple[Tensor, Tensor]:
    """The same for any activation, in float64, without a graph."""
    _check_no_gradient("only ReLU's kernel is differentiable", X, X2, s)
    rows, columns = X.double(), X2.double()
    factor = 2 * input_variance / X.shape[1]
    T = factor * (rows @ columns.T) + 2 * bias_variance
    of_rows = factor * (rows * rows).sum(dim=1) + 2 * bias_variance
    of_columns = of_rows if X2 is X else factor * (columns * columns).sum(dim=1) + 2 * bias_variance
    found = population(activation, float(s), T, (of_rows, of_columns))
    return found.gram.to(X.dtype), found.slope_gram.to(X.dtype)


def _check_no_gradient(reason: str, X: Tensor, X2: Tensor, s: float | Tensor) -> None:
    for name, value in (("X", X), ("X", X2), ("weight_variance", s)):
        if torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad:
            raise InvalidArgument(f"deq_ntk: {reason}, and {name} requires a gradient. Pass {name}.detach().")
