"""Experiments of [ling2022]."""

from wellposed_lab.papers.ling2022.depth import Depth
from wellposed_lab.papers.ling2022.figure1 import Ling2022Figure1
from wellposed_lab.papers.ling2022.lemma1 import Lemma1
from wellposed_lab.papers.ling2022.theorem2 import Theorem2

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = (Ling2022Figure1(), Lemma1(), Theorem2(), Depth())
