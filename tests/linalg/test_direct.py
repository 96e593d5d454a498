"""Batched direct solves against one solve at a time, and against exact solutions."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.direct import batched_solve, batched_solve_ex

DTYPES = [torch.float32, torch.float64]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def well_conditioned(batch: int, k: int, dtype: torch.dtype) -> Tensor:
    """Far from symmetric and with rows permuted, so that pivoting matters; condition about 10."""
    generator = torch.Generator().manual_seed(k)
    A = torch.randn(batch, k, k, generator=generator, dtype=dtype) / max(k, 1) ** 0.5
    A = A + 2 * torch.eye(k, dtype=dtype)
    return A[:, torch.randperm(k, generator=generator)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "k", "columns"),
    [(3, 1, None), (5, 2, 1), (33, 17, 3), (9, 64, None), (9, 65, 3), (16, 200, None), (1, 200, 2)],
)
def test_against_a_loop_and_the_residual(two_threads, batch: int, k: int, columns: int | None, dtype) -> None:
    A = well_conditioned(batch, k, dtype)
    shape = (batch, k) if columns is None else (batch, k, columns)
    B = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    X = batched_solve(A, B)
    assert X.shape == B.shape and X.dtype == dtype
    one_by_one = torch.stack([torch.linalg.solve(a, c) for a, c in zip(A, B, strict=True)])
    eps = torch.finfo(dtype).eps
    assert torch.allclose(X, one_by_one, rtol=0, atol=200 * eps * one_by_one.abs().max().item())
    product = torch.stack([a @ x for a, x in zip(A, X, strict=True)])
    assert (product - B).abs().max() <= 50 * eps * k**0.5 * B.abs().max()


@pytest.mark.parametrize("k", [3, 100])
def test_integers_come_out_exactly(k: int) -> None:
    # Unit lower triangular times a permutation: LU makes no rounding on small integers.
    generator = torch.Generator().manual_seed(0)
    L = torch.eye(k, dtype=torch.float64).repeat(4, 1, 1)
    L[:, 1:, 0] = 1.0
    A = L[:, torch.randperm(k, generator=generator)]
    X = torch.randint(-9, 9, (4, k), generator=generator).double()
    assert torch.equal(batched_solve(A, torch.stack([a @ x for a, x in zip(A, X, strict=True)])), X)


def test_large_cpu_batches_never_reach_the_batched_routine(monkeypatch: pytest.MonkeyPatch) -> None:
    solve_ex = torch.linalg.solve_ex

    def unbatched_only(A: Tensor, B: Tensor):
        assert A.ndim == 2 or A.shape[-1] <= 64
        return solve_ex(A, B)

    monkeypatch.setattr(torch.linalg, "solve_ex", unbatched_only)
    batched_solve(well_conditioned(8, 160, torch.float32), torch.ones(8, 160))
    batched_solve(well_conditioned(8, 65, torch.float32), torch.ones(8, 65))


@pytest.mark.parametrize("k", [3, 66])
@pytest.mark.parametrize("columns", [None, 2])
def test_gradients(k: int, columns: int | None) -> None:
    A = well_conditioned(2, k, torch.float64).requires_grad_()
    B = torch.randn((2, k) if columns is None else (2, k, columns), dtype=torch.float64, requires_grad=True)
    if k < 10:
        assert torch.autograd.gradcheck(batched_solve, (A, B))
        assert torch.autograd.gradgradcheck(batched_solve, (A, B))
    # dL/dB = A^-T G,  dL/dA = -(dL/dB) X^T
    X = batched_solve(A, B)
    G = torch.randn_like(X)
    grad_A, grad_B = torch.autograd.grad(X, (A, B), G)
    rhs = G.unsqueeze(-1) if columns is None else G
    expected_B = torch.stack([torch.linalg.solve(a.T, g) for a, g in zip(A.detach(), rhs, strict=True)])
    assert torch.allclose(grad_B, expected_B.reshape(G.shape), atol=1e-10)
    assert torch.allclose(grad_A, -expected_B @ X.detach().reshape(rhs.shape).transpose(1, 2), atol=1e-10)


@pytest.mark.parametrize("k", [0, 5, 70])
def test_empty_batch(k: int) -> None:
    assert batched_solve(torch.zeros(0, k, k), torch.zeros(0, k)).shape == (0, k)
    assert batched_solve(torch.zeros(0, k, k), torch.zeros(0, k, 2)).shape == (0, k, 2)


@pytest.mark.parametrize("k", [3, 70])
def test_singular_matrices_are_named(k: int) -> None:
    A = torch.eye(k, dtype=torch.float64).repeat(5, 1, 1)
    A[3, 1] = 0.0
    A[4] = 0.0
    B = torch.ones(5, k, dtype=torch.float64)
    with pytest.raises(InvalidArgument, match=rf"2 of 5 matrices are singular \(first: index 3, pivot 2 of {k}"):
        batched_solve(A, B)
    X, info = batched_solve_ex(A, B)
    assert info.gt(0).tolist() == [False, False, False, True, True]
    assert torch.equal(X[:3], B[:3])


@pytest.mark.parametrize("k", [3, 70])
def test_nan_stays_in_its_matrix(k: int) -> None:
    A = torch.eye(k).repeat(3, 1, 1)
    A[1, 0, 0] = torch.nan
    X, _ = batched_solve_ex(A, torch.ones(3, k))
    assert torch.equal(X[[0, 2]], torch.ones(2, k)) and not torch.isfinite(X[1]).all()


@pytest.mark.parametrize(
    ("A", "B", "message"),
    [
        (torch.ones(3, 3), torch.ones(3), r"\(batch, k, k\), got \(3, 3\)"),
        (torch.ones(2, 3, 4), torch.ones(2, 3), r"\(batch, k, k\), got \(2, 3, 4\)"),
        (torch.ones(2, 3, 3), torch.ones(3), r"\(batch, k\) = \(2, 3\).*got \(3,\)"),
        (torch.ones(2, 3, 3), torch.ones(1, 3), r"\(batch, k\) = \(2, 3\).*got \(1, 3\)"),
        (torch.ones(2, 3, 3), torch.ones(2, 3).double(), "agree in dtype"),
    ],
)
def test_bad_input(A: Tensor, B: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        batched_solve(A, B)


def test_not_a_tensor() -> None:
    with pytest.raises(InvalidType, match="B must be a torch.Tensor, got list"):
        batched_solve(torch.ones(1, 1, 1), [[1.0]])  # type: ignore[arg-type]


@pytest.mark.parametrize("package", [wp, wp.linalg], ids=["wellposed", "linalg"])
def test_the_old_name_of_the_dense_solver_names_the_new_one(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"Dense is now .*\.DenseSolve"):
        _ = package.Dense
    assert not hasattr(package, "Dense") and "DenseSolve" in package.__all__
    with pytest.raises(AttributeError, match="has no attribute 'Densest'"):
        _ = package.Densest
