"""What a paper says, what decides it, and what was found."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Check", "Claim", "Finding", "Outcome", "decide", "not_tested", "spread"]


class Outcome(enum.Enum):
    """How a claim fared. The values are the words that are printed."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, with the rule that decides it, written down before anything is measured.

    Attributes:
        key: A short name.
        text: What is claimed.
        source: Where, such as "[ling2022, Section 5]"; "ours" for a question that the paper does not ask.
        decided_by: The threshold, in words and numbers.
    """

    key: str
    text: str
    source: str
    decided_by: str

    @property
    def ours(self) -> bool:
        """Whether it is a question of ours that the paper does not ask; its answer says nothing about the paper."""
        return self.source == "ours"


@dataclass(frozen=True)
class Finding:
    """What was measured about a claim.

    Attributes:
        outcome: The verdict.
        measured: One sentence with the numbers, and their spread over the seeds.
        numbers: The same as plain Python, for machines.
    """

    outcome: Outcome
    measured: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A claim together with what was found."""

    claim: Claim
    finding: Finding

    @property
    def outcome(self) -> Outcome:
        """The verdict."""
        return self.finding.outcome

    def to_dict(self) -> dict[str, Any]:
        """Plain Python that JSON can write."""
        claim, finding = self.claim, self.finding
        return {
            "claim": claim.key,
            "text": claim.text,
            "source": claim.source,
            "decided_by": claim.decided_by,
            "outcome": finding.outcome.value,
            "measured": finding.measured,
            "numbers": dict(finding.numbers),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Check:
        """The check that `to_dict` wrote."""
        claim = Claim(plain["claim"], plain["text"], plain["source"], plain["decided_by"])
        return cls(claim, Finding(Outcome(plain["outcome"]), plain["measured"], plain["numbers"]))


def decide(holds: bool, measured: str, **numbers: Any) -> Finding:
    """REPRODUCED if it holds, else NOT_REPRODUCED."""
    return Finding(Outcome.REPRODUCED if holds else Outcome.NOT_REPRODUCED, measured, numbers)


def not_tested(reason: str) -> Finding:
    """NOT_TESTED, and why."""
    return Finding(Outcome.NOT_TESTED, reason)


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """`mean (least to greatest, n seeds)`; a single value is told as such.

    >>> spread([1.0, 2.0, 3.0])
    '2 (1 to 3, 3 seeds)'
    """
    if not values:
        return "nothing"
    mean = statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan
    if len(values) == 1:
        return f"{mean:{form}} (1 seed)"
    return f"{mean:{form}} ({min(values):{form}} to {max(values):{form}}, {len(values)} seeds)"
