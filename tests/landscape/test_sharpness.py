"""Curvature: products, trace and eigenvalues against the dense Hessian."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.landscape import hessian_directions, sharpness, surface
from wellposed.landscape.curvature import HessianProduct, Sharpness, hessian_eigenvalues, hessian_trace
from wellposed.landscape.directions import flatten

mse = nn.functional.mse_loss


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    cell = wp.nn.DenseCell(2, 3, activation=wp.nn.Tanh(), weight=wp.nn.Spectral(0.8), generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(wp.EquilibriumLayer(cell), nn.Linear(3, 1, dtype=torch.float64))
    X = torch.randn(5, 2, generator=generator).double()
    return model, X, torch.randn(5, 1, generator=generator).double()


def explicit(width: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()
    return model, torch.randn(10, 3).double(), torch.randn(10, 1).double()


def test_product_agrees_with_differences_of_the_gradient() -> None:
    model, X, y = problem()
    product = HessianProduct(model, mse, X, y)
    v = torch.randn(product.size, generator=torch.Generator().manual_seed(2)).double()
    gradients = []
    for sign in (1, -1):
        other, _, _ = problem()
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) + sign * 1e-5 * v, other.parameters())
        gradients.append(HessianProduct(other, mse, X, y).gradient)
    torch.testing.assert_close(product(v), (gradients[0] - gradients[1]) / 2e-5, rtol=1e-6, atol=1e-8)


def test_dense_is_symmetric_and_agrees_with_jacrev() -> None:
    model, X, y = explicit(2)
    H = HessianProduct(model, mse, X, y).dense()
    names = list(dict(model.named_parameters()))
    sizes = [p.numel() for p in model.parameters()]

    def loss(theta: Tensor) -> Tensor:
        parts = zip(names, theta.split(sizes), model.parameters(), strict=True)
        return mse(torch.func.functional_call(model, {n: v.reshape(p.shape) for n, v, p in parts}, (X,)), y)

    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(H, torch.func.jacrev(torch.func.jacrev(loss))(theta))
    torch.testing.assert_close(H, H.mT)


@pytest.mark.parametrize("width", [3, 20])  # formed as a whole, and by Lanczos
def test_top_eigenvalues(width: int) -> None:
    model, X, y = explicit(width)
    product = HessianProduct(model, mse, X, y)
    spectrum = hessian_eigenvalues(product, num=3)
    H = product.dense()
    expected = torch.linalg.eigvalsh((H + H.mT) / 2).flip(0)[:3]
    torch.testing.assert_close(spectrum.values, expected, rtol=1e-6, atol=1e-9)
    assert bool((spectrum.residuals <= 1e-4 * expected[0]).all())


def test_trace_is_unbiased_with_an_honest_error() -> None:
    model, X, y = explicit(3)
    product = HessianProduct(model, mse, X, y)
    H = product.dense()
    estimate = hessian_trace(product, probes=800)
    variance = 2 * (H.square().sum() - H.diagonal().square().sum())
    assert estimate.standard_error == pytest.approx(float((variance / 800).sqrt()), rel=0.2)
    assert abs(estimate.value - float(H.trace())) < 4 * estimate.standard_error
    assert hessian_trace(product, probes=5) == hessian_trace(product, probes=5)


def test_a_diagonal_hessian_has_its_trace_from_one_probe() -> None:
    class Bowl(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.arange(4.0).double())

        def forward(self, X: Tensor) -> Tensor:
            return (X * self.w**2).sum()

    X = torch.tensor([1.0, -2.0, 3.0, 5.0]).double()
    product = HessianProduct(Bowl(), lambda p, y: p, X, None)
    assert hessian_trace(product, probes=1).value == pytest.approx(14.0)
    torch.testing.assert_close(hessian_eigenvalues(product, num=2).values, torch.tensor([10.0, 6.0]).double())


def test_hessian_directions_bend_as_the_eigenvalues_say() -> None:
    model, X, y = explicit(2)
    directions = hessian_directions(model, mse, X, y)
    values = hessian_eigenvalues(HessianProduct(model, mse, X, y)).values
    assert float(flatten(directions[0]) @ flatten(directions[1])) == pytest.approx(0.0, abs=1e-10)
    for direction, value in zip(directions, values, strict=True):
        s = surface(model, mse, X, y, directions=[direction], num=3, radius=1e-3)
        assert (s.values[0] - 2 * s.values[1] + s.values[2]) / 1e-6 == pytest.approx(float(value), rel=1e-4)


def test_record_and_round_trip() -> None:
    model, X, y = problem()
    made = sharpness(model, mse, X, y, num_eigenvalues=2, probes=4)
    assert made.parameters == 22 and made.loss == pytest.approx(mse(model(X), y).item())
    assert Sharpness.from_dict(json.loads(made.to_json())) == made
    assert model[0].on_failure == "warn" and model.training


def test_a_solve_that_fails_is_no_sharpness() -> None:
    model, X, y = problem()
    model[0].max_steps = 1
    with pytest.raises(wp.NotConverged):
        sharpness(model, mse, X, y)


def test_bad_arguments() -> None:
    model, X, y = problem()
    product = HessianProduct(model, mse, X, y)
    with pytest.raises(wp.InvalidArgument, match="below the number of parameters, 22"):
        hessian_eigenvalues(product, num=22)
    with pytest.raises(wp.InvalidArgument, match=r"vector of shape \(22,\)"):
        product(torch.zeros(3))
    with pytest.raises(wp.InvalidArgument, match="'probes'"):
        hessian_trace(product, probes=0)


def test_rows_must_fit():
    """Of one row of y a loss would broadcast, and its Hessian would be that of something else."""
    model, X = torch.nn.Linear(3, 2), torch.randn(6, 3)
    with pytest.raises(wp.InvalidArgument, match="got 6 rows of X and 1 of y"):
        wp.landscape.sharpness(model, torch.nn.functional.mse_loss, X, torch.randn(1, 2))
