"""Experiments of [xie2021]."""

from wellposed.experiments.xie2021.table1 import Table1
from wellposed.experiments.xie2021.theorems import Theorems

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = (Theorems(), Table1())
