"""Image networks: residual and multiscale equilibria, their explicit twins, and what keeps them tame."""

from wellposed.nn.vision.cells import MultiscaleCell, ResidualCell
from wellposed.nn.vision.jacobian import equilibrium_spectral_radius, jacobian_penalty
from wellposed.nn.vision.modules import ClassificationHead, SegmentationHead, VariationalDropout
from wellposed.nn.vision.networks import ExplicitTwin, MultiscaleDEQ, ResidualDEQ, WeightTied

__all__ = [
    "ClassificationHead",
    "ExplicitTwin",
    "MultiscaleCell",
    "MultiscaleDEQ",
    "ResidualCell",
    "ResidualDEQ",
    "SegmentationHead",
    "VariationalDropout",
    "WeightTied",
    "equilibrium_spectral_radius",
    "jacobian_penalty",
]
