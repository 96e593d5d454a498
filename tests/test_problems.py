"""What the test problems claim about themselves is true."""

from __future__ import annotations

import pytest
import torch

from problems import PROBLEMS, flat, gaussian, map_leaves, problem

SOLVABLE = [name for name in PROBLEMS if problem(name).solution is not None]


def near(name: str, seed: int, size: float):
    """Random points around the solution, and the solution."""
    p = problem(name)
    seeds = iter(range(seed, seed + 100))
    return p, map_leaves(lambda leaf: leaf + size * gaussian(*leaf.shape, seed=next(seeds)), p.solution)


@pytest.mark.parametrize("name", SOLVABLE)
def test_solution_is_a_fixed_point(name: str) -> None:
    p = problem(name)
    g, f = p.residual(p.solution)
    fine = flat(p.solution).isfinite().all(dim=1)
    assert fine.any()
    assert (g <= 1e-14 * (1 + f))[fine].all()


@pytest.mark.parametrize("name", SOLVABLE)
@pytest.mark.parametrize("size", [0.01, 1.0, 10.0])
def test_lipschitz_and_conditioning(name: str, size: float) -> None:
    p, z = near(name, 1000, size)
    _, y = near(name, 2000, size)
    fine = flat(p.solution).isfinite().all(dim=1)
    if name == "ambush":
        z, y = z.clamp(max=90), y.clamp(max=90)
    change = (flat(p.image(z)) - flat(p.image(y))).norm(dim=1)
    assert (change <= p.lipschitz * (flat(z) - flat(y)).norm(dim=1) * (1 + 1e-12))[fine].all()
    g, _ = p.residual(z)
    assert (p.distance(z) <= p.conditioning * g * (1 + 1e-12))[fine].all()


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_every_size_and_dtype_can_be_built(name: str, dtype: torch.dtype, batch: int) -> None:
    p = PROBLEMS[name](dtype, batch)
    assert p.batch == batch and p.dtype == dtype
    assert p.solution is None or flat(p.solution).shape == flat(p.z0).shape
    if batch == 3:
        part = p.take(torch.tensor([2, 0]))
        assert torch.equal(flat(part.z0), flat(p.z0)[[2, 0]])


def test_monotone_does_not_contract_and_plain_iteration_diverges() -> None:
    p = problem("monotone")
    assert p.lipschitz > 3
    z = p.z0
    for _ in range(60):
        z = p.image(z)
    assert p.residual(z)[0].max() > 1e6


@pytest.mark.parametrize("name", ["affine", "relu_random", "monotone", "tanh"])
def test_dense_map_is_the_same_map(name: str) -> None:
    p = problem(name)
    assert torch.allclose(p.dense_map()(p.z0), p.image(p.z0), rtol=0, atol=1e-14)
