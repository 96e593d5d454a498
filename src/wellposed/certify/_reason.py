"""Why the radius certificate is undecided, in words: samples that no network fits, too many of them, or what else is known."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wellposed.certify._measure import Measurement
from wellposed.certify._units import HOMOGENEOUS
from wellposed.linalg.scaling import ldexp

__all__ = ["Samples"]


@dataclass(frozen=True)
class Samples:
    """What the samples say about why nothing is proved.

    Attributes:
        X: (n, d). y: (n,).
        features: How many numbers of a sample the read-out multiplies; None if that is not known.
        without_bias: Whether the prediction at x = 0 is 0 for all parameters.
    """

    X: Tensor
    y: Tensor
    features: int | None = None
    without_bias: bool = False

    @classmethod
    def of(cls, at: Measurement) -> Samples:
        X, y = (ldexp(tensor, at.unit.exponent) for tensor in (at.X, at.y))
        return cls(X, y, at.features.shape[1], type(at.model) in HOMOGENEOUS)

    def reason(self, s0: float, *, readout: bool, layerwise: bool) -> str:
        """The note of an undecided certificate.

        Args:
            s0: Lower bound of sqrt(lambda_min) of the kernel at the present point.
            readout: Whether a read-out is trained.
            layerwise: Whether layer-wise rates were searched for already.
        """
        if s0 <= 0 and (found := self._singular()):
            return found
        n = self.X.shape[0]
        if readout and self.features is not None and n > self.features:
            hidden = "the residual is too large for what" if s0 > 0 else "nothing is proved of what"
            return (
                f"There are more samples ({n}) than features ({self.features}): but for special labels, zero loss is out of "
                f"reach for the read-out alone, and {hidden} the hidden parameters add. Take a wider network or fewer samples."
            )
        if s0 <= 0 and readout:
            return "The features are not proved to be of full rank: some samples are nearly parallel, or the network is narrow."
        if s0 <= 0:
            return (
                "The Jacobian is not proved to be of full rank: there are too many samples, nearly parallel ones, or units at "
                "their kinks."
            )
        if not readout:
            return "The residual is too large for the radius, or units are too near to their kinks: train on and certify again."
        other = "" if layerwise else ", or ask for layer-wise rates (hidden_rate='largest')"
        return f"The residual is too large for the radius: train on and certify again{other}."

    def _singular(self) -> str:
        """Rows of X that make the kernel singular at any parameters; contradictory ones first."""
        first: dict[bytes, int] = {}
        equal = ""
        for i, row in enumerate((self.X + 0.0).numpy()):  # -0.0 becomes 0.0
            j = first.setdefault(row.tobytes(), i)
            if j == i:
                continue
            if self.y[i] != self.y[j]:
                return (
                    f"Rows {j} and {i} of X are equal and their labels differ ({float(self.y[j]):.4g} and "
                    f"{float(self.y[i]):.4g}): zero loss is impossible for any network."
                )
            equal = equal or f"Rows {j} and {i} of X are equal, so the kernel is singular: keep one of them."
        zero = (self.X == 0).all(dim=1).nonzero().flatten().tolist() if self.without_bias else []
        if zero:
            i, label = zero[0], float(self.y[zero[0]])
            end = f"its label {label:.4g} is out of reach" if label else "leave it out, it is fitted already"
            return f"Row {i} of X is zero, where the prediction is 0 whatever the parameters, so the kernel is singular: {end}."
        return equal
