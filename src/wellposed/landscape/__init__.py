"""Loss landscapes and trajectories that know about equilibria: numbers only, `wellposed.plot` draws them."""

from wellposed.landscape._basin import Basin, basin
from wellposed.landscape._sharpness import Sharpness, TraceEstimate, hessian_trace, sharpness
from wellposed.landscape._surface import surface
from wellposed.landscape._trajectory import Trajectory, trajectory
from wellposed.landscape.cell_status import CellStatus
from wellposed.landscape.directions import PathDirections, filter_normalized, path_directions, random_direction
from wellposed.landscape.hessian import HessianProduct, HessianSpectrum, hessian_directions, hessian_eigenvalues
from wellposed.landscape.projection import Projection, project
from wellposed.landscape.record import Surface

__all__ = [
    "Basin",
    "CellStatus",
    "HessianProduct",
    "HessianSpectrum",
    "PathDirections",
    "Projection",
    "Sharpness",
    "Surface",
    "TraceEstimate",
    "Trajectory",
    "basin",
    "filter_normalized",
    "hessian_directions",
    "hessian_eigenvalues",
    "hessian_trace",
    "path_directions",
    "project",
    "random_direction",
    "sharpness",
    "surface",
    "trajectory",
]
