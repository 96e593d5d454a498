r"""The inequalities between the stored numbers of a proof, in exact rational arithmetic.

Every float64 number is a fraction, so nothing is rounded; roots are enclosed between fractions. A
number that follows from others must agree with them to 1e-8 (kappa: 5e-7), and bounds that follow
from nothing else have six digits: a number that was changed alone then contradicts the others, or
is not a number of a proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

from wellposed.prove.verify_reading import StoredProof

Report = Callable[[str, bool, str], None]

_TIGHT = Fraction(1, 10**8)
_KAPPA_TIGHT = Fraction(5, 10**7)
#: What the rounding of a rate near 1 may take.
_LAST_DIGIT = Fraction(1, 2**51)
#: A proof ends where residuals are less than four times their errors.
_RESIDUAL = Fraction(4, 3)
#: Bounds of six digits.
_SHORT = ("expansion", "jacobian", "omega", "error", "mask_ratio", "residual")
_SHORT_TAIL = ("residual", "s", "s0", "L", "f", "e0", "g", "g0", "Lambda", "omega")
#: Most pieces of [s, L] that are examined.
_PIECES = 200_000
#: Points of [s, L] at which the least quotient is looked for.
_POINTS = 400
#: How often the interval around the least of these is made shorter by a third.
_SEARCHES = 50


def check_numbers(proof: StoredProof, report: Report) -> None:
    """Everything that needs nothing but proof.json."""
    document, steps, K = proof.document, proof.steps, proof.K
    eta = Fraction(proof.step_size)
    k = Fraction(proof.scales["R"])
    report("step size", eta > 0, f"{proof.step_size:.6g}")
    _check_scales(proof, report)
    delta = [Fraction(value) for value in steps["delta"]]
    report("delta", delta[0] == 0, f"it begins with {steps['delta'][0]}")
    for j in range(K):
        M, eps, L = (Fraction(steps[name][j] or 0) for name in ("expansion", "error", "jacobian"))
        follows = (1 + eta * M) * delta[j] + eps
        fine = follows <= delta[j + 1] <= (1 + _TIGHT) * follows
        report("delta", fine, f"step {j}: {steps['delta'][j + 1]:.6g} stored, {_shown(follows):.6g} follows")
        report("jacobian", eta * L * L <= 2, f"step {j}: eta L^2 = {_shown(eta * L * L):.6g}, at most 2")
        room = 1 - Fraction(steps["omega"][j]) - k * delta[j]
        report("omega", room > 0, f"step {j}: 1 - omega - k delta = {_shown(room):.4g}")
        ratio = steps["mask_ratio"][j]
        fine = (ratio is None) == (proof.smooth or delta[j] == 0)
        report("mask", fine and (ratio is None or ratio > 1), f"step {j}: ratio {ratio}")
        for name in _SHORT:
            report("digits", _is_short(steps[name][j]), f"step {j}: {name} {steps[name][j]!r}")
        r, residual = _root(2 * Fraction(steps["loss"][j]), up=False), Fraction(steps["residual"][j])
        fine = r <= residual * (1 + _TIGHT) and residual <= (r + L * delta[j]) * _RESIDUAL
        report("residual", fine, f"step {j}: {_shown(residual):.8g} stored, {_shown(r):.8g} at the computed point")
        report("digits", (steps["expansion"][j] is None) == (delta[j] == 0), f"step {j}: expansion, where delta is not 0")
    for name in ("delta", "loss"):
        value = proof.number(name, document.get(name), least=0.0)
        if name == "delta":
            report(
                "delta",
                Fraction(value) == delta[K],
                f"{value:.6g} stored for the last point, {_shown(delta[K]):.6g} in its column",
            )
    proved = proof.text("verdict") == "proved"
    claims = proved and proof.tail is not None and proof.text("reason") == ""
    report("verdict", claims, "proved" if claims else "the file does not claim a proof")


def _is_short(value: float | None) -> bool:
    """Whether it has at most six decimal digits."""
    return value is None or float(f"{value:.5e}") == value


def _check_scales(proof: StoredProof, report: Report) -> None:
    """Which parts a family trains, and what a scale must be."""
    trained = {"gaussian": "RUw", "skip": "RUwv", "implicit_only": "R"}[proof.family]
    ones = {"gaussian": "RUw", "skip": "wv", "implicit_only": ""}[proof.family]
    fine = all((proof.scales[part] > 0) == (part in trained) for part in proof.parts)
    fine = fine and all(proof.scales[part] == 1 for part in ones)
    report("scales", fine, ", ".join(f"{part} {scale:.4g}" for part, scale in proof.scales.items()))


def check_tail_numbers(proof: StoredProof, report: Report) -> None:
    """The inequalities of the tail, of a file whose other numbers agree."""
    assert proof.tail is not None
    eta, k, delta = Fraction(proof.step_size), Fraction(proof.scales["R"]), Fraction(proof.steps["delta"][proof.K])
    radius = Fraction(proof.number("radius", proof.document.get("radius"), least=0.0))
    rate = Fraction(proof.number("rate", proof.document.get("rate"), least=0.0))
    for name, value in proof.tail.items():
        report("digits", name not in _SHORT_TAIL or _is_short(value), f"tail: {name} {value!r}")
    distance = proof.number("distance", proof.document.get("distance"), least=0.0)
    report("digits", _is_short(distance), f"distance {distance!r}")
    if not all(_is_short(value) for name, value in proof.tail.items() if name in _SHORT_TAIL):
        return
    t = {name: Fraction(value) for name, value in proof.tail.items()}
    report("tail", 0 <= rate < 1, f"rate {_shown(rate)!r} below 1")
    report(
        "tail",
        t["omega"] + k * (delta + radius) < 1,
        f"omega {_shown(t['omega']):.4g} on the ball of radius {_shown(radius):.4g}",
    )
    check = _check_smooth if proof.smooth else _check_relu
    check(t, eta, delta, radius, rate, report)
    if not proof.smooth:
        whole = t["switches"].denominator == 1 and t["switches"] <= proof.n * proof.m
        report("tail", whole, f"{_shown(t['switches']):g} switches")


def _shown(x: Fraction) -> float:
    """For messages: x as a float64 number, infinite if it is too large for one."""
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _near(value: Fraction, follows: Fraction) -> bool:
    """value is a lower bound of what follows, and not much below it."""
    return (1 - _TIGHT) * follows <= value <= follows


def _near_rate(rate: Fraction, follows: Fraction) -> bool:
    """rate is 1 less what follows, or a little larger."""
    return (1 - _TIGHT) * follows - _LAST_DIGIT <= 1 - rate <= follows


def _check_relu(
    t: dict[str, Fraction], eta: Fraction, delta: Fraction, radius: Fraction, rate: Fraction, report: Report
) -> None:
    s, L, f, e0, kappa, e = (t[name] for name in ("s", "L", "f", "e0", "kappa", "residual"))
    g, g0 = t.get("g", Fraction(0)), t.get("g0", f * f)
    report("tail", 0 < s <= L, f"0 < s = {_shown(s):.4g} <= L = {_shown(L):.4g}")
    if not (0 < s <= L and kappa > 0):
        report("tail", False, f"kappa {_shown(kappa):.4g} is not positive")
        return
    steep = kappa * eta * (L + f)
    report("tail", steep <= 1, f"kappa eta (L + f) = {_shown(steep):.4g}, at most 1")
    tight = e <= radius * kappa <= (1 + _TIGHT) * e
    report("tail", tight, f"radius {_shown(radius):.9g}, residual/kappa = {_shown(e / kappa):.9g}")
    near = _near_rate(rate, eta * kappa * (s + f))
    report("tail", near, f"rate {_shown(rate)!r}")
    if steep <= 1 and tight and near:  # else the rest is not worth the time
        holds, least = _least_quotient(s, L, f, e0, eta, kappa, g, g0)
        fine = holds and kappa >= (1 - _KAPPA_TIGHT) * least
        report("tail", fine, f"kappa {_shown(kappa):.9g}, least quotient {_shown(least):.9g}")


def _least_quotient(
    s: Fraction, L: Fraction, f: Fraction, e0: Fraction, eta: Fraction, kappa: Fraction, g: Fraction, g0: Fraction
) -> tuple[bool, Fraction]:
    """Whether the quotient of the tail (see `format`) is at least kappa on [s, L], and its least
    value seen."""
    t, s2 = eta * L * L, s * s
    A1, A2 = 1 - t / 2 - eta * s2 / 2, t * s2 / 2

    def h2(x: Fraction) -> Fraction:
        return (s2 + L * L) * (x * x - s2) + s2 * s2

    def gap(x: Fraction) -> Fraction:
        """Numerator less kappa (x + f), from below."""
        E, pull = f * x + e0, min(f * f, g * x * x + g0)
        return A1 * x * x + A2 - pull - eta * _root(h2(x), up=True) * E - eta * E * E / 2 - kappa * (x + f)

    def slope(a: Fraction, b: Fraction) -> Fraction:
        """Upper bound of |gap'| on [a, b]."""
        h_a, h_b = _root(h2(a), up=False), _root(h2(b), up=True)
        rising = (2 * min(A1 * a, A1 * b), 2 * max(A1 * a, A1 * b))

        def falling(x: Fraction, h: Fraction, other: Fraction) -> Fraction:
            E = f * x + e0
            return eta * ((s2 + L * L) * x / other * E + h * f) + eta * E * f + kappa

        return max(abs(rising[1] - falling(a, h_a, h_b)), abs(rising[0] - falling(b, h_b, h_a) - 2 * g * b))

    def quotient(x: Fraction) -> Fraction:
        return gap(x) / (x + f) + kappa

    bend = _root((f * f - g0) / g, up=True) if g > 0 else s  # where the two terms of pull are equal
    least = min(_least_near(quotient, list(_grid(s, L))), quotient(min(max(bend, s), L)))
    pieces = [(s, L)]
    for _ in range(_PIECES):
        if not pieces:
            return True, least
        a, b = pieces.pop()
        middle = _short((a + b) / 2, up=True)
        middle = min(max(middle, a), b)
        value = gap(middle)
        if value < 0 or (b - a) * 10**12 < L:
            return False, least
        if value - slope(a, b) * max(b - middle, middle - a) < 0:
            pieces += [(a, middle), (middle, b)]
    return False, least


