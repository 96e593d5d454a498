"""The plane of many states of many features, against all singular vectors."""

from __future__ import annotations

import numpy as np
import pytest

from wellposed.landscape import Trajectory, project


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [False, True])
def test_the_plane_by_lanczos_steps_is_that_of_all_components(dtype: type, scale: bool) -> None:
    draws = np.random.default_rng(0)
    sizes = np.concatenate([[9.0, 5.0], np.full(298, 0.3)])
    states = (draws.standard_normal((20, 30, 300)) * sizes + 3.0).astype(dtype)
    states[15:, :10] = np.nan
    way = Trajectory(states, np.zeros((20, 30)), np.full(30, 20), np.zeros(30))
    plane = project([way], scale=scale)
    rows = states[np.isfinite(states).all(axis=2)].astype(np.float64)
    centred = (rows - rows.mean(axis=0)) / (rows.std(axis=0) if scale else 1.0)
    U, s, _ = np.linalg.svd(centred, full_matrices=False)
    found = plane.points[0][np.isfinite(states).all(axis=2)]
    for i in range(2):
        wanted = U[:, i] * s[i]
        error = min(np.abs(found[:, i] - sign * wanted).max() for sign in (1, -1))
        assert error <= 1e4 * np.finfo(dtype).eps * np.abs(wanted).max() * s[0] / (s[i] - s[i + 1])
        assert abs(plane.explained[i] - s[i] ** 2 / (s**2).sum()) <= 100 * np.finfo(dtype).eps
    assert np.isnan(plane.points[0][15:, :10]).all()
