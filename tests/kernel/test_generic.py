"""The kernel of any model: against a dense autograd Jacobian and the closed form; what cannot work is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.kernel import kernel_memory
from wellposed.kernel._generic import GenericMethod
from wellposed.kernel._method import KernelLayout


def inputs(n: int, d: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(make: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return make().double()  # type: ignore[operator]


class Equilibrium(nn.Module):
    """An `EquilibriumLayer` between two linear maps."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer = wp.EquilibriumLayer(wp.nn.DenseCell(4, 6, activation=wp.nn.Tanh()))
        self.head = nn.Linear(6, outputs)

    def forward(self, X: Tensor) -> Tensor:
        return self.head(self.layer(X))


class Unused(nn.Module):
    """One parameter has no part in the output, and one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(3))
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, X: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(X))).sum(1)


class Embedded(nn.Module):
    """Takes integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 3), nn.Linear(3, 2)

    def forward(self, X: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(X)))


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), inputs(7), inputs(5, seed=1)),
    "column": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)), inputs(7), inputs(5, seed=1)),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)),
        inputs(6, 16).reshape(6, 1, 4, 4),
        inputs(3, 16, seed=1).reshape(3, 1, 4, 4),
    ),
    "equilibrium": (lambda: Equilibrium(2), inputs(4), inputs(2, seed=1)),
    "unused": (Unused, inputs(5), inputs(4, seed=1)),
    "integers": (Embedded, torch.tensor([0, 3, 3, 5]), torch.tensor([1, 0])),
    "norm within samples": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), inputs(4), inputs(3, seed=1)),
}


def dense_jacobian(model: nn.Module, X: Tensor) -> dict[str, Tensor]:
    """parameter -> (n c, size), by backward passes through the whole batch."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for single in model(X).reshape(-1):
        rows.append(
            torch.autograd.grad(single, list(named.values()), retain_graph=True, allow_unused=True, materialize_grads=True)
        )
    return {name: torch.stack([row[k].reshape(-1) for row in rows]) for k, name in enumerate(named)}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("block_size", [None, 1, 3])
def test_agrees_with_a_dense_jacobian(name: str, cross: bool, block_size: int | None) -> None:
    make, X, X2 = MODELS[name]
    model = seeded(make)
    J, J2 = dense_jacobian(model, X), dense_jacobian(model, X2 if cross else X)
    expected = sum(J[parameter] @ J2[parameter].T for parameter in J)
    K = wp.tangent_kernel(model, X, X2 if cross else None, block_size=block_size)
    assert relative(K, expected) < 1e-9
    assert cross or torch.equal(K, K.T)
    parts = wp.tangent_kernel(model, X, X2 if cross else None, block_size=block_size, by_parameter=True)
    assert list(parts) == list(J)
    for parameter, part in parts.items():
        assert float((part - J[parameter] @ J2[parameter].T).norm()) <= 1e-9 * float(expected.norm())


@pytest.mark.parametrize("block_size", [None, 2])
def test_output_by_output(block_size: int | None) -> None:
    make, X, X2 = MODELS["mlp"]
    model = seeded(make)
    for second in (None, X2):
        whole = wp.tangent_kernel(model, X, second)
        each = wp.tangent_kernel(model, X, second, per_output=True, block_size=block_size)
        assert each.shape == (3, 7, 7 if second is None else 5)
        for k in range(3):
            # Row i c + k is output k of sample i.
            assert relative(each[k], whole[k::3, k::3]) < 1e-13


def test_unused_parameters_have_a_part_of_zeros() -> None:
    model = seeded(Unused)
    parts = wp.tangent_kernel(model, inputs(3), by_parameter=True)
    assert set(parts) == {"spare", "first.weight"}
    assert not parts["spare"].any() and parts["first.weight"].any()


def test_a_model_without_dependence_on_its_parameters() -> None:
    class Constant(nn.Linear):
        def forward(self, X: Tensor) -> Tensor:
            return X.sum(1)

    assert not wp.tangent_kernel(Constant(4, 1).double(), inputs(3)).any()


def test_memory_decides_what_is_held() -> None:
    make, X, _ = MODELS["mlp"]
    model = seeded(make)
    expected = wp.tangent_kernel(model, X)
    row = 3 * sum(p.numel() for p in model.parameters()) * 8
    base = 3 * 512**2 * 8 + expected.numel() * 8
    for rows in (5, 7, 40):
        limit = base + rows * row
        estimate = kernel_memory(model, X, memory=limit)
        assert estimate.total <= limit
        assert estimate.features <= rows * row
        assert relative(wp.tangent_kernel(model, X, memory=limit), expected) < 1e-13
    with pytest.raises(InvalidArgument, match="Allow more with memory="):
        wp.tangent_kernel(model, X, memory=row)


def test_gradients_that_do_not_fit_are_never_all_held(monkeypatch: pytest.MonkeyPatch) -> None:
    make, X, _ = MODELS["mlp"]
    method = GenericMethod(seeded(make), X, block_size=2)
    seen: list[int] = []
    original = GenericMethod.jacobian
    monkeypatch.setattr(
        GenericMethod, "jacobian", lambda self, X, *, out=None: (seen.append(len(X)), original(self, X, out=out))[1]
    )
    list(method.blocks(KernelLayout()))
    assert max(seen) == 2 and sum(seen) == 7 + 5 + 3 + 1  # two held at a time, what lies below streams past


def test_train_and_eval_mode_are_respected() -> None:
    class Scaled(nn.Linear):
        def forward(self, X: Tensor) -> Tensor:
            return super().forward(X) * (2.0 if self.training else 1.0)

    model = Scaled(4, 1).double()
    assert torch.equal(wp.tangent_kernel(model, inputs(3)), 4 * wp.tangent_kernel(model.eval(), inputs(3)))
    assert not model.training


class Centred(nn.Linear):
    """Subtracts the mean over the batch: mixes samples without any module that says so."""

    def forward(self, X: Tensor) -> Tensor:
        y = super().forward(X)
        return y - y.mean(0, keepdim=True)


class Peeking(nn.Linear):
    """Depends on the other samples so weakly that values hardly tell."""

    def forward(self, X: Tensor) -> Tensor:
        return super().forward(X) + 1e-5 * (X.sum() - X.sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "BatchNorm1d '1' takes its statistics from the batch"),
        (lambda: nn.BatchNorm1d(4, track_running_stats=False).eval(), "statistics from the batch"),
        (lambda: Centred(4, 2), "another output alone than in a batch"),
        (lambda: Peeking(4, 1), "depends on another sample"),
    ],
)
def test_models_that_mix_samples_are_refused(make: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        wp.tangent_kernel(seeded(make), inputs(5))


class Noisy(nn.Linear):
    """Multiplies its outputs by what `draw` returns."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__(4, 1)
        self.draw = draw

    def forward(self, X: Tensor) -> Tensor:
        return super().forward(X) * self.draw()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Dropout(0.2)),
        lambda: Noisy(lambda: 1.0 if torch.rand(()) < 0.999 else 2.0),
        lambda: Noisy(lambda: 1.0 if random.random() < 0.999 else 2.0),
        lambda: Noisy(lambda: 1.0 if np.random.rand() < 0.999 else 2.0),
    ],
)
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize(
    "compute", [wp.tangent_kernel, wp.least_eigenvalue, lambda model, X: wp.TangentKernel(model, X).diagonal()]
)
def test_random_models_are_refused_whatever_they_draw(make: object, n: int, compute: Callable[..., Any]) -> None:
    model = seeded(make)
    with torch.random.fork_rng():
        for seed in range(3):  # by chance all outputs may agree: with one dropout in five, in about every second case
            torch.manual_seed(seed)
            with pytest.raises(InvalidArgument, match="is random: it draws random numbers"):
                compute(model, inputs(n))


