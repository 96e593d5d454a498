"""Experiments of [gao2022]."""

from wellposed_lab.papers.gao2022.figure1 import Gao2022Figure1

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = (Gao2022Figure1(),)
