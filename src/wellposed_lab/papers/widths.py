"""Full-batch training at several widths, for [ling2022], [gao2022] and [gao2023]."""

from __future__ import annotations

import abc
import dataclasses
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from wellposed.data import Dataset
from wellposed.descent import State, Stop, descend
from wellposed.errors import DivergedWarning
from wellposed.kernel import tangent_kernel
from wellposed.nn import AbstractContraction
from wellposed.nn.families import NormBound, may_be_ill_posed
from wellposed_lab.papers.claims import ClaimFinding, decide, not_tested, spread
from wellposed_lab.papers.datasets import samples, two_classes
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task

__all__ = ["FALLS", "AbstractWidthStudy", "WidthConfig", "WidthResults", "largest_eigenvalue", "speed", "train"]

Values = Mapping[str, Any]
#: How a measure that falls with the width is decided, in words.
FALLS = "its mean falls from each width to the next, and for every seed from the narrowest to the widest"


@dataclass(frozen=True, kw_only=True)
class WidthConfig(ExperimentConfig):
    """Sizes of a study of widths."""

    data: tuple[str, ...] = ("mnist",)  # names of data sets
    widths: tuple[int, ...] = (50, 150, 450)  # m
    n: int = 100  # n, n_test: samples to train and to test
    n_test: int = 200
    steps: int = 300  # of descent
    points: int = 30  # about how often to look at test loss and norm
    step: float = 1.0  # the step size in units of 1/lambda_max of the tangent kernel of the widest network at its start


