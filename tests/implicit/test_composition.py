"""The exact gradient among everything else that autograd and torch.func do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, grad
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import wellposed as wp
from equilibria import F64, leaf, normal

# torch itself calls torch.jit.script when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


class Plain(nn.Module):
    """tanh(W z + U x + b) as any user would write it: the general way through the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(normal(3, 3, seed=0, scale=0.3))
        self.U = nn.Parameter(normal(3, 3, seed=1))
        self.b = nn.Parameter(normal(3, seed=2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.T + x @ self.U.T + self.b)


def make(kind: str, **options: Any) -> wp.EquilibriumLayer:
    """The same equilibrium by a module of the user or by DenseCell, or its reference by unrolling."""
    options = {"on_failure": "raise", **options}
    cell = Plain()
    if kind == "dense":
        plain, cell = cell, wp.nn.DenseCell(3, 3, wp.nn.Tanh(), dtype=F64)
        cell.load_state_dict(plain.state_dict())
    if kind == "unrolled":
        options["gradient"] = wp.UnrolledGradient(100)
    return wp.EquilibriumLayer(cell, **options)


every_kind = pytest.mark.parametrize("kind", ["module", "dense"])


def same(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def parameter_gradients(layer: wp.EquilibriumLayer, loss: Tensor) -> tuple[Tensor, ...]:
    return grad(loss, tuple(layer.parameters()))


# --- backward passes ----------------------------------------------------------------------------------


@every_kind
def test_several_forwards_before_one_backward(kind):
    losses = []
    for layer in (make(kind), make("unrolled")):
        x, y = leaf(2, 3, seed=3), leaf(4, 3, seed=4)
        loss = layer(x).square().sum() * layer(y).sum() + (layer(x + 1) * layer(x)).sum()
        losses.append((loss.detach(), *grad(loss, (x, y, *layer.parameters()))))
    for ours, theirs in zip(*losses, strict=True):
        same(ours, theirs)


@every_kind
def test_backward_passes_belong_to_their_own_forward(kind):
    """Backward in another order, and after another forward: nothing on the layer is needed."""
    layer = make(kind)
    x, y = leaf(2, 3, seed=3), leaf(2, 3, seed=4)
    first, second = layer(x), layer(y)
    (gx,) = grad(first.sum(), x)
    (gy,) = grad(second.sum(), y)
    layer(normal(5, 3, seed=5))
    same(gx, grad(make("unrolled")(x).sum(), x)[0])
    same(gy, grad(make("unrolled")(y).sum(), y)[0])


@every_kind
def test_backward_can_be_repeated_if_the_graph_is_kept(kind):
    layer, x = make(kind), leaf(2, 3, seed=3)
    z = layer(x)
    v, w = normal(2, 3, seed=4), normal(2, 3, seed=5)
    (first,) = grad(z, x, v, retain_graph=True)
    (again,) = grad(z, x, v, retain_graph=True)
    (other,) = grad(z, x, w, retain_graph=True)
    (both,) = grad(z, x, v + w)
    same(first, again, 0)
    same(first + other, both)


@every_kind
def test_backward_cannot_be_repeated_otherwise(kind):
    layer, x = make(kind), leaf(2, 3, seed=3)
    loss = layer(x).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@every_kind
def test_gradients_accumulate(kind):
    layer = make(kind)
    x = normal(6, 3, seed=3)
    whole = parameter_gradients(layer, layer(x).square().sum())
    for part in x.split(2):
        layer(part).square().sum().backward()
    for parameter, expected in zip(layer.parameters(), whole, strict=True):
        same(parameter.grad, expected)


@every_kind
def test_gradients_in_eval_mode(kind):
    layer, x = make(kind), leaf(2, 3, seed=3)
    training = grad(layer(x).sum(), (x, *layer.parameters()))
    layer.eval()
    evaluating = grad(layer(x).sum(), (x, *layer.parameters()))
    for a, b in zip(training, evaluating, strict=True):
        same(a, b, 0)


@every_kind
def test_stacked_layers(kind):
    def model(kind: str) -> nn.Sequential:
        head = nn.Linear(3, 1, dtype=F64)
        head.load_state_dict({"weight": normal(1, 3, seed=8), "bias": normal(1, seed=9)})
        return nn.Sequential(make(kind), nn.Tanh(), make(kind), head)

    x = leaf(2, 3, seed=3)
    ours, theirs = model(kind), model("unrolled")
    for a, b in zip(
        grad(ours(x).sum(), (x, *ours.parameters())), grad(theirs(x).sum(), (x, *theirs.parameters())), strict=True
    ):
        same(a, b)


@every_kind
def test_one_layer_used_twice_in_a_row(kind):
    x = leaf(2, 3, seed=3)
    ours, theirs = make(kind), make("unrolled")
    for a, b in zip(
        grad(ours(ours(x)).sum(), (x, *ours.parameters())),
        grad(theirs(theirs(x)).sum(), (x, *theirs.parameters())),
        strict=True,
    ):
        same(a, b)


def test_an_equilibrium_inside_the_cell_of_another():
    def model(gradient: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        W, x = leaf(3, 3, seed=0, scale=0.2), leaf(2, 3, seed=3)
        inner = wp.EquilibriumLayer(lambda y, z: torch.tanh(y @ W.T + z), gradient=gradient)
        outer = wp.EquilibriumLayer(lambda z, x: 0.3 * torch.sin(inner(z)) + x, gradient=gradient)
        loss = outer(x).square().sum()
        first = grad(loss, (x, W), create_graph=True)
        return loss.detach(), (*first, *grad(first[0].sum() + first[1].square().sum(), (x, W)))

    ours, theirs = model(None), model(wp.UnrolledGradient(60))
    same(ours[0], theirs[0])
    for a, b in zip(ours[1], theirs[1], strict=True):
        same(a, b, 1e-8)


@every_kind
def test_second_derivatives_of_stacked_layers(kind):
    values = []
    for one, two in ((make(kind), make(kind)), (make("unrolled"), make("unrolled"))):
        x = leaf(2, 3, seed=3)
        (first,) = grad(two(torch.sin(one(x))).square().sum(), x, create_graph=True)
        values.append(grad(first.square().sum(), (x, *one.parameters(), *two.parameters())))
    for a, b in zip(*values, strict=True):
        same(a, b, 1e-8)


# --- what requires a gradient ---------------------------------------------------------------------------


@every_kind
def test_without_gradients_there_is_no_graph(kind):
    layer, x = make(kind), leaf(2, 3, seed=3)
    with torch.no_grad():
        z = layer(x)
    assert not z.requires_grad and z.grad_fn is None
    same(z, layer(x).detach(), 0)


@every_kind
def test_inference_mode(kind):
    layer, x = make(kind), normal(2, 3, seed=3)
    with torch.inference_mode():
        z = layer(x)
        assert z.is_inference()
        z = z.clone()
    same(z, layer(x).detach(), 0)


@every_kind
def test_nothing_requires_a_gradient(kind):
    layer = make(kind).requires_grad_(False)
    z = layer(normal(2, 3, seed=3))
    assert not z.requires_grad


@every_kind
def test_an_input_that_requires_none(kind):
    x = normal(2, 3, seed=3)
    ours, theirs = make(kind), make("unrolled")
    for a, b in zip(
        parameter_gradients(ours, ours(x).square().sum()),
        parameter_gradients(theirs, theirs(x).square().sum()),
        strict=True,
    ):
        same(a, b)
    assert x.grad is None


@every_kind
@pytest.mark.parametrize("trained", ["W", "U", "b", "x"])
def test_frozen_parameters_get_nothing_and_the_others_the_same(kind, trained):
    x = leaf(2, 3, seed=3)
    layer = make(kind)
    tensors = {"x": x, **dict(layer.cell.named_parameters())}
    all_of_them = dict(zip(tensors, grad(layer(x).square().sum(), tuple(tensors.values())), strict=True))
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == trained)
    layer(x).square().sum().backward()
    for name, tensor in tensors.items():
        if name == trained:
            same(tensor.grad, all_of_them[name])
        else:
            assert tensor.grad is None


def test_a_tensor_the_cell_does_not_depend_on():
    x, unused = leaf(2, 3, seed=3), leaf(3)
    layer = wp.EquilibriumLayer(lambda z, x: 0.5 * torch.sin(z) + x["x"])
    z = layer({"x": x, "unused": unused.expand(2, 3)}, torch.zeros(2, 3, dtype=F64))
    gx, gu = grad(z.sum(), (x, unused), allow_unused=True)
    assert gu is None
    (expected,) = grad(wp.EquilibriumLayer(lambda z, x: 0.5 * torch.sin(z) + x)(x).sum(), x)
    same(gx, expected)


def test_a_cell_that_ignores_the_state():
    """f(z, x) = 2 x: an equilibrium all the same, with J = 0, in derivatives of every order."""
    x = leaf(2, 3, seed=3)
    z = wp.EquilibriumLayer(lambda z, x: x**3)(x)
    (first,) = grad(z.sum(), x, create_graph=True)
    same(first, 3 * x**2)
    same(grad(first.sum(), x)[0], 6 * x)


def test_a_cell_that_ignores_its_input():
    a = leaf(3, seed=0, scale=0.3)
    x = leaf(2, 3, seed=3)
    z = wp.EquilibriumLayer(lambda z, x: torch.tanh(a * z + 1))(x)
    gx, ga = grad(z.sum(), (x, a), allow_unused=True)
    assert gx is None and bool((ga != 0).all())


@every_kind
def test_part_of_the_outputs_in_the_loss(kind):
    """Samples and units that the loss does not see."""
    x = leaf(4, 3, seed=3)
    ours, theirs = make(kind), make("unrolled")
    for a, b in zip(
        grad(ours(x)[1, 2], (x, *ours.parameters())), grad(theirs(x)[1, 2], (x, *theirs.parameters())), strict=True
    ):
        same(a, b)


def test_part_of_a_structure_in_the_loss():
    A, x = leaf(3, 3, scale=0.3), leaf(2, 3, seed=3)
    zeros = {"p": torch.zeros(2, 3, dtype=F64), "q": torch.zeros(2, 3, dtype=F64)}

    def cell(z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        return {"p": torch.tanh(z["q"] @ A.T + x), "q": 0.5 * z["p"] - x}

    values = []
    for gradient in (None, wp.UnrolledGradient(100)):
        z = wp.EquilibriumLayer(cell, gradient=gradient)(x, zeros)
        values.append(grad(z["q"].square().sum(), (x, A)))
    for a, b in zip(*values, strict=True):
        same(a, b)


# --- hooks, retained gradients, changes in place --------------------------------------------------------


@every_kind
def test_hooks_on_the_equilibrium_and_on_the_input(kind):
    layer, x = make(kind), leaf(2, 3, seed=3)
    (plain,) = grad(layer(x).square().sum(), x)
    seen: dict[str, Tensor] = {}

    def double(v: Tensor) -> Tensor:
        seen["z"] = v
        return 2 * v

    z = layer(x)
    z.register_hook(double)
    handle = x.register_hook(lambda v: seen.__setitem__("x", v))
    z.square().sum().backward()
    handle.remove()
    same(seen["z"], 2 * z.detach(), 0)
    same(seen["x"], 2 * plain)
    same(x.grad, 2 * plain)


@every_kind
def test_module_hooks(kind):
    layer, x = make(kind), leaf(2, 3, seed=3)
    order: list[str] = []
    layer.register_forward_pre_hook(lambda *_: order.append("before"))
    layer.register_forward_hook(lambda *_: order.append("after"))
    layer.register_full_backward_hook(lambda module, gx, gz: order.append(f"backward {tuple(gx[0].shape)}"))
    layer(x).sum().backward()
    assert order == ["before", "after", "backward (2, 3)"]


@every_kind
def test_retained_gradients(kind):
    layer, x = make(kind), leaf(2, 3, seed=3)
    z = layer(x)
    z.retain_grad()
    z.square().sum().backward()
    same(z.grad, 2 * z.detach(), 0)


@every_kind
def test_changing_the_equilibrium_in_place_is_never_silent(kind):
    layer, x = make(kind), leaf(2, 3, seed=3)
    z = layer(x)
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@every_kind
def test_changing_the_equilibrium_in_place_does_not_touch_the_record(kind):
    layer, x = make(kind), normal(2, 3, seed=3)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            z = layer(x)
            before = layer.last_solution.value.clone()
            with torch.no_grad():
                z.zero_()
        same(layer.last_solution.value, before, 0)


@every_kind
def test_parameters_changed_between_forward_and_backward_raise(kind):
    layer, x = make(kind), leaf(2, 3, seed=3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_changed_behind_autograds_back_are_seen_too():
    layer, x = make("module"), leaf(2, 3, seed=3)
    loss = layer(x).square().sum()
    layer.cell.b.data += 0.1  # .data leaves no trace in the version of the tensor
    with pytest.raises(wp.WellposedError, match=r"another value .* changed in place between forward and backward"):
        loss.backward()


@every_kind
def test_an_input_changed_between_forward_and_backward_raises(kind):
    layer, x = make(kind), normal(2, 3, seed=3)
    y = x.clone()
    loss = layer(y).square().sum()
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_random_cell_is_reported():
    torch.manual_seed(0)
    dropout = nn.Dropout(0.5)
    W, x = leaf(8, 8, scale=0.1), normal(2, 8, seed=3)

    def cell(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(dropout(z) @ W.T + x)

    with pytest.raises(wp.NotConverged):
        wp.EquilibriumLayer(cell, on_failure="raise")(x)
    z = wp.EquilibriumLayer(cell, on_failure="ignore")(x)
    with pytest.raises(wp.WellposedError, match="f is random"):
        z.sum().backward()
    dropout.eval()
    z = wp.EquilibriumLayer(cell, on_failure="raise")(x)
    z.sum().backward()
    assert W.grad is not None


def test_noise_that_is_constant_within_a_solve_is_fine():
    """Dropout with one mask for all steps, as the message advises."""
    x, W = leaf(2, 8, seed=3), leaf(8, 8, scale=0.1)
    mask = (torch.rand(2, 8, generator=torch.Generator().manual_seed(0)) > 0.5).to(F64) * 2
    values = []
    for gradient in (None, wp.UnrolledGradient(60)):
        layer = wp.EquilibriumLayer(lambda z, x: torch.tanh((z * x[1]) @ W.T + x[0]), gradient=gradient)
        values.append(grad(layer((x, mask), torch.zeros(2, 8, dtype=F64)).sum(), (x, W)))
    for a, b in zip(*values, strict=True):
        same(a, b)


@every_kind
def test_checkpointing(kind):
    x = leaf(2, 3, seed=3)
    layer = make(kind)
    expected = grad(layer(torch.sin(x)).square().sum(), (x, *layer.parameters()))
    z = checkpoint(lambda x: layer(torch.sin(x)), x, use_reentrant=False)
    for a, b in zip(grad(z.square().sum(), (x, *layer.parameters())), expected, strict=True):
        same(a, b)


def test_checkpointing_inside_the_cell():
    plain = Plain()
    x = leaf(2, 3, seed=3)
    layer = wp.EquilibriumLayer(lambda z, x: checkpoint(plain, z, x, use_reentrant=False))
    expected = make("unrolled")
    for a, b in zip(
        grad(layer(x).square().sum(), (x, *plain.parameters())),
        grad(expected(x).square().sum(), (x, *expected.parameters())),
        strict=True,
    ):
        same(a, b)


@every_kind
@pytest.mark.parametrize("order", [1, 2])
def test_saved_tensors_may_be_kept_elsewhere(kind, order):
    """torch.autograd.graph.save_on_cpu and its like give back other objects than they took."""
    layer, x = make(kind), leaf(2, 3, seed=3)

    def derivative() -> tuple[Tensor, ...]:
        first = grad(layer(x).square().sum(), (x, *layer.parameters()), create_graph=order == 2)
        return first if order == 1 else grad(first[0].square().sum() + first[1].sum(), (x, *layer.parameters()))

    expected = derivative()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone()):
        ours = derivative()
    for a, b in zip(ours, expected, strict=True):
        same(a, b)


@every_kind
@pytest.mark.parametrize("order", [0, 1, 2])
def test_graphs_are_freed_without_the_garbage_collector(kind, order):
    """A cycle of references would keep every graph of a training loop until a collection."""
    layer = make(kind)
    gc.disable()
    try:
        h = torch.sin(leaf(2, 3, seed=3))
        seen = weakref.ref(h)
        z = layer(h)
        if order == 1:
            z.sum().backward()
        if order == 2:
            (first,) = grad(z.square().sum(), layer.cell.W, create_graph=True)
            grad(first.sum(), layer.cell.W)
            del first
        del h, z
        assert seen() is None
    finally:
        gc.enable()


@every_kind
def test_anomaly_detection(kind):
    layer, x = make(kind), leaf(2, 3, seed=3)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        (g,) = grad(layer(x).square().sum(), x)
    same(g, grad(layer(x).square().sum(), x)[0])


# --- torch.func -----------------------------------------------------------------------------------------


def loss(layer: wp.EquilibriumLayer, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(layer, parameters, (x,)).square().sum()


def plain_parameters(layer: wp.EquilibriumLayer) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in layer.named_parameters()}


def both(kind: str, compute: Callable[[wp.EquilibriumLayer, dict[str, Tensor], Tensor], Any]) -> tuple[Any, Any]:
    """The same with our layer and with its unrolled reference."""
    x = normal(4, 3, seed=3)
    return tuple(compute(layer, plain_parameters(layer), x) for layer in (make(kind), make("unrolled")))


V, T = normal(4, 3, seed=6), normal(4, 3, seed=7)

TRANSFORMS: dict[str, Callable[[wp.EquilibriumLayer, dict[str, Tensor], Tensor], Any]] = {
    "grad in the parameters": lambda f, p, x: torch.func.grad(lambda p: loss(f, p, x))(p),
    "grad in the input": lambda f, p, x: torch.func.grad(lambda x: loss(f, p, x))(x),
    "vjp": lambda f, p, x: vjp(f, x)[1](V)[0],
    "vjp in the parameters": lambda f, p, x: vjp(lambda p: functional_call(f, p, (x,)), p)[1](V)[0],
    "jvp": lambda f, p, x: jvp(f, (x,), (T,)),
    "jvp in the parameters": lambda f, p, x: jvp(lambda p: functional_call(f, p, (x,)), (p,), (p,)),
    "jacrev": lambda f, p, x: jacrev(f)(x),
    "jacfwd": lambda f, p, x: jacfwd(f)(x),
    "jacrev in the parameters": lambda f, p, x: jacrev(lambda p: functional_call(f, p, (x,)))(p),
    "vmap": lambda f, p, x: vmap(f)(torch.stack([x, 2 * x])),
    "vmap of samples": lambda f, p, x: vmap(lambda sample: f(sample.unsqueeze(0)).squeeze(0))(x),
    "vmap over parameters": lambda f, p, x: vmap(lambda s: functional_call(f, {n: s * w for n, w in p.items()}, (x,)))(
        torch.tensor([0.5, 1.0], dtype=F64)
    ),
    "per-sample gradients": lambda f, p, x: vmap(
        torch.func.grad(lambda p, sample: loss(f, p, sample.unsqueeze(0))), in_dims=(None, 0)
    )(p, x),
    "hessian": lambda f, p, x: hessian(lambda x: loss(f, p, x))(x),
    "hessian in a matrix": lambda f, p, x: hessian(lambda W: loss(f, {**p, "cell.W": W}, x))(p["cell.W"]),
    "jacrev of jacrev": lambda f, p, x: jacrev(jacrev(lambda x: loss(f, p, x)))(x),
    "grad of grad": lambda f, p, x: torch.func.grad(lambda x: torch.func.grad(lambda y: loss(f, p, y))(x).square().sum())(x),
    "jvp of grad": lambda f, p, x: jvp(torch.func.grad(lambda x: loss(f, p, x)), (x,), (T,)),
}


@every_kind
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_transforms(kind, transform):
    ours, theirs = both(kind, transform)
    same(ours, theirs, 1e-8)


@every_kind
def test_functional_call_outside_transforms(kind):
    layer = make(kind)
    parameters = {name: (0.5 * p).requires_grad_() for name, p in plain_parameters(layer).items()}
    x = normal(2, 3, seed=3)
    ours = grad(loss(layer, parameters, x), tuple(parameters.values()))
    theirs = grad(loss(make("unrolled"), parameters, x), tuple(parameters.values()))
    for a, b in zip(ours, theirs, strict=True):
        same(a, b)
    assert all(parameter.grad is None for parameter in layer.parameters())


@every_kind
def test_forward_mode(kind):
    x, t = normal(4, 3, seed=3), normal(4, 3, seed=7)
    tangents = []
    for layer in (make(kind), make("unrolled")):
        with forward_ad.dual_level():
            tangents.append(forward_ad.unpack_dual(layer(forward_ad.make_dual(x, t))).tangent)
    same(*tangents)


@every_kind
def test_autograd_functional(kind):
    x, v = normal(2, 3, seed=3), normal(2, 3, seed=6)
    ours, theirs = make(kind), make("unrolled")
    functional = torch.autograd.functional
    same(functional.jacobian(ours, x), functional.jacobian(theirs, x))
    same(functional.vjp(ours, x, v)[1], functional.vjp(theirs, x, v)[1])
    same(functional.jvp(ours, x, v)[1], functional.jvp(theirs, x, v)[1])

    def scalar(layer: wp.EquilibriumLayer) -> Callable[[Tensor], Tensor]:
        return lambda x: layer(x).square().sum()

    same(functional.hessian(scalar(ours), x), functional.hessian(scalar(theirs), x))
    same(functional.vhp(scalar(ours), x, v)[1], functional.vhp(scalar(theirs), x, v)[1])
    same(functional.hvp(scalar(ours), x, v)[1], functional.hvp(scalar(theirs), x, v)[1])


@every_kind
def test_vmap_over_cotangents(kind):
    layer, x = make(kind), leaf(2, 3, seed=3)
    z = layer(x)
    cotangents = normal(5, 2, 3, seed=6)
    tensors = (x, *layer.parameters())
    ours = vmap(lambda v: grad(z, tensors, v, retain_graph=True))(cotangents)
    one_by_one = [grad(z, tensors, v, retain_graph=True) for v in cotangents]
    for a, b in zip(ours, zip(*one_by_one, strict=True), strict=True):
        same(a, torch.stack(b))


@pytest.mark.parametrize("size", [1e-30, 1e10, 1e30])
@every_kind
def test_vmap_over_tiny_and_huge_cotangents(kind, size):
    layer, x = make(kind), leaf(2, 3, seed=3)
    z = layer(x)
    v = normal(2, 3, seed=6)
    (expected,) = grad(z, x, v, retain_graph=True)
    ours = vmap(lambda v: grad(z, x, v, retain_graph=True)[0])(size * v.unsqueeze(0))
    same(ours[0] / size, expected)


def test_the_tail_is_long_enough_for_a_sample_that_begins_at_its_equilibrium():
    """z = tanh(0.9 z + x) at x = 0 is solved at once, and its derivative is 10 all the same."""
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(0.9 * z + x))
    for x in (torch.zeros(1, 1, dtype=F64), torch.tensor([[5.0], [0.0]], dtype=F64)):
        g = torch.func.grad(lambda x: layer(x).sum())(x)
        assert float(g[-1]) == pytest.approx(10.0, rel=1e-9)
        t = jvp(layer, (x,), (torch.ones_like(x),))[1]
        assert float(t[-1]) == pytest.approx(10.0, rel=1e-9)


def test_the_tail_is_long_enough_after_a_good_start():
    """Started at the solution, there are no steps from which a rate could be measured."""
    W, x = normal(3, 3, scale=0.4), normal(2, 3, seed=3)
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W.T + x))
    z0 = layer.solve(x).value
    warm = torch.func.grad(lambda x: layer(x, z0).square().sum())(x)
    cold = x.clone().requires_grad_()
    same(warm, grad(layer(cold).square().sum(), cold)[0])


def test_transforms_on_structures():
    A, x = normal(3, 3, scale=0.3), normal(2, 3, seed=3)
    zeros = {"p": torch.zeros(2, 3, dtype=F64), "q": torch.zeros(2, 3, dtype=F64)}

    def cell(z: dict[str, Tensor], x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"p": torch.tanh(z["q"] @ A.T + x["x"]), "q": 0.5 * z["p"] - x["x"]}

    values = []
    for gradient in (None, wp.UnrolledGradient(100)):
        layer = wp.EquilibriumLayer(cell, gradient=gradient)
        values.append(jacrev(lambda x: layer({"x": x}, zeros))(x))  # noqa: B023
    same(*values)


def test_transforms_with_float32_and_an_empty_batch():
    layer = wp.EquilibriumLayer(wp.nn.DenseCell(3, 4))
    assert torch.func.grad(lambda x: layer(x).sum())(torch.zeros(0, 3)).shape == (0, 3)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    ours = torch.func.grad(lambda x: layer(x).sum())(x)
    y = x.clone().requires_grad_()
    same(ours, grad(layer(y).sum(), y)[0], 1e-4)


# --- what is not supported says so ------------------------------------------------------------------------


@every_kind
def test_batched_cotangents_of_the_old_kind_are_refused(kind):
    layer, x = make(kind), leaf(2, 3, seed=3)
    z = layer(x)
    with pytest.raises(wp.WellposedError, match=r"is_grads_batched=True.*Use torch.func"):
        grad(z, x, torch.ones(5, 2, 3, dtype=F64), is_grads_batched=True)
    with pytest.raises(wp.WellposedError, match="vectorize=True"):
        torch.autograd.functional.jacobian(layer, x, vectorize=True)


@pytest.mark.parametrize("factor", [0.995, 1.0])
def test_slow_maps_inside_transforms_are_refused(factor):
    layer = wp.EquilibriumLayer(lambda z, x: factor * z + x, on_failure="ignore", max_steps=1000)
    x = torch.full((2, 1), 0.0 if factor == 1 else 1.0, dtype=F64)
    with pytest.raises(wp.WellposedError, match=r"torch.func transforms.*Use torch.autograd"):
        torch.func.grad(lambda x: layer(x).sum())(x)


def test_maps_that_do_not_contract_inside_transforms_are_told():
    layer = wp.EquilibriumLayer(lambda z, x: -2 * z + x, on_failure="raise")
    x = torch.ones(2, 1, dtype=F64)
    same(layer(x), x / 3)  # outside there is no problem
    with pytest.raises(wp.NotConverged, match=r"inside torch.func transforms: 2 of 2 samples"):
        torch.func.grad(lambda x: layer(x).sum())(x)
    layer = wp.EquilibriumLayer(lambda z, x: 0.9 * z + x, on_failure="warn", max_steps=10)
    with pytest.warns(wp.errors.NotConvergedWarning, match=r"4 of 4 samples.*max_steps=10"):
        vmap(layer)(torch.ones(2, 2, 1, dtype=F64))


def test_fixed_point_inside_transforms_is_refused():
    with pytest.raises(wp.WellposedError, match="Inside them use EquilibriumLayer"):
        vmap(lambda x: wp.fixed_point(lambda z: 0.5 * z + x, torch.zeros(2, 1)).value)(torch.ones(3, 2, 1))
    with pytest.raises(wp.WellposedError, match="Inside them use EquilibriumLayer"):
        torch.func.grad(lambda x: wp.fixed_point(lambda z: 0.5 * z + x, torch.zeros(2, 1)).value.sum())(torch.ones(2, 1))


def test_solve_inside_transforms_is_refused():
    layer = make("module")
    with pytest.raises(wp.WellposedError, match="torch.func"):
        vmap(lambda x: layer.solve(x).value)(normal(2, 2, 3, seed=3))


def test_records_do_not_outlive_a_transform():
    """What a transform knows lives on its levels: nothing of it may be left on the layer."""
    layer = make("module")
    layer(normal(2, 3, seed=3))
    vmap(layer)(normal(2, 2, 3, seed=3))
    assert layer.last_solution is None and layer.last_adjoint is None
