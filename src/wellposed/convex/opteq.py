"""OptEq networks with matrices: one unit layer at equilibrium, or a chain of them as one fixed
point."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer, check_rows
from wellposed.convex._network import AbstractOptEq, check_norm_bound
from wellposed.convex.composition import CompositionMap
from wellposed.convex.stages import MatrixMap, UnitLayer
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg import spectral_norm_upper
from wellposed.nn.families import Theory
from wellposed.nn.parametrizations import NormBall
from wellposed.nn.sensitivity import AbstractSensitivity
from wellposed.nn.tangent import GramProduct, TangentFeatures, gram, outer


@dataclass(frozen=True)
class UnitParameters:
    """The raw parameters W (m_l, m), U (m_l, d) and b (m_l,) of one unit layer, and their names."""

    names: tuple[str, str, str]
    W: Tensor
    U: Tensor
    b: Tensor


class AbstractDenseOptEq(AbstractOptEq):
    """An OptEq network of rows (n, d), with a linear read-out y = w . z.

    Args:
        in_features: d.
        width: m, the size of the state.
        norm_bound: Keeps a L_s |W_l|^2/mu <= a norm_bound^2, in (0, 1]; None does not constrain the
            matrices.
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

    @property
    def theory(self) -> Theory:
        """Biases, and layers in a chain: the network measures itself."""
        return Theory(readout=("w",), closed_form=False)

    def sensitivity_at(self, X: Tensor, y: Tensor) -> AbstractSensitivity:
        """The bounds of the radius certificate, from data (n, d), (n,)."""
        from wellposed.convex.sensitivity import OptEqSensitivity  # imports this module

        return OptEqSensitivity(self, X, y)

    @abc.abstractmethod
    def parameters_by_unit(self) -> list[UnitParameters]:
        """The raw parameters of every unit layer."""

    def matrices(self) -> list[Tensor]:
        """W_1, ..., W_L (m_l, m) as they act: the parameters, made small enough."""
        return [unit.W if self.weight is None else self.weight(unit.W) for unit in self.parameters_by_unit()]

    def units(self, features: Tensor) -> list[UnitLayer]:
        options = {"scale": self.alpha / self.mu, "keep": 1 - self.alpha}
        return [
            UnitLayer(MatrixMap(W), nn.functional.linear(features, unit.U, unit.b), self.activation, **options)
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
        r"""What the tangent kernel is made of; parameters that do not require a gradient have no
        part.

        With q^(L) = (I - J_T)^(-T) w, q^(l-1) = J_l^T q^(l), h^(l) = a/mu D_l W_l q^(l) and s^(l) =
        a/mu s(W_l z_(l-1) + ...), dy/dW_l = s q^T + h z_(l-1)^T, dy/dU_l = h x^T, dy/db_l = h,
        dy/dw = z: not in [xie2021], where the kernel appears only as a bound, and with the unrolled
        network in the place of the equilibrium. If the norm bound is active (W = k V with k =
        bound/|V|, and u, v the leading singular vectors of V) dy/dV = k (G - <G, V>/|V| u v^T), G =
        dy/dW.
        """
        if self.couples_samples:
            raise InvalidArgument(f"A tangent kernel compares samples, but {self.prior!r} makes them depend on one another.")
        point = self.layer.linearise(X, self.w.detach())
        features: dict[str, Tensor] = {"X": X.detach(), "Z": point.value}
        terms: dict[str, tuple[GramProduct, ...]] = {"w": gram("Z")}
        with torch.no_grad():
            assert isinstance(point.f, CompositionMap)
            found = point.f.adjoints(point.adjoint, point.value)
            parts = [(stage, z, q) for stage, z, q in found if isinstance(stage, UnitLayer)]
            for index, ((unit, z, q), raw) in enumerate(zip(parts, self.parameters_by_unit(), strict=True)):
                s, h = unit.sensitivity(q, z)
                S, Q, H, Z = (f"{letter}{index + 1}" for letter in "SQHZ")
                features |= {S: s, Q: q, H: h, Z: z}
                name_W, name_U, name_b = raw.names
                terms[name_U] = outer(H, "X")
                terms[name_b] = gram(H)
                terms[name_W] = self._matrix_terms(features, raw.W, index + 1)
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return TangentFeatures(features, {name: part for name, part in terms.items() if name in trained})

    def _matrix_terms(self, features: dict[str, Tensor], V: Tensor, index: int) -> tuple[GramProduct, ...]:
        """The kernel of W_l: G = s q^T + h z^T, taken through the norm bound if that is active;
        adds its features."""
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


class OptEq(AbstractDenseOptEq):
    r"""z = (1/mu) W^T s(W z + U x + b), y = w . z [xie2021, eq. (3)], with the skip form a(...) +
    (1 - a) z.

    The equilibrium minimises a convex function, [xie2021, Theorem 1], which
    `convex.objective(model, X)` gives. The skip connection changes neither the equilibrium nor its
    derivatives, only the path to it. Starts from |W| of about 0.7 sqrt(mu), U_ij ~ N(0, 2/d), b =
    0, w_i ~ N(0, 1/m); the paper leaves this open.

        >>> import torch, wellposed as wp
        >>> model = wp.OptEq(4, 16)
        >>> model(torch.randn(8, 4)).shape
        torch.Size([8])

    Args:
        in_features: d.
        width: m, the size of z.
        hidden_width: m_1, the rows of W; m if not given.
        norm_bound: Keeps L_s |W|^2 <= norm_bound^2 mu, in (0, 1], by the exact spectral norm; below
            1 there is exactly one equilibrium. None does not constrain W.
        generator: Of the initialization. device, dtype: Of the parameters.
        options: `alpha`, `mu`, `activation`, `prior`, `solver`, `gradient`, `on_failure`, `rtol`,
            `max_steps` as in `AbstractOptEq`.

    Attributes:
        W: (m_1, m). U: (m_1, d). b: (m_1,). w: (m,).
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        *,
        hidden_width: int | None = None,
        norm_bound: float | None = 0.95,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, width, norm_bound=norm_bound, **options)
        self.hidden_width = width if hidden_width is None else hidden_width
        check_positive_integer("OptEq", "hidden_width", self.hidden_width)
        draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        W, U, b = self._draw(self.hidden_width, **draw)
        self.W, self.U, self.b = nn.Parameter(W), nn.Parameter(U), nn.Parameter(b)
        self.w = nn.Parameter(torch.randn(width, **draw) / math.sqrt(width))

    def parameters_by_unit(self) -> list[UnitParameters]:
        return [UnitParameters(("W", "U", "b"), self.W, self.U, self.b)]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.width}, hidden_width={self.hidden_width}, {self._common_repr()}"


class DeepOptEq(AbstractDenseOptEq):
    r"""z = f_L o ... o f_1(z, x), f_l(z, x) = a/mu W_l^T s(W_l z + U_l x + b_l) + (1 - a) z, y = w
    . z [xie2021, eq. (4)-(5)].

    With two layers the equilibrium still minimises a convex function ([xie2021, Corollary 1],
    `convex.objective`); with more it solves a monotone inclusion ([xie2021, Theorem 2],
    `convex.inclusion_residual`). Unlike in one layer, `alpha` matters.

        >>> import torch, wellposed as wp
        >>> model = wp.DeepOptEq(4, (8, 16, 8), alpha=0.5)
        >>> model(torch.randn(8, 4)).shape
        torch.Size([8])

    Args:
        in_features: d.
        widths: (m_1, ..., m_L), the rows of the matrices W_l.
        width: m, the size of the state; the largest of `widths` if not given.
        norm_bound: Keeps L_s |W_l|^2 <= norm_bound^2 mu for all l, in (0, 1], by exact spectral
            norms; below 1 there is exactly one equilibrium. None does not constrain the matrices.
        generator: Of the initialization. device, dtype: Of the parameters.
        options: `alpha`, `mu`, `activation`, `prior`, `solver`, `gradient`, `on_failure`, `rtol`,
            `max_steps` as in `AbstractOptEq`.

    Attributes:
        W: L matrices (m_l, m). U: L matrices (m_l, d). b: L vectors (m_l,). w: (m,).
    """

    def __init__(
        self,
        in_features: int,
        widths: Sequence[int],
        *,
        width: int | None = None,
        norm_bound: float | None = 0.95,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(widths, (list, tuple)) or not widths:
            raise InvalidArgument(
                f"The 'widths' parameter of DeepOptEq must be a sequence such as (16, 32, 16). Got {widths!r}."
            )
        for size in widths:
            check_positive_integer("DeepOptEq", "widths", size)
        super().__init__(in_features, max(widths) if width is None else width, norm_bound=norm_bound, **options)
        self.widths = tuple(widths)
        draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        drawn = [self._draw(size, **draw) for size in self.widths]
        self.W, self.U, self.b = (
            nn.ParameterList(nn.Parameter(tensor) for tensor in part) for part in zip(*drawn, strict=True)
        )
        self.w = nn.Parameter(torch.randn(self.width, **draw) / math.sqrt(self.width))

    def parameters_by_unit(self) -> list[UnitParameters]:
        return [
            UnitParameters((f"W.{i}", f"U.{i}", f"b.{i}"), W, U, b)
            for i, (W, U, b) in enumerate(zip(self.W, self.U, self.b, strict=True))
        ]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.widths}, width={self.width}, {self._common_repr()}"


def check_dense(owner: str, model: Any, *, plain: bool = False) -> AbstractDenseOptEq:
    """The model, if it is a dense OptEq network; and, if `plain`, one without a prior."""
    if not isinstance(model, AbstractDenseOptEq):  # by type: no other network has unit layers
        raise InvalidType(f"{owner} needs a dense network such as OptEq or DeepOptEq; got {type(model).__name__}.")
    if plain and model.prior is not None:
        raise InvalidArgument(f"{owner} is stated for networks without a prior; this one has {model.prior!r}.")
    return model
