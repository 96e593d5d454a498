"""Building blocks: cells, activations, parametrizations, networks, and the layer that holds them
together."""

from wellposed.implicit.warm_start import EquilibriumCache
from wellposed.nn._constrain import constrain
from wellposed.nn._export import export
from wellposed.nn._trajectory import correction_loss, trajectory
from wellposed.nn._truncated import truncated
from wellposed.nn.activations import AbstractActivation, Identity, LeakyReLU, ReLU, Sigmoid, Softplus, SoftThreshold, Tanh
from wellposed.nn.cell import AbstractCell, DenseCell
from wellposed.nn.constructions import unrolled, weight_tied
from wellposed.nn.families import AbstractContraction, AbstractNetwork, GaussianDEQ, ImplicitOnlyDEQ, MonotoneDEQ, SkipDEQ
from wellposed.nn.graph import GraphCell
from wellposed.nn.layer import EquilibriumLayer
from wellposed.nn.learned import AndersonWeights, LearnedAnderson, train_learned
from wellposed.nn.monotone import MonotoneClassifier, MonotoneConvCell, MonotoneTierCell
from wellposed.nn.parametrizations import ConvNormBall, Monotone, NormBall, Spectral
from wellposed.nn.pretrained import Pretrained
from wellposed.nn.sequence import TransformerCell, TransformerDEQ
from wellposed.nn.vision import MultiscaleCell, MultiscaleDEQ, ResidualCell, ResidualDEQ, jacobian_penalty

__all__ = [
    "AbstractActivation",
    "AbstractCell",
    "AbstractContraction",
    "AbstractNetwork",
    "AndersonWeights",
    "ConvNormBall",
    "DenseCell",
    "EquilibriumCache",
    "EquilibriumLayer",
    "GaussianDEQ",
    "GraphCell",
    "Identity",
    "ImplicitOnlyDEQ",
    "LeakyReLU",
    "LearnedAnderson",
    "Monotone",
    "MonotoneClassifier",
    "MonotoneConvCell",
    "MonotoneDEQ",
    "MonotoneTierCell",
    "MultiscaleCell",
    "MultiscaleDEQ",
    "NormBall",
    "Pretrained",
    "ReLU",
    "ResidualCell",
    "ResidualDEQ",
    "Sigmoid",
    "SkipDEQ",
    "SoftThreshold",
    "Softplus",
    "Spectral",
    "Tanh",
    "TransformerCell",
    "TransformerDEQ",
    "constrain",
    "correction_loss",
    "export",
    "jacobian_penalty",
    "train_learned",
    "trajectory",
    "truncated",
    "unrolled",
    "weight_tied",
]
