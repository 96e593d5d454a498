"""Data that are made up."""

from __future__ import annotations

import numpy as np

__all__ = ["moons", "sphere"]

Arrays = tuple[np.ndarray, np.ndarray]


def sphere(n: int, features: int, rng: np.random.Generator) -> Arrays:
    """(n, d) points uniform on the unit sphere, (n,) standard normal labels."""
    X = rng.standard_normal((n, features))
    return X / np.linalg.norm(X, axis=1, keepdims=True), rng.standard_normal(n)


def moons(n: int, noise: float, rng: np.random.Generator) -> Arrays:
    """(n, 2) two interleaving half circles, (n,) classes 0 and 1 in turn, as scikit-learn's `make_moons`."""
    y = np.arange(n) % 2
    angle = np.pi * rng.random(n)
    upper, lower = np.stack([np.cos(angle), np.sin(angle)], 1), np.stack([1 - np.cos(angle), 0.5 - np.sin(angle)], 1)
    X = np.where((y == 0)[:, None], upper, lower)
    return X + noise * rng.standard_normal((n, 2)), y
