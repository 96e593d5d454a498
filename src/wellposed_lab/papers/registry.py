"""All experiments, by name."""

from __future__ import annotations

from collections.abc import Sequence

from wellposed.errors import InvalidArgument, did_you_mean
from wellposed_lab.papers import gao2022, gao2023, ling2022, nguyen2022, xie2021
from wellposed_lab.papers.experiment import AbstractExperiment

__all__ = ["EXPERIMENTS", "choose", "find"]

#: In the order of the papers' importance for them: ling2022/figure1 first.
EXPERIMENTS: dict[str, AbstractExperiment] = {
    experiment.name: experiment
    for paper in (ling2022, gao2022, gao2023, nguyen2022, xie2021)
    for experiment in paper.EXPERIMENTS
}
#: Their keys.
PAPERS = tuple(dict.fromkeys(name.partition("/")[0] for name in EXPERIMENTS))


def find(name: str) -> AbstractExperiment:
    """The experiment of a name, or a sentence with the nearest one."""
    if name not in EXPERIMENTS:
        raise InvalidArgument(
            f"Unknown experiment {name!r}; known are {', '.join(EXPERIMENTS)}.{did_you_mean(name, [*EXPERIMENTS, *PAPERS])}"
        )
    return EXPERIMENTS[name]


def choose(names: Sequence[str]) -> list[AbstractExperiment]:
    """The experiments of names, each of which is an experiment, a paper such as "ling2022", or
    "all"; each of them once."""
    chosen: dict[str, AbstractExperiment] = {}
    for name in names:
        if name == "all":
            chosen |= EXPERIMENTS
        elif name in PAPERS:
            chosen |= {key: experiment for key, experiment in EXPERIMENTS.items() if key.partition("/")[0] == name}
        else:
            chosen[name] = find(name)
    return list(chosen.values())
