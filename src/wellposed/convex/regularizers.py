"""Regularizers of an equilibrium: each with its proximal operator, its gradient, or both."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed._checks import check_interval, check_positive_integer
from wellposed.errors import InvalidArgument


class AbstractRegularizer(abc.ABC):
    """R: a function of the equilibrium that says what is preferred. Immutable.

    Rows are samples; a sample of another shape, such as (channels, height, width), is taken as one
    vector unless said otherwise. R has a `prox`, a `gradient`, or both; the one that it lacks
    raises.
    """

    #: Whether R is convex; where it is not, no theorem about selection applies.
    is_convex: bool = True

    @property
    def couples_samples(self) -> bool:
        """Whether the value belongs to the batch as a whole: then samples are no longer
        independent."""
        return False

    @abc.abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """(n, ...) -> (n,) R of every sample; () if samples are coupled."""

    def prox(self, z: Tensor, step_size: float = 1.0) -> Tensor:
        """(n, ...) -> (n, ...) argmin_y step_size R(y) + |y - z|^2 / 2."""
        raise InvalidArgument(
            f"{self!r} has no proximal operator in closed form; use GradientStep({self!r}, step_size) instead."
        )

    def gradient(self, z: Tensor) -> Tensor:
        """(n, ...) -> (n, ...) grad R."""
        raise InvalidArgument(f"{self!r} is not differentiable, so it has no gradient; use its prox.")

    def smoothness(self) -> float | None:
        """L_z with |grad R(y) - grad R(z)| <= L_z |y - z| everywhere; None if there is none."""
        return None

    @property
    def has_prox(self) -> bool:
        """Whether `prox` is known."""
        return type(self).prox is not AbstractRegularizer.prox

    @property
    def has_gradient(self) -> bool:
        """Whether `gradient` exists."""
        return type(self).gradient is not AbstractRegularizer.gradient


@dataclass(frozen=True)
class L1(AbstractRegularizer):
    r"""R(z) = weight |z|_1, whose prox is the soft threshold sign(z) max(|z| - weight, 0) [xie2021,
    Section 4.1].

    Examples:
        >>> import torch, wellposed as wp
        >>> wp.convex.L1(0.5).prox(torch.tensor([[2.0, 0.25]])).tolist()
        [[1.5, 0.0]]
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        check_weight(self, self.weight)

    def value(self, z: Tensor) -> Tensor:
        return self.weight * z.flatten(1).abs().sum(dim=1)

    def prox(self, z: Tensor, step_size: float = 1.0) -> Tensor:
        return torch.sign(z) * torch.relu(z.abs() - step_size * self.weight)


@dataclass(frozen=True)
class SquaredL2(AbstractRegularizer):
    r"""R(z) = weight |z - center|^2; prox (z + 2 weight center) / (1 + 2 weight), gradient 2 weight
    (z - center).

    Without a factor 1/2: [xie2021] uses both, and (weight/2) |z|^2 has the prox z / (1 + weight).

    Args:
        weight: Positive.
        center: The point that is preferred, a number for all coordinates.

    Examples:
        >>> import torch, wellposed as wp
        >>> R = wp.convex.SquaredL2(0.5, center=1.0)
        >>> R.prox(torch.tensor([[3.0]])).tolist(), R.gradient(torch.tensor([[3.0]])).tolist()
        ([[2.0]], [[2.0]])
    """

    weight: float = 1.0
    center: float = 0.0

    def __post_init__(self) -> None:
        check_weight(self, self.weight)

    def value(self, z: Tensor) -> Tensor:
        return self.weight * (z - self.center).flatten(1).square().sum(dim=1)

    def prox(self, z: Tensor, step_size: float = 1.0) -> Tensor:
        twice = 2 * step_size * self.weight
        return (z + twice * self.center) / (1 + twice)

    def gradient(self, z: Tensor) -> Tensor:
        return 2 * self.weight * (z - self.center)

    def smoothness(self) -> float:
        return 2 * self.weight


