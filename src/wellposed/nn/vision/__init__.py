"""Image networks: residual and multiscale equilibria, explicit twins, Jacobian penalty."""

from wellposed.nn.vision.cells import MultiscaleCell, ResidualCell
from wellposed.nn.vision.jacobian import equilibrium_spectral_radius, jacobian_penalty
from wellposed.nn.vision.modules import ClassificationHead, SegmentationHead, VariationalDropout, WeightTied
from wellposed.nn.vision.networks import ExplicitTwin, MultiscaleDEQ, ResidualDEQ

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