def _least_near(quotient: Callable[[Fraction], Fraction], grid: list[Fraction]) -> Fraction:
    """The least quotient on a grid, and between the two neighbours of that point."""
    values = [quotient(x) for x in grid]
    j = min(range(len(grid)), key=values.__getitem__)
    a, b, least = grid[max(j - 1, 0)], grid[min(j + 1, len(grid) - 1)], values[j]
    for _ in range(_SEARCHES):
        one, two = _short(a + (b - a) / 3, up=True), _short(b - (b - a) / 3, up=True)
        left, right = quotient(one), quotient(two)
        least = min(least, left, right)
        a, b = (a, two) if left <= right else (one, b)
    return least


def _grid(s: Fraction, L: Fraction) -> Iterator[Fraction]:
    """s, and x for which x^2 - s^2 is a geometric sequence up to L^2 - s^2: h grows by its root, so
    the least quotient is often near s."""
    yield s
    span = L * L - s * s
    first = min(Fraction(1), s * s / span) / 10**6 if span else Fraction(1)
    for j in range(_POINTS):
        share = Fraction(_shown(first) ** (1 - j / (_POINTS - 1)))
        yield min(max(_root(s * s + span * share, up=True), s), L)


def _short(x: Fraction, *, up: bool) -> Fraction:
    """A fraction near x > 0 with few digits, on this side of it."""
    unit = Fraction(2) ** (_exponent(x) - 80)
    return (math.ceil(x / unit) if up else math.floor(x / unit)) * unit