@dataclass(frozen=True)
class GroupL1(AbstractRegularizer):
    r"""R(z) = weight sum_g |z_g|_2 over consecutive groups: whole groups become zero.

    The prox shrinks every group radially, z_g max(1 - weight/|z_g|, 0).

    Args:
        weight: Positive.
        group_size: Coordinates of a group; must divide the number of features of a sample.

    Examples:
        >>> import torch, wellposed as wp
        >>> wp.convex.GroupL1(2.5, group_size=2).prox(torch.tensor([[0.3, 0.4, 3.0, 4.0]])).tolist()
        [[0.0, 0.0, 1.5, 2.0]]
    """

    weight: float = 1.0
    group_size: int = 2

    def __post_init__(self) -> None:
        check_weight(self, self.weight)
        check_positive_integer("GroupL1", "group_size", self.group_size)

    def value(self, z: Tensor) -> Tensor:
        return self.weight * torch.linalg.vector_norm(self._groups(z), dim=2).sum(dim=1)

    def prox(self, z: Tensor, step_size: float = 1.0) -> Tensor:
        groups = self._groups(z)
        squares = groups.square().sum(dim=2, keepdim=True)
        threshold = step_size * self.weight
        outside = squares > threshold**2
        # the root only where it is used: at a zero group its derivative would be infinite, and inf * 0 is NaN
        norm = torch.where(outside, squares, torch.ones_like(squares)).sqrt()
        return torch.where(outside, groups * (1 - threshold / norm), torch.zeros_like(groups)).reshape(z.shape)

    def _groups(self, z: Tensor) -> Tensor:
        features = z[0].numel() if len(z) else math.prod(z.shape[1:])
        if features % self.group_size:
            raise InvalidArgument(f"GroupL1: group_size={self.group_size} does not divide the {features} features of a sample.")
        return z.reshape(len(z), features // self.group_size, self.group_size)


@dataclass(frozen=True)
class Box(AbstractRegularizer):
    r"""R(z) = 0 if low <= z <= high in every coordinate, infinite elsewhere; its prox is the
    projection onto the box.

    Examples:
        >>> import torch, wellposed as wp
        >>> wp.convex.Box(0.0, 1.0).prox(torch.tensor([[-2.0, 0.5, 3.0]])).tolist()
        [[0.0, 0.5, 1.0]]
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise InvalidArgument(f"Box needs low <= high; got low={self.low!r}, high={self.high!r}.")

    def value(self, z: Tensor) -> Tensor:
        inside = ((z >= self.low) & (z <= self.high)).flatten(1).all(dim=1)
        return torch.where(inside, 0.0, math.inf).to(z.dtype)

    def prox(self, z: Tensor, step_size: float = 1.0) -> Tensor:
        return z.clamp(self.low, self.high)


@dataclass(frozen=True)
class InverseNorm(AbstractRegularizer):
    r"""R(z) = weight / (|z|^2 + eps): prefers *large* features. Not convex, so [xie2021, Theorem 4]
    says nothing about it.

    Gradient -2 weight z / (|z|^2 + eps)^2. The Hessian is largest in modulus at z = 0, so L_z = 2
    weight / eps^2.

    Examples:
        >>> import torch, wellposed as wp
        >>> wp.convex.InverseNorm(1.0).gradient(torch.tensor([[1.0]])).tolist()
        [[-0.5]]
    """

    weight: float = 1.0
    eps: float = 1.0
    is_convex = False

    def __post_init__(self) -> None:
        check_weight(self, self.weight)
        check_interval("InverseNorm", "eps", self.eps, low=0.0, high=math.inf, closed="neither")

    def value(self, z: Tensor) -> Tensor:
        return self.weight / (z.flatten(1).square().sum(dim=1) + self.eps)

    def gradient(self, z: Tensor) -> Tensor:
        rows = z.flatten(1)
        q = rows.square().sum(dim=1, keepdim=True) + self.eps
        return (-2 * self.weight * rows / q.square()).reshape(z.shape)

    def smoothness(self) -> float:
        return 2 * self.weight / self.eps**2


@dataclass(frozen=True)
class Decorrelation(AbstractRegularizer):
    r"""R(Z) = (weight/2) |D Z Z^T D - I|_F^2: features that point in different directions [xie2021,
    Appendix A.1].

    Z has one row per feature; D divides every row by its norm. With Y = D Z, C = Y Y^T and E = C -
    I the gradient is

        2 weight D [E Y - diag(E C) Y],

    which differs from the one with D held constant. What the columns of Z are depends on the state:
    for (n, channels, height, width) a column is a pixel and every sample has its own R; for (n, m)
    a column is a sample, and the samples of a batch are coupled. Not convex, and not smooth where a
    feature vanishes identically.

    Args:
        weight: Positive.
        across: "pixels" or "samples".
    """

    weight: float = 1.0
    across: str = "samples"
    is_convex = False

    def __post_init__(self) -> None:
        check_weight(self, self.weight)
        if self.across not in ("pixels", "samples"):
            raise InvalidArgument(
                f"The 'across' parameter of Decorrelation must be 'pixels' or 'samples'. Got {self.across!r}."
            )

    @property
    def couples_samples(self) -> bool:
        return self.across == "samples"

    def value(self, z: Tensor) -> Tensor:
        _, _, C = self._normalized(z)
        E = C - torch.eye(C.shape[1], dtype=C.dtype, device=C.device)
        value = self.weight / 2 * E.square().sum(dim=(1, 2))
        return value[0] if self.couples_samples else value

    def gradient(self, z: Tensor) -> Tensor:
        D, Y, C = self._normalized(z)
        E = C - torch.eye(C.shape[1], dtype=C.dtype, device=C.device)
        diagonal = (E * C).sum(dim=2, keepdim=True)  # diag(E C), as C is symmetric
        return self._like(2 * self.weight * D * (torch.bmm(E, Y) - diagonal * Y), z)

    def _normalized(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """D (b, m, 1), Y = D Z (b, m, N) and C = Y Y^T, with b = 1 if samples are coupled."""
        if self.couples_samples:
            Z = z.flatten(1).t().unsqueeze(0)
        elif z.dim() >= 3:
            Z = z.flatten(2)
        else:
            raise InvalidArgument(
                f"Decorrelation(across='pixels') needs a state (n, channels, ...); got {tuple(z.shape)}. Use across='samples'."
            )
        # A feature that is zero everywhere has no direction: it is left at zero, with C_ii = 0, instead of NaN.
        squares = Z.square().sum(dim=2, keepdim=True)
        D = torch.where(squares > 0, squares, torch.ones_like(squares)).rsqrt()
        Y = D * Z
        return D, Y, torch.bmm(Y, Y.transpose(1, 2))

    def _like(self, rows: Tensor, z: Tensor) -> Tensor:
        return rows[0].t().reshape(z.shape) if self.couples_samples else rows.reshape(z.shape)


def check_weight(regularizer: AbstractRegularizer, weight: float) -> None:
    """Raises unless the weight is a positive number."""
    check_interval(type(regularizer).__name__, "weight", weight, low=0.0, high=math.inf, closed="neither")
