"""OptEq networks with matrices: parameters, tangent kernel, norms."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed.convex._network import AbstractOptEq, check_norm_bound, check_rows
from wellposed.convex.operators import MatrixOperator
from wellposed.convex.stages import Unit
from wellposed.errors import InvalidArgument
from wellposed.linalg import spectral_norm_upper
from wellposed.nn import GramProduct, TangentFeatures
from wellposed.nn.parametrizations import NormBall

__all__ = ["AbstractDenseOptEq", "UnitParameters"]


@dataclass(frozen=True)
class UnitParameters:
    """The raw parameters of one unit layer: names and tensors.

    Attributes:
        names: Of W_l, U_l and b_l.
        W: (m_l, m). U: (m_l, d). b: (m_l,).
    """

    names: tuple[str, str, str]
    W: Tensor
    U: Tensor
    b: Tensor


class AbstractDenseOptEq(AbstractOptEq):
    """An OptEq network of rows (n, d), with a linear read-out y = w . z.

    Args:
        in_features: d.
        width: m, the size of the state.
        norm_bound: Keeps a L_s |W_l|^2/mu <= a norm_bound^2, in (0, 1]; None takes the matrices as they are.
        options: As in `AbstractOptEq`.
    """

    w: Tensor

    def __init__(self, in_features: int, width: int, *, norm_bound: float | None, **options: Any) -> None:
        super().__init__(**options)
        name = type(self).__name__
        check_positive_integer(name, "in_features", in_features)
        check_positive_integer(name, "width", width)
        check_norm_bound(name, norm_bound)
        self.in_features, self.width, self.norm_bound = in_features, width, norm_bound
        self.weight = None if norm_bound is None else NormBall(self.norm_limit(norm_bound))

    @abc.abstractmethod
    def parameters_by_unit(self) -> list[UnitParameters]:
        """The raw parameters of every unit layer."""

    def matrices(self) -> list[Tensor]:
        """W_1, ..., W_L (m_l, m) as they act: the parameters, made small enough."""
        return [unit.W if self.weight is None else self.weight(unit.W) for unit in self.parameters_by_unit()]

    def units(self, features: Tensor) -> list[Unit]:
        options = {"scale": self.alpha / self.mu, "keep": 1 - self.alpha}
        return [
            Unit(MatrixOperator(W), nn.functional.linear(features, unit.U, unit.b), self.activation, **options)
            for W, unit in zip(self.matrices(), self.parameters_by_unit(), strict=True)
        ]

    def sample_shape(self, features: Tensor) -> tuple[int, ...]:
        check_rows(type(self).__name__, features, self.in_features, self.w.dtype)
        return (self.width,)

    def norms_upper(self) -> list[float]:
        with torch.no_grad():
            return [spectral_norm_upper(W) for W in self.matrices()]

    def readout(self, Z: Tensor) -> Tensor:
        """(n, m) -> (n,)."""
        return Z @ self.w

    def tangent_features(self, X: Tensor) -> TangentFeatures:
        r"""What the tangent kernel is made of; parameters that do not require a gradient have no part.

        With q^(L) = (I - J_T)^(-T) w, q^(l-1) = J_l^T q^(l), h^(l) = a/mu D_l W_l q^(l) and s^(l) = a/mu s(W_l z_(l-1) + ...),
        dy/dW_l = s q^T + h z_(l-1)^T, dy/dU_l = h x^T, dy/db_l = h, dy/dw = z: not in [xie2021], where the kernel appears
        only as a bound, and with the unrolled network in the place of the equilibrium. If the norm bound is active
        (W = k V with k = bound/|V|, and u, v the leading singular vectors of V) dy/dV = k (G - <G, V>/|V| u v^T), G = dy/dW.
        """
        if self.couples_samples:
            raise InvalidArgument(f"A tangent kernel compares samples, but {self.prior!r} makes them depend on one another.")
        at = self.layer.linearise(X, self.w.detach())
        features: dict[str, Tensor] = {"X": X.detach(), "Z": at.value}
        terms: dict[str, tuple[GramProduct, ...]] = {"w": (GramProduct((("Z", "Z"),)),)}
        with torch.no_grad():
            parts = [part for part in at.f.adjoints(at.adjoint, at.value) if isinstance(part[0], Unit)]
            for index, ((unit, z, q), raw) in enumerate(zip(parts, self.parameters_by_unit(), strict=True)):
                s, h = unit.sensitivity(q, z)
                S, Q, H, Z = (f"{letter}{index + 1}" for letter in "SQHZ")
                features |= {S: s, Q: q, H: h, Z: z}
                name_W, name_U, name_b = raw.names
                terms[name_U] = (GramProduct(((H, H), ("X", "X"))),)
                terms[name_b] = (GramProduct(((H, H),)),)
                terms[name_W] = self._matrix_terms(features, raw.W, index + 1)
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return TangentFeatures(features, {name: part for name, part in terms.items() if name in trained})

    def _matrix_terms(self, features: dict[str, Tensor], V: Tensor, index: int) -> tuple[GramProduct, ...]:
        """The kernel of W_l: G = s q^T + h z^T, taken through the norm bound if that is active; adds its features."""
        S, Q, H, Z = (f"{letter}{index}" for letter in "SQHZ")
        pairs = [((S, S), (Q, Q)), ((H, H), (Z, Z)), ((S, H), (Q, Z)), ((H, S), (Z, Q))]
        if self.weight is None:
            return tuple(GramProduct(pair) for pair in pairs)
        U_, sigma, Vh = torch.linalg.svd(V.detach(), full_matrices=False)
        if float(sigma[0]) <= self.weight.bound:
            return tuple(GramProduct(pair) for pair in pairs)
        u, v = U_[:, 0], Vh[0]
        s, q, h, z = (features[name] for name in (S, Q, H, Z))
        k = self.weight.bound / float(sigma[0])
        # g = <G, V>/|V| and e = u^T G v, one number per sample
        g = ((s @ V) * q + (h @ V) * z).sum(dim=1, keepdim=True) / sigma[0]
        e = (s @ u * (q @ v) + h @ u * (z @ v)).unsqueeze(1)
        E, F = f"E{index}", f"F{index}"
        features |= {E: e, F: g}
        # |k (G - g u v^T)|: <G_i, G_j> - g_i e_j - e_i g_j + g_i g_j
        return (
            *(GramProduct(pair, k * k) for pair in pairs),
            GramProduct(((F, E),), -k * k),
            GramProduct(((E, F),), -k * k),
            GramProduct(((F, F),), k * k),
        )

    def _draw(self, hidden: int, **draw: Any) -> tuple[Tensor, Tensor, Tensor]:
        """W_l with |W_l| about 0.7 sqrt(mu/L_s), U_ij ~ N(0, 2/d), b = 0."""
        size = self.norm_limit(0.7) / (math.sqrt(hidden) + math.sqrt(self.width))
        W = torch.randn(hidden, self.width, **draw) * size
        U = torch.randn(hidden, self.in_features, **draw) * math.sqrt(2 / self.in_features)
        return W, U, torch.zeros(hidden, dtype=W.dtype, device=W.device)
