"""export: a plain module with the values of the layer, through torch.export, torch.jit.trace and ONNX."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp

# torch's own: jit.trace and parts of the exporters are deprecated
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),  # checks of shapes are Python branches
]
RTOL = 1e-4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.conv.weight.data.mul_(0.2)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.conv(z) + x))


class Turning(nn.Module):
    """Plain steps diverge: the Jacobian is 1.1 times a rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.tensor([[0.0, -1.1], [1.1, 0.0]]))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z @ self.W.T + x


CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "dense": (lambda: wp.nn.DenseCell(3, 5, wp.nn.Tanh(), weight=wp.nn.Spectral(0.6)), (4, 3)),
    "monotone": (lambda: wp.nn.DenseCell(3, 5, weight=wp.nn.Monotone(0.5)), (4, 3)),
    "block": (Block, (4, 4, 3, 3)),
    "constrained": (lambda: wp.nn.constrain(Block(), wp.nn.Spectral(0.5)), (4, 4, 3, 3)),
    "turning": (Turning, (4, 2)),
    "function": (lambda: lambda z, x: 0.4 * torch.sin(z) + x, (4, 2)),
    "monotone convolution": (lambda: wp.nn.MonotoneConvCell(2, 3, margin=0.5), (4, 2, 4, 4)),
}


def case(name: str) -> tuple[wp.EquilibriumLayer, Tensor]:
    torch.manual_seed(0)
    make, shape = CASES[name]
    return wp.EquilibriumLayer(make(), on_failure="raise", rtol=1e-6), torch.randn(*shape)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize("name", CASES)
def test_values_residuals_and_traces(name: str) -> None:
    layer, x = case(name)
    module = wp.export(layer, x, rtol=RTOL)
    with torch.no_grad():
        z, residual = module(x)
        exact = layer(x)
        image = layer.cell(z, x)
    assert residual.shape == (4,) and (residual <= RTOL).all()
    measured = (image - z).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)
    assert (residual - measured).abs().max() <= 1e-5
    assert relative(z, exact) <= 100 * RTOL  # |(I - J)^-1| is below 100 for these cells
    assert module.accelerated == (name == "turning") or name.startswith("monotone")
    short = wp.export(layer, x, 6)  # a graph of more steps repeats them, and takes longer to build
    with torch.no_grad():
        z, residual = short(x)
    traced = torch.jit.trace(short, (x,))
    graph = torch.export.export(short, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)).module()
    for run in (traced, graph):
        for ours, theirs in zip(run(x), (z, residual), strict=True):
            assert (ours - theirs).abs().max() <= 1e-5 * z.abs().max()
        assert relative(run(torch.cat((x, x)))[0], torch.cat((z, z))) <= 1e-5, "another batch size"


