r"""Gaussian expectations of an activation for all pairs of samples, by its Hermite coefficients.

For jointly normal u, v of variances p, q and correlation c, and the normalized Hermite polynomials h_k (Mehler's formula),

    E[f(u) g(v)] = sum_k a_k b_k c^k,      a_k = E[f(sqrt(p) x) h_k(x)],   b_k = E[g(sqrt(q) x) h_k(x)],   x ~ N(0, 1)      (1)

so an activation is evaluated once per sample and node, not once per pair. The coefficients are integrals over the two
half-lines by Gauss-Legendre quadrature: a kink at 0, the usual place, costs them no accuracy. Cutting the series at N
leaves at most

    |c|^N sqrt(t u),      t = E[f^2] - sum_(k<N) a_k^2,   u likewise                                         (2)

by Cauchy-Schwarz and Parseval: a bound that is computed, not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn.activations import AbstractActivation

__all__ = ["Function", "Hermite", "derivative_of", "series"]

Function = Callable[[Tensor], Tensor]

# exp(-x^2/4), by which nodes are weighted in (1), is 1e-20 at 13.5; 400 nodes a side resolve h_k up to k = 1024.
_REACH = 13.5
_HALF_NODES = 400
_TERMS = (64, 128, 256, 512, 1024)
_ENOUGH = 1e-13


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
        """h_k(x) sqrt(density(x)), (nodes, terms), by the three-term recurrence: bounded, so nothing overflows."""
        rows = [self._root, self.x * self._root]
        for k in range(1, terms - 1):
            rows.append((self.x * rows[k] - math.sqrt(k) * rows[k - 1]) / math.sqrt(k + 1))
        return torch.stack(rows, dim=1)

    def disagreement(self, f: Function, variance: Tensor) -> float:
        """Largest relative difference between E[f^2] by these nodes and by three quarters as many."""
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
        """Coefficients (terms, n), energy E[f^2] (n,) and tail of (2) (n,) of each function, given by values (n, nodes).

        The number of terms is the same for all and doubles until every tail is down to rounding, or 1024 are reached.
        """
        energies = [self.mean(values**2) for values in functions]
        for terms in _TERMS:
            basis = self._functions[:, :terms] * (self._w * self._root)[:, None]
            found = [basis.T @ values.T for values in functions]
            tails = [(energy - (a * a).sum(dim=0)).clamp(min=0.0) for energy, a in zip(energies, found, strict=True)]
            if all((tail <= _ENOUGH * energy).all() for tail, energy in zip(tails, energies, strict=True)):
                break
        return list(zip(found, energies, tails, strict=True))


def series(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """(1) for a (terms, n), b (terms, n2) and correlations c (n, n2), by Horner's rule.

    Terms that c^k has taken below rounding are left out: |a_k b_k| is at most the product of the norms of f and g.
    """
    terms, largest = min(a.shape[0], b.shape[0]), float(c.abs().max())
    if largest < 1:
        terms = min(terms, 1 + math.ceil(math.log(1e-18) / math.log(max(largest, 1e-18))))
    total = torch.zeros_like(c)
    for k in range(terms - 1, -1, -1):
        total.mul_(c).addcmul_(a[k, :, None], b[k])
    return total
