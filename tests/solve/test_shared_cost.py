"""What f computes once for the whole batch does not make the choice of Auto depend on the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import wellposed as wp
from problems import gaussian
from wellposed._torch import counted

N = 100
A = gaussian(N, N, seed=0)
X = 0.3 * gaussian(300, N, seed=1)


def orthogonal(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z @ (0.93 * torch.matrix_exp(0.05 * (A - A.T))).T + x)


def symmetric(z: Tensor, x: Tensor) -> Tensor:
    W = A @ A.T
    return torch.tanh(z @ (0.9 * W / W.diagonal().sum()).T + x.sin())


def blocks(z: Tensor, x: Tensor) -> Tensor:
    """Rows of another number, in the form in which attention has them."""
    W = (0.1 * A[:10, :10]) @ A[:10, :10].T
    tokens = torch.cat([z.reshape(-1, 10)[:, :5], z.reshape(-1, 10)[:, 5:]], dim=1)
    return torch.tanh((0.1 * tokens @ W).reshape(z.shape) + x)


CELLS = [orthogonal, symmetric, blocks]


@pytest.mark.parametrize("f", CELLS)
def test_the_cost_of_a_row_does_not_depend_on_the_batch(f: Callable[[Tensor, Tensor], Tensor]) -> None:
    costs = [
        counted(lambda z, x=X[:batch]: f(z, x), torch.zeros_like(X[:batch]), (X[:batch],))[1] for batch in (1, 7, 100, 300)
    ]
    assert min(costs) == max(costs)


@pytest.mark.parametrize("f", [orthogonal, symmetric])
def test_a_sample_takes_the_same_steps_alone_and_in_a_batch(f: Callable[[Tensor, Tensor], Tensor]) -> None:
    alone = wp.fixed_point(f, torch.zeros_like(X[:1]), args=(X[:1],), rtol=1e-6)
    among = wp.fixed_point(f, torch.zeros_like(X), args=(X,), rtol=1e-6)
    assert int(alone.num_steps[0]) == int(among.num_steps[0])
    steps = []
    for first in (1, 300):  # the cost is counted at the first call and kept
        layer = wp.EquilibriumLayer(f, rtol=1e-6)
        layer.solve(X[:first])
        steps.append(layer.solve(X[:8]).num_steps.tolist())
    assert steps[0] == steps[1]


def test_work_for_a_sample_counts_in_full_and_shared_work_for_one_of_32() -> None:
    W = A[:10, :10].clone()

    def cost(f: Callable[[Tensor], Tensor]) -> float:
        return counted(f, torch.zeros(4, 10, dtype=torch.float64))[1]

    plain = cost(lambda z: z @ W)
    made = cost(lambda z: z @ (W @ W))
    twice = cost(lambda z: (z @ W) @ W)
    # 100 numbers and 2000 flops for 32 samples; 10 numbers and 200 flops for each sample
    assert made - plain == pytest.approx(5 / 32 + (100 * 4e-4 + 2000 * 2e-5) / 32, rel=1e-12)
    assert twice - plain == pytest.approx(5 / 32 + 10 * 4e-4 + 200 * 2e-5, rel=1e-12)
