"""Building blocks: cells, activations, parametrizations, and the layer that holds them together."""

from wellposed.nn.activations import AbstractActivation, Identity, ReLU, Tanh
from wellposed.nn.cell import AbstractCell, DenseCell
from wellposed.nn.layer import EquilibriumLayer
from wellposed.nn.parametrizations import Spectral

__all__ = [
    "AbstractActivation",
    "AbstractCell",
    "DenseCell",
    "EquilibriumLayer",
    "Identity",
    "ReLU",
    "Spectral",
    "Tanh",
]
