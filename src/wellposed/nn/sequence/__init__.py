"""Equilibria of sequences."""

from wellposed.nn.sequence.transformer import TransformerCell, TransformerDEQ

__all__ = ["TransformerCell", "TransformerDEQ"]