def _root(x: Fraction, *, up: bool) -> Fraction:
    """sqrt(x) from above or from below, to 2^-78 of itself; 0 if x is not positive."""
    if x <= 0:
        return Fraction(0)
    unit = Fraction(2) ** (_exponent(x) // 2 - 80)
    scaled = math.isqrt(math.floor(x / unit**2))
    return (scaled + 1 if up else scaled) * unit


def _exponent(x: Fraction) -> int:
    """e with 2^(e - 1) < x < 2^(e + 1)."""
    return x.numerator.bit_length() - x.denominator.bit_length()


def _check_smooth(
    t: dict[str, Fraction], eta: Fraction, delta: Fraction, radius: Fraction, rate: Fraction, report: Report
) -> None:
    e, s0, L, Lam, c, slope, s1 = (t[name] for name in ("residual", "s0", "L", "Lambda", "c", "slope", "s1"))
    report("tail", 0 < s0 <= L, f"0 < s0 = {_shown(s0):.4g} <= L = {_shown(L):.4g}")
    # the least of A1 y + A2/y over y >= x is x (1 - eta x^2/2) at y = x if it rises there, and never below 2 sqrt(A1 A2)
    square, A1 = eta * L * L, 1 - eta * L * L / 2 - eta * s0 * s0 / 2
    rises = 1 - square - eta * s0 * s0 / 2 >= 0
    most = 1 - eta * s0 * s0 / 2 if rises else _root(2 * square * A1, up=False) if A1 > 0 else Fraction(0)
    report("tail", _near(c, most), f"c = {_shown(c):.6g}, at most {_shown(most):.6g}")
    follows = s0 - Lam * (delta + radius)
    report("tail", s1 > 0 and _near(s1, follows), f"s1 = {_shown(s1):.6g}, {_shown(follows):.6g} follows")
    bend = eta * Lam * L * e / 2
    report(
        "tail", slope > 0 and _near(slope, c * s1 - bend), f"slope = {_shown(slope):.6g}, {_shown(c * s1 - bend):.6g} follows"
    )
    reach = radius * (c * (s0 - Lam * delta - Lam * radius / 2) - bend)
    report(
        "tail",
        e <= reach <= (1 + _TIGHT) * e,
        f"the residual can fall by {_shown(reach):.6g} in the ball, {_shown(e):.6g} needed",
    )
    report("tail", eta * L * c * s0 <= 1, f"eta L c s0 = {_shown(eta * L * c * s0):.4g}, at most 1")
    report("tail", _near_rate(rate, eta * slope * s1), f"rate {_shown(rate)!r}")
