"""EquilibriumLayer: what it keeps, accepts, refuses, and survives."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.utils import prune

import wellposed as wp
from equilibria import F64, leaf, normal

F32 = torch.float32
LOW = [torch.bfloat16, torch.float16]


class Plain(nn.Module):
    """A cell as any user would write it."""

    def __init__(self, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.recurrent = nn.Linear(4, 4, dtype=dtype)
        self.recurrent.weight.data = normal(4, 4, scale=0.2, dtype=dtype)
        self.register_buffer("shift", torch.full((4,), 0.25, dtype=dtype))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.recurrent(z) + x + self.shift)


def dense(dtype: torch.dtype = F64, **options: Any) -> wp.nn.DenseCell:
    return wp.nn.DenseCell(4, 4, wp.nn.Tanh(), dtype=dtype, generator=torch.Generator().manual_seed(0), **options)


def make(kind: str, dtype: torch.dtype = F64, **options: Any) -> wp.EquilibriumLayer:
    return wp.EquilibriumLayer(dense(dtype) if kind == "dense" else Plain(dtype), **{"on_failure": "raise", **options})


every_kind = pytest.mark.parametrize("kind", ["dense", "module"])


def residual(layer: wp.EquilibriumLayer, z: Tensor, x: Tensor) -> Tensor:
    """(batch,) |f(z) - z| / |f(z)| in float64, whatever the layer computed in."""
    cell = copy.deepcopy(layer.cell).double()
    with torch.no_grad():
        fz = cell(z.double(), x.double())
    return (fz - z.double()).norm(dim=1) / fz.norm(dim=1)


# --- what it returns and remembers ------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_it_returns_an_equilibrium(kind, dtype):
    layer, x = make(kind, dtype), normal(5, 4, seed=1, dtype=dtype)
    z = layer(x)
    assert z.shape == (5, 4) and z.dtype == dtype and z.requires_grad
    # f itself is evaluated with some rounding errors
    assert bool((residual(layer, z.detach(), x) <= {F32: 1.2e-6, F64: 1e-12}[dtype]).all())


@every_kind
def test_it_remembers_how_the_last_solves_went(kind):
    layer, x = make(kind), leaf(5, 4, seed=1)
    assert layer.last_solution is None and layer.last_adjoint is None
    z = layer(x)
    solution = layer.last_solution
    assert isinstance(solution, wp.Solution) and layer.last_adjoint is None
    torch.testing.assert_close(solution.value, z.detach(), rtol=0, atol=0)
    assert not solution.value.requires_grad and bool(solution.converged.all())
    z.square().sum().backward()
    adjoint = layer.last_adjoint
    assert isinstance(adjoint, wp.Solution) and layer.last_solution is solution
    assert adjoint.value.shape == (5, 4) and bool(adjoint.converged.all()) and bool((adjoint.residual <= 1e-12).all())
    layer(x)
    assert layer.last_solution is not solution


@every_kind
def test_solve_has_no_graph_and_all_that_is_known(kind):
    layer, x = make(kind), leaf(5, 4, seed=1)
    solution = layer.solve(x)
    assert solution is layer.last_solution and solution.history is None
    assert not solution.value.requires_grad
    torch.testing.assert_close(solution.value, layer(x).detach(), rtol=0, atol=0)
    recorded = layer.solve(x, record=True)
    assert recorded.history.shape == (int(recorded.num_steps.max()), 5)
    last = recorded.history[recorded.num_steps - 1, torch.arange(5)]
    torch.testing.assert_close(last, recorded.residual)


@every_kind
def test_a_warm_start_saves_steps(kind):
    layer, x = make(kind, solver=wp.Picard()), leaf(5, 4, seed=1)
    cold = layer(x)
    steps = layer.last_solution.num_steps
    warm = layer(x, cold.detach())
    once = 1 if kind == "dense" else 2  # a function is evaluated once more, to confirm
    assert layer.last_solution.num_steps.tolist() == [once] * 5
    near = layer(x + 1e-6, cold.detach())
    assert bool((layer.last_solution.num_steps < steps).all())
    torch.testing.assert_close(warm, cold, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(near, layer(x + 1e-6), rtol=1e-10, atol=1e-10)
    # and it changes no gradient
    torch.testing.assert_close(grad(warm.sum(), x)[0], grad(cold.sum(), x)[0], rtol=1e-9, atol=1e-9)


@every_kind
def test_arguments_are_left_as_they_are(kind):
    layer, x, z0 = make(kind), leaf(5, 4, seed=1), leaf(5, 4, seed=2)
    before = x.detach().clone(), z0.detach().clone(), {k: v.clone() for k, v in layer.state_dict().items()}
    layer(x, z0).sum().backward()
    layer.solve(x, z0)
    assert torch.equal(x, before[0]) and torch.equal(z0, before[1])
    assert all(torch.equal(v, before[2][k]) for k, v in layer.state_dict().items())
    assert z0.grad is None  # an equilibrium does not depend on its start


def test_a_state_of_another_shape_than_the_input():
    W = normal(6, 3, scale=0.3)

    def cell(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z.flip(2) * 0.3 + (x @ W.T).reshape(-1, 2, 3))

    x = leaf(5, 3, seed=1)
    z = wp.EquilibriumLayer(cell, state_shape=(2, 3))(x)
    assert z.shape == (5, 2, 3)
    assert grad(z.sum(), x)[0].shape == (5, 3)
    empty = wp.EquilibriumLayer(lambda z, x: 0.5 * z + x.sum(1), state_shape=())(x)
    torch.testing.assert_close(empty, 2 * x.sum(1))


def test_inputs_may_be_structures():
    x = {"drive": leaf(5, 4, seed=1), "gain": leaf(5, 1, seed=2, scale=0.3), "scale": torch.tensor(0.5, dtype=F64)}

    def cell(z: Tensor, x: dict[str, Tensor]) -> Tensor:
        return torch.tanh(x["gain"] * z + x["scale"] * x["drive"])

    by_start = wp.EquilibriumLayer(cell)(x, torch.zeros(5, 4, dtype=F64))
    by_shape = wp.EquilibriumLayer(cell, state_shape=(4,))(x)
    torch.testing.assert_close(by_start, by_shape, rtol=0, atol=0)
    reference = wp.EquilibriumLayer(cell, state_shape=(4,), gradient=wp.UnrolledGradient(100))(x)
    leaves = (x["drive"], x["gain"])
    for a, b in zip(grad(by_shape.sum(), leaves), grad(reference.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_inputs_may_hold_indices():
    table, tokens = leaf(9, 4, seed=1), torch.tensor([3, 0, 3, 8])
    x = {"tokens": tokens, "gain": torch.full((4, 1), 0.3, dtype=F64)}

    def cell(z: Tensor, x: dict[str, Tensor]) -> Tensor:
        return torch.tanh(x["gain"] * z + table[x["tokens"]])

    values = []
    for gradient in (None, wp.UnrolledGradient(60)):
        z = wp.EquilibriumLayer(cell, gradient=gradient, state_shape=(4,))(x)
        (first,) = grad(z.square().sum(), table, create_graph=True)
        values.append((first.detach(), grad(first.square().sum(), table)[0]))
    for a, b in zip(*values, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_states_may_be_structures():
    layer = wp.EquilibriumLayer(lambda z, x: (0.5 * z[1] + x, {"a": 0.5 * z[0]}["a"]))
    zeros = (torch.zeros(3, 2, dtype=F64), torch.zeros(3, 2, dtype=F64))
    z = layer(normal(3, 2), zeros)
    assert isinstance(z, tuple) and len(z) == 2
    torch.testing.assert_close(z[0], normal(3, 2) / 0.75)
    assert isinstance(layer.last_solution.value, tuple)


def test_finished_samples_leave_the_computation():
    """The steps of one slow sample are evaluated for it alone, in forward and in backward."""
    seen: list[int] = []
    rates = torch.full((64, 1), 0.1, dtype=F64)
    rates[7] = 0.9

    def cell(z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(z.shape[0])
        return x[0] * z + x[1]

    layer = wp.EquilibriumLayer(cell, solver=wp.Picard(), state_shape=(1,), max_steps=500)
    x = torch.ones(64, 1, dtype=F64, requires_grad=True)
    z = layer((rates, x))
    assert seen[0] == 64 and seen.count(1) > 100 and sum(seen) < 64 * 30
    torch.testing.assert_close(z, 1 / (1 - rates))
    seen.clear()
    z.sum().backward()
    assert 1 in seen
    torch.testing.assert_close(x.grad, 1 / (1 - rates), rtol=1e-9, atol=0)


def test_neighbours_change_nothing():
    layer = make("dense")
    x = normal(6, 4, seed=1)
    x[2] *= 100
    together = layer(x)
    alone = torch.cat([layer(sample.unsqueeze(0)) for sample in x])
    torch.testing.assert_close(together, alone, rtol=1e-13, atol=1e-13)


# --- failures of the forward solve ---------------------------------------------------------------------------


def test_a_map_without_an_equilibrium_is_reported():
    x = torch.ones(2, 1, dtype=F64)
    with pytest.raises(wp.NotConverged, match=r"EquilibriumLayer: 2 of 2 samples.*DIVERGED") as caught:
        wp.EquilibriumLayer(lambda z, x: 2 * z + x, wp.Picard(), on_failure="raise")(x)
    assert all(status is wp.Status.DIVERGED for status in caught.value.solution.status)
    with pytest.warns(wp.errors.NotConvergedWarning, match="2 of 2 samples"):
        wp.EquilibriumLayer(lambda z, x: 2 * z + x, wp.Picard())(x)
    layer = wp.EquilibriumLayer(lambda z, x: 2 * z + x, wp.Picard(), on_failure="ignore")
    layer(x)
    assert not layer.last_solution.converged.any()


def test_a_cell_that_gives_nan_is_reported():
    x = torch.tensor([[1.0], [-1.0]], dtype=F64)
    layer = wp.EquilibriumLayer(lambda z, x: 0.5 * z + torch.log(x))
    with pytest.warns(wp.errors.NotConvergedWarning, match=r"1 of 2 samples .*index 1, NOT_FINITE"):
        layer(x)
    assert [status.name for status in layer.last_solution.status] == ["CONVERGED", "NOT_FINITE"]


@pytest.mark.parametrize("max_steps", [1, 2])
def test_very_few_steps_give_an_honest_residual(max_steps):
    layer = make("module", max_steps=max_steps, on_failure="ignore")
    x = normal(3, 4, seed=1)
    z = layer(x).detach()
    assert not layer.last_solution.converged.any()
    torch.testing.assert_close(layer.last_solution.residual, residual(layer, z, x))


def test_tolerances_are_kept():
    x = normal(3, 4, seed=1)
    loose, tight = make("module", rtol=1e-2), make("module", rtol=1e-13)
    loose(x), tight(x)
    assert bool((loose.last_solution.residual <= 1e-2).all()) and bool((loose.last_solution.residual > 1e-9).all())
    assert bool((tight.last_solution.residual <= 1e-13).all())
    absolute = make("module", rtol=0.0, atol=1e-3)
    absolute(x)
    assert bool((absolute.last_solution.absolute_residual <= 1e-3).all())
    assert bool((absolute.last_solution.absolute_residual > 1e-9).all())


def test_solvers_that_a_cell_cannot_serve_say_so():
    x = normal(3, 4, seed=1)
    with pytest.raises(wp.InvalidType, match="PeacemanRachford needs a map with a resolvent and a prox"):
        make("module", solver=wp.PeacemanRachford())(x)
    with pytest.raises(wp.InvalidType, match="PeacemanRachford needs a map with a resolvent and a prox"):
        make("module", gradient=wp.ImplicitGradient(wp.PeacemanRachford()))(x.requires_grad_()).sum().backward()


# --- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cell": 3}, "cell must be callable; got int"),
        ({"solver": "anderson"}, r"solver such as Auto\(\).*got 'anderson'.*Choices are objects"),
        ({"solver": wp.Anderson}, "Choices are objects"),
        ({"solver": wp.GMRES()}, "solver must be a solver"),
        ({"gradient": "implicit"}, r"gradient mode such as ImplicitGradient\(\).*Choices are objects"),
        ({"gradient": wp.ImplicitGradient}, r"Choices are objects: give ImplicitGradient\(\)"),
        ({"gradient": wp.GMRES()}, "gradient must be a gradient mode"),
        ({"on_failure": "rise"}, "got 'rise'. Did you mean 'raise'"),
        ({"on_failure": None}, "'raise', 'warn' or 'ignore'; got None"),
        ({"rtol": -1e-6}, "rtol must be a finite float of at least 0; got -1e-06"),
        ({"rtol": float("nan")}, "rtol must be a finite float"),
        ({"rtol": "1e-6"}, "rtol must be a finite float"),
        ({"atol": float("inf")}, "atol must be a finite float of at least 0; got inf"),
        ({"max_steps": 0}, "max_steps must be an integer of at least 1; got 0"),
        ({"max_steps": 10.0}, "max_steps must be an integer of at least 1; got 10.0"),
        ({"max_steps": True}, "max_steps must be an integer"),
        ({"coupled": "yes"}, r"coupled must be True or False; got 'yes'"),
        ({"state_shape": 3}, r"state_shape must be a tuple of integers .*\(width,\).*got 3"),
        ({"state_shape": (2.5,)}, r"state_shape must be a tuple of integers"),
        ({"state_shape": (-1,)}, r"state_shape must be a tuple of integers"),
        ({"cell": dense(), "state_shape": (4,)}, "DenseCell sets the shape of its state"),
    ],
)
def test_bad_arguments_are_explained(arguments, words):
    with pytest.raises(wp.WellposedError, match=words):
        wp.EquilibriumLayer(**{"cell": lambda z, x: x, **arguments})


def test_unknown_arguments_raise():
    with pytest.raises(TypeError, match="unexpected keyword argument 'tol'"):
        wp.EquilibriumLayer(lambda z, x: x, tol=1e-3)
    with pytest.raises(TypeError, match="positional"):
        wp.EquilibriumLayer(lambda z, x: x, wp.Auto(), wp.ImplicitGradient(), "warn")


@pytest.mark.parametrize("grad_enabled", [True, False])
@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (lambda z, x: z[:, :2], r"expected \(5, 4\), got \(5, 2\)"),
        (lambda z, x: z.sum(), r"expected \(5, 4\), got \(\)"),
        (lambda z, x: z[:3], r"expected \(5, 4\), got \(3, 4\)"),
        (lambda z, x: (z, z), r"expected \(5, 4\), got tuple\(\(5, 4\), \(5, 4\)\)"),
        (lambda z, x: None, r"expected \(5, 4\), got NoneType"),
        (lambda z, x: z.float(), "must keep the dtype of the state: expected torch.float64, got torch.float32"),
        (lambda z, x: z.add_(1), "changed its argument in place"),
    ],
)
def test_a_cell_of_the_wrong_shape_gets_a_clear_sentence(cell, words, grad_enabled):
    with torch.set_grad_enabled(grad_enabled), pytest.raises(wp.WellposedError, match=words):
        wp.EquilibriumLayer(cell)(normal(5, 4))


def test_a_state_of_the_wrong_structure_gets_a_clear_sentence():
    layer = wp.EquilibriumLayer(lambda z, x: {"a": z["a"], "c": x})
    zeros = {"a": torch.zeros(3, 2, dtype=F64), "b": torch.zeros(3, 2, dtype=F64)}
    with pytest.raises(wp.InvalidArgument, match=re.escape("expected {'a': (3, 2), 'b': (3, 2)}, got {'a': (3, 2), 'c'")):
        layer(normal(3, 2), zeros)


@pytest.mark.parametrize(
    ("x", "z0", "words"),
    [
        (None, None, "x must be a tensor or a structure of tensors, batch first; got NoneType"),
        ("x", None, "x must be a tensor"),
        (torch.tensor(1.0), None, "x must be batch first"),
        (torch.ones(3, 2, dtype=torch.int64), None, "floating point, real or complex; got torch.int64"),
        ({"a": torch.ones(3, 2)}, None, "give z0, or state_shape"),
        (torch.ones(3, 2), 3.0, "z0 must be a tensor"),
        (torch.ones(3, 2), torch.tensor(1.0), "z0 must be batch first"),
        (torch.ones(3, 2), (torch.ones(3, 2), torch.ones(2, 2)), "All tensors of z0 must share batch size"),
        (torch.ones(3, 2), (), "z0 holds no tensor"),
    ],
)
def test_bad_inputs_are_explained(x, z0, words):
    layer = wp.EquilibriumLayer(lambda z, x: x)
    for call in (layer, layer.solve):
        with pytest.raises(wp.WellposedError, match=words):
            call(x, z0)


@pytest.mark.parametrize(
    ("x", "z0", "words"),
    [
        (normal(3, 5), None, r"DenseCell expects x of shape \(batch, 4\); got \(3, 5\)"),
        (normal(4), None, r"DenseCell expects x of shape \(batch, 4\); got \(4,\)"),
        (normal(2, 3, 4), None, r"got \(2, 3, 4\)"),
        ({"x": normal(3, 4)}, None, r"DenseCell expects x of shape \(batch, 4\); got dict"),
        (normal(3, 4).float(), None, r"torch.float64 parameters and got x of torch.float32.*x.to\(torch.float64\)"),
        (torch.ones(3, 4, dtype=torch.int64), None, "got x of torch.int64"),
        (normal(3, 4), normal(3, 5), r"z0 must have the shape of the state, \(3, 4\); got \(3, 5\)"),
        (normal(3, 4), normal(2, 4), r"z0 must have the shape of the state, \(3, 4\); got \(2, 4\)"),
        (normal(3, 4), (normal(3, 4),), r"z0 must have the shape of the state, \(3, 4\); got tuple"),
        (normal(3, 4), normal(3, 4).float(), "z0 must have the dtype of the state, torch.float64; got torch.float32"),
    ],
)
def test_bad_inputs_of_a_dense_cell_are_explained(x, z0, words):
    layer = wp.EquilibriumLayer(dense())
    for call in (layer, layer.solve):
        with pytest.raises(wp.WellposedError, match=words):
            call(x, z0)


@every_kind
def test_an_empty_batch(kind):
    layer, x = make(kind), torch.zeros(0, 4, dtype=F64, requires_grad=True)
    z = layer(x)
    assert z.shape == (0, 4) and len(layer.last_solution.status) == 0
    assert layer.solve(x).value.shape == (0, 4)
    z.sum().backward()
    assert x.grad.shape == (0, 4)
    for parameter in layer.parameters():
        assert parameter.grad.shape == parameter.shape and bool((parameter.grad == 0).all())
    with torch.no_grad():
        assert layer(x).shape == (0, 4)


def test_a_state_without_features():
    z = wp.EquilibriumLayer(lambda z, x: z)(torch.zeros(3, 0, requires_grad=True))
    assert z.shape == (3, 0)
    z.sum().backward()


def test_repr():
    text = repr(wp.EquilibriumLayer(dense(), wp.Anderson(memory=3), wp.PhantomGradient(2)))
    for part in ("EquilibriumLayer(", "Anderson(memory=3", "PhantomGradient(steps=2", "on_failure='warn'", "DenseCell("):
        assert part in text
    assert "4, 4, activation=Tanh(), bias=True" in text


# --- precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", LOW, ids=str)
@every_kind
@pytest.mark.parametrize("which", ["input", "module", "both"])
def test_low_precision_is_solved_in_float32(which, kind, low):
    reference = make(kind, F32)
    x = normal(5, 4, seed=1, dtype=F32).to(low).float()
    if which != "input":
        reference.load_state_dict({k: v.to(low).float() for k, v in reference.state_dict().items()})
    layer = copy.deepcopy(reference)
    if which != "input":
        layer = layer.to(low)
    given = (x.to(low) if which != "module" else x).requires_grad_()
    z = layer(given)
    assert z.dtype == given.dtype  # the output is as precise as the input
    solution = layer.last_solution
    assert solution.value.dtype == F32 and bool((solution.residual <= 1e-6).all())
    exact = reference(x)
    torch.testing.assert_close(solution.value, exact.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z.float(), exact, rtol=1e-2, atol=1e-2)
    z.float().square().sum().backward()
    exact.square().sum().backward()
    for ours, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        assert ours.grad.dtype == ours.dtype
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("low", LOW, ids=str)
@every_kind
def test_a_low_precision_input_gets_its_gradient(kind, low):
    layer = make(kind, F32)
    x = normal(5, 4, seed=1, dtype=F32).to(low)
    exact, given = x.float().requires_grad_(), x.requires_grad_()
    layer(given).float().square().sum().backward()
    layer(exact).square().sum().backward()
    assert given.grad is not None and given.grad.dtype == low
    torch.testing.assert_close(given.grad.float(), exact.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("weights", ["low", "float32"])
def test_a_plain_function_in_low_precision(weights, low):
    W = normal(4, 4, scale=0.2, dtype=F32).to(low)
    if weights == "float32":
        W = W.float()
    W.requires_grad_()
    x = normal(5, 4, seed=1, dtype=F32).to(low).requires_grad_()
    # A function that takes nothing but its own low precision cannot be solved beyond that.
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W.T + x), rtol=None if weights == "float32" else 3e-2)
    z = layer(x)
    assert z.dtype == low
    z.float().sum().backward()
    V, y = W.detach().float().requires_grad_(), x.detach().float().requires_grad_()
    exact = wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ V.T + x))(y)
    exact.sum().backward()
    torch.testing.assert_close(z.float(), exact, rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(W.grad.float(), V.grad, rtol=0.1, atol=0.1)
    torch.testing.assert_close(x.grad.float(), y.grad, rtol=0.1, atol=0.1)


@every_kind
def test_autocast_solves_in_float32(kind):
    layer = make(kind, F32)
    head, first = nn.Linear(4, 2), nn.Linear(3, 4)
    x = normal(5, 3, seed=1, dtype=F32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = first(x)
        assert h.dtype == torch.bfloat16  # autocast is at work
        z = layer(h)
        y = head(z)
        loss = y.float().square().sum()
    assert z.dtype == F32 and y.dtype == torch.bfloat16
    assert bool((layer.last_solution.residual <= 1e-6).all())
    assert bool((residual(layer, z.detach(), h.detach()) <= 1.2e-6).all())
    loss.backward()
    for parameter in (*first.parameters(), *layer.parameters(), *head.parameters()):
        assert parameter.grad.dtype == F32 and bool((parameter.grad != 0).any())
    assert bool((layer.last_adjoint.residual <= 1e-6).all())
    # the same without autocast, from the same h: only the head differs, by its rounding
    again = layer(h.detach().float())
    torch.testing.assert_close(z, again, rtol=1e-5, atol=1e-5)


@every_kind
def test_backward_inside_autocast_is_as_exact_as_outside(kind):
    """The linear solve and what is made of it in closed form; a matrix product of torch's own is torch's own affair."""
    layer = make(kind, F32)
    x = normal(5, 4, seed=1, dtype=F32).requires_grad_()
    bias = layer.cell.b if kind == "dense" else layer.cell.recurrent.bias
    expected = grad(layer(x).square().sum(), bias)
    for create_graph in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = layer(x)
            ours = grad(z.square().sum(), bias, create_graph=create_graph)
        torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_dense_matrix_inside_autocast_is_exact():
    layer = make("dense", F32)
    x = normal(5, 4, seed=1, dtype=F32)
    (expected,) = grad(layer(x).square().sum(), layer.cell.W)
    for create_graph in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (ours,) = grad(layer(x).square().sum(), layer.cell.W, create_graph=create_graph)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@every_kind
def test_moving_to_another_dtype(kind):
    layer = make(kind, F32)
    x = normal(5, 4, seed=1)
    single = layer(x.float())
    assert layer.double() is layer
    double = layer(x)
    assert double.dtype == F64 and bool((layer.last_solution.residual <= 1e-12).all())
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)


# --- copies --------------------------------------------------------------------------------------------------


def by_torch_save(layer: wp.EquilibriumLayer) -> wp.EquilibriumLayer:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_pickle(layer: wp.EquilibriumLayer) -> wp.EquilibriumLayer:
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("clone", [by_pickle, copy.deepcopy, by_torch_save], ids=["pickle", "deepcopy", "torch.save"])
@pytest.mark.parametrize("moment", ["new", "after forward", "after backward", "after no_grad", "after transform"])
@every_kind
def test_copies(kind, moment, clone):
    layer = make(kind, solver=wp.Anderson(memory=3), gradient=wp.ImplicitGradient(wp.GMRES(restart=7)), max_steps=77)
    x = leaf(5, 4, seed=1)
    if moment in ("after forward", "after backward"):
        z = layer(x)
    if moment == "after backward":
        z.sum().backward()
    if moment == "after no_grad":
        with torch.no_grad():
            layer(x)
    if moment == "after transform":
        torch.func.grad(lambda x: layer(x).sum())(x.detach())
    other = clone(layer)
    assert repr(other) == repr(layer) and other.max_steps == 77
    if layer.last_solution is not None:
        assert other.last_solution.status[0] is wp.Status.CONVERGED
        assert torch.equal(other.last_solution.value, layer.last_solution.value)
    ours, theirs = layer(x), other(x)
    assert torch.equal(ours, theirs)
    for a, b in zip(grad(ours.sum(), (x, *layer.parameters())), grad(theirs.sum(), (x, *other.parameters())), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert torch.equal(layer(x), ours)  # nothing is shared


@every_kind
def test_state_dict_round_trip(kind):
    layer = make(kind)
    x = leaf(5, 4, seed=1)
    layer(x).sum().backward()
    names = {"dense": {"cell.W", "cell.U", "cell.b"}, "module": {"cell.recurrent.weight", "cell.recurrent.bias", "cell.shift"}}
    assert set(layer.state_dict()) == names[kind]
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = make(kind)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.zero_()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(layer(x), other(x))


def test_training_reduces_a_loss():
    """All of it together: twenty steps of an optimizer."""
    layer, head = make("dense"), nn.Linear(4, 1, dtype=F64)
    x, y = normal(32, 4, seed=1), normal(32, 4, seed=1).sum(1, keepdim=True).tanh()
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.02)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (head(layer(x)) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_state_of_another_width_is_explained():
    W, U = normal(8, 8, scale=0.1), normal(8, 5)

    def cell(z, x):
        return torch.tanh(z @ W.T + x @ U.T)

    x = normal(6, 5)
    with pytest.raises(wp.InvalidArgument, match=r"shape of x, \(6, 5\).*state_shape"):
        wp.EquilibriumLayer(cell)(x)
    assert wp.EquilibriumLayer(cell, state_shape=(8,))(x).shape == (6, 8)


@pytest.mark.parametrize("kind", ["cell", "function"])
def test_a_row_that_is_not_finite_is_nan_and_costs_the_others_nothing(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    cell = wp.nn.DenseCell(4, 4, wp.nn.Tanh(), generator=generator, dtype=torch.float64)
    made = cell if kind == "cell" else (lambda z, x: 0.5 * torch.tanh(z) + x)
    layer = wp.EquilibriumLayer(made, on_failure="ignore")
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    good = layer(x[[0, 2]])
    x[1, 2] = torch.nan
    z = layer(x.requires_grad_())
    assert z[1].isnan().all()
    torch.testing.assert_close(z[[0, 2]], good)
    z[[0, 2]].sum().backward()
    assert x.grad[[0, 2]].isfinite().all() and x.grad[[0, 2]].abs().sum() > 0
    if kind == "cell":
        good_x = x.detach()[[0, 2]]
        (expected,) = torch.autograd.grad(layer(good_x).sum(), cell.b)
        torch.testing.assert_close(cell.b.grad, expected)


def test_the_message_of_an_unrolled_layer_speaks_of_its_own_steps() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 0.9 * torch.tanh(z) + x, gradient=wp.UnrolledGradient(3))
    with pytest.warns(wp.errors.NotConvergedWarning, match=r"after 4 steps\. UnrolledGradient\(steps=\.\.\.\) sets its depth"):
        layer(torch.ones(2, 3, dtype=torch.float64).requires_grad_())


class Affine(nn.Module):
    """tanh(W z + U x) with 6 units for 4 inputs, perhaps normalized."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.recurrent, self.inject, self.norm = nn.Linear(6, 6), nn.Linear(4, 6), norm
        self.recurrent.weight.data *= 0.3

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        u = self.recurrent(z) + self.inject(x)
        return torch.tanh(u if self.norm is None else self.norm(u))


