"""A finding about a claim of a paper, and the numbers that its check computes."""

from __future__ import annotations

import functools
import math
import operator
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from types import ModuleType
from typing import Any

from torch import Tensor

__all__ = ["ROLES", "AuditFinding", "AuditRow", "Evidence", "Fact", "PaperAudit", "gap"]

RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}

#: What the evidence says about a fact.
ROLES = {"printed": "against the print", "corrected": "for the corrected form", "given": "given"}


@dataclass(frozen=True)
class Fact:
    """One comparison of numbers that were computed in this run.

    Attributes:
        role: "printed" (it contradicts the printed form), "corrected" (it agrees with the corrected
            form), or "given" (a premise of the check).
        what: The quantity, in words.
        value, relation, bound: The comparison.
    """

    role: str
    what: str
    value: float
    relation: str
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the comparison is true."""
        return RELATIONS[self.relation](self.value, self.bound)

    def __str__(self) -> str:
        text = f"{self.what}: {self.value:.4g} {self.relation} {self.bound:.4g}"
        return text if self.holds else f"FALSE: {text}"


@dataclass
class Evidence:
    """The facts of a check. It is confirmed if there are some and all are true."""

    facts: list[Fact] = field(default_factory=list)

    def printed(self, what: str, value: Any, relation: str, bound: Any) -> None:
        """A comparison that would be false if the printed form were right."""
        self.facts.append(Fact("printed", what, float(value), relation, float(bound)))

    def corrected(self, what: str, value: Any, relation: str, bound: Any) -> None:
        """A comparison that the corrected form asks for."""
        self.facts.append(Fact("corrected", what, float(value), relation, float(bound)))

    def given(self, what: str, value: Any, relation: str, bound: Any) -> None:
        """A comparison without which the check would say nothing."""
        self.facts.append(Fact("given", what, float(value), relation, float(bound)))

    @property
    def confirmed(self) -> bool:
        """Whether every fact is true."""
        return bool(self.facts) and all(fact.holds for fact in self.facts)

    def __str__(self) -> str:
        return "; ".join(f"{ROLES[fact.role]}: {fact}" for fact in self.facts)


#: Fills in the evidence.
Check = Callable[[Evidence], None]


@dataclass(frozen=True)
class AuditFinding:
    """A row of the audit before it is run.

    Attributes:
        paper: A key of src/wellposed/references.bib.
        claim, printed, verdict, corrected: As on the page of findings.
        check: Fills in the evidence; None if there is nothing to measure, and then `by` says how it
            was found.
        by: E.g. "by counting".
    """

    paper: str
    claim: str
    printed: str
    verdict: str
    corrected: str
    check: Check | None
    by: str = ""

    @property
    def name(self) -> str:
        """The name of the check, or how it was found."""
        return self.by if self.check is None else self.check.__name__

    def run(self) -> AuditRow:
        """Computes the evidence now."""
        began, evidence = time.perf_counter(), Evidence()
        if self.check is not None:
            self.check(evidence)
        return AuditRow(self, evidence, time.perf_counter() - began)


@dataclass(frozen=True)
class AuditRow:
    """A row of the audit, run.

    Attributes:
        finding: The claim and the verdict.
        evidence: The facts of this run.
        seconds: Of the check.
    """

    finding: AuditFinding
    evidence: Evidence
    seconds: float

    @property
    def confirmed(self) -> bool | None:
        """Whether the numbers confirm the verdict; None if there is nothing to measure."""
        return None if self.finding.check is None else self.evidence.confirmed

    def to_dict(self) -> dict[str, Any]:
        """Plain Python, for JSON."""
        finding = self.finding
        texts = {key: getattr(finding, key) for key in ("paper", "claim", "printed", "verdict", "corrected")}
        facts = [{**vars(fact), "holds": fact.holds} for fact in self.evidence.facts]
        evidence = [{key: _finite(value) for key, value in fact.items()} for fact in facts]
        run = {"check": finding.name, "confirmed": self.confirmed, "seconds": self.seconds}
        return {**texts, **run, "evidence": evidence}


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinities: they become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class PaperAudit:
    """The findings about one paper: the table of `findings.md` in its folder, with its checks.

    Args:
        key: Of src/wellposed/references.bib; also the name of the folder.
        modules: Where the functions are that the last column of the table names.
    """

    key: str
    modules: tuple[ModuleType, ...]

    @functools.cached_property
    def text(self) -> str:
        """The page: a title, the notation, the table, and what follows."""
        return resources.files("wellposed_lab.papers").joinpath(self.key, "findings.md").read_text(encoding="utf-8")

    @functools.cached_property
    def findings(self) -> tuple[AuditFinding, ...]:
        """One for each row of the table, in order."""
        rows = [line for line in self.text.splitlines() if line.startswith("|")]
        return tuple(self._finding(row) for row in rows[2:])

    def _finding(self, row: str) -> AuditFinding:
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        claim, printed, verdict, corrected, name = cells
        if not name.startswith("`"):
            return AuditFinding(self.key, claim, printed, verdict, corrected, None, by=name)
        name = name.strip("`")
        checks = [getattr(module, name) for module in self.modules if hasattr(module, name)]
        if not checks:
            raise AssertionError(f"{self.key}/findings.md names {name}, which its audit does not have.")
        return AuditFinding(self.key, claim, printed, verdict, corrected, checks[0])


def gap(a: Tensor, b: Tensor) -> float:
    """|a - b|_F relative to |b|_F; infinite if the shapes differ."""
    if a.shape != b.shape:
        return math.inf
    return float((a - b).norm() / b.norm().clamp(min=1e-300))
