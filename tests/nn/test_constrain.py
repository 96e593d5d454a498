"""constrain: norms of linear and convolutional parts against dense matrices, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

import wellposed as wp


def dense_norm(part: nn.Module, *shape: int) -> float:
    """The norm of the linear map (without bias) on images of one shape, by its matrix."""
    zero = torch.zeros(1, *shape, dtype=torch.float64)
    J = torch.autograd.functional.jacobian(part.double(), zero)
    return float(torch.linalg.matrix_norm(J.reshape(-1, zero.numel()), ord=2))


@settings(deadline=None, max_examples=20)
@given(out=st.integers(1, 9), inside=st.integers(1, 9), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_a_matrix_of_any_shape(out: int, inside: int, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    part = nn.Linear(inside, out)
    part.weight.data.mul_(scale)
    before = part.weight.detach().clone()
    wp.nn.constrain(part, wp.nn.Spectral(0.9))
    norm, old = (float(torch.linalg.matrix_norm(w.detach().double(), ord=2)) for w in (part.weight, before))
    assert norm <= 0.9
    if old < 0.89:
        assert torch.equal(part.weight, before)
    else:
        assert norm >= 0.88


CONVOLUTIONS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "zeros": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 6, 5)),
    "circular": (lambda: nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), (3, 6, 6)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 5)),
    "stride and dilation": (lambda: nn.Conv2d(2, 3, 3, padding=2, stride=2, dilation=2), (2, 8, 8)),
    "even and oblong": (lambda: nn.Conv2d(2, 3, (2, 5), padding=2), (2, 6, 6)),
    "one by one": (lambda: nn.Conv2d(5, 2, 1), (5, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, groups=2), (4, 4, 4)),
    "one dimension": (lambda: nn.Conv1d(3, 2, 4, padding=2), (3, 9)),
    "three dimensions": (lambda: nn.Conv3d(2, 2, (2, 3, 3), padding=1), (2, 3, 4, 4)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("bound", [0.9, 2.5])
def test_a_convolution(name: str, bound: float) -> None:
    make, shape = CONVOLUTIONS[name]
    torch.manual_seed(1)
    part = make()
    part.weight.data.mul_(20)
    wp.nn.constrain(part, wp.nn.Spectral(bound) if bound < 1 else wp.nn.NormBall(bound))
    part = parametrize.remove_parametrizations(part, "weight")
    norm = dense_norm(part, *shape)
    assert norm <= bound
    assert norm >= (0.3 if name == "three dimensions" else 0.5) * bound, "the bound is far too strict"


def test_weights_inside_the_ball_stay_and_low_precision_obeys() -> None:
    part = nn.Conv2d(3, 3, 3, padding=1)
    part.weight.data.mul_(0.01)
    before = part.weight.detach().clone()
    assert torch.equal(wp.nn.constrain(part, wp.nn.Spectral(0.9)).weight, before)
    torch.manual_seed(0)
    low = wp.nn.constrain(nn.Conv2d(3, 3, 3, padding=1, dtype=torch.bfloat16), wp.nn.Spectral(0.5))
    low.parametrizations.weight.original.data.mul_(30)
    assert low.weight.dtype == torch.bfloat16
    assert dense_norm(parametrize.remove_parametrizations(low, "weight"), 3, 6, 6) <= 0.5


class Block(nn.Module):
    """A residual block of one's own, with parts that do not contract at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.inner(z) + x


def test_a_constrained_block_contracts_and_learns_its_own_weights() -> None:
    torch.manual_seed(0)
    block = wp.nn.constrain(Block(), wp.nn.Spectral(0.9))
    layer = wp.EquilibriumLayer(block, wp.Picard(), on_failure="raise", max_steps=300)
    x = torch.randn(3, 4, 5, 5)
    layer(x).square().mean().backward()
    assert float(layer.last_solution.rate.max()) <= 0.9**2 + 1e-3
    raw = block.inner[0].parametrizations.weight.original
    assert raw.grad is not None and raw.grad.isfinite().all() and raw.grad.any()
    raw.data.mul_(0)  # seen at the next solve, although .data does not change the version of a tensor
    assert not block.inner[0].weight.any()


def test_the_norm_is_computed_once_per_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    linear = wp.nn.constrain(nn.Linear(4, 4), wp.nn.Spectral(0.9))
    counted = []
    norm = wp.nn.Spectral.norm
    monkeypatch.setattr(wp.nn.Spectral, "norm", lambda self, V: counted.append(1) or norm(self, V))
    solution = wp.EquilibriumLayer(lambda z, x: torch.tanh(linear(z)) + x).solve(torch.randn(2, 4))
    assert int(solution.num_steps.max()) > 3 and len(counted) == 1


def test_gradients_of_a_constrained_weight() -> None:
    torch.manual_seed(0)
    for part, x in [(nn.Linear(3, 2), torch.randn(2, 3)), (nn.Conv1d(2, 2, 3), torch.randn(1, 2, 5))]:
        part, x = wp.nn.constrain(part.double(), wp.nn.NormBall(0.5)), x.double()
        V = part.parametrizations.weight.original
        V.data.mul_(4)

        def run(V: Tensor, part: nn.Module = part, x: Tensor = x) -> Tensor:
            return torch.func.functional_call(part, {"parametrizations.weight.original": V}, (x,))

        assert torch.autograd.gradcheck(run, (V.detach().clone().requires_grad_(),))


@pytest.mark.parametrize(
    ("module", "weight", "message"),
    [
        (nn.ReLU(), wp.nn.Spectral(0.9), "no linear or convolutional part in ReLU"),
        (wp.nn.DenseCell(3, 3), wp.nn.Spectral(0.9), "argument weight= instead"),
        (nn.Linear(2, 2), wp.nn.Monotone(0.1), r"Spectral\(bound\) or NormBall\(bound\); got Monotone"),
        (nn.Linear(2, 2), 0.9, "got 0.9"),
        (nn.LazyLinear(2), wp.nn.Spectral(0.9), "no weight yet"),
        (nn.Sequential(nn.Conv2d(1, 1, 3, padding_mode="reflect")), wp.nn.Spectral(0.9), "'0' has padding_mode='reflect'"),
        (nn.Conv2d(1, 1, 3, padding=2, padding_mode="circular"), wp.nn.Spectral(0.9), "pixels are then repeated"),
        (nn.Conv1d(1, 1, 1, padding=2, padding_mode="circular"), wp.nn.Spectral(0.9), "Use padding='same'"),
        (nn.Linear(2, 2, dtype=torch.complex64), wp.nn.Spectral(0.9), "real floating point is needed"),
        (lambda z: z, wp.nn.Spectral(0.9), "needs a module; got function"),
    ],
)
def test_what_cannot_be_constrained(module: Any, weight: Any, message: str) -> None:
    with pytest.raises(wp.WellposedError, match=message):
        wp.nn.constrain(module, weight)
