"""Loss landscapes and trajectories that know about equilibria: numbers only, `wellposed.plot` draws them."""

from wellposed.landscape._basin import Basin, basin
from wellposed.landscape._surface import surface
from wellposed.landscape.curvature import (
    HessianProduct,
    HessianSpectrum,
    Sharpness,
    TraceEstimate,
    hessian_directions,
    hessian_eigenvalues,
    hessian_trace,
    sharpness,
)
from wellposed.landscape.directions import PathDirections, filter_normalized, path_directions, random_direction
from wellposed.landscape.record import CellStatus, Surface
from wellposed.landscape.trajectories import Projection, Trajectory, project, trajectory

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
