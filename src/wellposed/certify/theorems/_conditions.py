r"""What the theorems of the papers share: least radii, and hypotheses about data and
initialization.

The conditions get harder as the radii grow. The theorems of [ling2022] and [nguyen2022] ask for
radii R (one by parameter) with

    R >= need(R)                 training never leaves them
    value >= bound(R)            further conditions

where `need` and every `bound` increase with every radius. So iterating R <- need(R) upward from 0
finds the least radii that satisfy the first; if any radii satisfy all conditions, these do. The
papers take one radius for all parameters, or leave them open. Run with every number taken from the
harmful side it proves; run with every number taken from the helpful side it refutes, because each
iterate is then below all radii that could work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from wellposed.certify._gate import changed, check_data, trained_otherwise
from wellposed.certify.certificate import Certificate, Hypothesis, Verdict, verdict_on
from wellposed.certify.measurement import Measurement, measure
from wellposed.errors import InvalidArgument, InvalidType, did_you_mean
from wellposed.linalg import least_eigenvalue_lower
from wellposed.linalg.directed import ROUNDING, UNDERFLOW, DataUnit, down, ldexp, scaled, up, vector_norm_upper
from wellposed.nn.families import theory_of

Radii = Mapping[str, float]
N = TypeVar("N")

_ROUNDS = 1000
_INFLATION = 1e-9
#: `need` is a polynomial (or has a pole): what has grown to this beside the scale will never settle.
_LARGEST = 1e30
#: Fractions of a scale at which a failing condition is shown, when no radii satisfy the first one.
_SHOWN = (0.01, 0.1, 0.3, 0.5, 0.9)
#: Data normalised in float32 pass for unit vectors.
_NORMALISED = 1e-6


@dataclass(frozen=True)
class Condition(Generic[N]):
    """value(numbers) >= bound(numbers, radii), with a bound that increases with the radii; both of
    `power` in the data."""

    name: str
    equation: str
    value: Callable[[N], float]
    bound: Callable[[N, Radii], float]
    note: str = ""
    power: int = 0


@dataclass(frozen=True)
class Judgement:
    """The hypotheses as numbers, and the radii if they all hold."""

    radii: Radii
    hypotheses: tuple[Hypothesis, ...]

    @property
    def verdict(self) -> Verdict:
        return verdict_on(self.hypotheses)


def root_rate(decrease: float) -> float:
    """sqrt(1 - decrease) from above, right to a few roundings also for a tiny decrease; at most
    1."""
    rate = math.exp(math.log1p(-down(decrease)) / 2)
    return min(1.0, rate + 8 * 2.0**-53)


@dataclass(frozen=True)
class Theorem(Generic[N]):
    """Conditions with radii to choose.

    Attributes:
        need: The radii that training may use up if it stays within the given ones; None where the
            theorem ends (e.g. no contraction is left).
        scale: Radii of the order at which things happen, to show a failing condition at.
        radii_condition: The one that says R >= need(R), in the form in which the paper writes it.
        conditions: The others.
        unit: Of the data.
    """

    need: Callable[[N, Radii], Radii | None]
    scale: Callable[[N], Radii]
    radii_condition: Condition[N]
    conditions: tuple[Condition[N], ...]
    unit: DataUnit = DataUnit()

    def judge(self, harmful: N, helpful: N) -> Judgement:
        """Chooses the radii and judges each condition.

        Args:
            harmful: The numbers, each bounded from the side that can only harm: what holds with
                them is proved.
            helpful: The same from the other side: what fails with them, for the least radii, is
                refuted.
        """
        radii = self._proved(harmful)
        below, ended = self._below(helpful)
        refuted = radii is None and ended
        shown = radii if radii is not None else self._shown(harmful)
        first = self.radii_condition
        note = first.note or ("these are the least radii" if radii is not None else "no radii were found")
        value, bound = max(0.0, down(first.value(harmful))), up(first.bound(harmful, shown))
        holds = True if radii is not None else (False if refuted else None)
        hypotheses = [self._hypothesis(first, value, bound, holds, note)]
        for condition in self.conditions:
            value, bound = max(0.0, down(condition.value(harmful))), up(condition.bound(harmful, shown))
            # at radii below all that could work, on the helpful side: what fails here fails for all of them
            false = up(condition.value(helpful)) < down(condition.bound(helpful, below))
            holds = True if value >= bound and radii is not None else (False if false else None)
            hypotheses.append(self._hypothesis(condition, value, bound, holds, condition.note))
        return Judgement(shown, tuple(hypotheses))

    def _hypothesis(self, condition: Condition[N], value: float, bound: float, holds: bool | None, note: str) -> Hypothesis:
        """With both sides as the data were given, if float64 holds them."""
        value, bound, where = self.unit.sides(value, bound, condition.power)
        note = "; ".join(filter(None, (note, where)))
        return Hypothesis(condition.name, condition.equation, value, bound, ">=", holds, note)

    def _proved(self, numbers: N) -> Radii | None:
        """Radii R >= need(R), the least up to a little; None if the iteration ends or does not
        settle."""
        radii: Radii = dict.fromkeys(self.scale(numbers), 0.0)
        for _ in range(_ROUNDS):
            needed = self._finite_need(numbers, radii)
            if needed is None:
                return None
            if all(up(needed[name]) <= radii[name] for name in radii):
                return radii
            radii = {name: up(value * (1 + _INFLATION)) for name, value in needed.items()}
        return None

    def _below(self, numbers: N) -> tuple[Radii, bool]:
        """Radii below all that satisfy R >= need(R), and whether there are none at all."""
        radii: Radii = dict.fromkeys(self.scale(numbers), 0.0)
        for _ in range(_ROUNDS):
            needed = self._finite_need(numbers, radii)
            if needed is None:
                return radii, True
            following = {name: max(radii[name], down(value * (1 - _INFLATION))) for name, value in needed.items()}
            if self._finite_need(numbers, following) is None:
                return radii, True
            if following == radii:
                break
            radii = following
        return radii, False

    def _finite_need(self, numbers: N, radii: Radii) -> Radii | None:
        needed, largest = self.need(numbers, radii), _LARGEST * max(1.0, *self.scale(numbers).values())
        return needed if needed is not None and all(value <= largest for value in needed.values()) else None

    def _shown(self, numbers: N) -> Radii:
        """Where the worst of the ratios bound/value is best, on a coarse grid: which shows how far
        the conditions are."""
        scale = self.scale(numbers)

        def worst(radii: Radii) -> float:
            ratios = [c.bound(numbers, radii) / max(c.value(numbers), 1e-300) for c in (self.radii_condition, *self.conditions)]
            return max(ratios)

        grid = itertools.product(_SHOWN, repeat=len(scale))
        return min(({name: f * scale[name] for name, f in zip(scale, fs, strict=True)} for fs in grid), key=worst)


def measured_for(
    theorem: str, family: str, model: Any, X: Tensor, y: Tensor, *, dynamics: str, trains: tuple[str, ...] = ()
) -> Measurement | Certificate:
    """The measurement that a theorem is judged by; or an undecided certificate that says why there
    is none.

    Args:
        theorem: Its key. family: The name of the networks that it is about.
        model, X, y: As the caller gave them.
        dynamics: "flow" or "descent".
        trains: Names of the parameters that the theorem trains, if it licenses training.
    """
    theory = theory_of(model)
    if theory is None or theory.theorem != theorem:
        raise InvalidType(
            f"{theorem} is a theorem about {family}; got {type(model).__name__}. The theorem 'radius' knows all networks."
        )
    if dynamics not in ("flow", "descent"):
        hint = did_you_mean(str(dynamics), ("flow", "descent"))
        raise InvalidArgument(f"{theorem}: dynamics must be 'flow' or 'descent'; got {dynamics!r}.{hint}")
    X, y = check_data(model, X, y)
    # a paper is about its own network: what another class declares does not make it that
    otherwise = trained_otherwise(model, trains) if trains else ""
    point = changed(model) or otherwise or measure(model, X, y)
    return Certificate(theorem, Verdict.UNDECIDED, dynamics=dynamics, note=point) if isinstance(point, str) else point


def errors_of(point: Measurement) -> dict[str, float]:
    """The numerical errors that a theorem takes into account."""
    return {"|Z - Z*|_F": point.unit.upper(point.z_error_F), "|r - r*|": point.unit.upper(point.r_error)}


def report(
    theorem: str,
    dynamics: str,
    hypotheses: Sequence[Hypothesis],
    measured: Mapping[str, float],
    errors: Mapping[str, float],
    note: str,
) -> Certificate:
    """UNDECIDED, or VIOLATED if a hypothesis is false: these theorems state orders, not numbers,
    and license nothing."""
    false = any(h.holds is False for h in hypotheses)
    verdict = Verdict.VIOLATED if false else Verdict.UNDECIDED
    return Certificate(theorem, verdict, tuple(hypotheses), dynamics, measured=measured, errors=errors, note=note)


def gram_bounds(G: Tensor) -> tuple[float, float]:
    """Lower and upper bounds of the least eigenvalue of a Gram matrix computed entry by entry to
    about 64 roundings.

    Args:
        G: (n, n) symmetric up to rounding.
    """
    G = (G.detach() + G.detach().t()) / 2
    error = (64 + 2 * len(G)) * ROUNDING * vector_norm_upper(G) + UNDERFLOW**2
    x = torch.linalg.eigh(G).eigenvectors[:, 0]
    upper = float(x @ (G @ x)) / float(x @ x)
    return down(least_eigenvalue_lower(G) - error), up(upper + 2 * error)


def unit_norm(X: Tensor, equation: str) -> Hypothesis:
    """|x_i| = 1 for all samples."""
    rows, exponent = scaled(X)
    off = float((ldexp(torch.linalg.vector_norm(rows, dim=1), exponent) - 1).abs().max())
    return Hypothesis.compare(
        "inputs have norm 1", equation, off, "<=", _NORMALISED, note="the largest | |x_i| - 1 |; divide each sample by its norm"
    )


def parallel(X: Tensor, equation: str) -> Hypothesis:
    """No two samples are parallel."""
    rows = torch.stack([scaled(row)[0] for row in X])
    rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=0.5)  # a row of zeros stays
    cosine = (rows @ rows.t()).abs()
    cosine.fill_diagonal_(0.0)
    largest = float(cosine.max())
    same = any(bool(torch.equal(X[i], X[j])) for i, j in (cosine > 1 - 1e-9).nonzero().tolist())
    holds = True if largest < 1 - 1e-9 else (False if same else None)
    return Hypothesis("no two inputs are parallel", equation, largest, 1.0, "<", holds, "the largest |cosine|")


def has_signs(v: Tensor, name: str, equation: str, *, trained: bool) -> Hypothesis:
    """All entries are +1 or -1; a vector that is trained has them at the start only."""
    off = float((v.detach().abs() - 1).abs().max())
    note = "as at the start; training moves it" if trained else "as drawn; it is not trained"
    return Hypothesis.compare(f"{name} has entries +1 and -1", equation, off, "<=", 0.0, note=note)
