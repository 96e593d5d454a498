"""Our own certificate: from the present parameters, training converges to zero loss."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from wellposed.certify import _radius_search as search
from wellposed.certify._gate import changed, check_data, not_finite, trained_otherwise
from wellposed.certify._radius_search import ball, full_rank, no_radius, outweighs, steady
from wellposed.certify._sensitivity import SHARPENINGS, sensitivity_of
from wellposed.certify.certificate import OWN_SOURCE, Certificate, Hypothesis, Verdict, finish, in_range
from wellposed.certify.measurement import LIMIT, Measurement, has_no_bias, measure, no_room
from wellposed.errors import InvalidArgument
from wellposed.linalg.directed import DataUnit, ldexp
from wellposed.nn.sensitivity import AbstractSensitivity

DYNAMICS = ("flow", "descent")


def radius(
    model: Any,
    X: Tensor,
    y: Tensor,
    *,
    dynamics: str = "flow",
    hidden_rate: float | str | None = None,
    sharpen: tuple[str, ...] = SHARPENINGS,
) -> Certificate:
    r"""Proves from the present parameters that training ends at zero loss, or says what is missing.

    Flow: in a ball of radius R around the parameters the tangent kernel has sqrt(lambda_min) >=
    s(R). If the integral of s from 0 to R is at least e, the norm of the present residual, the path
    of the flow is shorter than R, so it never leaves the ball, and |r(t)| <= exp(-s(R)^2 t) e. The
    proof, and that for descent, is in docs/certificates.md. The loss is |r|^2/2 summed over the
    samples; the read-out is trained, except in `ImplicitOnlyDEQ`, whose kernel is that of its
    recurrent matrix.

    Costs a few singular value decompositions of (n, m) and (m, m), and with the sharpening "active"
    about n factorizations of the recurrent matrix on active units.

    Args:
        model: A theory network, a dense OptEq network, or any network with a `theory` or a
            `sensitivity(measurement)` method that returns an `AbstractSensitivity`.
        X: (n, d) inputs.
        y: (n,) targets.
        dynamics: "flow" or "descent".
        hidden_rate: h, the speed of the hidden parameters relative to the read-out, in (0, 1].
            "largest" searches for the largest that certifies. None is 1 for flow (the plain
            gradient flow) and "largest" for descent. Without a read-out that is trained
            (`ImplicitOnlyDEQ`) there is nothing to be slower than, and one speed or step for all.
        sharpen: Which sharpenings to use, of "active" and "kernel".

    Examples:
        >>> import torch, wellposed as wp
        >>> X, y = wp.data.load("sphere", n=3, features=20, norm="sqrt_d", dtype=torch.float64)
        >>> model = wp.GaussianDEQ(20, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> certificate = wp.certify.radius(model, X, y, hidden_rate="largest")
        >>> certificate.verdict, certificate.rate > 0, sorted(certificate.rates)
        (<Verdict.CERTIFIED: 'certified'>, True, ['U', 'W', 'a'])
    """
    rate = check_radius_options(dynamics, hidden_rate, sharpen)
    X64, y64 = check_data(model, X, y)
    if model.theory.closed_form:
        return radius_at(measure(model, X64, y64), dynamics, rate, sharpen)
    if reason := changed(model) or not_finite(model):
        return _not_measured(reason, dynamics)
    twin = copy.deepcopy(model).double().cpu()
    if reason := no_room(twin, X64, y64):
        return _not_measured(reason, dynamics)

    def make() -> Certificate:
        return _judged(twin.sensitivity_at(X64, y64), model, Samples(X64, y64), dynamics, rate, DataUnit())

    return in_range("radius", dynamics, make)


def check_radius_options(dynamics: object, hidden_rate: object, sharpen: object) -> float | str:
    """The hidden rate to use; one sentence for whatever is wrong."""
    if dynamics not in DYNAMICS:
        raise InvalidArgument(f"dynamics must be 'flow' or 'descent'; got {dynamics!r}.")
    if not isinstance(sharpen, (tuple, list)) or not all(name in SHARPENINGS for name in sharpen):
        raise InvalidArgument(f"sharpen must be a tuple of {' and '.join(map(repr, SHARPENINGS))}; got {sharpen!r}.")
    if hidden_rate is None:
        return 1.0 if dynamics == "flow" else "largest"
    if hidden_rate == "largest":
        return "largest"
    if isinstance(hidden_rate, bool) or not isinstance(hidden_rate, (int, float)) or not 0 < hidden_rate <= 1:
        raise InvalidArgument(f"hidden_rate must be a number in (0, 1] or 'largest'; got {hidden_rate!r}.")
    if hidden_rate < 2.0**-LIMIT:
        raise InvalidArgument(f"hidden_rate must be at least 2^-{LIMIT}, or products underflow; got {hidden_rate!r}.")
    return float(hidden_rate)


def radius_at(
    point: Measurement | str, dynamics: str, hidden_rate: float | str, sharpen: tuple[str, ...] = SHARPENINGS
) -> Certificate:
    """The same, from a measurement."""
    if isinstance(point, str):
        return _not_measured(point, dynamics)

    def make() -> Certificate:
        return _judged(sensitivity_of(point, sharpen), point.model, Samples.of(point), dynamics, hidden_rate, point.unit)

    return in_range("radius", dynamics, make)


def _not_measured(reason: str, dynamics: str) -> Certificate:
    well_posed = Hypothesis("exactly one equilibrium", OWN_SOURCE, None, None, "<", None, reason)
    return Certificate("radius", Verdict.UNDECIDED, (well_posed,), dynamics, note=reason)


def _judged(
    sensitivity: AbstractSensitivity,
    model: nn.Module,
    samples: Samples,
    dynamics: str,
    hidden_rate: float | str,
    unit: DataUnit,
) -> Certificate:
    if other := trained_otherwise(model, (*sensitivity.readout, *sensitivity.hidden)):
        return Certificate("radius", Verdict.UNDECIDED, (), dynamics, measured=sensitivity.measured(), note=other)
    if dynamics == "flow":
        return _flow(sensitivity, samples, hidden_rate, unit)
    if sensitivity.readout:
        return _descent(sensitivity, samples, hidden_rate, unit)
    return _plain_descent(sensitivity, samples, unit)


def _flow(sensitivity: AbstractSensitivity, samples: Samples, hidden_rate: float | str, unit: DataUnit) -> Certificate:
    e = sensitivity.residual
    if not sensitivity.readout:
        hidden_rate = 1.0  # nothing to be slower than
    result = (
        search.largest_flow(sensitivity) if hidden_rate == "largest" else search.flow_radius(sensitivity, float(hidden_rate))
    )
    h = 1.0 if hidden_rate == "largest" else float(hidden_rate)
    if result is None:
        sensitivity.prepare(math.inf)
        s0 = sensitivity.least(0.0, h)
        note = samples.reason(s0, readout=bool(sensitivity.readout), layerwise=hidden_rate == "largest")
        return _undecided(sensitivity, "flow", (full_rank(s0, unit), ball(s0, e, None)), note)
    R, s, h = result.radius, result.least, result.speed
    rate = unit.exact(result.rate, 2)
    radii = dict.fromkeys(sensitivity.readout, R) | dict.fromkeys(sensitivity.hidden, math.sqrt(h) * R)
    rates = dict.fromkeys(sensitivity.readout, 1.0) | dict.fromkeys(sensitivity.hidden, h)
    slower = "" if h == 1 else f", hidden parameters at {h:.3g} times the speed of the read-out"
    licenses = (
        f"the gradient flow of |r|^2/2 from here{slower} keeps exactly one equilibrium and moves by at most {R:.3g}",
        f"|r(t)| <= exp(-{rate:.4g} t) {unit.upper(e):.3g} for all t: it ends at zero loss",
    )
    numbers = {"rates": rates, "rate": rate, "radii": radii}
    return _certified(sensitivity, "flow", (full_rank(s, unit), ball(result.mean, e, R)), licenses, numbers)


def _descent(sensitivity: AbstractSensitivity, samples: Samples, hidden_rate: float | str, unit: DataUnit) -> Certificate:
    largest = hidden_rate == "largest"
    result = search.largest_descent(sensitivity) if largest else search.descent_at(sensitivity, float(hidden_rate))
    if result is None:
        h = search.SMALLEST_SPEED if largest else float(hidden_rate)
        sensitivity.prepare(math.inf)
        here = sensitivity.descent(dict.fromkeys((*sensitivity.readout, *sensitivity.hidden), 0.0), h)
        s0 = sensitivity.least(0.0, h) if here is None else here.least
        missing: tuple[Hypothesis, ...] = (full_rank(s0, unit),)
        if here is not None and s0 > 0:
            gap = outweighs(h, here.steps, s0, unit, here=True)
            room = s0**2 - 2 * h * here.steps
            needed = 2 * s0 * sensitivity.residual / room if room > 0 else math.inf
            missing += (gap, no_radius("radius of the read-out R_w >= 2 s e/(s^2 - 2 h E)", needed, f"h = {h:.3g}"))
        note = samples.reason(s0, readout=True, layerwise=largest)
        return _undecided(sensitivity, "descent", missing, note)
    s, E, h = result.bounds.least, result.bounds.steps, result.speed
    step = unit.exact(result.step, -2)
    step_size = dict.fromkeys(sensitivity.readout, step) | dict.fromkeys(sensitivity.hidden, h * step)
    licenses = (
        f"gradient descent on |r|^2/2 from here, with these or smaller steps in the same proportion (h = {h:.3g}), keeps "
        "exactly one equilibrium and stays within the radii",
        f"with exactly these steps |r_k| <= {result.rate:.12g}^k {unit.upper(sensitivity.residual):.3g} for all k: it ends at "
        "zero loss",
    )
    numbers = {"step_size": step_size, "rate": result.rate, "radii": result.radii}
    return _certified(sensitivity, "descent", (full_rank(s, unit), outweighs(h, E, s, unit)), licenses, numbers)


def _plain_descent(sensitivity: AbstractSensitivity, samples: Samples, unit: DataUnit) -> Certificate:
    """Nothing reads out that could be faster than the rest: one step size for all."""
    result, e = search.plain_descent(sensitivity), sensitivity.residual
    if result is None:
        sensitivity.prepare(math.inf)
        s0, share = sensitivity.least(0.0, 1.0), search.SHARES[-1]
        here = sensitivity.jacobian(0.0, share)
        missing: tuple[Hypothesis, ...] = (full_rank(s0, unit),)
        if here is not None and s0 > 0:
            room = (1 - share / 2) * here.least - here.variation
            needed = e / room if room > 0 else math.inf
            missing += (
                steady(here, share, unit, here=True),
                no_radius("radius R >= e/((1 - share/2) s - |S - J|)", needed, f"steps of {share:g}/|J|^2"),
            )
        return _undecided(sensitivity, "descent", missing, samples.reason(s0, readout=False, layerwise=False))
    bounds, R = result.bounds, result.radius
    licenses = (
        "gradient descent on |r|^2/2 from here, with this or a smaller step, keeps exactly one equilibrium and moves by at "
        f"most {R:.3g}",
        f"with exactly this step |r_k| <= {result.rate:.12g}^k {unit.upper(e):.3g} for all k: it ends at zero loss",
    )
    step_size = dict.fromkeys(sensitivity.hidden, unit.exact(result.step, -2))
    numbers = {"step_size": step_size, "rate": result.rate, "radii": dict.fromkeys(sensitivity.hidden, R)}
    hypotheses = (full_rank(bounds.least, unit), steady(bounds, result.share, unit))
    return _certified(sensitivity, "descent", hypotheses, licenses, numbers)


def _certified(
    sensitivity: AbstractSensitivity,
    dynamics: str,
    hypotheses: tuple[Hypothesis, ...],
    licenses: tuple[str, ...],
    numbers: dict[str, Any],
) -> Certificate:
    rest = {"licenses": licenses, "measured": sensitivity.measured(), "errors": sensitivity.errors()}
    return finish("radius", Verdict.CERTIFIED, hypotheses, dynamics, **numbers, **rest)


def _undecided(sensitivity: AbstractSensitivity, dynamics: str, hypotheses: tuple[Hypothesis, ...], note: str) -> Certificate:
    measured, errors = sensitivity.measured(), sensitivity.errors()
    return Certificate("radius", Verdict.UNDECIDED, hypotheses, dynamics, measured=measured, errors=errors, note=note)


@dataclass(frozen=True)
class Samples:
    """The samples, which may be the reason why nothing is proved.

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
    def of(cls, point: Measurement) -> Samples:
        X, y = (ldexp(tensor, point.unit.exponent) for tensor in (point.X, point.y))
        return cls(X, y, point.features.shape[1], has_no_bias(point.model))

    def reason(self, s0: float, *, readout: bool, layerwise: bool) -> str:
        """The note of an undecided certificate: s0 <= sqrt(lambda_min) of the kernel here; whether
        a read-out is trained; whether layer-wise rates were searched for."""
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
            return "The residual is too large for the radius, or units are near their kinks: train further and certify again."
        other = "" if layerwise else ", or ask for layer-wise rates (hidden_rate='largest')"
        return f"The residual is too large for the radius: train further and certify again{other}."

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
            end = f"its label {label:.4g} is out of reach" if label else "drop it, it is fitted already"
            return f"Row {i} of X is zero, where the prediction is 0 whatever the parameters, so the kernel is singular: {end}."
        return equal
