"""Parametrizations: they keep a cell well-posed, whatever the optimizer does."""

from wellposed.nn.parametrizations.monotone import Monotone
from wellposed.nn.parametrizations.norm_ball import ConvNormBall, NormBall, conv_norm_upper
from wellposed.nn.parametrizations.spectral import Spectral

__all__ = ["ConvNormBall", "Monotone", "NormBall", "Spectral", "conv_norm_upper"]
