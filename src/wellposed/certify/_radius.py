"""The engine of the radius certificate: least radii, from any point."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wellposed.certify._measure import down, up
from wellposed.nn import AbstractSensitivity, DescentBounds

__all__ = ["DescentResult", "FlowResult", "descent_at", "descent_radii", "flow_radius", "largest_descent", "largest_flow"]

_ROUNDS = 400
_WIDENINGS = 6
_SMALLEST_SPEED = 1e-12
#: Radii beyond those of the first certificate for which active sets are tried, as factors.
_GROWTHS = (8.0, 4.0, 2.0)


@dataclass(frozen=True)
class FlowResult:
    """A radius R >= e/s(R), with s = s(R)."""

    radius: float
    least: float
    speed: float


def flow_radius(sensitivity: AbstractSensitivity, h: float) -> FlowResult | None:
    r"""The least R with R >= e/s(R), if there is one: then the flow never leaves the ball of radius R.

    In the ball |theta'| >= s |r|, and along the flow d(|r|^2/2)/dt = -|theta'|^2, so d|r|/dt <= -s |theta'|: the path is never
    longer than e/s. The right side grows with R, so iterating R <- e/s(R) upward from 0 finds the least R.

    Args:
        sensitivity: Of the family.
        h: Speed of the hidden parameters relative to the read-out.
    """
    e = sensitivity.residual
    sensitivity.prepare(math.inf)
    s = sensitivity.least(0.0, h)
    if s <= 0:
        return None
    # if s falls linearly, e/s(R) and R touch at R = 2 e/s(0), so the least R is within this cap; if it falls faster, R may
    # pass the cap, and goes on from there with what is valid further out. There s is smaller: s <= 0 ends the search.
    R = e / s
    for _ in range(_WIDENINGS):
        cap = up(2.0 * R)
        sensitivity.prepare(up(math.sqrt(h) * cap))
        for _ in range(_ROUNDS):
            R = R * (1 + 1e-9)
            if cap < R:
                break
            bound = sensitivity.least(R, h)
            if bound <= 0:
                return None
            needed = up(e / bound)
            if needed <= R:
                return FlowResult(R, bound, h)
            R = needed
        else:
            return None
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
        return min(1.0, up(1.0 - self.step * (self.bounds.least**2 - self.speed * self.bounds.steps)))


def descent_radii(sensitivity: AbstractSensitivity, h: float) -> DescentResult | None:
    r"""The least radii for descent with read-out step eta = 1/B'^2 and hidden steps h eta, if there are some.

    With F the features, B' >= |F|, s <= sigma_min(F) and E as in `DescentBounds`, everywhere within the radii,

        |r_next| <= |(I - eta F F^T) r| + h eta E |r| <= |r| - eta |F^T r|^2/(2 |r|) + h eta E |r|.

    Summed over the steps this bounds the paths if 2 h E < s^2: by R_a = 2 s e/(s^2 - 2 h E) for the read-out, and by
    h g R_a/s for a hidden parameter whose gradient is at most g |r|.

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
    if result is not None:
        return result
    globally = _everywhere(sensitivity)
    if globally is None:
        return None
    for growth in _GROWTHS:
        _prepare_nearby(sensitivity, globally, growth)
        result = descent_radii(sensitivity, h)
        if result is not None:
            return result
    return None


def _everywhere(sensitivity: AbstractSensitivity) -> DescentResult | None:
    """The largest h with what is valid at any distance."""
    sensitivity.prepare(math.inf)
    best: DescentResult | None = _largest(lambda h: descent_radii(sensitivity, h), 1.0)
    return best


def _prepare_nearby(sensitivity: AbstractSensitivity, result: DescentResult, growth: float) -> None:
    sensitivity.prepare(growth * math.sqrt(sum(result.radii[name] ** 2 for name in sensitivity.hidden)))


def largest_descent(sensitivity: AbstractSensitivity) -> DescentResult | None:
    """The descent certificate of the largest h <= 1 that was found; not the largest there is."""
    best = _everywhere(sensitivity)
    if best is None or best.speed == 1.0:
        return best
    # what is valid only nearby allows more: sets for radii that a greater h would need
    globally = best
    for growth in _GROWTHS:
        _prepare_nearby(sensitivity, globally, growth)
        top = min(1.0, growth * globally.speed)
        better = _largest(lambda h: descent_radii(sensitivity, h), top, floor=min(best.speed, top))
        if better is not None and better.speed > best.speed:
            best = better
    return best


def _largest(attempt: Callable[[float], Any], top: float, floor: float = _SMALLEST_SPEED) -> Any:
    """The result of `attempt` for the largest argument that gives one, to about 5 per cent, by bisection of the logarithm."""
    result = attempt(top)
    if result is not None:
        return result
    low, high = math.log(floor), math.log(top)
    best = attempt(floor)
    if best is None:
        return None
    while high - low > 0.05:
        middle = (low + high) / 2
        result = attempt(math.exp(middle))
        if result is None:
            high = middle
        else:
            best, low = result, middle
    return best
