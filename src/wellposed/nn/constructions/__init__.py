"""Explicit networks as equilibrium networks, and the other way around."""

from wellposed.nn.constructions.unrolling import UnrolledNetwork, unrolled
from wellposed.nn.constructions.weight_tying import WeightTiedCell, weight_tied

__all__ = ["UnrolledNetwork", "WeightTiedCell", "unrolled", "weight_tied"]
