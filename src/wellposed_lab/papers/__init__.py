"""Experiments: from a configuration to data, a model, and a run directory; and those of the papers, their claims as checks.

`_experiment.py` is what an experiment is, `registry.py` names them all, one folder a paper, and `reproduce` runs one.
"""

from wellposed_lab.papers._claim import Check, Claim, Finding, Outcome
from wellposed_lab.papers._config import Config, changes_of
from wellposed_lab.papers._experiment import AbstractExperiment, Record, Result
from wellposed_lab.papers._reproduce import reproduce
from wellposed_lab.papers.registry import EXPERIMENTS, choose, find

__all__ = [
    "AbstractExperiment",
    "Check",
    "Claim",
    "Config",
    "EXPERIMENTS",
    "Finding",
    "Outcome",
    "Record",
    "Result",
    "changes_of",
    "choose",
    "find",
    "reproduce",
]
