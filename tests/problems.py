"""The problems of `wellposed.testing`, and the helpers they are made of, for the tests of every package."""

from wellposed.testing._problem import (
    LOW_PRECISION,
    Problem,
    compute_dtype,
    flat,
    gaussian,
    leaves,
    map_leaves,
    norm,
    rotations,
    with_norm,
)
from wellposed.testing.problems import PROBLEMS, problem, spread_with

__all__ = [
    "LOW_PRECISION",
    "PROBLEMS",
    "Problem",
    "compute_dtype",
    "flat",
    "gaussian",
    "leaves",
    "map_leaves",
    "norm",
    "problem",
    "rotations",
    "spread_with",
    "with_norm",
]
