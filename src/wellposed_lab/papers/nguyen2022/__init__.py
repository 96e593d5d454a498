"""Experiments of [nguyen2022]."""

from wellposed_lab.papers.nguyen2022.chapter3 import Chapter3
from wellposed_lab.papers.nguyen2022.figure4_1 import Figure41
from wellposed_lab.papers.nguyen2022.figure4_2 import Figure42
from wellposed_lab.papers.nguyen2022.figure4_3 import Figure43
from wellposed_lab.papers.nguyen2022.figure4_4 import Figure44
from wellposed_lab.papers.nguyen2022.figure4_5 import Figure45
from wellposed_lab.papers.nguyen2022.initial import Initial
from wellposed_lab.papers.nguyen2022.splitting import Splitting

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = (Splitting(), Chapter3(), Figure41(), Figure42(), Figure43(), Figure44(), Figure45(), Initial())
