"""Monotone equilibrium networks: weights with I - W >= margin, cells, a classifier."""

from wellposed.nn.monotone.cells import MonotoneConvCell, MonotoneTierCell
from wellposed.nn.monotone.classifier import MonotoneClassifier
from wellposed.nn.monotone.weights import TierWeights

__all__ = ["MonotoneClassifier", "MonotoneConvCell", "MonotoneTierCell", "TierWeights"]
