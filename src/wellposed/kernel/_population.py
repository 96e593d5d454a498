r"""The equations of an infinitely wide equilibrium layer with any activation, solved pair by pair.

With f the activation, W_ij ~ N(0, 2 s/m), and T_ij the covariance that inputs and bias give to the
pre-activations,

    C_ij = 2 s E[f(u_i) f(u_j)] + T_ij,        (u_i, u_j) ~ N(0, [[C_ii, C_ij], [C_ij, C_jj]])                 (1)

First the diagonal, one scalar equation per sample; then each C_ij alone, the right side having the
derivative 2 s E[f'(u_i) f'(u_j)] (Price's theorem). Newton's method on both. The root is stable,
and a limit exists, where 2 s E[f'(u_i)^2] < 1.

Expectations come from Hermite coefficients: for jointly normal u, v of variances p, q and
correlation c, and the normalized Hermite polynomials h_k (Mehler's formula),

    E[f(u) g(v)] = sum_k a_k b_k c^k,      a_k = E[f(sqrt(p) x) h_k(x)],   b_k = E[g(sqrt(q) x) h_k(x)],   x ~ N(0, 1)      (2)

so an activation is evaluated once per sample and node, not once per pair. The coefficients are
integrals over the two half-lines by Gauss-Legendre quadrature: a kink at 0, the usual place, costs
them no accuracy. Cutting the series at N leaves at most

    |c|^N sqrt(t u),      t = E[f^2] - sum_(k<N) a_k^2,   u likewise                                         (3)

by Cauchy-Schwarz and Parseval: a bound that is computed, not guessed.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType, NotConverged, WellposedWarning
from wellposed.nn.activations import AbstractActivation

Function = Callable[[Tensor], Tensor]

_MAX_STEPS = 200
_BLOCK = 2**15
_ROUNDING = 4e-15  # of relative residuals in float64
_ACCURACY = 1e-8  # a cut series that may be off by more is reported
# exp(-x^2/4), by which nodes are weighted in (2), is 1e-20 at 13.5; 400 nodes a side resolve h_k up to k = 1024.
_REACH = 13.5
_HALF_NODES = 400
_TERMS = (64, 128, 256, 512, 1024)
_ENOUGH = 1e-13


class Population(NamedTuple):
    """E[f(u_i) f(u_j)] and E[f'(u_i) f'(u_j)], both (n, n2); E[f(u_i)^2] of rows (n,) and columns
    (n2,), one tensor if they are the same."""

    gram: Tensor
    slope_gram: Tensor
    of_rows: Tensor
    of_columns: Tensor


class _Side(NamedTuple):
    """One set of samples: variances (n,), then coefficients (terms, n), energies and tails (n,) of
    f and of f'."""

    variance: Tensor
    f: tuple[Tensor, Tensor, Tensor]
    slope: tuple[Tensor, Tensor, Tensor]

    def take(self, part: slice) -> _Side:
        f, slope = ((a[:, part].contiguous(), energy[part], tail[part]) for a, energy, tail in (self.f, self.slope))
        return _Side(self.variance[part], f, slope)


def population(activation: Function, s: float, T: Tensor, diagonals: tuple[Tensor, Tensor]) -> Population:
    """The expectations at the root of (1), given T (n, n2) and T_ii of the rows (n,) and of the
    columns (n2,); float64.

    If both diagonals are one tensor, the samples of rows and columns are the same.
    """
    hermite, slope = _hermite(T.device), derivative_of(activation)
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
    return Population(gram, slope_gram, rows.f[1], columns.f[1])


