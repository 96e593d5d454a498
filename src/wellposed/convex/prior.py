"""Priors on the equilibrium: the last stage of a regularized architecture.

Two ways to express a preference [xie2021, Section 4]. A *regularized architecture* appends a stage to the map, the proximal
operator of R or a step along its gradient, and so changes the equilibrium: give `prior=` to a network. *Selection* leaves the
equilibria as they are and picks the one with the least R: see `selection.py`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed._checks import check_interval
from wellposed.convex.regularizers import AbstractRegularizer
from wellposed.convex.stages import AbstractStage, Tangent
from wellposed.errors import InvalidType
from wellposed.linalg import Jacobian

__all__ = ["AbstractPrior", "GradientStep", "ProxStep", "as_prior"]


class AbstractPrior(AbstractStage):
    """A last stage that expresses a preference: T_R o T in the place of T [xie2021, Section 4.1]."""

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
        """Whether the stage is proved to be 1-Lipschitz, so that it takes nothing from the contraction of the others."""


@dataclass(frozen=True)
class ProxStep(AbstractPrior):
    r"""z -> prox_R(z), for a regularizer whose prox is known.

    The equilibrium of prox_R o prox_phi does not minimise phi + R, as [xie2021, Section 4.1] reads, but, jointly with z_1,
    phi(z_1) + R(z) + |z_1 - z|^2/2: R is a new block, tied to the others by the distance.
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

    Non-expansive if R is convex with an L_z-Lipschitz gradient and step_size <= 2/L_z; otherwise nothing proves that an
    equilibrium exists, and the status of the solve is all there is.
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
