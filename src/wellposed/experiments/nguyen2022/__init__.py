"""Experiments of [nguyen2022]."""

from wellposed.experiments._experiment import AbstractExperiment

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[AbstractExperiment, ...] = ()