@pytest.mark.parametrize(
    ("options", "z0", "message"),
    [
        ({}, None, r"z of the shape of x, \(5, 4\), which is the default: .*give state_shape"),
        ({"state_shape": (7,)}, None, r"z of shape \(5, 7\) by state_shape=\(7,\): mat1.*less the batch"),
        ({}, torch.zeros(5, 7), r"the given z0, \(5, 7\) of torch.float32: mat1.*dtype of f"),
        ({}, torch.zeros(4, 6), r"the given z0, \(4, 6\) of torch.float32: .*size"),
        ({}, torch.zeros(5, 6, dtype=torch.float64), r"the given z0, \(5, 6\) of torch.float64: .*dtype"),
    ],
)
def test_a_state_that_does_not_fit_is_explained(options, z0, message):
    layer = wp.EquilibriumLayer(Affine(), **options)
    with pytest.raises(wp.InvalidArgument, match=message):
        layer(torch.randn(5, 4), z0)


def test_a_dtype_that_does_not_fit_is_explained_as_one():
    layer = wp.EquilibriumLayer(Affine(), state_shape=(6,))
    with pytest.raises(wp.InvalidArgument, match=r"z of torch.float64, the dtype of x: .*Convert x to the dtype") as caught:
        layer(torch.randn(5, 4, dtype=torch.float64))
    assert "state_shape" not in str(caught.value)


