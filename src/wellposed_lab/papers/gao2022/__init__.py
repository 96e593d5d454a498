"""Experiments of [gao2022]."""

from wellposed_lab.papers.gao2022.figure1 import Figure1

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = (Figure1(),)
