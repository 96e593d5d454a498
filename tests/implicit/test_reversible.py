"""ReversibleGradient: the gradient of its own steps, by states that are computed backward and not kept."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.utils import parametrize

import wellposed as wp
from equilibria import CASES, F64, Case, flat, leaf, like, normal

EPS = torch.finfo(F64).eps


def steps_of(f: Any, start: Tensor, steps: int, damping: float) -> Tensor:
    """The two states of [mccallum2025], written out."""
    y = z = start
    for _ in range(steps):
        y = (1 - damping) * y + damping * f(z)
        z = (1 - damping) * z + damping * f(y)
    return z


def unrolled(case: Case, layer: wp.EquilibriumLayer, state: Any, steps: int, damping: float) -> Tensor:
    """The same steps of a case, all of them recorded by autograd."""
    start = torch.zeros_like(flat(state)) if case.z0 is None else flat(case.z0)
    return steps_of(lambda rows: flat(layer.cell(like(rows, state), case.x)), start, steps, damping)


def assert_same(ours: Any, theirs: Any, rtol: float = 1e4 * EPS) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or float((a - b).detach().norm()) <= rtol * float(b.detach().norm())


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_steps(name):
    case = CASES[name]()
    layer = case.layer(gradient=wp.ReversibleGradient(7, 0.4), on_failure="ignore")
    state = layer(case.x, case.z0)
    z, expected = flat(state), unrolled(case, layer, state, 7, 0.4)
    assert_same([z], [expected])
    v = normal(*z.shape, seed=99)
    ours, theirs = (grad(value, case.leaves, v, allow_unused=True, retain_graph=True) for value in (z, expected))
    assert_same(ours, theirs)
    solution, adjoint = layer.last_solution, layer.last_adjoint
    assert set(solution.num_steps.tolist()) == {15} and set(adjoint.num_steps.tolist()) == {14}
    assert 0 < float(adjoint.absolute_residual.max()) < 1e4 * EPS and bool(adjoint.converged.all())


@pytest.mark.parametrize("name", ["tanh, spectral", "function of a tensor with a graph", "module", "tuple"])
def test_second_derivatives_are_those_of_the_steps(name):
    case = CASES[name]()
    layer = case.layer(gradient=wp.ReversibleGradient(5), on_failure="ignore")
    state = layer(case.x, case.z0)

    def second(z: Tensor) -> tuple[Tensor | None, ...]:
        first = grad(z.square().sum(), case.leaves, create_graph=True)
        return grad(torch.stack([g.square().sum() for g in first]).sum(), case.leaves, retain_graph=True)

    assert_same(second(flat(state)), second(unrolled(case, layer, state, 5, 0.5)))


def shared_weight(layer_of: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x, a captured tensor and f itself are all made of W: no path may be counted twice."""
    W, z0 = leaf(3, 3, scale=0.4), leaf(2, 3, seed=3)
    V, x = W.tanh(), normal(2, 3, seed=1) @ W.T
    return layer_of(lambda z, x: torch.tanh(z @ V.T + 0.1 * z @ W + x), x, 2 * z0), (W, z0)


@pytest.mark.parametrize("order", [1, 2])
def test_what_depends_on_the_same_tensor_is_counted_once(order):
    def ours(f: Any, x: Tensor, z0: Tensor) -> Tensor:
        return wp.EquilibriumLayer(f, gradient=wp.ReversibleGradient(6), on_failure="ignore")(x, z0)

    def theirs(f: Any, x: Tensor, z0: Tensor) -> Tensor:
        return steps_of(lambda z: f(z, x), z0, 6, 0.5)

    found = []
    for layer_of in (ours, theirs):
        z, inputs = shared_weight(layer_of)
        gradients = grad(z.square().sum(), inputs, create_graph=order == 2)
        found.append(gradients if order == 1 else grad(sum(g.square().sum() for g in gradients), inputs))
    assert_same(*found)


def test_memory_does_not_depend_on_the_number_of_steps():
    """Neither what forward keeps, nor how many states are alive at once in backward."""

    def measured(steps: int) -> tuple[int, int]:
        W, sizes = leaf(16, 16, scale=0.1), []
        images: list[weakref.ref[Tensor]] = []
        alive = [0]

        def cell(z: Tensor, x: Tensor) -> Tensor:
            image = torch.tanh(z @ W.T + x)
            images.append(weakref.ref(image))
            alive[0] = max(alive[0], sum(reference() is not None for reference in images))
            return image

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        layer = wp.EquilibriumLayer(cell, gradient=wp.ReversibleGradient(steps), on_failure="ignore")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            z = layer(normal(4, 16, seed=1))
        z.sum().backward()
        assert len(images) > 4 * steps
        return sum(sizes), alive[0]

    assert measured(4) == measured(24)
    assert measured(4)[1] <= 4


