"""Building blocks: cells, activations, parametrizations, and the layer that holds them together."""

from wellposed.nn.activations import (
    ACTIVATIONS,
    AbstractActivation,
    Identity,
    LeakyReLU,
    ReLU,
    Sigmoid,
    Softplus,
    SoftThreshold,
    Tanh,
)
from wellposed.nn.cell import AbstractCell, DenseCell
from wellposed.nn.layer import EquilibriumLayer, Linearised
from wellposed.nn.models import AbstractContraction, AbstractNetwork, GaussianDEQ, ImplicitOnlyDEQ, MonotoneDEQ, SkipDEQ
from wellposed.nn.parametrizations import Monotone, Spectral
from wellposed.nn.tangent import GramProduct, TangentFeatures

__all__ = [
    "ACTIVATIONS",
    "AbstractActivation",
    "AbstractCell",
    "AbstractContraction",
    "AbstractNetwork",
    "DenseCell",
    "EquilibriumLayer",
    "GaussianDEQ",
    "GramProduct",
    "Identity",
    "ImplicitOnlyDEQ",
    "LeakyReLU",
    "Linearised",
    "Monotone",
    "MonotoneDEQ",
    "ReLU",
    "Sigmoid",
    "SkipDEQ",
    "SoftThreshold",
    "Softplus",
    "Spectral",
    "TangentFeatures",
    "Tanh",
]
