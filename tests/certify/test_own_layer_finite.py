"""Cells that are NaN or infinite at some inputs: no statement is about those inputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp

F = nn.functional
INF, NAN = math.inf, math.nan
#: At which the functions of `PARTIAL` are tried.
INPUTS = torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 0], [-3, -3, -3, -3], [1, 2, 3, 4], [2, -2, 0, 1]])
#: Functions of x alone, of four features, which are NaN or infinite at some of them.
PARTIAL: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (4,), eps=0.0),
    "layer_norm of a negative eps": lambda x: F.layer_norm(x, (4,), eps=-1e-3),
    "group_norm": lambda x: F.group_norm(x, 2, eps=0.0),
    "group_norm of a negative eps": lambda x: F.group_norm(x, 2, eps=-1.0),
    "normalize": lambda x: F.normalize(x, eps=0.0),
    "batch_norm": lambda x: F.batch_norm(x, x[0], x[0]),
    "reciprocal": torch.reciprocal,
    "division": lambda x: 1 / (x - 1),
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "pow -1": lambda x: x**-1,
    "pow -2": lambda x: x**-2,
    "pow -1/2": lambda x: x**-0.5,
    "log": torch.log,
    "logit": torch.logit,
    "atanh": torch.atanh,
    "acos": torch.acos,
    "xlogy": lambda x: torch.xlogy(x, x),
    "fmod": lambda x: torch.fmod(x, 0.0),
    "remainder": lambda x: torch.remainder(x, torch.relu(x)),
    "division by 0": lambda x: x / 0,
    "floor division": lambda x: torch.div(x, 0.0, rounding_mode="floor"),
    "mean of nothing": lambda x: x[:, :0].mean(1, keepdim=True),
    "masked softmax": lambda x: torch.softmax(x.masked_fill(torch.ones(4, dtype=torch.bool), -INF), -1),
    "pad": lambda x: F.pad(x[:, :3], (0, 1), value=INF),
    "times infinity": lambda x: x * INF,
    "divided by NaN": lambda x: x / NAN,
    "plus NaN": lambda x: x + NAN,
    "lerp": lambda x: torch.lerp(x, x + 1, INF),
    "leaky_relu": lambda x: F.leaky_relu(x, INF),
    "leaky_relu of NaN": lambda x: F.leaky_relu(x, NAN),
    "elu": lambda x: F.elu(x, INF),
    "celu": lambda x: F.celu(x, INF),
    "softplus": lambda x: F.softplus(x, beta=0),
    "softplus of an infinite beta": lambda x: F.softplus(x, beta=INF),
    "clamp": lambda x: x.clamp(min=INF),
    "clamp of NaN": lambda x: x.clamp(min=NAN),
}
#: Functions of x alone that are finite at every x.
TOTAL: dict[str, Callable[[Tensor], Tensor]] = {
    "x": lambda x: x,
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "division": lambda x: 1 / (2 + torch.tanh(x)),
    "root": lambda x: torch.relu(x).sqrt() + torch.rsqrt(1 + torch.sigmoid(x)),
    "clamp": lambda x: x.clamp(-INF, 1.0) + F.hardtanh(x, -INF, INF),
    "softplus": lambda x: F.softplus(x, threshold=INF),
}


def licensed(f: Callable[[Tensor, Tensor], Tensor]) -> str:
    licenses = wp.certify(wp.EquilibriumLayer(f, state_shape=(4,))).licenses
    return licenses[0] if licenses else ""


@pytest.mark.parametrize("name", PARTIAL)
def test_inputs_at_which_the_cell_is_not_finite_are_left_out(name: str) -> None:
    f = PARTIAL[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert any(not f(x[None]).isfinite().all() for x in INPUTS)
    said = licensed(lambda z, x: 0.5 * torch.tanh(z) + f(x))
    assert said.startswith("For every x of shape (batch, 4) in float32 at which the cell is finite there is exactly one")


@pytest.mark.parametrize("name", TOTAL)
def test_no_input_is_left_out_if_the_cell_is_finite_everywhere(name: str) -> None:
    f = TOTAL[name]
    assert f(INPUTS).isfinite().all()
    assert licensed(lambda z, x: 0.5 * torch.tanh(z) + f(x)).startswith(
        "For every x of shape (batch, 4) in float32 there is exactly one"
    )


@pytest.mark.parametrize(
    "f",
    [
        lambda z, x: 0.2 * torch.tanh(z) * F.layer_norm(x, (4,), eps=-1e-3),  # which may be of any size
        lambda z, x: x + F.layer_norm(0 * z + x, (4,), eps=0.0),
        lambda z, x: 0.5 * z.clamp(INF) + x,
        lambda z, x: torch.add(0.5 * z, x, alpha=INF),
        lambda z, x: 0.5 * torch.tanh(z) + x / torch.zeros(4),
        lambda z, x: 0.5 * torch.tanh(z) + F.batch_norm(x, torch.zeros(4), torch.zeros(4), eps=0.0),
        lambda z, x: 0.5 * torch.tanh(z) + F.batch_norm(x, torch.zeros(4), -torch.ones(4)),
    ],
)
def test_nothing_is_certified_where_z_or_every_input_is_affected(f: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert not licensed(f)
