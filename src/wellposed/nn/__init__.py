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
from wellposed.nn.constructions import UnrolledNetwork, WeightTiedCell, unrolled, weight_tied
from wellposed.nn.families import AbstractContraction, AbstractNetwork, GaussianDEQ, ImplicitOnlyDEQ, MonotoneDEQ, SkipDEQ
from wellposed.nn.layer import EquilibriumLayer, Linearised
from wellposed.nn.learned import AndersonWeights, LearnedAnderson, train_learned
from wellposed.nn.monotone import MonotoneClassifier, MonotoneConvCell, MonotoneTierCell, TierWeights
from wellposed.nn.parametrizations import ConvNormBall, Monotone, NormBall, Spectral, conv_norm_upper
from wellposed.nn.sensitivity import AbstractSensitivity, DescentBounds, JacobianBounds
from wellposed.nn.sequence import TransformerCell, TransformerDEQ
from wellposed.nn.tangent import GramProduct, TangentFeatures
from wellposed.nn.vision import (
    ClassificationHead,
    ExplicitTwin,
    MultiscaleCell,
    MultiscaleDEQ,
    ResidualCell,
    ResidualDEQ,
    SegmentationHead,
    VariationalDropout,
    WeightTied,
    equilibrium_spectral_radius,
    jacobian_penalty,
)

__all__ = [
    "ACTIVATIONS",
    "AbstractActivation",
    "AbstractCell",
    "AbstractContraction",
    "AbstractNetwork",
    "AbstractSensitivity",
    "AndersonWeights",
    "ClassificationHead",
    "ConvNormBall",
    "DenseCell",
    "DescentBounds",
    "EquilibriumLayer",
    "ExplicitTwin",
    "GaussianDEQ",
    "GramProduct",
    "Identity",
    "ImplicitOnlyDEQ",
    "JacobianBounds",
    "LeakyReLU",
    "LearnedAnderson",
    "Linearised",
    "Monotone",
    "MonotoneClassifier",
    "MonotoneConvCell",
    "MonotoneDEQ",
    "MonotoneTierCell",
    "MultiscaleCell",
    "MultiscaleDEQ",
    "NormBall",
    "ReLU",
    "ResidualCell",
    "ResidualDEQ",
    "SegmentationHead",
    "Sigmoid",
    "SkipDEQ",
    "SoftThreshold",
    "Softplus",
    "Spectral",
    "TangentFeatures",
    "Tanh",
    "TierWeights",
    "TransformerCell",
    "TransformerDEQ",
    "UnrolledNetwork",
    "VariationalDropout",
    "WeightTied",
    "WeightTiedCell",
    "conv_norm_upper",
    "equilibrium_spectral_radius",
    "jacobian_penalty",
    "train_learned",
    "unrolled",
    "weight_tied",
]