def test_draws_of_another_thread_or_of_a_seeded_generator_are_no_draws_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> Tensor:
        return torch.rand((), generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    assert wp.tangent_kernel(Noisy(draw).double(), inputs(3)).shape == (3, 3)
    states = iter([torch.tensor([1]), torch.tensor([2])])  # another thread drew between two looks
    monkeypatch.setattr("wellposed.kernel._outputs.random_state", lambda device: next(states))
    assert wp.tangent_kernel(nn.Linear(4, 1).double(), inputs(3)).shape == (3, 3)


def test_a_refused_batch_norm_keeps_its_statistics_and_works_in_eval() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    before = model[1].running_mean.clone()
    with pytest.raises(InvalidArgument, match=r"model\.eval\(\)"):
        wp.tangent_kernel(model, inputs(5))
    assert torch.equal(model[1].running_mean, before)
    assert wp.tangent_kernel(model.eval(), inputs(5)).shape == (15, 15)


@pytest.mark.parametrize(
    ("model", "X", "error", "message"),
    [
        (nn.Linear(3, 1).double(), inputs(2), InvalidArgument, r"fails on rows of shape \(2, 4\) and dtype torch.float64"),
        (nn.Linear(4, 1), inputs(2), InvalidArgument, "Give X the shape and dtype that the model takes"),
        (nn.Unflatten(1, (2, 2)), inputs(2), InvalidArgument, "no parameter of the model requires a gradient"),
        (nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2))).double(), inputs(3), InvalidArgument, r"\(n,\) or \(n, c\)"),
        (nn.LSTM(4, 2).double(), inputs(3), InvalidType, "must return a tensor, got tuple"),
        (nn.Linear(4, 1).double(), [[0.0] * 4], InvalidType, r"got list\. Use torch\.as_tensor"),
        (nn.Bilinear(4, 4, 1), (inputs(2), inputs(2)), InvalidType, "got tuple of tensors.*Module that takes one tensor"),
        (nn.Bilinear(4, 4, 1), {"a": inputs(2)}, InvalidType, "got dict of tensors"),
    ],
)
def test_errors_say_what_was_wrong(model: nn.Module, X: Tensor, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        wp.tangent_kernel(model, X)
