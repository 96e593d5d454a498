"""One folder per paper: its figures and tables as experiments, its claims, and its audit.

`claims.py` and `experiment.py` define an experiment, `run.py` runs one, `audit.py` runs the checks
of all findings about the papers.
"""

from wellposed_lab.papers.claims import Claim, ClaimCheck, ClaimFinding, ClaimOutcome
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, changes_of
from wellposed_lab.papers.record import Record
from wellposed_lab.papers.registry import EXPERIMENTS, choose, find
from wellposed_lab.papers.run import reproduce

__all__ = [
    "EXPERIMENTS",
    "AbstractExperiment",
    "ClaimCheck",
    "Claim",
    "ClaimFinding",
    "ClaimOutcome",
    "ExperimentConfig",
    "Record",
    "Result",
    "changes_of",
    "choose",
    "find",
    "reproduce",
]