def test_an_error_of_the_cell_itself_stays_its_own():
    def cell(z: Tensor, x: Tensor) -> Tensor:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="^out of luck$"):
        wp.EquilibriumLayer(cell)(torch.ones(2, 3), torch.zeros(2, 3))


def test_batch_norm_inside_a_cell_is_refused_unless_it_is_fixed():
    x = torch.randn(5, 4)
    layer = wp.EquilibriumLayer(Affine(nn.BatchNorm1d(6)), state_shape=(6,), on_failure="raise")
    with pytest.raises(wp.InvalidArgument, match=r"BatchNorm1d \('norm'\).*GroupNorm.*eval\(\)"):
        layer(x)
    torch.testing.assert_close(layer.eval()(x)[:2], layer(x[:2]), rtol=1e-5, atol=1e-6)
    always = wp.EquilibriumLayer(Affine(nn.BatchNorm1d(6, track_running_stats=False)), state_shape=(6,)).eval()
    with pytest.raises(wp.InvalidArgument, match=r"mixes the samples.*coupled=True"):
        always(x)


def test_batch_norm_without_running_statistics_is_solved_with_coupled_rows():
    x = torch.randn(5, 4, dtype=torch.float64)
    cell = Affine(nn.BatchNorm1d(6, affine=False, track_running_stats=False)).double()
    layer = wp.EquilibriumLayer(cell, state_shape=(6,), coupled=True, on_failure="raise")
    z = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(cell(z, x), z.detach(), rtol=1e-5, atol=1e-6)


