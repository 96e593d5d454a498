"""GMRES with a product that is known before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.linalg.linear_solver import LinearSystems


def _systems(known: Tensor | None, seen: list[Tensor]) -> LinearSystems:
    generator = torch.Generator().manual_seed(0)
    A = torch.eye(7, dtype=torch.float64) + 0.5 * torch.randn(4, 7, 7, generator=generator, dtype=torch.float64)
    b = torch.randn(4, 7, generator=generator, dtype=torch.float64) * torch.tensor([[1e-30], [1.0], [0.0], [1e20]])

    def matvec(v: Tensor) -> Tensor:
        seen.append(v)
        return torch.einsum("bij,bj->bi", A, v)

    systems = LinearSystems(matvec, b, None, 1e-10, 0.0, 50)
    if known is not None:
        systems.known = torch.where(known.unsqueeze(1), torch.einsum("bij,bj->bi", A, b), torch.nan)
    wp.GMRES().run(systems)
    return systems


@pytest.mark.parametrize("rows", [[True] * 4, [False] * 4, [True, False, True, True], [False, True, True, True]])
def test_a_known_product_is_not_taken_again(rows: list[bool]) -> None:
    seen: list[Tensor] = []
    plain, known = _systems(None, []).solution(), _systems(torch.tensor(rows), seen).solution()
    torch.testing.assert_close(known.value, plain.value, rtol=1e-9, atol=0.0)
    saved = plain.num_steps - known.num_steps
    assert saved.tolist() == [int(row and i != 2) for i, row in enumerate(rows)]  # the third has b = 0, and needs none
    assert bool(known.converged.all()) and len(seen) == int(known.num_steps.max())
