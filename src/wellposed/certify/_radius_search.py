"""The engine of the radius certificate: its conditions as numbers, least radii that satisfy them,
and the conditions as they are reported, with both of their sides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from wellposed.certify.certificate import OWN_SOURCE, Hypothesis
from wellposed.linalg.directed import DataUnit, down, rate_after, up
from wellposed.nn.sensitivity import AbstractSensitivity, DescentBounds, JacobianBounds

Found = TypeVar("Found")

_ROUNDS = 400
_WIDENINGS = 6
#: Parts of [0, R] in the sum that bounds the integral of s.
FLOW_PARTS = 24
#: Of the hidden parameters, relative to the read-out: where the search for the largest begins.
SMALLEST_SPEED = 1e-12
#: Radii beyond those of the first certificate for which active sets are tried, as factors.
_GROWTHS = (8.0, 4.0, 2.0)
#: Step sizes of plain descent that are tried, times |J|^2: the smaller, the nearer descent is to the flow.
SHARES = (1.0, 0.5, 0.25, 0.0625, 2.0**-10)


@dataclass(frozen=True)
class FlowResult:
    """A radius R >= e/mean, where s = s(R), and the mean is that of s over [0, R], from below."""

    radius: float
    least: float
    mean: float
    speed: float

    @property
    def rate(self) -> float:
        """s^2: |r(t)| <= exp(-s^2 t) |r(0)|."""
        return down(self.least**2)


def flow_radius(sensitivity: AbstractSensitivity, h: float) -> FlowResult | None:
    r"""The least R for which the integral of s from 0 to R is at least e, if there is one: then the
    path of the flow is never longer than R.

    Once the path has the length l, |theta'| >= s(l) |r|, and along the flow d(|r|^2/2)/dt =
    -|theta'|^2, so d|r| <= -s(l) dl. s falls, so the integral is bounded from below by a sum, and
    is concave: Newton's method finds the least R from below.

    Args:
        sensitivity: Of the family.
        h: Speed of the hidden parameters relative to the read-out.
    """
    e, mean = sensitivity.residual, 0.0

    def needed(R: float, s: float) -> float:
        nonlocal mean
        mean = _mean(sensitivity, R, h, s)
        missing = e - down(R * mean)
        return R if missing <= 0 else max(R + missing / s, math.nextafter(R, math.inf))

    found = _least_radius(sensitivity, h, lambda R: sensitivity.least(R, h), needed)
    return None if found is None else FlowResult(*found, mean, h)


def _mean(sensitivity: AbstractSensitivity, R: float, h: float, last: float) -> float:
    """Lower bound of the mean of s over [0, R]: in each part s is at least that at its end."""
    ends = (up(R * j / FLOW_PARTS) for j in range(1, FLOW_PARTS))
    return down(math.fsum([last, *(max(last, sensitivity.least(end, h)) for end in ends)]) / FLOW_PARTS)


def _least_radius(
    sensitivity: AbstractSensitivity, h: float, slope: Callable[[float], float], needed: Callable[[float, float], float]
) -> tuple[float, float] | None:
    """The least R >= needed(R, slope(R)), and slope(R), if there is one; slope falls as R grows."""
    sensitivity.prepare(math.inf)
    s = slope(0.0)
    if s <= 0:
        return None
    # if s falls linearly, e/s(R) and R touch at R = 2 e/s(0), so the least R is within this cap; if it falls faster, R may
    # pass the cap, and continues from there with what is valid further out. There s is smaller: s <= 0 ends the search.
    R = sensitivity.residual / s
    for _ in range(_WIDENINGS):
        cap = up(2.0 * R)
        sensitivity.prepare(up(math.sqrt(h) * cap))
        for _ in range(_ROUNDS):
            R = R * (1 + 1e-9)
            if cap < R:
                break
            s = slope(R)
            if s <= 0:
                return None
            least = needed(R, s)
            if least <= R:
                return R, s
            R = least
        else:
            return None
    return None


@dataclass(frozen=True)
class PlainDescentResult:
    """A radius that descent with one step size, share/largest^2, never leaves."""

    radius: float
    bounds: JacobianBounds
    share: float

    @property
    def step(self) -> float:
        return down(self.share / self.bounds.largest**2)

    @property
    def rate(self) -> float:
        """q with |r_k| <= q^k |r_0|: the better of the two bounds of Theorem 3."""
        s, L, variation = self.bounds.least, self.bounds.largest, self.bounds.variation
        gain = max(s * _slope(self.bounds, self.share), down(s**2 - up(variation * L)))
        return rate_after(self.step * down(gain))


def _slope(bounds: JacobianBounds, share: float) -> float:
    """(1 - share/2) s - variation: by how much |r| falls, at least, per length of a step."""
    return down(down((1 - share / 2) * bounds.least) - bounds.variation)


def plain_descent(sensitivity: AbstractSensitivity) -> PlainDescentResult | None:
    r"""The least radius for descent on all parameters with one step size, for the largest of a few
    steps, if there is one.

    With J the Jacobian where a step begins, S its secant (f(end) - f(beginning) = S (end -
    beginning)), |S - J| <= d, s <= sigma_min(J), |J| <= L and eta = share/L^2,

        |r_next| <= |(I - eta J J^T) r| + eta d |J^T r| <= |r| - eta |J^T r| ((1 - share/2) s - d),

    and the step is eta |J^T r| long: the path is at most e/((1 - share/2) s - d). See Theorem 3 of
    docs/certificates.md.
    """
    for share in SHARES:

        def slope(R: float, share: float = share) -> float:
            bounds = sensitivity.jacobian(R, share)
            return -math.inf if bounds is None else _slope(bounds, share)

        found = _least_radius(sensitivity, 1.0, slope, lambda R, s: up(sensitivity.residual / s))
        if found is not None:
            bounds = sensitivity.jacobian(found[0], share)
            assert bounds is not None
            return PlainDescentResult(found[0], bounds, share)
    return None


@dataclass(frozen=True)
class DescentResult:
    """Radii that gradient descent never leaves."""

    radii: dict[str, float]
    bounds: DescentBounds
    step: float
    speed: float

    @property
    def rate(self) -> float:
        """q with |r_k| <= q^k |r_0|."""
        return rate_after(self.step * down(self.bounds.least**2 - up(self.speed * self.bounds.steps)))


def descent_radii(sensitivity: AbstractSensitivity, h: float) -> DescentResult | None:
    r"""The least radii for descent with read-out step eta = 1/B'^2 and hidden steps h eta, if there
    are some.

    With F the features, B' >= |F|, s <= sigma_min(F) and E as in `DescentBounds`, everywhere within
    the radii,

        |r_next| <= |(I - eta F F^T) r| + h eta E |r| <= |r| - eta |F^T r|^2/(2 |r|) + h eta E |r|.

    Summed over the steps this bounds the paths if 2 h E < s^2: by R_a = 2 s e/(s^2 - 2 h E) for the
    read-out, and by h g R_a/s for a hidden parameter whose gradient is at most g |r|.

    Args:
        sensitivity: Of the family.
        h: Hidden steps relative to that of the read-out.
    """
    e = sensitivity.residual
    radii = dict.fromkeys((*sensitivity.readout, *sensitivity.hidden), 0.0)
    for _ in range(_ROUNDS):
        radii = {name: up(radius * (1 + 1e-9)) for name, radius in radii.items()}
        bounds = sensitivity.descent(radii, h)
        if bounds is None or bounds.least <= 0:
            return None
        s, gap = bounds.least, down(bounds.least**2 - 2 * up(h * bounds.steps))
        if gap <= 0:
            return None
        path = up(2 * s * e / gap)
        needed = dict.fromkeys(sensitivity.readout, path)
        needed |= {name: up(h * g * path / s) for name, g in bounds.gradients.items()}
        if all(needed[name] <= radii[name] for name in radii):
            return DescentResult(radii, bounds, down(1.0 / bounds.largest**2), h)
        radii = {name: max(radii[name], needed[name]) for name in radii}
        if any(not math.isfinite(radius) for radius in radii.values()):
            return None
    return None


def largest_flow(sensitivity: AbstractSensitivity) -> FlowResult | None:
    """The flow certificate of the largest speed h <= 1 that was found; not the largest there is."""
    return _largest(lambda h: flow_radius(sensitivity, h), 1.0)


def descent_at(sensitivity: AbstractSensitivity, h: float) -> DescentResult | None:
    """The descent certificate of a given h, with the same means as `largest_descent`."""
    sensitivity.prepare(math.inf)
    result = descent_radii(sensitivity, h)
    if result is None and (globally := _everywhere(sensitivity)) is not None:
        for growth in _GROWTHS:
            _prepare_nearby(sensitivity, globally, growth)
            if (result := descent_radii(sensitivity, h)) is not None:
                break
    return result


def _everywhere(sensitivity: AbstractSensitivity) -> DescentResult | None:
    """The largest h with what is valid at any distance."""
    sensitivity.prepare(math.inf)
    return _largest(lambda h: descent_radii(sensitivity, h), 1.0)


def _prepare_nearby(sensitivity: AbstractSensitivity, result: DescentResult, growth: float) -> None:
    sensitivity.prepare(growth * math.sqrt(sum(result.radii[name] ** 2 for name in sensitivity.hidden)))


def largest_descent(sensitivity: AbstractSensitivity) -> DescentResult | None:
    """The descent certificate of the largest h <= 1 that was found; not the largest there is."""
    best = globally = _everywhere(sensitivity)
    if best is None or globally is None or best.speed == 1.0:
        return best
    # what is valid only nearby allows more: sets for radii that a greater h would need
    for growth in _GROWTHS:
        _prepare_nearby(sensitivity, globally, growth)
        top = min(1.0, growth * globally.speed)
        better = _largest(lambda h: descent_radii(sensitivity, h), top, floor=min(best.speed, top))
        if better is not None and better.speed > best.speed:
            best = better
    return best


def _largest(attempt: Callable[[float], Found | None], top: float, floor: float = SMALLEST_SPEED) -> Found | None:
    """What `attempt` gives for the largest argument that gives something, to about 5 per cent, by
    bisection of the logarithm."""
    if (result := attempt(top)) is not None or (best := attempt(floor)) is None:
        return result
    low, high = math.log(floor), math.log(top)
    while high - low > 0.05:
        middle = (low + high) / 2
        if (result := attempt(math.exp(middle))) is None:
            high = middle
        else:
            best, low = result, middle
    return best


def full_rank(s: float, unit: DataUnit) -> Hypothesis:
    """Of all theorems: s > 0."""
    return _compared("s: sqrt(lambda_min) of the kernel in the ball", (s, ">", 0.0), unit, 1, refutes=False)


def ball(mean: float, e: float, R: float | None) -> Hypothesis:
    """The ball is not left: R >= e/(mean of s over [0, R])."""
    name = "radius R >= e/(mean of s on the way)"
    if R is None:
        return no_radius(name, e / mean if mean > 0 else math.inf)
    return Hypothesis.compare(name, OWN_SOURCE, R, ">=", e / mean)


def no_radius(name: str, needed: float, note: str = "") -> Hypothesis:
    """The condition that failed for every radius, with what it asks for at the present point."""
    text = "no radius satisfies it; the bound shown is that of the present point" + (f", {note}" if note else "")
    return Hypothesis(name, OWN_SOURCE, None, needed, ">=", None, text)


def outweighs(h: float, E: float, s: float, unit: DataUnit, *, here: bool = False) -> Hypothesis:
    """Of Theorem 2; `here` if the numbers are those of the present point instead of a ball's."""
    name, note = "the read-out outweighs the hidden steps: 2 h E < s^2", "at the present point" if here else ""
    return _compared(name, (2 * h * E, "<", s**2), unit, 2, refutes=not here, note=note)


def steady(bounds: JacobianBounds, share: float, unit: DataUnit, *, here: bool = False) -> Hypothesis:
    """Of Theorem 3; `here` as in `outweighs`."""
    name, right = "the Jacobian is steady: |S - J| < (1 - share/2) s", (1 - share / 2) * bounds.least
    note = f"steps of {share:g}/|J|^2" + (", at the present point" if here else "")
    return _compared(name, (bounds.variation, "<", right), unit, 1, refutes=not here, note=note)


def _compared(name: str, sides: tuple[float, str, float], unit: DataUnit, power: int, **options: Any) -> Hypothesis:
    """A comparison that was made in the unit, with the sides of the data as they were given."""
    made = Hypothesis.compare(name, OWN_SOURCE, *sides, **options)
    value, bound, where = unit.sides(sides[0], sides[2], power)
    return replace(made, value=value, bound=bound, note=", ".join(filter(None, (made.note, where))))