def _block(rows: _Side, columns: _Side, s: float, T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Correlations and both expectations of some rows with all columns."""
    c = _correlations(rows, columns, s, T)
    return c, series(rows.f[0], columns.f[0], c), series(rows.slope[0], columns.slope[0], c)


def _side(hermite: Hermite, f: Function, slope: Function, *, s: float, T: Tensor) -> _Side:
    """The diagonal of (1), q = 2 s E[f(sqrt(q) x)^2] + T, and what the pairs need of each
    sample."""
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
    """Warns if a coarser rule sees another E[f^2] or E[f'^2]: a kink that is not at 0, or too steep
    a function."""
    error = max(hermite.disagreement(function, q) for function in functions)
    if error > _ACCURACY:
        warnings.warn(
            f"deq_ntk: the quadrature of the activation or its derivative is good to {error:.1e} only, and the kernel"
            f" no better. A kink away from 0, or pre-activations as large as {float(q.max().sqrt()):.1e}, may cause it.",
            WellposedWarning,
            stacklevel=6,
        )


def _report_truncation(rows: _Side, columns: _Side, c: Tensor, same: bool) -> None:
    """Warns if cutting the series may have cost more than 1e-8 of an entry's scale: a kink, and
    nearly parallel samples."""
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


def derivative_of(activation: Function) -> Function:
    """The derivative: by the slope if the activation knows it, else by autograd."""
    if isinstance(activation, AbstractActivation):

        def by_slope(v: Tensor) -> Tensor:
            slope = activation.slope(activation(v))
            return torch.ones_like(v) if slope is None else slope

        return by_slope
    if not callable(activation):
        raise InvalidType(f"The activation must be a function of a tensor, as torch.tanh or wp.nn.Tanh(); got {activation!r}.")

    def by_autograd(v: Tensor) -> Tensor:
        with torch.enable_grad():
            v = v.detach().requires_grad_()
            (slope,) = torch.autograd.grad(activation(v).sum(), v)
        return slope

    return by_autograd


def _half_lines(nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the integral over the line, by one rule on each side of 0."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    half, weights = (x + 1) * _REACH / 2, w * _REACH / 2
    both = np.concatenate([-half[::-1], half]), np.concatenate([weights[::-1], weights])
    return torch.as_tensor(both[0], device=device), torch.as_tensor(both[1], device=device)


class Hermite:
    """Quadrature nodes x for one standard normal variable, and the Hermite functions on them."""

    def __init__(self, device: torch.device) -> None:
        self.x, self._w = _half_lines(_HALF_NODES, device)
        self._coarse = _half_lines(_HALF_NODES * 3 // 4, device)
        self._root = torch.exp(-(self.x**2) / 4) / (2 * math.pi) ** 0.25  # the square root of the density
        self._functions = self._hermite_functions(_TERMS[-1])

    def _hermite_functions(self, terms: int) -> Tensor:
        """h_k(x) sqrt(density(x)), (nodes, terms), by the three-term recurrence: bounded, so
        nothing overflows."""
        rows = [self._root, self.x * self._root]
        for k in range(1, terms - 1):
            rows.append((self.x * rows[k] - math.sqrt(k) * rows[k - 1]) / math.sqrt(k + 1))
        return torch.stack(rows, dim=1)

    def disagreement(self, f: Function, variance: Tensor) -> float:
        """Largest relative difference between E[f^2] by these nodes and by three quarters as
        many."""
        x, w = self._coarse
        energy = self.mean(self.values(f, variance) ** 2)
        coarse = f(variance.sqrt()[:, None] * x) ** 2 @ (w * torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi))
        return float(((coarse - energy).abs() / torch.where(energy > 0, energy, 1.0)).max())

    def values(self, f: Function, variance: Tensor) -> Tensor:
        """f(sqrt(variance) x), (n, nodes), checked."""
        v = variance.sqrt()[:, None] * self.x
        values = f(v)
        if not isinstance(values, Tensor) or values.shape != v.shape or values.dtype != v.dtype:
            seen = f"{tuple(values.shape)}, {values.dtype}" if isinstance(values, Tensor) else type(values).__name__
            raise InvalidArgument(
                f"The activation must keep shape and dtype: expected {tuple(v.shape)}, {v.dtype}; got {seen}."
            )
        if not torch.isfinite(values).all():
            raise InvalidArgument(
                f"The activation or its derivative is not finite on [{float(v.min()):.3g}, {float(v.max()):.3g}]."
                " An infinite-width limit needs it finite, and growing no faster than a polynomial."
            )
        return values.detach()

    def mean(self, values: Tensor) -> Tensor:
        """E[values], (n,)."""
        return values @ (self._w * self._root**2)

    def coefficients(self, *functions: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Coefficients (terms, n), energy E[f^2] (n,) and tail of (3) (n,) of each function, given
        by values (n, nodes).

        The number of terms is the same for all and doubles until every tail is down to rounding, or
        1024 are reached.
        """
        energies = [self.mean(values**2) for values in functions]
        for terms in _TERMS:
            basis = self._functions[:, :terms] * (self._w * self._root)[:, None]
            found = [basis.T @ values.T for values in functions]
            tails = [(energy - (a * a).sum(dim=0)).clamp(min=0.0) for energy, a in zip(energies, found, strict=True)]
            if all((tail <= _ENOUGH * energy).all() for tail, energy in zip(tails, energies, strict=True)):
                break
        return list(zip(found, energies, tails, strict=True))


@functools.cache
def _hermite(device: torch.device) -> Hermite:
    return Hermite(device)


def series(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """(2) for a (terms, n), b (terms, n2) and correlations c (n, n2), by Horner's rule.

    Terms that c^k has taken below rounding are left out: |a_k b_k| is at most the product of the
    norms of f and g.
    """
    terms, largest = min(a.shape[0], b.shape[0]), float(c.abs().max())
    if largest < 1:
        terms = min(terms, 1 + math.ceil(math.log(1e-18) / math.log(max(largest, 1e-18))))
    total = torch.zeros_like(c)
    for k in range(terms - 1, -1, -1):
        total.mul_(c).addcmul_(a[k, :, None], b[k])
    return total
