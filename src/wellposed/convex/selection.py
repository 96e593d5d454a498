"""Which equilibrium, when there are many: the sequential averaging of [xie2021, Section 4.2]."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed._checks import check_interval, check_positive_integer
from wellposed.convex._network import AbstractOptEq
from wellposed.convex.regularizers import AbstractRegularizer
from wellposed.errors import InvalidArgument, InvalidType, WellposedWarning


@dataclass(frozen=True)
class Schedule:
    r"""The step sizes of [xie2021, Theorem 4]: beta_k = eta/k^rho, lambda_k = eta/k^c, gamma = 1/(2
    L_z), with

        rho, c > 0,    rho + 2c < 1,    eta = min(sqrt(2 L_z), 1/2, L_z/2).

    (The print is damaged there; sqrt(2 L_z) and the range of lambda are forced by the proof.) The
    error decays like k^(-min(rho, c)) at best: slowly.

    Args:
        smoothness: L_z, the Lipschitz constant of grad R.
        rho, c: The exponents.
    """

    smoothness: float
    rho: float = 0.3
    c: float = 0.3

    def __post_init__(self) -> None:
        check_interval("Schedule", "smoothness", self.smoothness, low=0.0, closed="neither")
        check_interval("Schedule", "rho", self.rho, low=0.0, high=1.0, closed="neither")
        check_interval("Schedule", "c", self.c, low=0.0, high=0.5, closed="neither")
        if self.rho + 2 * self.c >= 1:
            raise InvalidArgument(
                f"Schedule needs rho + 2 c < 1 (Theorem 4); got rho={self.rho:g}, c={self.c:g}. Try 0.3 and 0.3."
            )

    @property
    def eta(self) -> float:
        """min(sqrt(2 L_z), 1/2, L_z/2)."""
        return min(math.sqrt(2 * self.smoothness), 0.5, self.smoothness / 2)

    @property
    def gamma(self) -> float:
        """1/(2 L_z)."""
        return 1 / (2 * self.smoothness)

    def beta(self, k: int) -> float:
        """The weight of the regularizer in step k = 1, 2, ..."""
        return self.eta / k**self.rho

    def shrinkage(self, k: int) -> float:
        """lambda_k."""
        return self.eta / k**self.c


@dataclass(frozen=True)
class Selection:
    """What the iteration came to.

    Attributes:
        value: (n, ...) the last iterate, with a graph if one was being recorded.
        residual: (n,) |T(z) - z| there, measured.
        regularizer: R there: (n,), or () if samples are coupled.
        num_steps: How many steps were made.
        is_proved: Whether Theorem 4 applies as far as R is concerned: convex, with a Lipschitz
            gradient. It is about the limit of infinitely many steps; how near `value` is to an
            equilibrium, `residual` says.
    """

    value: Tensor
    residual: Tensor
    regularizer: Tensor
    num_steps: int
    is_proved: bool


def sequential_averaging(
    T: Callable[[Tensor], Tensor],
    z0: Tensor,
    regularizer: AbstractRegularizer,
    *,
    steps: int = 20,
    schedule: Schedule | None = None,
) -> Selection:
    r"""z^k = beta_k [(1 - gamma lambda_k) z - gamma grad R(z)] + (1 - beta_k) T(z) at z = z^(k-1)
    [xie2021, eq. (10)].

    If T is non-expansive, R convex with an L_z-Lipschitz gradient and a single minimiser on the
    equilibria of T, and the equilibria of the averaged maps are bounded together, then z^k tends to
    the equilibrium with the least R [xie2021, Theorem 4]. Recorded by autograd like any other loop,
    so K steps of it can be trained through.

    Args:
        T: The map, (n, ...) -> (n, ...).
        z0: (n, ...) the start.
        regularizer: R, with a gradient. A warning is given if it is not convex.
        steps: K.
        schedule: The step sizes; by default those of Theorem 4 for the regularizer's own
            smoothness.
    """
    if not isinstance(regularizer, AbstractRegularizer):
        raise InvalidType(f"regularizer must be a regularizer such as convex.SquaredL2(0.5); got {regularizer!r}.")
    check_positive_integer("sequential_averaging", "steps", steps)
    smoothness = regularizer.smoothness()
    if schedule is None:
        if not regularizer.has_gradient:
            regularizer.gradient(z0)  # raises, and says why
        if smoothness is None:
            raise InvalidArgument(
                f"{regularizer!r} has no gradient with a known Lipschitz constant, so Theorem 4 sets no step sizes. "
                "Give schedule=Schedule(smoothness=...)."
            )
        schedule = Schedule(smoothness)
    is_proved = regularizer.is_convex and smoothness is not None and schedule.smoothness >= smoothness
    if not regularizer.is_convex:
        warnings.warn(
            f"{regularizer!r} is not convex: the iteration still ends near an equilibrium, but Theorem 4 does not say which.",
            WellposedWarning,
            stacklevel=2,
        )
    z = z0
    for k in range(1, steps + 1):
        beta = schedule.beta(k)
        preferred = (1 - schedule.gamma * schedule.shrinkage(k)) * z - schedule.gamma * regularizer.gradient(z)
        z = beta * preferred + (1 - beta) * T(z)
    with torch.no_grad():
        residual = torch.linalg.vector_norm((T(z) - z).flatten(1), dim=1)
        value = regularizer.value(z)
    return Selection(z, residual, value, steps, is_proved)


def select_equilibrium(
    model: AbstractOptEq,
    X: Tensor,
    regularizer: AbstractRegularizer,
    *,
    steps: int = 20,
    schedule: Schedule | None = None,
    z0: Tensor | None = None,
) -> Selection:
    """`sequential_averaging` for the map of a network: the equilibrium that the regularizer
    prefers.

    Args:
        model: An OptEq network.
        X: Its inputs.
        regularizer: R.
        steps: K; the paper trains with 20.
        schedule: The step sizes.
        z0: (n, ...) the start; zeros if not given.

    Examples:
        >>> import torch, wellposed as wp
        >>> model, *_ = wp.convex.line_of_equilibria()
        >>> x = torch.zeros(1, 1, dtype=torch.float64)
        >>> selected = wp.convex.select_equilibrium(model, x, wp.convex.SquaredL2(0.5), steps=200)
        >>> selected.value.round(decimals=1).tolist(), selected.is_proved
        ([[0.4, 0.8]], True)
    """
    if not isinstance(model, AbstractOptEq):  # by type: it needs `bind`, `features` and `sample_shape` of an OptEq network
        raise InvalidType(f"select_equilibrium needs an OptEq network; got {type(model).__name__}.")
    features = model.features(X)
    shape = (len(X), *model.sample_shape(features))
    f = model.bind(features)
    start = torch.zeros(shape, dtype=features.dtype, device=features.device) if z0 is None else z0
    if tuple(start.shape) != shape:
        raise InvalidArgument(f"z0 must have the shape of the state, {shape}; got {tuple(start.shape)}.")
    rows = 1 if model.couples_samples else len(X)

    def T(z: Tensor) -> Tensor:
        return f.tracked(z.reshape(rows, -1)).reshape(shape)

    return sequential_averaging(T, start, regularizer, steps=steps, schedule=schedule)
