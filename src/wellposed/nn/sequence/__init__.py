"""Equilibria of sequences."""

from wellposed.nn.sequence.cell import TransformerCell
from wellposed.nn.sequence.transformer import TransformerDEQ

__all__ = ["TransformerCell", "TransformerDEQ"]
