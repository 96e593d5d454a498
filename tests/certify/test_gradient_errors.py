"""Bounds of the error of gradients with respect to parameters and input, against gradients at the exact equilibrium."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.certify import _krawczyk
from wellposed.certify.local_certificate import LocalCertificate


class Cell(nn.Module):
    """Two layers, a product and a norm, with weights that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.inject = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(3, 6)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(z) + self.inject(x))
        return 0.4 * torch.sigmoid(self.a(h)) * self.norm(h + 2 * self.inject(x))


def gradients(layer: wp.EquilibriumLayer, z: Tensor, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Of <v, .> by the implicit function theorem at z, dense: with respect to all parameters, and to x."""
    x = x.clone().requires_grad_()
    J = torch.autograd.functional.jacobian(lambda z: layer.cell(z, x.detach()), z).reshape(6, 6)
    u = torch.linalg.solve((torch.eye(6, dtype=z.dtype) - J).T, v)
    parts = torch.autograd.grad(layer.cell(z, x).squeeze(0), [*layer.parameters(), x], u)
    return torch.cat([part.flatten() for part in parts[:-1]]), parts[-1].flatten()


@pytest.mark.parametrize("rtol", [1e-2, 1e-4, 1e-7])
def test_bounds_hold_and_are_not_empty(rtol: float) -> None:
    torch.manual_seed(0)
    layer = wp.EquilibriumLayer(Cell(), wp.Picard(), rtol=rtol, state_shape=(6,)).double()
    X = torch.randn(4, 3, dtype=torch.float64)
    found = wp.certify(layer, X)
    assert isinstance(found, LocalCertificate) and found.certified
    rough, sharp = (
        layer.solve(X).value,
        wp.EquilibriumLayer(layer.cell, rtol=1e-15, state_shape=(6,), on_failure="ignore").solve(X).value,
    )
    for i in range(4):
        for seed in range(3):
            v = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            pairs = zip(*(gradients(layer, z[i : i + 1], X[i : i + 1], v) for z in (rough, sharp)), strict=True)
            for (ours, exact), bound in zip(pairs, (found.parameter_error[i], found.input_error[i]), strict=True):
                # the exact one is itself known to some roundings
                assert float((ours - exact).norm()) <= float(bound * v.norm()) + 1e-12
        assert float(found.parameter_error[i]) < 3e3 * rtol and float(found.input_error[i]) < 3e3 * rtol


def test_a_derivative_that_is_too_large_is_not_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = wp.EquilibriumLayer(Cell(), state_shape=(6,)).double()
    monkeypatch.setattr(_krawczyk, "LARGEST_DERIVATIVE", 200)
    found = wp.certify(layer, torch.randn(1, 3, dtype=torch.float64))
    assert isinstance(found, LocalCertificate)
    assert found.certified and found.parameter_error.tolist() == [torch.inf] and found.input_error.isfinite().all()
    assert LocalCertificate.from_dict(found.to_dict()).parameter_error.tolist() == [torch.inf]


def test_an_unknown_operation_of_x_has_an_unknown_derivative() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(0.5 * z + torch.special.i0(x))).double()
    found = wp.certify(layer, torch.ones(1, 2, dtype=torch.float64))
    assert isinstance(found, LocalCertificate) and found.certified
    assert found.gradient_error.isfinite().all() and found.input_error.tolist() == [torch.inf]
    assert float(found.parameter_error[0]) < 1e-100  # it has none


def _without_gradient(t: Tensor) -> Tensor:
    with torch.no_grad():
        return 1 * t


def _in_inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return 1 * t


def _hooked(t: Tensor) -> Tensor:
    t = 1 * t
    with contextlib.suppress(RuntimeError):  # that it has no graph
        t.register_hook(torch.zeros_like)
    return t


@pytest.mark.parametrize("hide", [Tensor.detach, lambda t: t.data, _without_gradient, _in_inference, _hooked])
def test_a_part_that_is_hidden_from_derivatives_has_an_unknown_adjoint(hide: Callable[[Tensor], Tensor]) -> None:
    # PyTorch's derivative is 0.69 larger than that of the map, which is tanh(z/4 + x)
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(0.25 * z + x) + (0.69 * z - hide(0.69 * z)), rtol=1e-2)
    found = wp.certify(layer, torch.full((1, 1), 0.1, dtype=torch.float64))
    assert isinstance(found, LocalCertificate) and found.certified and found.error_bound.isfinite().all()
    for bound in (found.gradient_error, found.input_error):
        assert bound.tolist() == [torch.inf]


def test_what_is_detached_of_x_and_of_parameters_has_no_derivative() -> None:
    class Straight(nn.Module):
        """tanh(z/4 + x) as a map; PyTorch's derivatives by x and by a see the last two terms."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(0.25 * z + x.detach()) + z * (x - x.detach()) + z * (self.a - self.a.detach())

    layer = wp.EquilibriumLayer(Straight(), wp.Picard(), rtol=3e-2)
    x = torch.full((1, 1), 0.5, dtype=torch.float64)
    found, z = wp.certify(layer, x), float(layer.solve(x).value)
    exact = float(wp.EquilibriumLayer(layer.cell, rtol=1e-14).solve(x).value)
    assert isinstance(found, LocalCertificate) and found.certified

    def gradient(z: float) -> float:
        slope = 1 - math.tanh(0.25 * z + 0.5) ** 2
        return z / (1 - 0.25 * slope)

    truth = abs(gradient(z) - gradient(exact))
    assert truth > 1e-4
    for bound in (found.parameter_error, found.input_error):
        assert truth <= float(bound) < 10 * truth


class Looked(nn.Module):
    """A parameter that meets x in an operation that is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 3, dtype=torch.float64)
        self.layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(0.4 * z + self.rows(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, torch.zeros(len(x), 3, dtype=torch.float64))


def test_an_unknown_operation_of_x_and_a_parameter_has_an_unknown_derivative_by_it() -> None:
    found = wp.certify(Looked(), torch.tensor([1, 3]))
    assert isinstance(found, LocalCertificate) and found.certified
    assert found.gradient_error.isfinite().all() and found.parameter_error.tolist() == [torch.inf] * 2


def test_so_has_one_behind_other_steps() -> None:
    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(0.4 * z + torch.log1p(torch.log1p(2 * self.a * x) * 3))

    found = wp.certify(wp.EquilibriumLayer(Behind(), state_shape=(2,)), torch.ones(1, 2, dtype=torch.float64))
    assert isinstance(found, LocalCertificate) and found.certified and found.parameter_error.tolist() == [torch.inf]


@pytest.mark.parametrize(
    ("f", "point", "slope"),
    [
        (lambda v: nn.functional.hardsigmoid(3 * v - 1), 0.0, 0.5),
        (lambda v: nn.functional.celu(0.9 * v - 1e-6, 1.7), -1e-5, 0.9 * math.exp(-1e-5 / 1.7)),
    ],
)
def test_bounds_hold_where_a_derivative_of_pytorch_has_a_factor_in_float32(
    f: Callable[[Tensor], Tensor], point: float, slope: float
) -> None:
    layer = wp.EquilibriumLayer(lambda z, x: f(z) + x, rtol=1e-14)
    z = torch.full((1, 1), point, dtype=torch.float64)
    x = (z - f(z)).requires_grad_()  # z is the equilibrium
    found = wp.certify(layer, x.detach())
    (g,) = torch.autograd.grad(layer(x).sum(), x)
    assert isinstance(found, LocalCertificate) and found.certified
    error = abs(float(g) - 1 / (1 - slope))
    assert 1e-8 < error
    for bound in (found.gradient_error, found.input_error):
        assert error <= float(bound) < 20 * error
