"""Parametrizations: they keep a cell well-posed, whatever the optimizer does."""

from wellposed.nn.parametrizations.monotone import Monotone
from wellposed.nn.parametrizations.spectral import Spectral

__all__ = ["Monotone", "Spectral"]