ONNX = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(ONNX), reason=f"not installed: {', '.join(ONNX)} (pip install 'wellposed[export]')")
@pytest.mark.parametrize(
    "name", ["block", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "turning", "constrained"))]
)
def test_onnxruntime_gives_the_same_values(name: str, tmp_path: Path) -> None:
    import onnxruntime

    layer, x = case(name)
    module = wp.export(layer, x, rtol=RTOL)
    path = str(tmp_path / "layer.onnx")
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    torch.onnx.export(module, (x,), path, dynamo=True, dynamic_shapes=shapes, verbose=False, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    twice = torch.cat((x, x.flip(0)))
    found = session.run(None, {session.get_inputs()[0].name: twice.numpy()})
    with torch.no_grad():
        expected = module(twice)
    for ours, theirs in zip(found, expected, strict=True):
        assert (torch.from_numpy(ours) - theirs).abs().max() <= 1e-5 * expected[0].abs().max()


def test_given_steps_and_what_was_chosen() -> None:
    layer, x = case("function")
    module = wp.export(layer, x, 7)
    z = torch.zeros_like(x)
    for _ in range(6):
        z = layer.cell(z, x)
    assert module.steps == 7 and not module.accelerated and torch.equal(module(x)[0], z)
    assert wp.export(layer, x, rtol=1e-2).steps < wp.export(layer, x).steps
    assert "steps=7, accelerated=False" in repr(module)


def test_a_copy_that_training_does_not_change() -> None:
    layer, x = case("constrained")
    module = wp.export(layer, x, rtol=RTOL)
    before = module(x)[0]
    raw = layer.cell.conv.parametrizations.weight.original
    layer(x).sum().backward()  # the original still has its parametrization
    assert raw.grad is not None and raw.grad.any()
    raw.data.zero_()
    assert torch.equal(module(x)[0], before)
    assert not any("parametrizations" in name for name, _ in module.named_parameters())


def test_structures_a_given_start_and_coupled_rows() -> None:
    layer = wp.EquilibriumLayer(
        lambda z, x: {"a": 0.3 * z["b"] + x[0], "b": 0.5 * torch.tanh(z["a"]) + x[1]}, on_failure="raise"
    )
    x = (torch.randn(3, 2), torch.randn(3, 2))
    start = {"a": torch.zeros(3, 2), "b": torch.zeros(3, 2)}
    module = wp.export(layer, x, rtol=RTOL, z0=start)
    z, residual = module(x, start)
    assert (z["a"] - layer(x, start)["a"]).abs().max() <= 1e-3 and residual.shape == (3,)
    coupled = wp.EquilibriumLayer(lambda z, x: 0.5 * z.mean(0) + x, coupled=True, on_failure="raise")
    z, residual = wp.export(coupled, x[0], rtol=RTOL)(x[0])
    assert (z - coupled(x[0])).abs().max() <= 1e-3 and residual.shape == (3,) and (residual == residual[0]).all()


def test_low_precision_is_lifted() -> None:
    torch.manual_seed(0)
    layer = wp.EquilibriumLayer(wp.nn.DenseCell(3, 4, wp.nn.Tanh(), dtype=torch.bfloat16), on_failure="raise")
    x = torch.randn(2, 3).bfloat16()
    z, residual = wp.export(layer, x, rtol=RTOL)(x)
    assert z.dtype == residual.dtype == torch.float32
    assert relative(z, layer(x).float()) <= 2**-7


class Branching(nn.Module):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z + x if z.sum() > 0 else 0.3 * z + x


@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        (nn.Linear(2, 2), {}, "needs an EquilibriumLayer; got Linear"),
        (wp.EquilibriumLayer(Branching()), {"rtol": 1e-2}, "cannot be traced.*torch.where"),
        (wp.EquilibriumLayer(lambda z, x: z + x), {}, "neither plain nor accelerated steps .* max_steps=200.*least seen"),
        (
            wp.EquilibriumLayer(lambda z, x: 0.9 * z + x),
            {"steps": 2, "rtol": 1e-3},
            "after steps=2 the largest residual .* > rtol",
        ),
        (wp.EquilibriumLayer(lambda z, x: 0.9 * z + x), {"steps": 0}, "integer of at least 1"),
        (wp.EquilibriumLayer(lambda z, x: 0.9 * z + x), {"rtol": -1.0}, "rtol must be a finite float"),
        (
            wp.EquilibriumLayer(lambda z, x: 0.5 * z + x),
            {"steps": torch.zeros(2, 2)},
            r"at least 1. Got Tensor of shape \(2, 2\) instead",
        ),
        (
            wp.EquilibriumLayer(lambda z, x: 0.5 * nn.functional.dropout(z, 0.3, True) + x),
            {},
            "f is random: it draws random numbers.*dropout",
        ),
        (wp.EquilibriumLayer(wp.nn.DenseCell(3, 3)), {}, r"DenseCell expects x of shape \(batch, 3\); got \(2, 2\)"),
    ],
)
def test_what_cannot_be_exported(layer: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(wp.WellposedError, match=message):
        wp.export(layer, torch.ones(2, 2), **arguments)


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_the_residual_of_every_scale(size: float) -> None:
    x = torch.full((2, 3), size)
    z, residual = wp.export(wp.EquilibriumLayer(lambda z, x: 0.5 * z + x), x, steps=3)(x)
    fz = 0.5 * z.double() + x.double()
    torch.testing.assert_close(residual.double(), (fz - z.double()).norm(dim=1) / fz.norm(dim=1), rtol=1e-4, atol=1e-6)


def test_a_map_without_equilibrium_is_refused_though_its_relative_residual_falls() -> None:
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.5
    for cell in (lambda z, x: z + x, lambda z, x: z + torch.relu(x) + 1):
        with pytest.raises(wp.InvalidArgument, match="may have no equilibrium|bring the residual"):
            wp.export(wp.EquilibriumLayer(cell), x)
