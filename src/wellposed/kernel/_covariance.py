r"""The equations of an infinitely wide equilibrium layer with any activation, solved pair by pair.

With f the activation, W_ij ~ N(0, 2 s/m), and T_ij the covariance that inputs and bias give to the pre-activations,

    C_ij = 2 s E[f(u_i) f(u_j)] + T_ij,        (u_i, u_j) ~ N(0, [[C_ii, C_ij], [C_ij, C_jj]])                 (1)

First the diagonal, one scalar equation per sample; then each C_ij alone, the right side having the derivative
2 s E[f'(u_i) f'(u_j)] (Price's theorem). Newton's method on both. The root is stable, and a limit exists, where
2 s E[f'(u_i)^2] < 1.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, NotConverged, WellposedWarning
from wellposed.kernel._hermite import Function, Hermite, derivative_of, series

__all__ = ["Population", "population"]

_MAX_STEPS = 200
_BLOCK = 2**15
_ROUNDING = 4e-15  # of relative residuals in float64
_ACCURACY = 1e-8  # a cut series that may be off by more is reported


class Population(NamedTuple):
    """E[f(u_i) f(u_j)] and E[f'(u_i) f'(u_j)], both (n, n2)."""

    gram: Tensor
    slope_gram: Tensor


class _Side(NamedTuple):
    """One set of samples: variances (n,), then coefficients (terms, n), energies and tails (n,) of f and of f'."""

    variance: Tensor
    f: tuple[Tensor, Tensor, Tensor]
    slope: tuple[Tensor, Tensor, Tensor]

    def take(self, part: slice) -> _Side:
        f, slope = ((a[:, part].contiguous(), energy[part], tail[part]) for a, energy, tail in (self.f, self.slope))
        return _Side(self.variance[part], f, slope)


