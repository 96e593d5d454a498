"""Cells as lists of steps: values, difference quotients and Lipschitz constants, against the cells
themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.certify import _activations
from wellposed.certify._activations import PLAIN
from wellposed.certify._balls import Boxes
from wellposed.certify._composition import Bound, Lipschitz
from wellposed.certify._followed import Followed
from wellposed.certify._functions import ULPS, Function
from wellposed.certify._uniqueness import constants

F = nn.functional


class Cell(nn.Module):
    """A function of (own parts, z, x) as a module."""

    def __init__(self, body: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.body = body

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.body(self, z, x)


def _attention(cell: Any, z: Tensor, x: Tensor) -> Tensor:
    tokens = (z + x).view(-1, 3, 4)
    weights = torch.softmax(cell.q(tokens) @ tokens.transpose(1, 2) / 2, dim=-1)
    return 0.3 * (weights @ tokens).flatten(1)


def _fused(cell: Any, z: Tensor, x: Tensor, **options: Any) -> Tensor:
    q, k, v = (part.view(-1, 3, 2, 2).transpose(1, 2) for part in (cell.q(z), z + x, z - x))
    return 0.3 * F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(1)


def _heads(cell: Any, z: Tensor, x: Tensor) -> Tensor:
    tokens = (z + x).view(-1, 3, 4)
    return 0.3 * cell.m(tokens, tokens, tokens, need_weights=False)[0].flatten(1)


def _in_place(cell: Any, z: Tensor, x: Tensor) -> Tensor:
    h = cell.a(z)
    h += x
    h.mul_(0.5).relu_()
    return h


def _pieces(cell: Any, z: Tensor, x: Tensor) -> Tensor:
    a, b, c = z.chunk(3, dim=1)
    joined = torch.cat((b.sigmoid() * a, c - x[:, :4].exp(), b.flip(1)), dim=1)
    return torch.einsum("bi,ij->bj", joined, cell.a.weight) + z.mean(dim=1, keepdim=True) / (
        1 + x.square().sum(1, keepdim=True)
    )


def _image(z: Tensor) -> Tensor:
    return z.view(-1, 3, 2, 2)


#: Cells of 12 entries, by what is special in them.
ZOO: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: Cell(lambda c, z, x: torch.tanh(c.a(z) + x), a=nn.Linear(12, 12)),
    "in place": lambda: Cell(_in_place, a=nn.Linear(12, 12)),
    "pieces": lambda: Cell(_pieces, a=nn.Linear(12, 12)),
    "layer norm": lambda: Cell(lambda c, z, x: c.n(c.a(z) + x).relu(), a=nn.Linear(12, 12), n=nn.LayerNorm(12)),
    "group norm": lambda: Cell(lambda c, z, x: c.n(_image(c.a(z) + x)).flatten(1), a=nn.Linear(12, 12), n=nn.GroupNorm(3, 3)),
    "batch norm": lambda: Cell(lambda c, z, x: c.n(c.a(z) + x), a=nn.Linear(12, 12), n=nn.BatchNorm1d(12)).eval(),
    "attention": lambda: Cell(_attention, q=nn.Linear(4, 4)),
    "fused attention": lambda: Cell(_fused, q=nn.Linear(12, 12)),
    "causal attention": lambda: Cell(lambda c, z, x: _fused(c, z, x, is_causal=True, scale=0.5), q=nn.Linear(12, 12)),
    "masked attention": lambda: Cell(
        lambda c, z, x: _fused(c, z, x, attn_mask=torch.ones(3, 3).triu().log() + 0.5), q=nn.Linear(12, 12)
    ),
    "several heads": lambda: Cell(_heads, m=nn.MultiheadAttention(4, 2, batch_first=True)).eval(),
    "circular": lambda: Cell(
        lambda c, z, x: c.a(_image(z + x)).flatten(1).tanh(), a=nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")
    ),
    "reflected": lambda: Cell(
        lambda c, z, x: c.a(_image(z + x)).flatten(1).tanh(), a=nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")
    ),
    "grouped": lambda: Cell(lambda c, z, x: F.silu(c.a(_image(z))).flatten(1) + x, a=nn.Conv2d(3, 3, 3, padding=1, groups=3)),
    "transposed": lambda: Cell(lambda c, z, x: F.gelu(c.a(_image(z))).flatten(1) + x, a=nn.ConvTranspose2d(3, 3, 3, padding=1)),
    "pooled": lambda: Cell(lambda c, z, x: F.interpolate(F.avg_pool2d(_image(z), 2), size=2).flatten(1) - x),
    "one dimension": lambda: Cell(lambda c, z, x: c.a(z.view(-1, 3, 4)).flatten(1) + x, a=nn.Conv1d(3, 3, 3, padding=1)),
    "prelu": lambda: Cell(lambda c, z, x: c.p(c.a(z) + x), a=nn.Linear(12, 12), p=nn.PReLU()),
    "elu": lambda: Cell(lambda c, z, x: F.selu(c.a(z)) + F.celu(z + x, 0.7), a=nn.Linear(12, 12)),
    "gated": lambda: Cell(lambda c, z, x: torch.sigmoid(z + x) * torch.tanh(4 * z) + torch.tanh(3 * z) * torch.sigmoid(x)),
    "ends": lambda: Cell(lambda c, z, x: torch.maximum(F.relu6(c.a(z)), x) + F.softshrink(z), a=nn.Linear(12, 12)),
    "hard": lambda: Cell(lambda c, z, x: F.hardtanh(z) * F.hardsigmoid(c.a(z)) + x.clamp(min=0), a=nn.Linear(12, 12)),
    "softplus": lambda: Cell(lambda c, z, x: F.softplus(c.a(z), beta=2.0) + F.logsigmoid(z) + x, a=nn.Linear(12, 12)),
    "waves": lambda: Cell(lambda c, z, x: torch.sin(c.a(z)) + z.cos() * torch.atan(x) + z.erf() + z.abs(), a=nn.Linear(12, 12)),
    "powers": lambda: Cell(lambda c, z, x: z**2 / (2 + z.abs()) + (z**2 + 1).rsqrt() - (x**2 + 1) ** 0.5 * z**3),
    "parametrized": lambda: Cell(
        lambda c, z, x: c.a(z) + x, a=nn.utils.parametrizations.weight_norm(nn.Linear(12, 12))
    ),
}  # fmt: skip


def _followed(name: str, dtype: torch.dtype = torch.float64) -> tuple[Followed, Callable[[Tensor], Tensor]]:
    torch.manual_seed(3)
    cell = ZOO[name]().to(dtype)
    x = torch.randn(1, 12, dtype=dtype)
    layer = wp.EquilibriumLayer(cell)
    return Followed(layer, layer, x), lambda z: cell(z, x.expand(len(z), -1)).detach()


@pytest.mark.parametrize("name", ZOO)
def test_values_and_quotients_on_a_box(name: str) -> None:
    followed, f = _followed(name)
    boxes = Boxes(followed.tape(0))
    for radius in (0.0, 1e-6, 0.05):
        z = torch.randn(12, dtype=torch.float64)
        ball = boxes.at(z, radius, quotients=True)
        assert ball.quotients is not None
        v, w = (z + radius * (2 * torch.rand(2, 200, 12, dtype=torch.float64) - 1)).unbind()
        fv, fw = f(v), f(w)
        rounding = 1e-12 * (1 + fv.abs())  # of the cell
        mid, rad = (part.reshape(-1) for part in ball.value)
        assert bool(((fv - mid).abs() <= rad + rounding).all())
        assert bool(((f(z[None]) - mid).abs() <= rad + rounding[:1]).all()) and (radius > 0 or float(rad.max()) < 1e-11)
        Q, R = (part.reshape(12, 12) for part in ball.quotients)
        assert bool((((fv - fw) - (v - w) @ Q).abs() <= (v - w).abs() @ R + 2 * rounding).all())
        assert radius > 1e-6 or float(R.max()) < 1e-3


@pytest.mark.parametrize("name", ZOO)
def test_lipschitz_constants(name: str) -> None:
    followed, f = _followed(name)
    tape = followed.tape(0)
    v, w = (
        torch.randn(2, 300, 12, dtype=torch.float64) * torch.tensor([0.3, 1.0, 5.0], dtype=torch.float64).repeat(100)[:, None]
    )
    w = torch.where(torch.arange(300)[:, None] % 2 == 0, v + 1e-3 * w, w)
    quotient = float(((f(v) - f(w)).norm(dim=1) / (v - w).norm(dim=1)).max())
    singly, together = constants(tape, multiply_out=False), constants(tape, multiply_out=True)
    assert quotient <= min(singly.contraction, together.contraction) * (1 + 1e-6)
    one_sided = float((((f(v) - f(w)) * (v - w)).sum(1) / (v - w).square().sum(1)).max())
    if tape.result.parents and name not in (
        "dense",
        "in place",
        "layer norm",
        "prelu",
        "circular",
        "reflected",
    ):  # (2) of g there
        assert one_sided <= together.monotone * (1 + 1e-6)


def test_the_values_are_those_of_stored_weights() -> None:
    """A float32 cell in exact arithmetic: more precise than the cell itself."""
    followed, _ = _followed("dense", torch.float32)
    z = torch.randn(12).double()
    value = Boxes(followed.tape(0)).at(z).value
    cell = followed.layer.cell.double()
    assert bool(((cell(z[None], followed.x.double())[0].detach() - value.mid).abs() <= value.rad + 1e-15).all())
    assert float(value.rad.max()) < 1e-14


MORE: dict[str, Function] = {
    **PLAIN,
    "softplus": _activations.softplus(1.0, 20.0),
    "softplus 3": _activations.softplus(3.0, 28.0),
    "elu": _activations.elu(1.3, 1.1, 0.9),
    "selu": _activations.elu(1.6732632423543772, 1.0507009873554805, 1.0),
    "celu": _activations.celu(1.7),
    "celu 0.7": _activations.celu(0.7),
    "leaky": _activations.leaky_relu(0.2),
    "clamp": _activations.clamp(-0.5, 1.0),
    "clamp from below": _activations.clamp(-0.5, None),
    "softshrink": _activations.softshrink(0.3),
}
EXACT: dict[str, Callable[[Any], Any]] = {
    "tanh": mpmath.tanh, "sigmoid": lambda v: 1 / (1 + mpmath.exp(-v)), "silu": lambda v: v / (1 + mpmath.exp(-v)),
    "gelu": lambda v: v * mpmath.ncdf(v), "sin": mpmath.sin, "cos": mpmath.cos, "atan": mpmath.atan, "erf": mpmath.erf,
    "exp": mpmath.exp, "sqrt": mpmath.sqrt, "rsqrt": lambda v: 1 / mpmath.sqrt(v), "reciprocal": lambda v: 1 / v,
    "softplus": lambda v: mpmath.log1p(mpmath.exp(v)),
    "gelu_tanh": lambda v: v / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (v + mpmath.mpf("0.044715") * v**3))),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_quotients_of_functions(name: str) -> None:
    function = MORE[name]
    positive = name in ("sqrt", "rsqrt", "reciprocal")
    generator = torch.Generator().manual_seed(0)
    m = torch.linspace(0.3 if positive else -9, 9, 400, dtype=torch.float64)
    r = 0.29 * torch.rand(400, generator=generator, dtype=torch.float64) ** 3
    low, high = function.slopes(m, r)
    s, t = m + r * (2 * torch.rand(2, 60, 400, generator=generator, dtype=torch.float64) - 1)
    apart = (s - t).abs() > 1e-5
    quotients = (function.value(s) - function.value(t)) / (s - t)
    rounding = 1e-9 * (1 + low.abs() + high.abs())
    assert bool(((quotients >= low - rounding) & (quotients <= high + rounding) | ~apart).all())
    least, largest = function.slope_range
    # the derivatives of PyTorch are among the slopes; some have a factor in float32
    assert bool((low >= least - 1e-7).all() and (high <= largest + 1e-7).all()) or positive or name == "exp"
    values = function.value(m)
    assert function.value_range[0] <= float(values.min()) and float(values.max()) <= function.value_range[1]


@pytest.mark.parametrize("name", EXACT)
def test_values_of_functions_are_right_to_16_units(name: str) -> None:
    function, truth = MORE[name], EXACT[name]
    points = [0.001 * 1.6**k for k in range(20)]
    points += [] if name in ("sqrt", "rsqrt") else [-p for p in points]
    with mpmath.workdps(40):
        for point in points:
            value = float(function.value(torch.tensor(point, dtype=torch.float64)))
            assert abs(value - truth(mpmath.mpf(point))) <= ULPS * (abs(value) + abs(point))


_PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "own_layer.md").read_text(encoding="utf-8")
_NAMED = re.findall(r"`(\w+)`", _PAGE.partition("these functions are known:")[2].partition("Of $x$")[0])


@pytest.mark.parametrize("name", _NAMED)
def test_the_functions_that_the_page_names_are_known(name: str) -> None:
    f = getattr(torch if hasattr(torch, name) else F, name)

    def cell(z: Tensor, x: Tensor) -> Tensor:
        pair = (z.flip(-1),) if name in ("maximum", "minimum", "logaddexp") else ()
        others = {"prelu": (torch.tensor([0.2]),), "clamp": (-1.0, 1.0), "softmax": (-1,)}
        value: Tensor = 0.1 * f(z, *pair, *others.get(name, ())) + x
        return value

    layer = wp.EquilibriumLayer(cell)
    assert Followed(layer, layer, torch.ones(2, 3)).tape(0).result.of_z  # is not refused


def test_the_range_of_a_sum_is_not_too_small() -> None:
    def cell(z: Tensor, x: Tensor) -> Tensor:
        return 1e-17 / (1 + torch.tanh(z)) + x  # steeper than any number where tanh comes near -1

    layer = wp.EquilibriumLayer(cell, state_shape=(4,))
    tape = Followed(layer, layer, torch.zeros(1, 4)).tape(0)
    bounds = Lipschitz(tape)
    found: dict[int, Bound] = {}
    for step in tape.steps:
        found[id(step)] = bounds.interpret(step, tuple(found[id(parent)] for parent in step.parents))
    (total,) = (found[id(parent)] for step in tape.steps if step.name == "reciprocal" for parent in step.parents)
    assert total.low <= 0 and total.high >= 2
    assert not wp.certify(layer).certified


#: As PyTorch has them, if not under their names.
GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"), "softplus 3": lambda v: F.softplus(v, 3.0, 28.0),
    "elu": lambda v: torch.ops.aten.elu(v, 1.3, 1.1, 0.9), "leaky": lambda v: F.leaky_relu(v, 0.2),
    "celu": lambda v: F.celu(v, 1.7), "celu 0.7": lambda v: F.celu(v, 0.7), "softshrink": lambda v: F.softshrink(v, 0.3),
    "clamp": lambda v: v.clamp(-0.5, 1.0), "clamp from below": lambda v: v.clamp(min=-0.5),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MORE)
def test_derivatives_of_pytorch_are_among_the_slopes(name: str, dtype: torch.dtype) -> None:
    given = GIVEN.get(name) or getattr(torch, name, None) or getattr(F, name)
    points = torch.cat([torch.linspace(-9, 9, 2001), torch.tensor([-0.5, 0.0, 1e-9, -1e-9, 7 / 3, 20.0, 30.0])]).to(dtype)
    if name in ("sqrt", "rsqrt", "reciprocal"):
        points = points[points > 0.05]
    v = points.clone().requires_grad_()
    (d,) = torch.autograd.grad(given(v).sum(), v)
    low, high = MORE[name].slopes(points.double(), torch.zeros_like(points, dtype=torch.float64))
    rounding = 0.0 if dtype is torch.float64 else 32 * torch.finfo(dtype).eps * (1 + d.double().abs())
    assert bool(((d.double() >= low - rounding) & (d.double() <= high + rounding)).all())
