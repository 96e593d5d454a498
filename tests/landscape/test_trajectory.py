"""Trajectories: every iterate of every sample, and planes that they share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.landscape import Trajectory, project, trajectory
from wellposed.landscape.trajectories import Projection


def layer(solver: wp.solve.AbstractSolver, **options: object) -> tuple[wp.EquilibriumLayer, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    W = 0.8 * torch.linalg.qr(torch.randn(4, 4, generator=generator).double()).Q
    x = torch.randn(6, 4, generator=generator).double() * torch.tensor([1, 1, 1, 10, 10, 0.01]).double().unsqueeze(1)
    return wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W.T) + x, solver, **options), W, x


def test_picard_by_hand() -> None:
    model, W, x = layer(wp.Picard(), rtol=1e-6)
    t = trajectory(model, x)
    z = torch.zeros_like(x)
    assert len(set(t.num_steps.tolist())) > 1  # samples leave at different times
    for k in range(t.states.shape[0]):
        fz = torch.tanh(z @ W.T) + x
        here = t.num_steps > k
        np.testing.assert_allclose(t.states[k][here], z[torch.from_numpy(here)].numpy(), rtol=1e-12, atol=1e-14)
        residual = ((fz - z).norm(dim=1) / fz.norm(dim=1)).numpy()
        np.testing.assert_allclose(t.residual[k][here], residual[here], rtol=1e-9)
        assert np.isnan(t.states[k][~here]).all() and np.isnan(t.residual[k][~here]).all()
        z = fz
    np.testing.assert_array_equal(t.num_steps + 1, model.solve(x).num_steps.numpy())  # which confirms its answer
    assert t.converged.all()


@pytest.mark.parametrize("solver", [wp.Anderson(), wp.Broyden(), wp.Auto(), wp.NewtonKrylov()])
def test_every_solver_ends_at_the_equilibrium(solver: wp.solve.AbstractSolver) -> None:
    model, _, x = layer(solver)
    t = trajectory(model, x)
    expected = model.solve(x).value.numpy()
    for sample, steps in enumerate(t.num_steps):
        np.testing.assert_allclose(t.states[steps - 1, sample], expected[sample], atol=1e-9)
        assert t.residual[steps - 1, sample] <= 1e-12


def test_starts_and_failures_are_recorded() -> None:
    model, _, x = layer(wp.Picard(), max_steps=3)
    start = torch.ones_like(x)
    t = trajectory(model, x, z0=start)
    assert t.states.shape[0] == 3 and not t.converged.any()
    np.testing.assert_array_equal(t.states[0], start.numpy())
    assert model.on_failure == "warn" and model.last_solution is None


def test_models_with_an_encoder_and_theory_networks() -> None:
    inner, _, x = layer(wp.Picard())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).double(), inner, nn.Linear(4, 1).double())
    t = trajectory(model, x, solver=wp.Anderson())
    expected = inner.solve(model[0](x).detach()).value.numpy()
    np.testing.assert_allclose(t.states[t.num_steps - 1, np.arange(6)], expected, atol=1e-9)
    network = wp.SkipDEQ(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t = trajectory(network, x)
    np.testing.assert_allclose(t.states[t.num_steps - 1, np.arange(6)], network.solve(x).value.numpy(), atol=1e-9)


def test_projection_is_shared_and_an_isometry_in_the_plane(tmp_path: Path) -> None:
    model, _, x = layer(wp.Picard(), rtol=1e-6)
    two = [trajectory(model, x), trajectory(model, x, z0=torch.ones_like(x))]
    p = project(two, num=4, names=["zeros", "ones"])  # all components: distances are those of the states
    a, b = two[0].states[0, 0], two[1].states[1, 3]
    assert np.linalg.norm(p.points[0][0, 0] - p.points[1][1, 3]) == pytest.approx(np.linalg.norm(a - b))
    assert p.explained.sum() == pytest.approx(1.0)
    for one, points in zip(two, p.points, strict=True):
        np.testing.assert_array_equal(np.isnan(points[:, :, 0]), np.isnan(one.residual))
    p.save(tmp_path / "p.npz")
    two[0].save(tmp_path / "t.npz")
    for other in (Projection.load(tmp_path / "p.npz"), Projection.from_dict(json.loads(json.dumps(p.to_dict())))):
        assert other.names == ["zeros", "ones"]
        for k in range(2):
            np.testing.assert_array_equal(other.points[k], p.points[k])
            np.testing.assert_array_equal(other.residuals[k], p.residuals[k])
    loaded = Trajectory.load(tmp_path / "t.npz")
    np.testing.assert_array_equal(loaded.states, two[0].states)
    assert loaded.info == two[0].info
    with pytest.raises(wp.InvalidArgument, match="'trajectory'"):
        Projection.load(tmp_path / "t.npz")


def test_scaled_projection_ignores_units() -> None:
    states = np.random.default_rng(0).normal(size=(5, 3, 4))
    one = Trajectory(states, np.ones((5, 3)), np.full(3, 5), np.zeros(3, int))
    other = Trajectory(states * [1, 1e3, 1, 1e-2], np.ones((5, 3)), np.full(3, 5), np.zeros(3, int))
    np.testing.assert_allclose(np.abs(project([one], scale=True).points[0]), np.abs(project([other], scale=True).points[0]))


def test_bad_arguments() -> None:
    model, _, x = layer(wp.Picard())
    with pytest.raises(wp.InvalidArgument, match="has 1 equilibrium layers; got layer=1"):
        trajectory(model, x, layer=1)
    with pytest.raises(wp.InvalidType, match="cannot follow PeacemanRachford"):
        trajectory(model, x, solver=wp.PeacemanRachford())
    t = trajectory(model, x)
    with pytest.raises(wp.InvalidArgument, match="one name for each"):
        project([t], names=["a", "b"])
    with pytest.raises(wp.InvalidArgument, match="at least one"):
        project([])
