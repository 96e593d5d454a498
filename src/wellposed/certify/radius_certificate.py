"""Our own certificate: from the present parameters, training converges to zero loss."""

from __future__ import annotations

import copy
import math

from torch import Tensor, nn

from wellposed.certify._certificate import Certificate, Hypothesis, Verdict
from wellposed.certify._conditions import ball, full_rank, no_radius, outweighs, steady
from wellposed.certify._family import sensitivity_of
from wellposed.certify._finish import finish, in_range
from wellposed.certify._gate import changed, trained_otherwise
from wellposed.certify._measure import Measurement, check_data, measure, not_finite
from wellposed.certify._radius_search import (
    SHARES,
    SMALLEST_SPEED,
    descent_at,
    flow_radius,
    largest_descent,
    largest_flow,
    plain_descent,
)
from wellposed.certify._reason import Samples
from wellposed.certify._sensitivity import SHARPENINGS
from wellposed.certify._units import LIMIT, Unit, no_room
from wellposed.convex import AbstractDenseOptEq, OptEqSensitivity
from wellposed.errors import InvalidArgument
from wellposed.nn import AbstractNetwork, AbstractSensitivity

__all__ = ["check_radius_options", "radius", "radius_at", "sensitivity_of"]

DYNAMICS = ("flow", "descent")


def radius(
    model: AbstractNetwork | AbstractDenseOptEq,
    X: Tensor,
    y: Tensor,
    *,
    dynamics: str = "flow",
    hidden_rate: float | str | None = None,
    sharpen: tuple[str, ...] = SHARPENINGS,
) -> Certificate:
    r"""Proves from the present parameters that training ends at zero loss, or says what is missing.

    Flow: in a ball of radius R around the parameters the tangent kernel has sqrt(lambda_min) >= s(R). If R >= e/s(R), e the
    norm of the present residual, the path of the flow is shorter than R, so it never leaves the ball, and
    |r(t)| <= exp(-s^2 t) e. The proof, and that for descent, is in docs/certificates.md. The loss is |r|^2/2 summed over the
    samples; the read-out is trained, except in `ImplicitOnlyDEQ`, whose kernel is that of its recurrent matrix.

    Costs a few singular value decompositions of (n, m) and (m, m), and with the sharpening "active" about n products of the
    recurrent matrix on active units.

    Args:
        model: A theory network, a dense OptEq network, or any `AbstractNetwork` with a `sensitivity(measurement)` method that
            returns an `AbstractSensitivity`.
        X: (n, d) inputs.
        y: (n,) targets.
        dynamics: "flow" or "descent".
        hidden_rate: h, the speed of the hidden parameters relative to the read-out, in (0, 1]. "largest" searches for the
            largest that certifies. None is 1 for flow (the plain gradient flow) and "largest" for descent. Without a read-out
            that is trained (`ImplicitOnlyDEQ`) there is nothing to be slower than, and one speed or step for all.
        sharpen: Which sharpenings to use, of "active" and "kernel".
    """
    rate = check_radius_options(dynamics, hidden_rate, sharpen)
    X64, y64 = check_data(model, X, y)
    if isinstance(model, AbstractDenseOptEq):
        return _dense_opteq(model, X64, y64, dynamics, rate)
    return radius_at(measure(model, X64, y64), dynamics, rate, sharpen)


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
    at: Measurement | str, dynamics: str, hidden_rate: float | str, sharpen: tuple[str, ...] = SHARPENINGS
) -> Certificate:
    """The same from a measurement that was made already."""
    if isinstance(at, str):
        return _not_measured(at, dynamics)

    def make() -> Certificate:
        return _judged(sensitivity_of(at, sharpen), at.model, Samples.of(at), dynamics, hidden_rate, at.unit)

    return in_range("radius", dynamics, make)


def _dense_opteq(model: AbstractDenseOptEq, X: Tensor, y: Tensor, dynamics: str, hidden_rate: float | str) -> Certificate:
    if reason := changed(model) or not_finite(model):
        return _not_measured(reason, dynamics)
    twin = copy.deepcopy(model).double().cpu()
    if reason := no_room(twin, X, y):
        return _not_measured(reason, dynamics)

    def make() -> Certificate:
        return _judged(OptEqSensitivity(twin, X, y), model, Samples(X, y), dynamics, hidden_rate, Unit())

    return in_range("radius", dynamics, make)


def _not_measured(reason: str, dynamics: str) -> Certificate:
    well_posed = Hypothesis("exactly one equilibrium", "docs/certificates.md", None, None, "<", None, reason)
    return Certificate("radius", Verdict.UNDECIDED, (well_posed,), dynamics, note=reason)