def test_a_cell_has_two_arguments() -> None:
    with pytest.raises(wp.InvalidType, match=r"function of two arguments, cell\(z, x\): .*2 positional arguments but 3"):
        wp.EquilibriumLayer(torch.nn.Linear(5, 5))(torch.zeros(2, 5))


def test_a_budget_used_up_by_coupled_rows_is_explained_without_further_evaluations() -> None:
    """Attention over the batch: all rows fail together, none leaves, and nothing in the solve shows why."""
    W = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    calls = 0

    def cell(z: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 0.3 * torch.softmax(z @ z.T / 16, dim=1) @ torch.tanh(z @ W) + x

    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer = wp.EquilibriumLayer(cell, wp.Picard(), max_steps=6)
    hint = "rows of the batch depend on each other.*coupled=True.*groups"
    with pytest.warns(wp.errors.NotConvergedWarning, match=hint), torch.no_grad():
        layer(x)
    assert layer.last_solution is not None
    assert layer.last_solution.num_steps.tolist() == [6] * 6 and calls == 6
    for quiet in ({"coupled": True}, {}):  # one sample has no other rows
        with pytest.warns(wp.errors.NotConvergedWarning, match="Raise max_steps") as caught, torch.no_grad():
            wp.EquilibriumLayer(cell, wp.Picard(), max_steps=6, **quiet)(x if quiet else x[:1] * 9)
        assert "depend on each other" not in str(caught[0].message)


class _Halved(wp.nn.DenseCell):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * super().forward(z, x)


class _HalvedAgain(_Halved):
    pass


class _Both(wp.nn.DenseCell):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return super().forward(z, x)

    def bind(self, x: Tensor) -> Any:
        return super().bind(x)


@pytest.mark.parametrize("kind", [_Halved, _HalvedAgain, "hook", "pruned"])
def test_what_bind_would_ignore_is_refused(kind: Any) -> None:
    cell = (wp.nn.DenseCell if isinstance(kind, str) else kind)(4, 4)
    if kind == "hook":
        cell.register_forward_hook(lambda module, given, value: 0.5 * value)
    if kind == "pruned":
        prune.random_unstructured(cell, "W", 0.5)
    with pytest.raises(wp.InvalidArgument, match="would be ignored. Wrap the cell"):
        wp.EquilibriumLayer(cell)(torch.ones(2, 4))
    assert not _Both.overridden
    wp.EquilibriumLayer(_Both(4, 4))(torch.ones(2, 4))
