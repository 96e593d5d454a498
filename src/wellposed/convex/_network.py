"""What OptEq networks share: stages that depend on the input, their equilibrium, and what is known
about it."""

from __future__ import annotations

import abc
import math
from typing import Any

import torch
from torch import Tensor

from wellposed._checks import Policy, check_interval
from wellposed._tree import LOW_PRECISION
from wellposed.convex.composition import CompositionMap
from wellposed.convex.stages import AbstractPrior, AbstractStage, UnitLayer, as_prior
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.implicit import AbstractGradient
from wellposed.nn import AbstractActivation, AbstractCell, EquilibriumLayer
from wellposed.nn._activation import check_activation
from wellposed.nn.activations import ReLU
from wellposed.nn.pretrained import Pretrained
from wellposed.solve import AbstractSolver, Solution


class AbstractOptEq(Pretrained, abc.ABC):
    r"""z = T(z, x), T = f_L o ... o f_1, f_l(z) = a/mu W_l^T s(W_l z + U_l x + b_l) + (1 - a) z
    [xie2021, eq. (4)-(5)].

    Args:
        alpha: a, in (0, 1]: 1 - a is the weight of the skip connection.
        mu: Positive; |W_l|^2 L_s <= mu makes every f_l a proximal operator.
        activation: s; `ReLU()` if not given.
        prior: A last stage: a regularizer (its proximal step), `ProxStep`, `GradientStep` or None.
        solver, gradient, on_failure, rtol, max_steps: As in `EquilibriumLayer`.
            `gradient=UnrolledGradient(20)` is the training of the paper, `ImplicitGradient()`, the
            default, that of an equilibrium; it may be changed at any time through `gradient`.

    Attributes:
        layer: The `EquilibriumLayer` that solves; `layer.last_solution` and `layer.last_adjoint`
            describe the last solves.
    """

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        mu: float = 1.0,
        activation: AbstractActivation | None = None,
        prior: Any = None,
        solver: AbstractSolver | None = None,
        gradient: AbstractGradient | None = None,
        on_failure: Policy = "warn",
        rtol: float | None = None,
        max_steps: int = 200,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_interval(name, "alpha", alpha, low=0.0, high=1.0)
        check_interval(name, "mu", mu, low=0.0, closed="neither")
        self.alpha, self.mu = float(alpha), float(mu)
        self.activation = check_activation(name, ReLU() if activation is None else activation)
        self.prior: AbstractPrior | None = as_prior(prior, name)
        self.layer = EquilibriumLayer(_Cell(self), solver, gradient, on_failure=on_failure, rtol=rtol, max_steps=max_steps)

    @abc.abstractmethod
    def units(self, features: Tensor) -> list[UnitLayer]:
        """f_1, ..., f_L for these `features`, with a graph to them and to the parameters."""

    @abc.abstractmethod
    def sample_shape(self, features: Tensor) -> tuple[int, ...]:
        """The shape of one state; raises for features that do not fit."""

    @abc.abstractmethod
    def norms_upper(self) -> list[float]:
        """Upper bounds of |W_1|, ..., |W_L|."""

    @abc.abstractmethod
    def readout(self, Z: Tensor) -> Tensor:
        """(n, ...) -> predictions."""

    def features(self, X: Tensor) -> Tensor:
        """x = g(X), what the unit layers see of the inputs: by default the inputs themselves."""
        return X

    @property
    def gradient(self) -> AbstractGradient:
        """The gradient mode."""
        return self.layer.gradient

    @gradient.setter
    def gradient(self, gradient: AbstractGradient) -> None:
        if not isinstance(gradient, AbstractGradient):
            raise InvalidType(f"gradient must be a gradient mode such as ImplicitGradient(); got {gradient!r}.")
        self.layer.gradient = gradient

    @property
    def couples_samples(self) -> bool:
        """Whether the prior mixes the samples of a batch, so that the batch has one equilibrium
        together."""
        return self.prior is not None and self.prior.regularizer.couples_samples

    def bind(self, features: Tensor) -> CompositionMap:
        """The map T(., x) of rows for these `features`, with a graph to them and to the
        parameters."""
        stages: list[AbstractStage] = list(self.units(features))
        if self.prior is not None:
            stages.append(self.prior)
        return CompositionMap(stages, self.sample_shape(features), coupled=self.couples_samples)

    def forward(self, X: Tensor) -> Tensor:
        """Predictions; (n, d) -> (n,) for dense networks."""
        return self.readout(self.equilibrium(X))

    def equilibrium(self, X: Tensor, z0: Tensor | None = None) -> Tensor:
        """(n, ...) -> (n, ...) the equilibrium, differentiable.

        Args:
            X: The inputs.
            z0: The start; zeros if not given.
        """
        features = self.features(X)
        shape = (len(X), *self.sample_shape(features))
        z: Tensor = self.layer(features, self._start(z0, shape))
        return z.reshape(shape)

    def solve(self, X: Tensor, z0: Tensor | None = None, *, record: bool = False) -> Solution:
        """The equilibrium without a graph, with all that is known about it; see
        `EquilibriumLayer.solve`.

        If the prior couples the samples there is one status for the batch, and the value has one
        row.
        """
        with torch.no_grad():
            features = self.features(X)
        shape = (len(X), *self.sample_shape(features))
        return self.layer.solve(features, self._start(z0, shape), record=record)

    def contraction_upper(self) -> float:
        """An upper bound of the Lipschitz constant of T in z, prod_l (a L_s |W_l|^2/mu + 1 - a).

        Below 1 there is exactly one equilibrium. At 1 T is non-expansive: equilibria form a convex
        set, which may be larger than a point, or empty (z = relu(z + c) has none if some c_i > 0;
        [xie2021] assumes existence there). Infinite if the prior may expand.
        """
        if self.prior is not None and not self.prior.is_nonexpansive:
            return math.inf
        L_s = self.activation.lipschitz
        return math.prod(self.alpha * L_s * norm**2 / self.mu + (1 - self.alpha) for norm in self.norms_upper())

    def norm_limit(self, norm_bound: float) -> float:
        """The bound on |W_l| that makes f_l Lipschitz with a norm_bound^2 + 1 - a."""
        return norm_bound * math.sqrt(self.mu / self.activation.lipschitz)

    def _start(self, z0: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        if z0 is None:
            return None
        if not isinstance(z0, Tensor) or tuple(z0.shape) != shape:
            seen = tuple(z0.shape) if isinstance(z0, Tensor) else type(z0).__name__
            raise InvalidArgument(f"z0 must have the shape of the state, {shape}; got {seen}.")
        return z0.reshape(1, -1) if self.couples_samples else z0

    def _common_repr(self) -> str:
        parts = [f"alpha={self.alpha:g}", f"mu={self.mu:g}", f"activation={self.activation!r}", f"prior={self.prior!r}"]
        return ", ".join(parts)


class _Cell(AbstractCell):
    """The map of a network for given inputs. It holds no parameters: those have the names of the
    paper, on the network."""

    def __init__(self, network: AbstractOptEq) -> None:
        super().__init__()
        self._network = (network,)  # in a tuple, or the network would be a submodule of itself

    def bind(self, x: Tensor) -> CompositionMap:
        f = self._network[0].bind(x)
        inputs = f.inputs()
        if any(tensor.dtype in LOW_PRECISION for tensor in inputs):
            return f.with_inputs(*(tensor.float() for tensor in inputs))
        return f

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        network = self._network[0]
        shape = network.sample_shape(x)
        return (1, len(x) * math.prod(shape)) if network.couples_samples else (len(x), *shape)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self._network[0].bind(x).tracked(z.flatten(1)).reshape(z.shape)


def check_norm_bound(owner: str, norm_bound: object) -> None:
    """Raises unless the bound is None or a number in (0, 1]."""
    if norm_bound is not None:
        check_interval(owner, "norm_bound", norm_bound, low=0.0, high=1.0)
