"""All experiments, by name."""

from __future__ import annotations

from wellposed.errors import InvalidArgument, did_you_mean
from wellposed.experiments import gao2022, gao2023, ling2022, nguyen2022, xie2021
from wellposed.experiments._experiment import AbstractExperiment

__all__ = ["EXPERIMENTS", "find"]

#: In the order of the papers' importance for them: ling2022/figure1 first.
EXPERIMENTS: dict[str, AbstractExperiment] = {
    experiment.name: experiment
    for paper in (ling2022, gao2022, gao2023, nguyen2022, xie2021)
    for experiment in paper.EXPERIMENTS
}


def find(name: str) -> AbstractExperiment:
    """The experiment of a name, or a sentence with the nearest one."""
    if name not in EXPERIMENTS:
        raise InvalidArgument(
            f"Unknown experiment {name!r}; known are {', '.join(EXPERIMENTS)}.{did_you_mean(name, EXPERIMENTS)}"
        )
    return EXPERIMENTS[name]
