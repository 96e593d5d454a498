"""Experiments of [xie2021]."""

from wellposed_lab.papers.xie2021.table1a import Table1a
from wellposed_lab.papers.xie2021.table1b import Table1b
from wellposed_lab.papers.xie2021.table2 import Table2
from wellposed_lab.papers.xie2021.table3 import Table3
from wellposed_lab.papers.xie2021.theorems import Theorems

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = (Theorems(), Table1a(), Table1b(), Table2(), Table3())
