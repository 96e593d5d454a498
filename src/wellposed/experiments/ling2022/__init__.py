"""Experiments of [ling2022]."""

from wellposed.experiments.ling2022.figure1 import Figure1

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = (Figure1(),)
