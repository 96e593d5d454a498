"""Networks of whole tasks, and their trained weights by name."""

from wellposed.tasks._store import load, save
from wellposed.tasks.graphs import NodeClassifier
from wellposed.tasks.imaging import deblurrer
from wellposed.tasks.puzzles import PuzzleSolver

__all__ = ["NodeClassifier", "PuzzleSolver", "deblurrer", "load", "save"]
