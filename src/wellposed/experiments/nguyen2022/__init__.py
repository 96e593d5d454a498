"""Experiments of [nguyen2022]."""

from wellposed.experiments.nguyen2022.chapter3 import Chapter3
from wellposed.experiments.nguyen2022.figure4_1 import Figure41
from wellposed.experiments.nguyen2022.splitting import Splitting

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = (Splitting(), Chapter3(), Figure41())
