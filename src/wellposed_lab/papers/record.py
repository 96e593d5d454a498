"""The record of an experiment, and one JSON file per task, so that a run can be resumed."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wellposed._io import write_whole, writing
from wellposed._reading import read_object
from wellposed.errors import InvalidArgument, RunError
from wellposed_lab.papers.claims import ClaimCheck, ClaimOutcome
from wellposed_lab.papers.experiment import Result, Task
from wellposed_lab.runs.records import finite

__all__ = ["Record", "TaskCache", "measured_by_others", "program", "write"]

#: The largest result that is read.
BYTES = 1 << 28
#: Parts of the two packages that no number depends on.
_WITHOUT_NUMBERS = {("wellposed", "plot"), ("wellposed_lab", "cli"), ("wellposed_lab", "report")}


@dataclass(frozen=True)
class Record:
    """The outcome of an experiment.

    Attributes:
        experiment, title: Which one.
        size: "quick", "full", or either with "changed".
        config: Every key, as it was run.
        checks: The claims and their findings.
        results: One for each task.
        panels: What the figure shows.
        notes: What a reader of the verdicts must know about the runs.
        departures: Where this differs from the print: sizes, data, tolerances, optimizers, choices.
        environment: Of the code that judged: versions, and the commit of the source if it is under
            version control. Each result has its own.
        seconds: Wall clock of what was not cached.
    """

    experiment: str
    title: str
    size: str
    config: dict[str, Any]
    checks: list[ClaimCheck]
    results: list[Result]
    panels: list[dict[str, Any]]
    notes: list[str]
    departures: list[str]
    environment: dict[str, Any]
    seconds: float

    def outcome(self, key: str) -> ClaimOutcome:
        """The verdict about a claim."""
        for check in self.checks:
            if check.claim.key == key:
                return check.outcome
        raise InvalidArgument(f"{self.experiment} has no claim {key!r}; it has {', '.join(c.claim.key for c in self.checks)}.")

    def count(self, outcome: ClaimOutcome, *, ours: bool = False) -> int:
        """How many claims of the paper have this verdict, or how many questions of ours."""
        return sum(check.outcome is outcome and check.claim.ours is ours for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python that JSON can write."""
        checks, results = [check.to_dict() for check in self.checks], [dict(vars(result)) for result in self.results]
        return {**vars(self), "checks": checks, "results": results}

    def to_json(self) -> str:
        """`to_dict` as text; JSON has no NaN and no infinities, so they become null."""
        return json.dumps(finite(self.to_dict()), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The record that `to_json` wrote."""
        plain = json.loads(text)
        plain["checks"] = [ClaimCheck.from_dict(check) for check in plain["checks"]]
        ran = {key: plain["environment"].get(key) for key in ("program", "commit")}  # older records have them only here
        plain["results"] = [Result(**{**ran, **result}) for result in plain["results"]]
        return cls(**plain)

    def __str__(self) -> str:
        lines = [f"{self.experiment}: {self.title} ({self.size}, {len(self.results)} tasks, {self.seconds:.1f} s)"]
        for check in self.checks:
            lines.append(f"  {check.outcome.value.upper():<15} {check.claim.text} {check.claim.source}")
            lines.append(f"  {'':<15}   measured: {check.finding.measured}")
            lines.append(f"  {'':<15}   decided by: {check.claim.decided_by}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join([*lines, *(f"  departure: {departure}" for departure in self.departures)])


def measured_by_others(results: Sequence[Result]) -> list[str]:
    """A sentence about the results that other code measured than the code that judges them."""
    others = Counter((r.program, r.commit) for r in results if r.program != program())
    if not others:
        return []
    parts = [f"{number} by {name} (commit {(commit or 'unknown')[:10]})" for (name, commit), number in others.items()]
    whole = f"{others.total()} of {len(results)} results were measured by other code than the one that judges them"
    return [f"{whole}: {'; '.join(parts)}"]


@functools.cache
def program() -> str:
    """The versions of wellposed and torch, and a hash of the source.

    Code may change under the number of a release too: in a clone of the repository, or in an
    installed package that was edited. A result of other code is not taken for one of this code.
    """
    version = importlib.metadata.version("wellposed")
    return f"wellposed {version}, torch {torch.__version__}, source {source_hash(Path(__file__).parents[2])}"


def source_hash(folder: Path) -> str:
    """Of all source files of both packages that numbers can depend on.

    Args:
        folder: Contains the packages `wellposed` and `wellposed_lab`.
    """
    digest = hashlib.sha256()
    for path in sorted(path for package in ("wellposed", "wellposed_lab") for path in (folder / package).rglob("*.py")):
        if path.relative_to(folder).parts[:2] not in _WITHOUT_NUMBERS:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class TaskCache:
    """Results of one experiment, in a folder.

    A file that cannot be read, or that holds another task than its name says, does not count: the
    task is measured again.

    Args:
        folder: Made when the first result is kept.
        experiment: Its name.
    """

    def __init__(self, folder: Path, experiment: str) -> None:
        self.folder, self.experiment = folder, experiment

    def path(self, task: Task) -> Path:
        """The file for the result of a task."""
        text = json.dumps(self._key(task), sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def get(self, task: Task) -> Result | None:
        """The result, or None."""
        try:
            plain = read_object(self.path(task), limit=BYTES, error=RunError)
            if plain is None or plain["key"] != self._key(task):
                return None
            return Result(task, plain["values"], plain["seconds"], cached=True, program=program(), commit=plain["commit"])
        except (RunError, KeyError):
            return None

    def put(self, result: Result) -> None:
        """Keeps a result: whole, or not at all."""
        plain = {"key": self._key(result.task), **{key: getattr(result, key) for key in ("values", "seconds", "commit")}}
        write(self.path(result.task), json.dumps(plain).encode())

    def _key(self, task: Task) -> dict[str, Any]:
        return {"experiment": self.experiment, "task": json.loads(json.dumps(task)), "program": program()}


def write(path: Path, content: bytes) -> None:
    """A file and its folders: whole, or not at all."""
    try:
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except RunError as error:
        reason = getattr(error.__cause__, "strerror", None) or error.__cause__
        raise RunError(
            f"Cannot write {path}: {reason}. Choose another folder by --out; tasks that were kept before are not lost."
        ) from error
