"""The plain loop that every transform of torch.func understands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wellposed._torch import concrete, transforms_active
from wellposed.implicit._transformed import iterate_transformed
from wellposed.solve.solver import Tolerance

TOLERANCE = Tolerance(1e-8, 0.0)


def run(slope: Tensor, size: float = 1.0, max_steps: int = 300, tolerance: Tolerance = TOLERANCE):
    z = torch.zeros(slope.shape[0], 2, dtype=slope.dtype)
    return iterate_transformed(lambda z: slope.unsqueeze(1) * z + size, z, tolerance=tolerance, max_steps=max_steps)


def test_solves_every_sample() -> None:
    slope = torch.tensor([0.0, 0.5, 0.9], dtype=torch.float64)
    outcome = run(slope)
    assert (outcome.failed, outcome.total, outcome.worst) == (0, 3, 0.0)
    assert torch.allclose(outcome.value, (1 / (1 - slope)).unsqueeze(1).expand(3, 2), rtol=1e-6)


def test_counts_failures() -> None:
    outcome = run(torch.tensor([0.5, 0.999, 2.0], dtype=torch.float64), max_steps=50)
    assert outcome.failed == 2 and outcome.total == 3 and outcome.steps == 50
    assert outcome.worst > 0.1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_are_failures(bad: float) -> None:
    outcome = run(torch.tensor([0.5, bad], dtype=torch.float64))
    assert outcome.failed == 1 and outcome.worst == torch.inf


def test_infinity_is_not_convergence() -> None:
    z = torch.zeros(1, 2)
    outcome = iterate_transformed(lambda z: torch.exp(z) + 1, z, tolerance=TOLERANCE, max_steps=50)
    assert outcome.failed == 1 and outcome.steps < 50


@pytest.mark.parametrize("size", [1e-25, 1e-8, 1e12, 1e25])
def test_size_does_not_matter(size: float) -> None:
    """Tiny values are not converged by underflow; large residuals are not divergence."""
    slope = torch.tensor([0.5], dtype=torch.float32)
    outcome = run(slope, size=size, tolerance=Tolerance(1e-5, 0.0))
    assert outcome.failed == 0 and outcome.steps == run(slope, tolerance=Tolerance(1e-5, 0.0)).steps
    assert torch.allclose(outcome.value / size, torch.full((1, 2), 2.0), rtol=1e-4)


def test_divergence_ends_early() -> None:
    outcome = run(torch.tensor([3.0], dtype=torch.float64))
    assert outcome.failed == 1 and outcome.steps < 30


def test_finished_samples_are_held() -> None:
    slope = torch.tensor([0.1, 0.9], dtype=torch.float64)
    assert torch.equal(run(slope).value[:1], run(slope[:1]).value)


def test_under_vmap_all_levels_are_finished() -> None:
    slopes = torch.tensor([[0.1, 0.2], [0.9, 0.0]], dtype=torch.float64)
    seen: list[tuple[int, int]] = []

    def inner(slope: Tensor) -> Tensor:
        assert transforms_active()
        outcome = run(slope)
        seen.append((outcome.failed, outcome.total))
        return outcome.value

    values = torch.func.vmap(inner)(slopes)
    assert seen == [(0, 4)] and not transforms_active()
    assert torch.allclose(values, (1 / (1 - slopes)).unsqueeze(2).expand(2, 2, 2), rtol=1e-6)


def test_concrete_values() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    seen: list[Tensor] = []

    def inner(row: Tensor) -> Tensor:
        seen.append(concrete(row))
        return row.sum()

    torch.func.vmap(inner)(x)
    assert torch.equal(seen[0], x)
    assert concrete(x) is x
