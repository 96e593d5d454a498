"""Loss landscapes and trajectories of models with equilibria, as numbers; `plot` draws them."""

from wellposed.landscape._basin import basin
from wellposed.landscape._surface import surface
from wellposed.landscape.curvature import hessian_directions, sharpness
from wellposed.landscape.directions import filter_normalized, path_directions, random_direction
from wellposed.landscape.record import CellStatus, Surface
from wellposed.landscape.trajectories import Trajectory, project, trajectory

__all__ = [
    "CellStatus",
    "Surface",
    "Trajectory",
    "basin",
    "filter_normalized",
    "hessian_directions",
    "path_directions",
    "project",
    "random_direction",
    "sharpness",
    "surface",
    "trajectory",
]
