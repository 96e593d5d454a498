"""The Jacobian as an operator: products against matrices that torch forms in another way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wellposed.linalg import AbstractJacobian, Jacobian

F64 = torch.float64


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


W, X = normal(5, 5, seed=1), normal(3, 5, seed=2)

MAPS = {
    "tanh": lambda z: torch.tanh(z @ W.T + X),
    "relu": lambda z: torch.relu(z @ W.T + X),
    "affine": lambda z: z @ W.T + X,
    "product": lambda z: z * z.flip(1) + torch.sin(z[:, :1]),
    "normalised": lambda z: z / (1 + z.square().sum(1, keepdim=True)),
    "triangular": lambda z: z.cumsum(1) * X,
    "shift": lambda z: torch.roll(z, 1, dims=1),
}
every_map = pytest.mark.parametrize("f", MAPS.values(), ids=MAPS.keys())


def blocks(f, z: Tensor) -> Tensor:
    """(batch, m, m) one block per row, by forward mode on one sample at a time."""
    whole = torch.autograd.functional.jacobian(f, z)  # (batch, m, batch, m)
    i = torch.arange(z.shape[0])
    return whole[i, :, i, :]


@every_map
def test_products_are_those_of_the_matrices(f):
    z, u = normal(3, 5, seed=3), normal(3, 5, seed=4)
    J, expected = Jacobian(f, z), blocks(f, z)
    torch.testing.assert_close(J.mv(u), torch.einsum("bij,bj->bi", expected, u))
    torch.testing.assert_close(J.rmv(u), torch.einsum("bij,bi->bj", expected, u))
    torch.testing.assert_close(J.dense(), expected)
    torch.testing.assert_close(J.value, f(z))


@every_map
def test_products_are_adjoint_to_each_other_and_repeatable(f):
    z, u, v = (normal(3, 5, seed=s) for s in (3, 4, 5))
    J = Jacobian(f, z)
    for _ in range(2):
        torch.testing.assert_close((v * J.mv(u)).sum(1), (J.rmv(v) * u).sum(1))
    torch.testing.assert_close(J.mv(u + 2 * v), J.mv(u) + 2 * J.mv(v))


def test_rows_do_not_mix():
    J = Jacobian(MAPS["tanh"], normal(3, 5, seed=3))
    u = normal(3, 5, seed=4)
    u[1] = torch.nan
    for product in (J.mv(u), J.rmv(u)):
        assert bool(product[1].isnan().all()) and bool(product[[0, 2]].isfinite().all())


def test_f_is_evaluated_once_whatever_the_number_of_products():
    calls = []

    def f(z: Tensor) -> Tensor:
        calls.append(1)
        return torch.tanh(z @ W.T)

    J = Jacobian(f, normal(3, 5, seed=3))
    for seed in range(5):
        J.mv(normal(3, 5, seed=seed))
        J.rmv(normal(3, 5, seed=seed))
    J.dense()
    assert len(calls) == 1


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_it_works_with_and_without_grad_mode_and_makes_no_graph(grad_enabled):
    V = W.clone().requires_grad_()
    z = normal(3, 5, seed=3).requires_grad_()
    with torch.set_grad_enabled(grad_enabled):
        J = Jacobian(lambda z: torch.tanh(z @ V.T), z)
        for product in (J.mv(X), J.rmv(X), J.value, J.point):
            assert not product.requires_grad
    assert z.grad is None and V.grad is None
    torch.testing.assert_close(J.dense(), blocks(lambda z: torch.tanh(z @ W.T), z.detach()))


@pytest.mark.parametrize("f", [lambda z: X, lambda z: X + 0 * z.detach()], ids=["constant", "detached"])
def test_a_map_that_does_not_depend_on_z(f):
    J = Jacobian(f, normal(3, 5, seed=3))
    assert torch.equal(J.mv(X), torch.zeros_like(X)) and torch.equal(J.rmv(X), torch.zeros_like(X))
    assert torch.equal(J.dense(), torch.zeros(3, 5, 5, dtype=F64))


def test_a_map_that_depends_on_something_else_that_requires_a_gradient():
    """A graph there is, but none to z."""
    V = X.clone().requires_grad_()
    J = Jacobian(lambda z: 2 * V, normal(3, 5, seed=3))
    assert torch.equal(J.mv(X), torch.zeros_like(X)) and torch.equal(J.rmv(X), torch.zeros_like(X))


def test_a_map_that_uses_part_of_z():
    J = Jacobian(lambda z: torch.cat([z[:, 2:3].expand(-1, 4), X[:, :1]], dim=1), normal(3, 5, seed=3))
    expected = torch.zeros(3, 5, 5, dtype=F64)
    expected[:, :4, 2] = 1
    assert torch.equal(J.dense(), expected)
    torch.testing.assert_close(J.mv(X), torch.einsum("bij,bj->bi", expected, X))


def test_at_a_kink_both_products_use_the_same_element():
    J = Jacobian(torch.relu, torch.tensor([[-1.0, 0.0, 1.0]], dtype=F64))
    ones = torch.ones(1, 3, dtype=F64)
    assert J.mv(ones).tolist() == J.rmv(ones).tolist() == [[0.0, 0.0, 1.0]]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty_points(shape):
    z = torch.zeros(shape, dtype=F64)
    J = Jacobian(lambda z: 2 * z, z)
    assert J.mv(z).shape == shape and J.rmv(z).shape == shape
    assert J.dense().shape == (*shape, shape[1])


def test_what_it_tells_of_itself():
    z = normal(3, 5, seed=3, dtype=torch.float32)
    J = Jacobian(lambda z: 2 * z, z)
    assert isinstance(J, AbstractJacobian)
    assert J.shape == (3, 5) and J.dtype == torch.float32 and J.device == z.device and torch.equal(J.point, z)
    assert J.dense().dtype == torch.float32


def test_the_point_may_change_afterwards():
    z = normal(3, 5, seed=3)
    J = Jacobian(MAPS["tanh"], z)
    expected = J.rmv(X)
    z.zero_()
    torch.testing.assert_close(J.rmv(X), expected)


@every_map
def test_inference_mode_changes_no_product(f):
    z, u = normal(3, 5, seed=3), normal(3, 5, seed=4)
    expected = blocks(f, z)
    with torch.inference_mode():
        z, u, scale = 1 * z, 1 * u, torch.ones(5, dtype=F64)  # which autograd cannot keep
        J = Jacobian(lambda z: f(z) * scale, z)
        z.zero_()
        for _ in range(2):
            torch.testing.assert_close(J.mv(u), torch.einsum("bij,bj->bi", expected, u))
            torch.testing.assert_close(J.rmv(u), torch.einsum("bij,bi->bj", expected, u))
        constant = Jacobian(lambda z: X, z)
        assert torch.equal(constant.mv(u), torch.zeros_like(u)) and torch.equal(constant.rmv(u), torch.zeros_like(u))
