r"""How much the features and the kernel of a network can change in a ball of parameters: the input
of the radius certificate.

The ball has radius R in the norm |d readout|^2 + |d hidden|^2/h, where h is the speed of the hidden
parameters relative to the read-out. So the read-out moves by at most R and the hidden parameters,
together and in Frobenius norm, by sqrt(h) R.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DescentBounds:
    """What holds everywhere within given radii, for gradient descent.

    Attributes:
        least: Lower bound of sigma_min of the features.
        largest: Upper bound of their norm.
        gradients: By hidden parameter, g with |gradient|_F <= g |r|.
        steps: E with |(F_next - F) w_next| <= h eta E |r|, for hidden steps of at most h eta g |r|.
    """

    least: float
    largest: float
    gradients: Mapping[str, float]
    steps: float


@dataclass(frozen=True)
class JacobianBounds:
    """What holds everywhere in a ball for J, the Jacobian of the predictions in all parameters that
    are trained.

    Attributes:
        least: Lower bound of sigma_min(J) over its n rows.
        largest: Upper bound of |J|.
        variation: Upper bound of |S - J|, where J is the Jacobian with which a step begins, and S a
            matrix with f(end) - f(beginning) = S (end - beginning).
    """

    least: float
    largest: float
    variation: float


class AbstractSensitivity(abc.ABC):
    """A family's bounds in a ball around the present parameters. Values are one-sided: proofs rest
    on them.

    Attributes:
        residual: e, upper bound of |r|.
        readout: Names of the parameters that read out; empty if the read-out is fixed.
        hidden: Names of the others.

    Examples:
        >>> import wellposed as wp
        >>> sorted(wp.certify.AbstractSensitivity.__abstractmethods__)  # what a family must define
        ['descent', 'errors', 'least', 'measured']
        >>> issubclass(wp.certify.Contractive, wp.certify.AbstractSensitivity)
        True
    """

    residual: float
    readout: tuple[str, ...]
    hidden: tuple[str, ...]

    def prepare(self, hidden: float) -> None:
        """Precompute bounds valid for a change of the hidden parameters of at most `hidden`; `inf`
        is valid everywhere."""
        return  # a family whose bounds hold everywhere has nothing to precompute

    @abc.abstractmethod
    def least(self, R: float, h: float) -> float:
        """Lower bound of s = sqrt(lambda_min(K)) in the ball; not positive if nothing is known.

        K = F F^T + h (kernel of the hidden parameters), so that the flow has |theta'| >= s |r|.
        """

    @abc.abstractmethod
    def descent(self, radii: Mapping[str, float], h: float) -> DescentBounds | None:
        """Bounds within the given radii, for hidden steps h times that of the read-out; None if
        nothing is known.

        All read-out parameters together move by at most the radius of each of them.
        """

    def jacobian(self, R: float, share: float) -> JacobianBounds | None:
        """Bounds in the ball of radius R for descent with one step size, share/largest^2; None if
        nothing is known.

        Steps that begin with a residual of at most `residual` and end in the ball are covered.
        """
        return None  # what most families know is `descent`, which needs a read-out that is trained

    @abc.abstractmethod
    def measured(self) -> dict[str, float]:
        """The numbers that went in."""

    @abc.abstractmethod
    def errors(self) -> dict[str, float]:
        """The numerical errors that were taken into account."""