def _judged(
    sensitivity: AbstractSensitivity, model: nn.Module, samples: Samples, dynamics: str, hidden_rate: float | str, unit: Unit
) -> Certificate:
    if other := trained_otherwise(model, (*sensitivity.readout, *sensitivity.hidden)):
        return Certificate("radius", Verdict.UNDECIDED, (), dynamics, measured=sensitivity.measured(), note=other)
    if dynamics == "flow":
        return _flow(sensitivity, samples, hidden_rate, unit)
    if sensitivity.readout:
        return _descent(sensitivity, samples, hidden_rate, unit)
    return _plain_descent(sensitivity, samples, unit)


def _flow(sensitivity: AbstractSensitivity, samples: Samples, hidden_rate: float | str, unit: Unit) -> Certificate:
    e = sensitivity.residual
    if not sensitivity.readout:
        hidden_rate = 1.0  # nothing to be slower than
    result = largest_flow(sensitivity) if hidden_rate == "largest" else flow_radius(sensitivity, float(hidden_rate))
    errors = sensitivity.errors()
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
    return finish(
        "radius",
        Verdict.CERTIFIED,
        (full_rank(s, unit), ball(s, e, R)),
        "flow",
        rates=rates,
        rate=rate,
        radii=radii,
        licenses=licenses,
        measured=sensitivity.measured(),
        errors=errors,
    )


def _descent(sensitivity: AbstractSensitivity, samples: Samples, hidden_rate: float | str, unit: Unit) -> Certificate:
    errors = sensitivity.errors()
    if hidden_rate == "largest":
        result = largest_descent(sensitivity)
    else:
        result = descent_at(sensitivity, float(hidden_rate))
    if result is None:
        h = SMALLEST_SPEED if hidden_rate == "largest" else float(hidden_rate)
        sensitivity.prepare(math.inf)
        here = sensitivity.descent(dict.fromkeys((*sensitivity.readout, *sensitivity.hidden), 0.0), h)
        s0 = sensitivity.least(0.0, h) if here is None else here.least
        missing: tuple[Hypothesis, ...] = (full_rank(s0, unit),)
        if here is not None and s0 > 0:
            gap = outweighs(h, here.steps, s0, unit, here=True)
            room = s0**2 - 2 * h * here.steps
            needed = 2 * s0 * sensitivity.residual / room if room > 0 else math.inf
            missing += (gap, no_radius("radius of the read-out R_w >= 2 s e/(s^2 - 2 h E)", needed, f"h = {h:.3g}"))
        note = samples.reason(s0, readout=True, layerwise=hidden_rate == "largest")
        return _undecided(sensitivity, "descent", missing, note)
    s, E, h = result.bounds.least, result.bounds.steps, result.speed
    step = unit.exact(result.step, -2)
    step_size = dict.fromkeys(sensitivity.readout, step) | dict.fromkeys(sensitivity.hidden, h * step)
    licenses = (
        f"gradient descent on |r|^2/2 from here, with these or smaller steps in the same proportion (h = {h:.3g}), keeps "
        "exactly one equilibrium and stays within the radii",
        f"with just these steps |r_k| <= {result.rate:.12g}^k {unit.upper(sensitivity.residual):.3g} for all k: it ends at "
        "zero loss",
    )
    return finish(
        "radius",
        Verdict.CERTIFIED,
        (full_rank(s, unit), outweighs(h, E, s, unit)),
        "descent",
        step_size=step_size,
        rate=result.rate,
        radii=result.radii,
        licenses=licenses,
        measured=sensitivity.measured(),
        errors=errors,
    )


def _plain_descent(sensitivity: AbstractSensitivity, samples: Samples, unit: Unit) -> Certificate:
    """Nothing reads out that could be faster than the rest: one step size for all."""
    result, e = plain_descent(sensitivity), sensitivity.residual
    if result is None:
        sensitivity.prepare(math.inf)
        s0, share = sensitivity.least(0.0, 1.0), SHARES[-1]
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
        f"with just this step |r_k| <= {result.rate:.12g}^k {unit.upper(e):.3g} for all k: it ends at zero loss",
    )
    return finish(
        "radius",
        Verdict.CERTIFIED,
        (full_rank(bounds.least, unit), steady(bounds, result.share, unit)),
        "descent",
        step_size=dict.fromkeys(sensitivity.hidden, unit.exact(result.step, -2)),
        rate=result.rate,
        radii=dict.fromkeys(sensitivity.hidden, R),
        licenses=licenses,
        measured=sensitivity.measured(),
        errors=sensitivity.errors(),
    )


def _undecided(sensitivity: AbstractSensitivity, dynamics: str, hypotheses: tuple[Hypothesis, ...], note: str) -> Certificate:
    measured, errors = sensitivity.measured(), sensitivity.errors()
    return Certificate("radius", Verdict.UNDECIDED, hypotheses, dynamics, measured=measured, errors=errors, note=note)
