"""Monotone equilibrium networks: parametrizations with I - W >= margin, cells over them, and a classifier."""

from wellposed.nn.monotone.cells import MonotoneConvCell, MonotoneTierCell
from wellposed.nn.monotone.classifier import MonotoneClassifier
from wellposed.nn.monotone.weights import TierWeights

__all__ = ["MonotoneClassifier", "MonotoneConvCell", "MonotoneTierCell", "TierWeights"]
