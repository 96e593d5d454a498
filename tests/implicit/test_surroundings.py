"""Gradients of a layer inside contexts of torch, in other threads, and with derivatives inside a cell."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import wellposed as wp
from wellposed._torch import sequence_number

D = torch.float64


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=D)
        parametrize.register_parametrization(self.linear, "weight", nn.Tanh())
        self.original = self.linear.parametrizations.weight.original

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.linear(z) + x)


def unrolled(f, x):
    z = torch.zeros_like(x)
    for _ in range(80):
        z = f(z, x)
    return z


def problem():
    torch.manual_seed(0)
    return _Cell(), torch.randn(5, 4, dtype=D)


def close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.linalg.vector_norm(a - b) <= 1e-9 * torch.linalg.vector_norm(b))


def second(z: Tensor, p: Tensor) -> Tensor:
    (g,) = torch.autograd.grad((z**2).sum(), p, create_graph=True)
    return torch.autograd.grad((g**2).sum(), p, retain_graph=True)[0]


@pytest.mark.parametrize("mean", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["module", "function"])
def test_a_cached_weight_has_its_gradient(kind: str, mean: float) -> None:
    cell, x = problem()

    def f(z, x):
        return cell(z, x) + mean * z.mean(dim=0)

    if kind == "module" and not mean:
        f = cell
    (expected,) = torch.autograd.grad(unrolled(f, x).sum(), cell.original)
    layer = wp.EquilibriumLayer(f, on_failure="ignore")
    with parametrize.cached():
        layer.solve(x)
        wp.fixed_point(f, torch.zeros_like(x), args=(x,), on_failure="ignore")
        z = layer(x)
        (inside,) = torch.autograd.grad(z.sum(), cell.original, retain_graph=True)
    (after,) = torch.autograd.grad(z.sum(), cell.original)
    assert close(inside, expected) and close(after, expected)


def test_a_cached_weight_has_its_gradient_after_an_attached_equilibrium() -> None:
    cell, x = problem()
    z = wp.fixed_point(cell, torch.zeros_like(x), args=(x,), rtol=1e-13).value
    (expected,) = torch.autograd.grad(unrolled(cell, x).sum(), cell.original)
    with parametrize.cached():
        (g,) = torch.autograd.grad(wp.attach_gradient(cell, z, (x,)).sum(), cell.original)
    assert close(g, expected)


@pytest.mark.parametrize("what", ["export", "certify", "certify at x", "vmap", "jvp", "grad", "trajectory", "unrolled"])
def test_what_is_evaluated_without_a_graph_leaves_cached_weights_alone(what: str) -> None:
    cell, x = problem()
    layer = wp.EquilibriumLayer(cell)
    calls = {
        "export": lambda: wp.export(layer, x[:1]),
        "certify": lambda: wp.certify(layer),
        "certify at x": lambda: wp.certify(layer, x[:1]),
        "vmap": lambda: torch.func.vmap(lambda q: layer(q[None])[0])(x[:2]),
        "jvp": lambda: torch.func.jvp(layer, (x[:1],), (x[:1],)),
        "grad": lambda: torch.func.grad(lambda q: layer(q).sum())(x[:1]),
        "trajectory": lambda: torch.no_grad()(wp.nn.trajectory)(layer, x[:1]),
        "unrolled": lambda: torch.no_grad()(wp.EquilibriumLayer(cell, gradient=wp.UnrolledGradient(50)))(x[:1]),
    }
    with parametrize.cached():
        calls[what]()
        assert torch.autograd.grad(layer(x[:1]).sum(), cell.original, allow_unused=True)[0] is not None


def test_a_cached_weight_has_its_gradient_in_a_cell_with_a_formula() -> None:
    torch.manual_seed(0)
    cell = wp.nn.DenseCell(3, 4).double()
    parametrize.register_parametrization(cell, "W", nn.Tanh())
    layer, x = wp.EquilibriumLayer(cell, on_failure="ignore"), torch.randn(5, 3, dtype=D)
    p = cell.parametrizations.W.original
    (expected,) = torch.autograd.grad(layer(x).sum(), p)
    with parametrize.cached():
        layer.solve(x)
        assert close(torch.autograd.grad(layer(x).sum(), p)[0], expected)


def test_a_second_derivative_of_a_cached_weight() -> None:
    cell, x = problem()
    expected, layer = second(unrolled(cell, x), cell.original), wp.EquilibriumLayer(cell)
    with parametrize.cached():
        z = layer(x)
        assert close(second(z, cell.original), expected)
    assert close(second(z, cell.original), expected)


@pytest.mark.parametrize("asked", ["parameter", "weight", "both"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("made_before", [True, False])
def test_second_derivatives_of_a_weight_that_is_cached(asked: str, inside: bool, made_before: bool) -> None:
    """Whether it is made before the layer or by it, and differentiated inside the context or after it."""

    def derivatives(layer_of) -> tuple[Tensor, ...]:
        cell, x = problem()
        with contextlib.ExitStack() as stack:
            stack.enter_context(parametrize.cached())
            weight = cell.linear.weight if made_before else None
            z = layer_of(cell)(x)
            weight = cell.linear.weight if weight is None else weight
            assert weight.grad_fn is not None
            if not inside:
                stack.close()
            wanted = {"parameter": [cell.original], "weight": [weight], "both": [weight, cell.original]}[asked]
            first = torch.autograd.grad((z**2).sum(), wanted, create_graph=True)
            return torch.autograd.grad(sum((g**2).sum() for g in first), wanted)

    found = derivatives(lambda cell: wp.EquilibriumLayer(cell, rtol=1e-13))
    expected = derivatives(lambda cell: lambda x: unrolled(cell, x))
    assert all(close(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("earlier", [0, 1, 2, 3, 4, 6, 300])
def test_a_second_derivative_in_another_thread(earlier: int) -> None:
    torch.manual_seed(0)
    x, a = torch.randn(5, 4, dtype=D), torch.randn(4, 4, dtype=D, requires_grad=True)
    found = {}

    def make() -> None:
        b = a
        for _ in range(earlier):
            b = b * 1.0
        found["W"] = 0.2 * b.tanh()

    def run(name: str, solve) -> None:
        found[name] = second(solve(), found["W"])

    def f(z, x):
        return torch.tanh(2.0 * (z @ (0.5 * found["W"]).T) + x)

    layer = wp.EquilibriumLayer(f)
    for maker, user in ((0, 1), (1, 0), (1, 1)):  # 1 is another thread, a new one each time
        for inside, call in ((maker, make), (user, lambda: run("layer", lambda: layer(x)))):
            thread = threading.Thread(target=call)
            thread.start() if inside else call()
            thread.join() if inside else None
        run("unrolled", lambda: unrolled(f, x))
        assert close(found["layer"], found["unrolled"]), (maker, user)


@pytest.mark.parametrize("unused", [0, 40])
@pytest.mark.parametrize("ahead", [1, 4])
def test_a_second_derivative_of_a_tensor_of_another_thread(ahead: int, unused: int) -> None:
    """Its node has a number that the main thread gives to another node, of the graph or of an unused result."""
    torch.manual_seed(0)
    x, a = torch.randn(5, 4, dtype=D), torch.randn(4, 4, dtype=D, requires_grad=True)
    found, target = {}, sequence_number() + ahead + unused // 2

    def make() -> None:
        while sequence_number() < target:
            a * 1.0
        found["W"] = 0.2 * a

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()

    def f(z, x):
        for _ in range(unused):
            a * 1.0
        return torch.tanh(2.0 * (z @ (0.5 * found["W"]).T) + x)

    z = wp.EquilibriumLayer(f, wp.Broyden())(x)  # which records one evaluation, so the numbers meet
    if unused:
        with pytest.raises(wp.WellposedError, match="another thread"):
            second(z, found["W"])
    else:
        assert close(second(z, found["W"]), second(unrolled(f, x), found["W"]))


def test_a_cell_with_a_transform_inside() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(5, 3, dtype=D, requires_grad=True), torch.full((3,), 0.9, dtype=D, requires_grad=True)

    def energy(q):
        return ((w * q).sin() ** 2).sum()

    def f(z, x):
        return x - 0.2 * torch.func.vmap(torch.func.grad(energy))(z)

    layer = wp.EquilibriumLayer(f)
    assert wp.fixed_point(f, torch.zeros_like(x), args=(x,)).converged.all()
    for p in (x, w):
        z, expected = layer(x), unrolled(f, x)
        assert close(torch.autograd.grad(z.sum(), p)[0], torch.autograd.grad(expected.sum(), p)[0])
        assert close(second(layer(x), p), second(unrolled(f, x), p))
