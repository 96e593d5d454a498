r"""Least radii for theorems whose conditions get harder as the radii grow.

The theorems of [ling2022] and [nguyen2022] ask for radii R (one by parameter) with

    R >= need(R)                 training never leaves them
    value >= bound(R)            further conditions

where `need` and every `bound` increase with every radius. So iterating R <- need(R) upward from 0 finds the least radii
that satisfy the first; if any radii satisfy all conditions, these do. The papers take one radius for all parameters, or
leave them open. Run with every number taken from the harmful side it proves; run with every number taken from the
helpful side it refutes, because each iterate is then below all radii that could work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from wellposed.certify._certificate import Hypothesis, Verdict
from wellposed.certify._directed import down, up
from wellposed.certify._units import Unit

__all__ = ["Condition", "Judgement", "Radii", "Theorem", "root_rate", "verdict"]

Radii = Mapping[str, float]
N = TypeVar("N")

_ROUNDS = 1000
_INFLATION = 1e-9
#: `need` is a polynomial (or has a pole): what has grown to this beside the scale will never settle.
_LARGEST = 1e30
#: Fractions of a scale at which a failing condition is shown, when no radii satisfy the first one.
_SHOWN = (0.01, 0.1, 0.3, 0.5, 0.9)


@dataclass(frozen=True)
class Condition(Generic[N]):
    """value(numbers) >= bound(numbers, radii), with a bound that increases with the radii; both of `power` in the data."""

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
        return verdict(self.hypotheses)


def verdict(hypotheses: Sequence[Hypothesis]) -> Verdict:
    """CERTIFIED if all hold, VIOLATED if one is false, else UNDECIDED."""
    if any(h.holds is False for h in hypotheses):
        return Verdict.VIOLATED
    return Verdict.CERTIFIED if all(h.holds for h in hypotheses) else Verdict.UNDECIDED


def root_rate(decrease: float) -> float:
    """sqrt(1 - decrease) from above, right to a few roundings also for a tiny decrease; at most 1."""
    rate = math.exp(math.log1p(-down(decrease)) / 2)
    return min(1.0, rate + 8 * 2.0**-53)


@dataclass(frozen=True)
class Theorem(Generic[N]):
    """Conditions with radii to choose.

    Attributes:
        need: The radii that training may use up if it stays within the given ones; None where the theorem ends (e.g. no
            contraction is left).
        scale: Radii of the order at which things happen, to show a failing condition at.
        radii_condition: The one that says R >= need(R), in the form in which the paper writes it.
        conditions: The others.
        unit: Of the data.
    """

    need: Callable[[N, Radii], Radii | None]
    scale: Callable[[N], Radii]
    radii_condition: Condition[N]
    conditions: tuple[Condition[N], ...]
    unit: Unit = Unit()

    def judge(self, harmful: N, helpful: N) -> Judgement:
        """Chooses the radii and judges each condition.

        Args:
            harmful: The numbers, each bounded from the side that can only harm: what holds with them is proved.
            helpful: The same from the other side: what fails with them, for the least radii, is refuted.
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
        """Radii R >= need(R), the least up to a little; None if the iteration ends or does not settle."""
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
        """Where the worst of the ratios bound/value is best, on a coarse grid: it tells how far the conditions are."""
        scale = self.scale(numbers)

        def worst(radii: Radii) -> float:
            ratios = [c.bound(numbers, radii) / max(c.value(numbers), 1e-300) for c in (self.radii_condition, *self.conditions)]
            return max(ratios)

        grid = itertools.product(_SHOWN, repeat=len(scale))
        return min(({name: f * scale[name] for name, f in zip(scale, fs, strict=True)} for fs in grid), key=worst)