def population(activation: Function, s: float, T: Tensor, diagonals: tuple[Tensor, Tensor]) -> Population:
    """The expectations at the root of (1), given T (n, n2) and T_ii of the rows (n,) and of the columns (n2,); float64.

    If both diagonals are one tensor, the samples of rows and columns are the same.
    """
    hermite, slope = Hermite(T.device), derivative_of(activation)
    same = diagonals[0] is diagonals[1]
    rows = _side(hermite, activation, slope, s=s, T=diagonals[0])
    columns = rows if same else _side(hermite, activation, slope, s=s, T=diagonals[1])
    if same:
        T = T.clone().fill_diagonal_(0.0)  # known already, and the slowest to sum
    # A few rows at a time: hundreds of passes over a block that stays in cache.
    size = max(1, _BLOCK // T.shape[1])
    blocks = [_block(rows.take(slice(i, i + size)), columns, s, T[i : i + size]) for i in range(0, T.shape[0], size)]
    c, gram, slope_gram = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    if same:
        # Without a series: the correlation is 1 and the expectations are E[f^2] and E[f'^2].
        for part, diagonal in ((c, torch.ones_like(rows.variance)), (gram, rows.f[1]), (slope_gram, rows.slope[1])):
            part.diagonal().copy_(diagonal)
    _report_truncation(rows, columns, c, same)
    return Population(gram, slope_gram)


def _block(rows: _Side, columns: _Side, s: float, T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Correlations and both expectations of some rows with all columns."""
    c = _correlations(rows, columns, s, T)
    return c, series(rows.f[0], columns.f[0], c), series(rows.slope[0], columns.slope[0], c)


def _side(hermite: Hermite, f: Function, slope: Function, *, s: float, T: Tensor) -> _Side:
    """The diagonal of (1), q = 2 s E[f(sqrt(q) x)^2] + T, and what the pairs need of each sample."""
    q = T.clone()
    for _ in range(_MAX_STEPS):
        values = hermite.values(f, q)
        residual = 2 * s * hermite.mean(values**2) + T - q
        if (residual.abs() <= _ROUNDING * q).all():
            break
        root = q.sqrt()
        # d/dq E[f(sqrt(q) x)^2] = E[f f' x]/sqrt(q)
        growth = 2 * s * hermite.mean(values * hermite.values(slope, q) * hermite.x) / torch.where(root > 0, root, 1.0)
        # A plain step where Newton's would go the wrong way.
        q = (q + residual / torch.where((growth < 1) & (root > 0), 1 - growth, 1.0)).clamp(min=0.0)
        if not (q < 1e100).all():
            break
    stable = hermite.mean(hermite.values(slope, q) ** 2) if (q < 1e100).all() else torch.full_like(q, math.inf)
    worst = int(stable.argmax())
    if 2 * s * float(stable[worst]) >= 1:
        raise InvalidArgument(
            f"deq_ntk: with weight_variance={s:g} sample {worst} has 2 s E[f'^2] = {2 * s * float(stable[worst]):.3g}, which"
            " must be below 1: the population equilibrium is not stable and no limit exists. Lower weight_variance."
        )
    if not (residual.abs() <= 1e3 * _ROUNDING * q).all():
        raise NotConverged(f"deq_ntk: the variance equation did not converge in {_MAX_STEPS} steps. Lower weight_variance.")
    _report_quadrature(hermite, (f, slope), q)
    parts = hermite.coefficients(hermite.values(f, q), hermite.values(slope, q))
    return _Side(q, *parts)


def _correlations(rows: _Side, columns: _Side, s: float, T: Tensor) -> Tensor:
    """C_ij/sqrt(C_ii C_jj) off the diagonal of (1); 0 where a variance is 0."""
    scale = torch.sqrt(rows.variance[:, None] * columns.variance)
    inverse = torch.where(scale > 0, 1 / torch.where(scale > 0, scale, 1.0), 0.0)
    c = (T * inverse).clamp(-1.0, 1.0)
    for _ in range(_MAX_STEPS):
        step = (2 * s * series(rows.f[0], columns.f[0], c) + T) * inverse - c
        step /= 1 - 2 * s * series(rows.slope[0], columns.slope[0], c)
        after = (c + step).clamp(-1.0, 1.0)
        change = float((after - c).abs().max())
        c = after
        if change <= 2 * _ROUNDING:
            return c
    raise NotConverged(
        f"deq_ntk: the covariance equation still moves by {change:.1e} after {_MAX_STEPS} Newton steps. Lower weight_variance."
    )


def _report_quadrature(hermite: Hermite, functions: tuple[Function, Function], q: Tensor) -> None:
    """Warns if a coarser rule sees another E[f^2] or E[f'^2]: a kink that is not at 0, or too steep a function."""
    error = max(hermite.disagreement(function, q) for function in functions)
    if error > _ACCURACY:
        warnings.warn(
            f"deq_ntk: the quadrature of the activation or its derivative is good to {error:.1e} only, and the kernel"
            f" no better. A kink away from 0, or pre-activations as large as {float(q.max().sqrt()):.1e}, may cause it.",
            WellposedWarning,
            stacklevel=6,
        )


def _report_truncation(rows: _Side, columns: _Side, c: Tensor, same: bool) -> None:
    """Warns if cutting the series may have cost more than 1e-8 of an entry's scale: a kink, and nearly parallel samples."""
    worst, count = 0.0, 0
    for left, right in ((rows.f, columns.f), (rows.slope, columns.slope)):
        relative = [torch.sqrt(tail / torch.where(energy > 0, energy, 1.0)) for _, energy, tail in (left, right)]
        bound = c.abs() ** min(left[0].shape[0], right[0].shape[0]) * (relative[0][:, None] * relative[1])
        if same:
            bound.fill_diagonal_(0.0)
        worst, count = max(worst, float(bound.max())), max(count, int((bound > _ACCURACY).sum()))
    if count:
        warnings.warn(
            f"deq_ntk: {count} of {c.numel()} entries may be off by up to {worst:.1e} of their scale: the activation is not"
            " smooth and these samples are nearly parallel. For ReLU pass wp.nn.ReLU(), which has a closed form.",
            WellposedWarning,
            stacklevel=5,
        )