def test_states_of_float32_maps_are_reversed_in_float64():
    """In float32 alone 18 steps lose 2^18 roundings: all but one or two digits."""
    W, x = leaf(8, 8, scale=0.2, dtype=torch.float32), normal(4, 8, seed=1, dtype=torch.float32)
    layer = wp.EquilibriumLayer(
        lambda z, x: torch.tanh(z @ W.T + x), gradient=wp.ReversibleGradient(18), on_failure="raise", rtol=1e-3
    )
    z = layer(x)
    (ours,) = grad(z.square().sum(), W)
    start = torch.zeros(4, 8, dtype=F64)
    expected = steps_of(lambda z: torch.tanh(z.float() @ W.T + x).double(), start, 18, 0.5)
    (theirs,) = grad(expected.float().square().sum(), W)
    assert z.dtype == ours.dtype == torch.float32
    assert_same([ours], [theirs], 1e2 * torch.finfo(torch.float32).eps)
    assert float(layer.last_adjoint.absolute_residual.max()) < 1e-8


@pytest.mark.parametrize("policy", ["warn", "raise", "ignore"])
def test_a_start_that_is_missed_is_reported(policy):
    """40 steps that halve lose 2^40 roundings, and the cotangent has not fallen by as much."""
    W, x = leaf(8, 8, scale=0.2), normal(2, 8, seed=1)
    layer = wp.EquilibriumLayer(
        lambda z, x: torch.tanh(z @ W.T + x), gradient=wp.ReversibleGradient(40), on_failure=policy, rtol=1e-2
    )
    z = layer(x)
    assert bool(layer.last_solution.converged.all())
    words = "backward of ReversibleGradient: 2 of 2 samples .* Reversed steps missed the start"
    if policy == "warn":
        with pytest.warns(wp.errors.AdjointNotConvergedWarning, match=words):
            z.sum().backward()
    elif policy == "raise":
        with pytest.raises(wp.errors.AdjointNotConverged, match=words):
            z.sum().backward()
    else:
        z.sum().backward()
    adjoint = layer.last_adjoint
    assert not adjoint.converged.any() and float(adjoint.residual.min()) > 1e-8
    assert layer.failure_counts["backward DIVERGED"] == 1


def test_the_distance_from_the_start_is_measured():
    """A weight that is changed unseen after forward leads back to another start."""
    W, x = leaf(3, 3, scale=0.3), normal(2, 3, seed=1)
    layer = wp.EquilibriumLayer(
        lambda z, x: torch.tanh(z @ W.T + x), gradient=wp.ReversibleGradient(3, rtol=1e-4), on_failure="ignore"
    )
    z = layer(x)
    z.sum().backward(retain_graph=True)
    assert bool(layer.last_adjoint.converged.all())
    W.data *= 1.01
    z.sum().backward()
    adjoint = layer.last_adjoint
    assert not adjoint.converged.any() and 1e-3 < float(adjoint.absolute_residual.min()) < 0.5


@pytest.mark.parametrize("steps", [12, 24, 36])
def test_the_residual_estimates_the_error_of_the_gradient(steps):
    """From above, and by no more than two orders."""
    W, x = leaf(8, 8, scale=0.2), normal(4, 8, seed=1)
    layer = wp.EquilibriumLayer(
        lambda z, x: torch.tanh(z @ W.T + x), gradient=wp.ReversibleGradient(steps), on_failure="ignore"
    )
    (ours,) = grad(layer(x).square().sum(), W)
    (theirs,) = grad(steps_of(lambda z: torch.tanh(z @ W.T + x), torch.zeros_like(x), steps, 0.5).square().sum(), W)
    error, estimate = float((ours - theirs).norm() / theirs.norm()), float(layer.last_adjoint.residual.max())
    assert error <= estimate + 16 * EPS and estimate <= 100 * error
    assert (estimate > EPS**0.5) is (steps == 36)


