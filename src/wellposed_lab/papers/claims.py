"""Claims of a paper, the rules that decide them, and the verdicts."""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Claim", "ClaimCheck", "ClaimFinding", "ClaimOutcome", "decide", "not_tested", "slope", "spread"]


class ClaimOutcome(enum.Enum):
    """The verdict about a claim. The values are the words that are printed."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, and the rule that decides it, written before measuring.

    Attributes:
        key: A short name.
        text: The statement.
        source: Where it stands, for example "[ling2022, Section 5]"; "ours" for a question that the
            paper does not ask.
        decided_by: The threshold, in words and numbers.
    """

    key: str
    text: str
    source: str
    decided_by: str

    @property
    def ours(self) -> bool:
        """Whether the question is ours; then the answer says nothing about the paper."""
        return self.source == "ours"


@dataclass(frozen=True)
class ClaimFinding:
    """What was measured about a claim.

    Attributes:
        outcome: The verdict.
        measured: One sentence with the numbers, and their spread over the seeds.
        numbers: The same as plain Python, for machines.
    """

    outcome: ClaimOutcome
    measured: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClaimCheck:
    """A claim together with its finding."""

    claim: Claim
    finding: ClaimFinding

    @property
    def outcome(self) -> ClaimOutcome:
        """The verdict."""
        return self.finding.outcome

    def to_dict(self) -> dict[str, Any]:
        """Plain Python that JSON can write."""
        claim = dataclasses.asdict(self.claim)
        return {"claim": claim.pop("key"), **claim, **vars(self.finding), "outcome": self.outcome.value}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ClaimCheck:
        """The check that `to_dict` wrote."""
        claim = Claim(plain["claim"], plain["text"], plain["source"], plain["decided_by"])
        return cls(claim, ClaimFinding(ClaimOutcome(plain["outcome"]), plain["measured"], plain["numbers"]))


def decide(holds: bool, measured: str, **numbers: Any) -> ClaimFinding:
    """REPRODUCED if it holds, else NOT_REPRODUCED."""
    return ClaimFinding(ClaimOutcome.REPRODUCED if holds else ClaimOutcome.NOT_REPRODUCED, measured, numbers)


def not_tested(reason: str) -> ClaimFinding:
    """NOT_TESTED, and why."""
    return ClaimFinding(ClaimOutcome.NOT_TESTED, reason)


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """`mean (least to greatest, n seeds)`.

    >>> spread([1.0, 2.0, 3.0])
    '2 (1 to 3, 3 seeds)'
    """
    if not values:
        return "nothing"
    mean = statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan
    if len(values) == 1:
        return f"{mean:{form}} (1 seed)"
    return f"{mean:{form}} ({min(values):{form}} to {max(values):{form}}, {len(values)} seeds)"


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of y = c x^p, by least squares in logarithms.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 12)
    2.0
    """
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope
