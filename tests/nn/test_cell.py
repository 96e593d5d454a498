"""DenseCell: its formula, its map of rows, its closed-form derivatives, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp
from equilibria import F64, leaf, normal
from wellposed.nn import AbstractActivation, DenseCell, Identity, ReLU, Spectral, Tanh

ACTIVATIONS = [ReLU(), Tanh(), Identity()]
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
every_shape = pytest.mark.parametrize(
    ("bias", "weight"), [(True, None), (False, None), (True, Spectral(0.5))], ids=["bias", "no bias", "spectral"]
)


def make(activation: AbstractActivation, bias: bool = True, weight: Spectral | None = None) -> DenseCell:
    generator = torch.Generator().manual_seed(0)
    cell = DenseCell(3, 5, activation, bias=bias, weight=weight, dtype=F64, generator=generator)
    if cell.b is not None:
        cell.b.data = normal(5, seed=4)
    return cell


@every_activation
@every_shape
def test_the_formula(activation, bias, weight):
    cell = make(activation, bias, weight)
    z, x = normal(4, 5, seed=1), normal(4, 3, seed=2)
    W = cell.W
    if weight is not None:
        W = 0.5 * W / torch.linalg.matrix_norm(W, 2)
    pre = z @ W.T + x @ cell.U.T + (cell.b if bias else 0)
    reference = {ReLU(): torch.relu, Tanh(): torch.tanh, Identity(): lambda v: v}[activation]
    torch.testing.assert_close(cell(z, x), reference(pre), rtol=1e-12, atol=1e-12)


@every_activation
@every_shape
def test_the_map_of_rows_is_the_cell(activation, bias, weight):
    cell = make(activation, bias, weight)
    z, x = normal(4, 5, seed=1), normal(4, 3, seed=2)
    f = cell.bind(x)
    expected = cell(z, x).detach()
    torch.testing.assert_close(f(z), expected)
    torch.testing.assert_close(f.tracked(z), expected)
    buffer = torch.empty_like(z)
    assert f(z, out=buffer).data_ptr() == buffer.data_ptr()
    torch.testing.assert_close(buffer, expected)
    torch.testing.assert_close(f.at_zero(), cell(torch.zeros_like(z), x).detach())
    rows = torch.tensor([2, 0])
    torch.testing.assert_close(f.take(rows)(z[rows]), expected[rows])
    assert torch.equal(z, normal(4, 5, seed=1))  # nothing of the caller's was written to


@every_activation
@every_shape
def test_its_jacobian_is_that_of_autograd(activation, bias, weight):
    cell = make(activation, bias, weight)
    z, x = normal(4, 5, seed=1), normal(4, 3, seed=2)
    ours = cell.bind(x).jacobian(z)
    theirs = wp.linalg.Jacobian(lambda z: cell(z, x), z)
    u = normal(4, 5, seed=3)
    torch.testing.assert_close(ours.mv(u), theirs.mv(u))
    torch.testing.assert_close(ours.rmv(u), theirs.rmv(u))
    torch.testing.assert_close(ours.dense(), theirs.dense())
    assert torch.equal(u, normal(4, 5, seed=3))


@every_activation
def test_its_graph_reaches_every_parameter_and_the_input(activation):
    cell, x = make(activation), leaf(4, 3, seed=2)
    z = normal(4, 5, seed=1)
    direct = torch.autograd.grad(cell(z, x).square().sum(), (x, *cell.parameters()))
    bound = torch.autograd.grad(cell.bind(x).tracked(z).square().sum(), (x, *cell.parameters()))
    for a, b in zip(direct, bound, strict=True):
        torch.testing.assert_close(a, b)


def test_the_initialization_has_the_promised_variances():
    cell = DenseCell(400, 600, generator=torch.Generator().manual_seed(0))
    assert float(cell.W.detach().var()) == pytest.approx(0.16 / 600, rel=0.02)
    assert float(cell.U.detach().var()) == pytest.approx(2 / 400, rel=0.02)
    assert bool((cell.b == 0).all())
    norm = float(torch.linalg.matrix_norm(cell.W.detach(), 2))
    assert 0.75 < norm < 0.85  # a contraction


def test_the_generator_decides():
    def weights(seed: int) -> Tensor:
        return DenseCell(3, 4, generator=torch.Generator().manual_seed(seed)).W

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    weights(1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_shapes_and_names():
    cell = DenseCell(3, 5)
    assert {n: tuple(p.shape) for n, p in cell.named_parameters()} == {"W": (5, 5), "U": (5, 3), "b": (5,)}
    assert cell.state_shape(torch.zeros(7, 3)) == (7, 5)
    assert DenseCell(3, 5, bias=False).b is None
    assert isinstance(cell.activation, ReLU)


def test_the_parametrization_is_applied_and_trained_through():
    cell = make(Tanh(), weight=Spectral(0.3))
    assert torch.linalg.matrix_norm(cell.recurrent(), 2) <= 0.3 * (1 + 1e-12) < torch.linalg.matrix_norm(cell.W, 2)
    layer = wp.EquilibriumLayer(cell)
    layer(normal(4, 3, seed=2)).square().sum().backward()
    # along W itself nothing changes: the map projects radially
    assert float((cell.W.grad * cell.W).sum().detach()) == pytest.approx(0.0, abs=1e-12)
    assert float(cell.W.grad.norm()) > 1e-6


@pytest.mark.parametrize(
    ("make_cell", "words"),
    [
        (lambda: DenseCell(0, 3), "'in_features' parameter of DenseCell must be an integer of at least 1. Got 0"),
        (lambda: DenseCell(3, 2.0), "'width' parameter of DenseCell"),
        (
            lambda: DenseCell(3, 2, torch.relu),
            r"'activation' parameter of DenseCell must be one of wellposed.nn, such as wp.nn.ReLU\(\)",
        ),
        (lambda: DenseCell(3, 2, ReLU), r"'activation' parameter of DenseCell"),
        (lambda: DenseCell(3, 2, weight=torch.nn.Identity()), r"'weight' parameter of DenseCell must be Spectral"),
        (lambda: DenseCell(3, 2, weight=0.9), r"'weight' parameter of DenseCell must be .*Spectral"),
    ],
)
def test_bad_arguments_are_explained(make_cell, words):
    with pytest.raises(wp.WellposedError, match=words):
        make_cell()


def test_unknown_arguments_raise():
    with pytest.raises(TypeError, match="unexpected keyword"):
        DenseCell(3, 2, nonlinearity="relu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_lifted(dtype):
    cell = make(Tanh()).to(dtype)
    f = cell.bind(normal(4, 3, seed=2).to(dtype))
    assert f(torch.zeros(4, 5)).dtype == torch.float32
    with pytest.raises(wp.InvalidType, match="got x of torch.float64"):
        cell.state_shape(normal(4, 3))
    with pytest.raises(wp.InvalidType, match=f"torch.float64 parameters and got x of {dtype}"):
        make(Tanh()).state_shape(normal(4, 3).to(dtype))


def test_a_parametrization_of_ones_own_is_seen_by_the_solve():
    from torch.nn.utils import parametrize

    class Halved(torch.nn.Module):
        def forward(self, W):
            return 0.5 * W

    cell = DenseCell(3, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    plain = cell.W.detach().clone()
    parametrize.register_parametrization(cell, "W", Halved())
    x = torch.ones(2, 3, dtype=F64)
    z = wp.EquilibriumLayer(cell, rtol=1e-12)(x)
    torch.testing.assert_close(z, torch.relu(z @ (0.5 * plain).T + x @ cell.U.T), rtol=1e-10, atol=1e-12)
    z.sum().backward()
    assert cell.parametrizations.W.original.grad.abs().sum() > 0
