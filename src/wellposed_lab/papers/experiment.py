"""An experiment: sizes, tasks, results, and the checks of its claims."""

from __future__ import annotations

import abc
import ast
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from wellposed.errors import InvalidArgument, did_you_mean
from wellposed_lab.papers.claims import Claim, ClaimCheck, ClaimFinding, not_tested

__all__ = ["AbstractExperiment", "ExperimentConfig", "Result", "Task", "changes_of", "values_of"]

#: What one process works on: plain Python that JSON can write, so that it can be hashed and sent.
Task = dict[str, Any]
Self = TypeVar("Self", bound="ExperimentConfig")
#: Keys whose tuples are sizes in an order; all other tuples are choices, each of which is run.
_IN_ORDER = ("channels",)


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Sizes. Values are numbers, words, or tuples of one kind of them.

    Attributes:
        seeds: Each is a draw of everything that is random: data, start, labels.
    """

    seeds: tuple[int, ...] = (0, 1, 2)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python that JSON can write."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()}

    def part(self, *keys: str) -> dict[str, Any]:
        """The values of some keys, as `to_dict` has them: what the tasks of an experiment share."""
        plain = self.to_dict()
        return {key: plain[key] for key in keys}

    def changed(self: Self, changes: Mapping[str, Any]) -> Self:
        """A copy with other values; raises on unknown keys and on values of another kind.

        Args:
            changes: By name. A single value for a tuple means a tuple of one.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for key in changes:
            if key not in known:
                raise InvalidArgument(
                    f"Unknown key {key!r} of the experiment; known are {', '.join(known)}.{did_you_mean(key, known)}"
                )
        return dataclasses.replace(self, **{key: _like(key, getattr(self, key), value) for key, value in changes.items()})


def changes_of(assignments: Iterable[str]) -> dict[str, Any]:
    """`["widths=50,100", "data=digits"]` as a dictionary."""
    changes = {}
    for text in assignments:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise InvalidArgument(f"Changes are written key=value, for example widths=50,100; got {text!r}.")
        try:
            changes[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            words = tuple(word.strip() for word in value.split(","))
            changes[key.strip()] = words[0] if len(words) == 1 else words
    return changes


def _like(key: str, default: Any, value: Any) -> Any:
    """The value, if it is of the kind of the default."""
    if isinstance(default, tuple):
        parts = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        if not parts:
            raise InvalidArgument(f"{key} must not be empty.")
        if len(set(parts)) != len(parts) and key not in _IN_ORDER:
            raise InvalidArgument(f"{key} must not have a value twice; got {parts!r}.")
        return tuple(_like(key, default[0], part) for part in parts)
    kind = type(default)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise InvalidArgument(f"{key} must be of type {kind.__name__}, for example {default!r}; got {value!r}.")
    if kind in (int, float) and not (0 < value < math.inf or key == "seeds" and value == 0):
        raise InvalidArgument(f"{key} must be positive and finite; got {value!r}.")
    return value


@dataclass(frozen=True)
class Result:
    """A task and what was measured.

    Attributes:
        task: What was asked for.
        values: The measurements, plain Python.
        seconds: Of CPU time, wherever it ran.
        cached: Whether it was read from an earlier run.
        program: The versions and the source that measured it.
        commit: The one of that source, if it is under version control.
    """

    task: Task
    values: dict[str, Any]
    seconds: float
    cached: bool = False
    program: str = ""
    commit: str | None = None


def values_of(results: Sequence[Result], key: str, **task: Any) -> list[Any]:
    """The measurement `key` of the results whose task has these entries, by seed."""
    chosen = [r for r in results if all(r.task.get(name) == value for name, value in task.items())]
    return [result.values[key] for result in sorted(chosen, key=lambda result: result.task["seed"])]


class AbstractExperiment(abc.ABC):
    """One figure, table or statement of a paper.

    `tasks` lists what is to be measured, `run` measures one task in any process, `judge` decides
    from all results.

    Attributes:
        name: "paper/place".
        title: In a few words.
        claims: The statements of the paper.
        departures: Where we differ from the paper, or had to choose, one sentence each.
        varied: Key of a task -> key of the configuration with its values, for example {"width":
            "widths"}.
        tasks_of: The name under which results are kept, if experiments share tasks; else `name`.
        quick: Sizes that take minutes at most.
        full: The sizes of the paper.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    claims: ClassVar[tuple[Claim, ...]]
    departures: ClassVar[tuple[str, ...]] = ()
    varied: ClassVar[Mapping[str, str]] = {}
    tasks_of: ClassVar[str | None] = None
    quick: ClassVar[ExperimentConfig]
    full: ClassVar[ExperimentConfig]

    def available(self, config: Any) -> tuple[Any, list[str]]:
        """The configuration with unavailable data replaced, and a sentence for each replacement."""
        return config, []

    def tasks(self, config: Any) -> list[Task]:
        """One task for each seed and each value of what is `varied`, the largest (longest) first;
        with all other keys of the configuration."""
        shared = config.to_dict()
        seeds = shared.pop("seeds")
        values = [sorted(shared.pop(key), reverse=True) for key in self.varied.values()]
        chosen = itertools.product(*values, seeds)
        return [{**dict(zip([*self.varied, "seed"], one, strict=True)), **shared} for one in chosen]

    @abc.abstractmethod
    def run(self, task: Task) -> dict[str, Any]:
        """Measures one task. Depends on nothing but the task."""

    @abc.abstractmethod
    def judge(self, config: Any, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        """Findings by the key of the claim; a claim without one is not tested."""

    @abc.abstractmethod
    def panels(self, config: Any, results: Sequence[Result]) -> list[dict[str, Any]]:
        """What `wellposed.plot.panels` draws."""

    def remarks(self, results: Sequence[Result]) -> list[str]:
        """What a reader of the verdicts must know about the runs, one sentence each."""
        return []

    def checks(self, config: Any, results: Sequence[Result]) -> list[ClaimCheck]:
        """Every claim with its finding, in order."""
        findings = dict(self.judge(config, results))
        nothing = not_tested("this size measures nothing about it")
        checks = [ClaimCheck(claim, findings.pop(claim.key, nothing)) for claim in self.claims]
        if findings:
            raise AssertionError(f"{self.name} judges claims that it does not state: {', '.join(findings)}.")
        return checks
