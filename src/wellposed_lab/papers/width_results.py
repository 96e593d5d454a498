"""The results of a study of widths: what falls with the width, and what holds in every run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wellposed_lab.papers.claims import ClaimFinding, decide, not_tested, spread
from wellposed_lab.papers.experiment import Result

__all__ = ["FALLS", "Values", "WidthResults", "speed"]

Values = Mapping[str, Any]
#: How a measure that falls with the width is decided, in words.
FALLS = "its mean falls from each width to the next, and for every seed from the narrowest to the widest"


class WidthResults:
    """The results of a study, by data set and width; within these, by seed.

    Not every seed has every width: the widest networks may be trained once. Widths are compared
    over the seeds that both of them have.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = sorted(results, key=lambda result: result.task["seed"])
        self.data = list(dict.fromkeys(result.task["data"] for result in results))
        self.widths = sorted({result.task["width"] for result in results})

    def widths_of(self, data: str) -> list[int]:
        """Of the networks that were trained on a data set, in rising order."""
        return sorted({r.task["width"] for r in self.results if r.task["data"] == data})

    def by_seed(self, data: str, width: int) -> dict[int, Values]:
        """The runs of a data set and a width."""
        return {r.task["seed"]: r.values for r in self.results if r.task["data"] == data and r.task["width"] == width}

    def of(self, data: str, width: int) -> list[Values]:
        """One for each seed."""
        return list(self.by_seed(data, width).values())

    def runs(self) -> list[Values]:
        """All of them, by data set, width and seed."""
        return [values for data in self.data for m in self.widths_of(data) for values in self.of(data, m)]

    def falls(self, measure: Callable[[Values], float], form: str = ".3g", *, rises: bool = False) -> ClaimFinding:
        """Whether a measure falls with the width: its mean from each width to the next, and for
        every seed from its narrowest to its widest, on every data set.

        Args:
            measure: Of one training run.
            form: How its values are printed.
            rises: The same, for a measure that should rise.
        """
        if not self.data or any(len(self.widths_of(data)) < 2 for data in self.data):
            return not_tested("it needs at least two widths")
        sign = -1.0 if rises else 1.0
        holds, texts, numbers = True, [], {}
        for data in self.data:
            widths = self.widths_of(data)
            found = {m: {seed: measure(values) for seed, values in self.by_seed(data, m).items()} for m in widths}
            for narrow, wide in zip(widths, widths[1:], strict=False):
                common = found[narrow].keys() & found[wide].keys()
                gaps = [sign * (found[wide][seed] - found[narrow][seed]) for seed in sorted(common)]
                holds &= bool(gaps) and statistics.fmean(gaps) < 0
            for seed in {seed for by in found.values() for seed in by}:
                own = [found[m][seed] for m in widths if seed in found[m]]
                holds &= len(own) < 2 or sign * own[-1] < sign * own[0]
            texts.append(f"{data}: " + ", ".join(f"m={m}: {spread(list(found[m].values()), form)}" for m in widths))
            numbers[data] = {str(m): list(by.values()) for m, by in found.items()}
        return decide(holds, "; ".join(texts), **numbers)

    def everywhere(self, measure: Callable[[Values], float | None], limit: float, form: str = ".4g") -> ClaimFinding:
        """Whether a measure is below a limit in every run; None is not."""
        found = {data: [measure(v) for m in self.widths_of(data) for v in self.of(data, m)] for data in self.data}
        failed = sum(value is None for values in found.values() for value in values)
        worst = {data: max((v for v in values if v is not None), default=math.nan) for data, values in found.items()}
        holds = failed == 0 and all(value < limit for value in worst.values())
        lost = f"; {failed} runs did not go to their end" if failed else ""
        runs = sum(map(len, found.values()))
        text = ", ".join(f"{data}: at most {value:{form}}" for data, value in worst.items())
        return decide(holds, f"{text} (over {runs} runs){lost}", **worst)

    def contracts(self) -> ClaimFinding:
        """Whether the contraction factor was proved to be below 1 at every step of every run."""
        runs = [result.values for result in self.results]
        proved = sum(values["norm_throughout"] is not None and values["norm_throughout"] < 1 for values in runs)
        lost = sum(values["norm_throughout"] is None for values in runs)
        greatest = {m: max(max(r.values["norm"]) for r in self.results if r.task["width"] == m) for m in self.widths}
        text = ", ".join(f"m={m}: {norm:.4g}" for m, norm in greatest.items())
        ended = f"; {lost} runs did not go to their end" if lost else ""
        measured = f"proved for all steps of {proved} of {len(runs)} runs{ended}; greatest norm at the looks {text}"
        return decide(proved == len(runs), measured, proved=proved, runs=len(runs), **{str(m): n for m, n in greatest.items()})


def speed(values: Values) -> float:
    """The mean over the looks after the start of log10(training loss/n): the lower, the faster.

    Not in parts of the loss at the start: that is the accident of a draw, and most of it is gone
    after a step.
    """
    return statistics.fmean(math.log10(max(loss, 1e-300)) for loss in values["loss"][1:])
