"""The stages that an OptEq map is composed of: unit layers, and a last one that expresses a
preference.

Two ways to express a preference [xie2021, Section 4]. A *regularized architecture* appends a stage
to the map, the proximal operator of R or a step along its gradient, and so changes the equilibrium:
give `prior=` to a network. *Selection* leaves the equilibria as they are and picks the one with the
least R: see `selection.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed._checks import check_interval
from wellposed.convex.regularizers import AbstractRegularizer
from wellposed.errors import InvalidType
from wellposed.linalg import Jacobian
from wellposed.nn import AbstractActivation


class AbstractLinearMap(abc.ABC):
    """z -> W z for every sample of a batch."""

    #: The tensor that W is made of.
    tensor: Tensor

    @abc.abstractmethod
    def apply(self, z: Tensor) -> Tensor:
        """(n, ...) -> (n, ...): W z."""

    @abc.abstractmethod
    def transpose(self, v: Tensor) -> Tensor:
        """(n, ...) -> (n, ...): W^T v, with <v, W z> = <W^T v, z>."""

    @abc.abstractmethod
    def cotangent(self, left: Tensor, right: Tensor) -> Tensor:
        """The derivative of sum_i <left_i, W right_i> in `tensor`."""

    @abc.abstractmethod
    def with_tensor(self, tensor: Tensor) -> AbstractLinearMap:
        """The same kind of operator made of another tensor."""


class MatrixMap(AbstractLinearMap):
    """A matrix W (h, m): samples are rows, so W z is Z W^T."""

    def __init__(self, W: Tensor) -> None:
        self.tensor = W

    def apply(self, z: Tensor) -> Tensor:
        return z @ self.tensor.t()

    def transpose(self, v: Tensor) -> Tensor:
        return v @ self.tensor

    def cotangent(self, left: Tensor, right: Tensor) -> Tensor:
        return left.t() @ right

    def with_tensor(self, tensor: Tensor) -> MatrixMap:
        return MatrixMap(tensor)


@dataclass(frozen=True)
class Tangent:
    """A stage at a point: its value, and products with its Jacobian and with the transpose."""

    value: Tensor
    mv: Callable[[Tensor], Tensor]
    rmv: Callable[[Tensor], Tensor]


class AbstractStage(abc.ABC):
    """One factor of T = stage_L o ... o stage_1, for a batch of states (n, ...)."""

    @abc.abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """The value, out of place, as autograd should see it."""

    @abc.abstractmethod
    def linearize(self, z: Tensor) -> Tangent:
        """Value and Jacobian at z, without a graph."""

    def in_place(self, z: Tensor) -> Tensor:
        """The value without a graph, which may be faster."""
        return self(z)

    def take(self, rows: Tensor) -> AbstractStage:
        """The same for some of the samples."""
        return self

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the stage depends on."""
        return ()

    def with_inputs(self, *inputs: Tensor) -> AbstractStage:
        """The same with other tensors in their place."""
        return self

    def pull(self, q: Tensor, z: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What a cotangent q of the value at z means for z, and for each of `inputs`; without a
        graph."""
        return self.linearize(z).rmv(q), ()


class UnitLayer(AbstractStage):
    r"""f(z) = a/mu W^T s(W z + c) + (1 - a) z, the unit layer of [xie2021, eq. (5)].

    By [xie2021, Theorem 1] f = prox of a convex function if |W|^2 L_s <= mu. With D = diag(s'(W z +
    c)) its Jacobian a/mu W^T D W + (1 - a) I is symmetric and lies between (1 - a) I and (a |W|^2
    L_s/mu + 1 - a) I.

    Args:
        operator: W.
        c: (n, ...) = U x + b.
        activation: s.
        scale: a / mu.
        keep: 1 - a.
    """

    def __init__(
        self, operator: AbstractLinearMap, c: Tensor, activation: AbstractActivation, *, scale: float = 1.0, keep: float = 0.0
    ) -> None:
        self.operator, self.c, self.activation, self.scale, self.keep = operator, c, activation, scale, keep

    def hidden(self, z: Tensor) -> Tensor:
        """(n, ...) s(W z + c)."""
        return self.activation(self.operator.apply(z) + self.c)

    def __call__(self, z: Tensor) -> Tensor:
        product = self.operator.transpose(self.hidden(z))
        if self.scale != 1.0:
            product = self.scale * product
        return product if self.keep == 0.0 else torch.add(product, z, alpha=self.keep)

    def in_place(self, z: Tensor) -> Tensor:
        """The value without a graph and with fewer temporaries."""
        v = self.activation.apply_(self.operator.apply(z).add_(self.c))
        product = self.operator.transpose(v)
        if self.scale != 1.0:
            product.mul_(self.scale)
        return product if self.keep == 0.0 else product.add_(z, alpha=self.keep)

    def linearize(self, z: Tensor) -> Tangent:
        hidden = self.hidden(z)
        slope = self.activation.slope(hidden)

        def product(u: Tensor) -> Tensor:
            v = self.operator.apply(u)
            image = self.operator.transpose(v if slope is None else v.mul_(slope)).mul_(self.scale)
            return image if self.keep == 0.0 else image.add_(u, alpha=self.keep)

        value = self.operator.transpose(hidden).mul_(self.scale)
        # the Jacobian is symmetric
        return Tangent(value if self.keep == 0.0 else value.add_(z, alpha=self.keep), product, product)

    def take(self, rows: Tensor) -> UnitLayer:
        return UnitLayer(self.operator, self.c[rows], self.activation, scale=self.scale, keep=self.keep)

    def inputs(self) -> tuple[Tensor, ...]:
        return self.operator.tensor, self.c

    def with_inputs(self, *inputs: Tensor) -> UnitLayer:
        tensor, c = inputs
        return UnitLayer(self.operator.with_tensor(tensor), c, self.activation, scale=self.scale, keep=self.keep)

    def without_skip(self) -> UnitLayer:
        """W^T s(W z + c)/mu: the same with a = 1."""
        return UnitLayer(self.operator, self.c, self.activation, scale=self.scale / (1 - self.keep))

    def detach(self) -> UnitLayer:
        """The same without a graph."""
        return self.with_inputs(self.operator.tensor.detach(), self.c.detach())

    def sensitivity(self, q: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """(s, h) with s = a/mu s(W z + c) and h = a/mu D W q: <q, f(z)> has the gradients s q^T + h
        z^T in W and h in c."""
        s = self.activation.apply_(self.operator.apply(z).add_(self.c))
        h = self.operator.apply(q)
        slope = self.activation.slope(s)
        if slope is not None:
            h.mul_(slope)
        # in place: in a convolutional network these are by far the largest tensors of a backward pass
        return s.mul_(self.scale), h.mul_(self.scale)

    def pull(self, q: Tensor, z: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        s, h = self.sensitivity(q, z)
        in_W = self.operator.cotangent(s, q).add_(self.operator.cotangent(h, z))
        before = self.operator.transpose(h)
        return before if self.keep == 0.0 else before.add_(q, alpha=self.keep), (in_W, h)


class AbstractPrior(AbstractStage):
    """A last stage that expresses a preference: T_R o T in the place of T [xie2021, Section
    4.1]."""

    regularizer: AbstractRegularizer

    def linearize(self, z: Tensor) -> Tangent:
        jacobian = Jacobian(lambda rows: self(rows.reshape(z.shape)).flatten(1), z.flatten(1))
        return Tangent(
            jacobian.value.reshape(z.shape),
            lambda u: jacobian.mv(u.flatten(1)).reshape(u.shape),
            lambda u: jacobian.rmv(u.flatten(1)).reshape(u.shape),
        )

    @property
    @abc.abstractmethod
    def is_nonexpansive(self) -> bool:
        """Whether the stage is proved to be 1-Lipschitz, so that it takes nothing from the
        contraction of the others."""


@dataclass(frozen=True)
class ProxStep(AbstractPrior):
    r"""z -> prox_R(z), for a regularizer whose prox is known.

    The equilibrium of prox_R o prox_phi does not minimise phi + R, as [xie2021, Section 4.1] reads,
    but, jointly with z_1, phi(z_1) + R(z) + |z_1 - z|^2/2: R is a new block, tied to the others by
    the distance.

    Examples:
        >>> import torch, wellposed as wp
        >>> prior = wp.convex.ProxStep(wp.convex.L1(0.1))
        >>> model = wp.OptEq(4, 8, prior=prior, generator=torch.Generator().manual_seed(0))
        >>> model.solve(torch.ones(2, 4)).status
        StatusArray(CONVERGED: 2)
    """

    regularizer: AbstractRegularizer

    def __post_init__(self) -> None:
        _check_regularizer("ProxStep", self.regularizer)
        if not self.regularizer.has_prox:
            self.regularizer.prox(torch.zeros(1, 1))  # raises, and says what to use

    def __call__(self, z: Tensor) -> Tensor:
        return self.regularizer.prox(z)

    @property
    def is_nonexpansive(self) -> bool:
        return self.regularizer.is_convex


@dataclass(frozen=True)
class GradientStep(AbstractPrior):
    r"""z -> z - step_size grad R(z), for a regularizer whose prox is hard.

    Non-expansive if R is convex with an L_z-Lipschitz gradient and step_size <= 2/L_z; otherwise
    nothing proves that an equilibrium exists, and the status of the solve is all there is.

    Examples:
        >>> import torch, wellposed as wp
        >>> prior = wp.convex.GradientStep(wp.convex.SquaredL2(0.5), step_size=0.1)
        >>> model = wp.OptEq(4, 8, prior=prior, generator=torch.Generator().manual_seed(0))
        >>> model.solve(torch.ones(2, 4)).status
        StatusArray(CONVERGED: 2)
    """

    regularizer: AbstractRegularizer
    step_size: float = 0.1

    def __post_init__(self) -> None:
        _check_regularizer("GradientStep", self.regularizer)
        check_interval("GradientStep", "step_size", self.step_size, low=0.0, closed="neither")
        if not self.regularizer.has_gradient:
            self.regularizer.gradient(torch.zeros(1, 1))

    def __call__(self, z: Tensor) -> Tensor:
        return z - self.step_size * self.regularizer.gradient(z)

    @property
    def is_nonexpansive(self) -> bool:
        smoothness = self.regularizer.smoothness()
        return self.regularizer.is_convex and smoothness is not None and self.step_size * smoothness <= 2


def as_prior(prior: object, owner: str) -> AbstractPrior | None:
    """The stage of a `prior` argument: a stage, a regularizer (its prox step), or None."""
    if prior is None or isinstance(prior, AbstractPrior):
        return prior
    if isinstance(prior, AbstractRegularizer):
        return ProxStep(prior)
    raise InvalidType(
        f"The 'prior' parameter of {owner} must be a regularizer such as convex.L1(0.1), a ProxStep or GradientStep, or None; "
        f"got {prior!r}."
    )


def _check_regularizer(owner: str, regularizer: object) -> None:
    if not isinstance(regularizer, AbstractRegularizer):
        raise InvalidType(f"{owner} needs a regularizer such as convex.L1(0.1); got {regularizer!r}.")