def test_a_looser_tolerance_is_one_argument():
    W, x = leaf(8, 8, scale=0.2), normal(2, 8, seed=1)
    for rtol, converged in ((None, False), (0.1, True)):
        layer = wp.EquilibriumLayer(
            lambda z, x: torch.tanh(z @ W.T + x), gradient=wp.ReversibleGradient(40, rtol=rtol), on_failure="ignore"
        )
        layer(x).sum().backward()
        assert bool(layer.last_adjoint.converged.all()) is converged


def test_nan_is_reported():
    a, x = leaf(1), torch.tensor([[1.0], [torch.nan]], dtype=F64)
    layer = wp.EquilibriumLayer(lambda z, x: 0.1 * a * z + x, gradient=wp.ReversibleGradient(3), on_failure="ignore")
    layer(x).sum().backward()
    assert [status.name for status in layer.last_adjoint.status] == ["CONVERGED", "NOT_FINITE"] and bool(a.grad.isnan())


def test_without_a_graph_the_solver_is_used():
    layer = wp.EquilibriumLayer(lambda z, x: 0.5 * z + x, gradient=wp.ReversibleGradient(2), on_failure="raise")
    with torch.no_grad():
        z = layer(torch.ones(2, 3, dtype=F64))
    torch.testing.assert_close(z, torch.full_like(z, 2.0))


def test_inside_transforms_it_agrees_with_itself_outside():
    case = CASES["tanh"]()
    layer = case.layer(gradient=wp.ReversibleGradient(6), on_failure="ignore")
    inside = torch.func.grad(lambda x: layer(x).square().sum())(case.x.detach())
    assert_same([inside], grad(layer(case.x).square().sum(), case.x))
    z = layer(case.x)
    units = torch.eye(z.numel(), dtype=F64).reshape(-1, *z.shape)
    rows = torch.func.jacrev(layer)(case.x.detach()).reshape(-1, *case.x.shape)
    assert_same(rows, [grad(z, case.x, unit, retain_graph=True)[0] for unit in units])
    with pytest.raises(wp.WellposedError, match="around the layer"):
        torch.func.vmap(lambda v: grad(z, case.x, v, retain_graph=True)[0])(units)
    with pytest.raises(wp.WellposedError, match="is_grads_batched"):
        grad(z, case.x, units, is_grads_batched=True)


class Halved(nn.Module):
    def forward(self, W: Tensor) -> Tensor:
        return W / 2


def test_a_weight_of_a_cache_that_is_gone_is_found_again():
    cell = nn.Linear(3, 3, dtype=F64)
    parametrize.register_parametrization(cell, "weight", Halved())
    layer = wp.EquilibriumLayer(lambda z, x: cell(z).tanh() + x, gradient=wp.ReversibleGradient(3), on_failure="ignore")
    x = normal(2, 3, seed=1)
    V = cell.parametrizations.weight.original
    found = [grad(layer(x).sum(), V)]
    with parametrize.cached():
        z = layer(x)  # makes the weight
        found.append(grad(z.sum(), V, retain_graph=True))
    found.append(grad(z.sum(), V))  # which was made of V, as it is now
    with parametrize.cached():
        weight = cell.weight
        z = layer(x)
        found.append(grad(z.sum(), V, retain_graph=True))
    assert weight is not cell.weight
    found.append(grad(z.sum(), V))
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: wp.ReversibleGradient(0), "'steps' parameter of ReversibleGradient"),
        (lambda: wp.ReversibleGradient(3, 1.0), r"'damping' parameter of ReversibleGradient must be a float in \(0, 1\)"),
        (lambda: wp.ReversibleGradient(3, rtol=-1.0), "'rtol' parameter of ReversibleGradient"),
        (lambda: wp.attach_gradient(torch.cos, torch.ones(1, 1), gradient=wp.ReversibleGradient(3)), "at an equilibrium"),
    ],
)
def test_bad_options_are_explained(make, words):
    with pytest.raises(wp.WellposedError, match=words):
        make()


def test_a_depth_too_small_is_no_success():
    layer = wp.EquilibriumLayer(lambda z, x: 0.9 * torch.tanh(z) + x, gradient=wp.ReversibleGradient(3))
    with pytest.warns(
        wp.errors.NotConvergedWarning, match=r"after 7 steps\. ReversibleGradient\(steps=\.\.\.\) sets its depth"
    ):
        layer(torch.ones(2, 3, dtype=F64).requires_grad_())