class WidthResults:
    """The results of a study, by data set and width; within these, by seed."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = sorted(results, key=lambda result: result.task["seed"])
        self.data = list(dict.fromkeys(result.task["data"] for result in results))
        self.widths = sorted({result.task["width"] for result in results})

    def of(self, data: str, width: int) -> list[Values]:
        """One for each seed."""
        return [r.values for r in self.results if r.task["data"] == data and r.task["width"] == width]

    def falls(self, measure: Callable[[Values], float], form: str = ".3g", *, rises: bool = False) -> ClaimFinding:
        """Whether a measure falls with the width: its mean from each width to the next, and for
        every seed from the narrowest to the widest, on every data set.

        Args:
            measure: Of one training run.
            form: How its values are printed.
            rises: The same, for a measure that should rise.
        """
        if len(self.widths) < 2:
            return not_tested("it needs at least two widths")
        sign = -1.0 if rises else 1.0
        holds, texts, numbers = True, [], {}
        for data in self.data:
            by_width = {m: [measure(values) for values in self.of(data, m)] for m in self.widths}
            means = [sign * statistics.fmean(by_width[m]) for m in self.widths]
            ends = zip(by_width[self.widths[0]], by_width[self.widths[-1]], strict=True)
            holds &= all(wide < narrow for narrow, wide in zip(means, means[1:], strict=False))
            holds &= all(sign * wide < sign * narrow for narrow, wide in ends)
            texts.append(f"{data}: " + ", ".join(f"m={m}: {spread(by_width[m], form)}" for m in self.widths))
            numbers[data] = {str(m): values for m, values in by_width.items()}
        return decide(holds, "; ".join(texts), **numbers)

    def everywhere(self, measure: Callable[[Values], float | None], limit: float, form: str = ".4g") -> ClaimFinding:
        """Whether a measure is below a limit in every run; None is not."""
        found = {data: [measure(values) for m in self.widths for values in self.of(data, m)] for data in self.data}
        failed = sum(value is None for values in found.values() for value in values)
        worst = {data: max((v for v in values if v is not None), default=math.nan) for data, values in found.items()}
        holds = failed == 0 and all(value < limit for value in worst.values())
        lost = f"; {failed} runs did not go to their end" if failed else ""
        runs = sum(map(len, found.values()))
        text = ", ".join(f"{data}: at most {value:{form}}" for data, value in worst.items())
        return decide(holds, f"{text} (over {runs} runs){lost}", **worst)

    def contracts(self) -> ClaimFinding:
        """Whether the contraction factor was proved to be below 1 at every step of every run."""
        runs = [values for data in self.data for m in self.widths for values in self.of(data, m)]
        proved = sum(values["norm_throughout"] is not None and values["norm_throughout"] < 1 for values in runs)
        lost = sum(values["norm_throughout"] is None for values in runs)
        greatest = {m: max(max(v["norm"]) for data in self.data for v in self.of(data, m)) for m in self.widths}
        text = ", ".join(f"m={m}: {norm:.4g}" for m, norm in greatest.items())
        ended = f"; {lost} runs did not go to their end" if lost else ""
        measured = f"proved for all steps of {proved} of {len(runs)} runs{ended}; greatest norm at the looks {text}"
        return decide(proved == len(runs), measured, proved=proved, runs=len(runs), **{str(m): n for m, n in greatest.items()})


class AbstractWidthStudy(AbstractExperiment):
    """Trains the network of a paper at several widths.

    Attributes:
        paper: Whose preprocessing.
    """

    paper: ClassVar[str]
    quick: ClassVar[WidthConfig]
    full: ClassVar[WidthConfig]

    @abc.abstractmethod
    def network(self, features: int, width: int, generator: torch.Generator) -> AbstractContraction:
        """The network at its start, with policies "ignore": failures are measured."""

    def available(self, config: WidthConfig) -> tuple[WidthConfig, list[str]]:
        data, n, n_test, notes = two_classes(config.data, config.n, config.n_test, paper=self.paper)
        return dataclasses.replace(config, data=data, n=n, n_test=n_test), notes

    def tasks(self, config: WidthConfig) -> list[Task]:
        shared = {key: getattr(config, key) for key in ("n", "n_test", "steps", "points", "step")}
        widest = max(config.widths)
        return [
            {"data": data, "seed": seed, "width": width, "reference": widest, **shared}
            for width in sorted(set(config.widths), reverse=True)  # the long ones first, so that no process is left with one
            for data in config.data
            for seed in config.seeds
        ]

    def run(self, task: Task) -> dict[str, Any]:
        data = samples(task["data"], task["n"], task["n_test"], paper=self.paper, seed=task["seed"])

        def make(width: int) -> AbstractContraction:
            return self.network(data.X.shape[1], width, torch.Generator().manual_seed(task["seed"]))

        options = {key: task[key] for key in ("width", "reference", "step", "steps", "points")}
        return train(make, data, **options)

    def remarks(self, results: Sequence[Result]) -> list[str]:
        unsolved = sum(result.values["unsolved"] for result in results)
        if not unsolved:
            return []
        runs = sum(result.values["unsolved"] > 0 for result in results)
        return [
            f"{unsolved} equilibria or adjoints in {runs} of {len(results)} runs did not converge; their numbers are not exact"
        ]

    def panels(self, config: WidthConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        of = WidthResults(results)
        rows = [(data, column) for data in of.data for column in ("loss", "test_loss", "norm")]
        return [_panel(of, data, column) for data, column in rows]


_LABELS = {"loss": "training loss / n", "test_loss": "test loss / n", "norm": "contraction factor"}


def _panel(of: WidthResults, data: str, column: str) -> dict[str, Any]:
    curves = []
    for m in of.widths:
        runs = of.of(data, m)
        x = max((values["step"] for values in runs), key=len)
        y = [[*values[column], *[None] * (len(x) - len(values[column]))] for values in runs]
        curves.append({"label": f"m = {m}", "x": x, "y": y})
    scale = "linear" if column == "norm" else "log"
    return {"title": data, "x_label": "step", "y_label": _LABELS[column], "y_scale": scale, "curves": curves}


def speed(values: Values) -> float:
    """The mean over the looks after the start of log10(training loss/n): the lower, the faster.

    Not in parts of the loss at the start: that is the accident of a draw, and most of it is gone
    after a step.
    """
    return statistics.fmean(math.log10(max(loss, 1e-300)) for loss in values["loss"][1:])


def largest_eigenvalue(model: AbstractContraction, X: Tensor) -> float:
    """Of the tangent kernel: descent with steps below 2 over this is stable at first order."""
    return float(torch.linalg.eigvalsh(tangent_kernel(model, X).double())[-1])


class TrainingRecorder:
    """Losses, errors and the contraction factor every so many steps, and at the last.

    Args:
        data: With its test part.
        every: How many steps.
        last: The last step.
    """

    def __init__(self, data: Dataset, every: int, last: int) -> None:
        self.data, self.every, self.last = data, every, last
        self.unsolved, self.norm_throughout, self._bound = 0, 0.0, NormBound()
        self.columns: dict[str, list[Any]] = {
            name: [] for name in ("step", "loss", "train_error", "test_loss", "test_error", "norm")
        }

    def on_step(self, state: State) -> None:
        """Called at every point of the descent."""
        assert state.point is not None
        solved = state.point.solution.converged & state.point.adjoint_solution.converged
        self.unsolved += int((~solved).sum())
        assert may_be_ill_posed(state.model)
        # cheap while it is below 1, and sharp as soon as it would not be: so 1 or more is no fault of the bound
        self.norm_throughout = max(self.norm_throughout, self._bound(state.model.recurrent(), below=1.0))
        if state.step % self.every and state.step != self.last:
            return
        assert self.data.X_test is not None and self.data.y_test is not None
        prediction = state.model(self.data.X_test)
        row = {
            "step": state.step,
            "loss": state.loss / len(state.y),
            "train_error": _error(state.r + state.y, state.y),
            "test_loss": float(((prediction - self.data.y_test) ** 2).double().mean()) / 2,
            "test_error": _error(prediction, self.data.y_test),
            "norm": state.model.contraction_upper(),
        }
        for name, value in row.items():
            self.columns[name].append(value)


def train(
    make: Callable[[int], AbstractContraction],
    data: Dataset,
    *,
    width: int,
    reference: int,
    step: float,
    steps: int,
    points: int,
) -> dict[str, Any]:
    """Full-batch descent with one fixed step.

    Args:
        make: (width) -> a network, the same one each time.
        data: To train and to test.
        width: Of the network that is trained.
        reference: The step is `step`/lambda_max of the tangent kernel of a network of this width,
            at its start.
        step: In units of 1/lambda_max.
        steps: How many.
        points: About how many times to look.

    Returns:
        Columns `step`, `loss` (|r|^2/(2n)), `train_error`, `test_loss` (|r|^2/(2 n_test)),
            `test_error`, `norm` (upper bounds
        of the contraction factor); `norm_throughout`, an upper bound over *all* steps, None if it
            did not go to its end;
        `unsolved`, equilibria and adjoints that did not converge; `gram_change`, |G(end) -
            G(0)|_F/|G(0)|_F of G = Z Z^T;
        `step_size`, `eigenvalue`, `stop`.
    """
    largest = largest_eigenvalue(make(reference), data.X)
    model = make(width)
    recorder = TrainingRecorder(data, max(1, steps // points), steps)
    size = step / largest
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergedWarning)  # it is in the record as `stop`
        before = _gram(model, data.X)
        history = descend(model, data.X, data.y, step_size=size, steps=steps, callbacks=[recorder])
    return {
        **recorder.columns,
        "norm_throughout": recorder.norm_throughout if history.stop is Stop.STEPS else None,
        "gram_change": float(torch.linalg.norm(_gram(model, data.X) - before) / torch.linalg.norm(before)),
        "unsolved": recorder.unsolved,
        "step_size": size,
        "eigenvalue": largest,
        "stop": None if history.stop is None else history.stop.value,
        "data": list(data.steps),
    }


def _gram(model: AbstractContraction, X: Tensor) -> Tensor:
    Z = model.solve(X).value.double()
    return Z @ Z.t()


def _error(prediction: Tensor, y: Tensor) -> float | None:
    """The part of wrong signs, if the targets are signs."""
    if bool((y.abs() != 1).any()):
        return None
    return float((torch.sign(prediction) != y).double().mean())
