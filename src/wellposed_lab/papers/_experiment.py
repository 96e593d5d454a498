"""Config -> tasks -> results -> checks -> Record -> figure."""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from wellposed.errors import InvalidArgument
from wellposed_lab.papers._claim import Check, Claim, Finding, Outcome, not_tested
from wellposed_lab.papers._config import Config

__all__ = ["AbstractExperiment", "Record", "Result", "Task"]

#: What one process works on: plain Python that JSON can write, so that it can be hashed and sent.
Task = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A task and what came out of it.

    Attributes:
        task: What was asked for.
        values: What was measured, plain Python.
        seconds: How long it took, wherever it ran.
        cached: Whether it was there already.
    """

    task: Task
    values: dict[str, Any]
    seconds: float
    cached: bool = False


class AbstractExperiment(abc.ABC):
    """One figure, table or statement of a paper.

    The parts know nothing of how they are run: `tasks` says what is to be measured, `run` measures one of them in some process,
    `judge` looks at all results.

    Attributes:
        name: "paper/place".
        title: In a few words.
        claims: What the paper says about it.
        departures: Where we do something else than the paper, or had to choose, one sentence each.
        quick: The sizes that take minutes at most.
        full: The sizes of the paper.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    claims: ClassVar[tuple[Claim, ...]]
    departures: ClassVar[tuple[str, ...]] = ()
    quick: ClassVar[Config]
    full: ClassVar[Config]

    def available(self, config: Any) -> tuple[Any, list[str]]:
        """The configuration with what is not at hand replaced, and a sentence for each replacement."""
        return config, []

    @abc.abstractmethod
    def tasks(self, config: Any) -> list[Task]:
        """What is to be measured, in the order of the report."""

    @abc.abstractmethod
    def run(self, task: Task) -> dict[str, Any]:
        """Measures one task. Depends on nothing but the task."""

    @abc.abstractmethod
    def judge(self, config: Any, results: Sequence[Result]) -> Mapping[str, Finding]:
        """Findings by the key of the claim; a claim without one is not tested."""

    @abc.abstractmethod
    def panels(self, config: Any, results: Sequence[Result]) -> list[dict[str, Any]]:
        """What `wellposed.plot.panels` draws."""

    def remarks(self, results: Sequence[Result]) -> list[str]:
        """What a reader of the verdicts must know about how the tasks went, one sentence each."""
        return []

    def checks(self, config: Any, results: Sequence[Result]) -> list[Check]:
        """Every claim with its finding, in order."""
        findings = dict(self.judge(config, results))
        nothing = not_tested("this size measures nothing about it")
        checks = [Check(claim, findings.pop(claim.key, nothing)) for claim in self.claims]
        if findings:
            raise AssertionError(f"{self.name} judges claims that it does not state: {', '.join(findings)}.")
        return checks


@dataclass(frozen=True)
class Record:
    """All that an experiment leaves behind.

    Attributes:
        experiment, title: Which.
        size: "quick", "full", or either with "changed".
        config: As it was run, every key.
        checks: The claims and what was found.
        results: One for each task.
        panels: What the figure shows.
        notes: What was done differently from the paper, and what was not at hand.
        environment: Versions.
        seconds: Of wall clock, for what was not cached.
    """

    experiment: str
    title: str
    size: str
    config: dict[str, Any]
    checks: list[Check]
    results: list[Result]
    panels: list[dict[str, Any]]
    notes: list[str]
    environment: dict[str, Any]
    seconds: float

    def outcome(self, key: str) -> Outcome:
        """The verdict about a claim."""
        for check in self.checks:
            if check.claim.key == key:
                return check.outcome
        raise InvalidArgument(f"{self.experiment} has no claim {key!r}; it has {', '.join(c.claim.key for c in self.checks)}.")

    def count(self, outcome: Outcome, *, ours: bool = False) -> int:
        """How many claims of the paper have this verdict, or how many questions of ours."""
        return sum(check.outcome is outcome and check.claim.ours is ours for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python that JSON can write."""
        plain = dict(vars(self))
        plain["checks"] = [check.to_dict() for check in self.checks]
        plain["results"] = [
            {"task": r.task, "values": r.values, "seconds": r.seconds, "cached": r.cached} for r in self.results
        ]
        return plain

    def to_json(self) -> str:
        """`to_dict` as text; JSON has no NaN and no infinities, so they become null."""
        return json.dumps(_finite(self.to_dict()), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The record that `to_json` wrote."""
        plain = json.loads(text)
        plain["checks"] = [Check.from_dict(check) for check in plain["checks"]]
        plain["results"] = [Result(**result) for result in plain["results"]]
        return cls(**plain)

    def __str__(self) -> str:
        lines = [f"{self.experiment}: {self.title} ({self.size}, {len(self.results)} tasks, {self.seconds:.1f} s)"]
        for check in self.checks:
            lines.append(f"  {check.outcome.value.upper():<15} {check.claim.text} {check.claim.source}")
            lines.append(f"  {'':<15}   measured: {check.finding.measured}")
            lines.append(f"  {'':<15}   decided by: {check.claim.decided_by}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
