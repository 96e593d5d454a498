"""The tangent kernel in closed form, against a dense autograd Jacobian and against its own parts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.kernel import _closed_form
from wellposed.nn.tangent import GramProduct, TangentFeatures

NETWORKS = {
    "gaussian": wp.GaussianDEQ,
    "skip": wp.SkipDEQ,
    "implicit_only": wp.ImplicitOnlyDEQ,
    "monotone": wp.MonotoneDEQ,
}


def network(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    return NETWORKS[name](5, 20, generator=torch.Generator().manual_seed(1), dtype=dtype)


def inputs(n: int, d: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense_jacobian(model: nn.Module, X: Tensor) -> dict[str, Tensor]:
    """parameter -> (n c, size), one backward pass through the whole batch per output: nothing shared with the library."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    y = model(X).reshape(-1)
    rows = [torch.autograd.grad(single, list(named.values()), retain_graph=True) for single in y]
    return {name: torch.stack([row[k].reshape(-1) for row in rows]) for k, name in enumerate(named)}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


class TwoLayers(nn.Module):
    """y = a . tanh(W x), whose features are known by hand; no equilibrium at all."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(2)
        self.W = nn.Parameter(torch.randn(7, 5, generator=draw, dtype=torch.float64).to(dtype))
        self.a = nn.Parameter(torch.randn(7, generator=draw, dtype=torch.float64).to(dtype))
        self.calls: list[int] = []

    def forward(self, X: Tensor) -> Tensor:
        return torch.tanh(X @ self.W.T) @ self.a

    def tangent_features(self, X: Tensor) -> TangentFeatures:
        self.calls.append(X.shape[0])
        Z = torch.tanh(X @ self.W.T)
        P = (1 - Z**2) * self.a
        terms = {"W": (GramProduct((("P", "P"), ("X", "X"))),), "a": (GramProduct((("Z", "Z"),)),)}
        return TangentFeatures({"Z": Z, "P": P, "X": X}, terms)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("cross", [False, True])
def test_agrees_with_a_dense_jacobian(name: str, cross: bool) -> None:
    model, X, X2 = network(name), inputs(9), inputs(4, seed=1)
    J, J2 = dense_jacobian(model, X), dense_jacobian(model, X2 if cross else X)
    parts = wp.tangent_kernel(model, X, X2 if cross else None, by_parameter=True)
    assert set(parts) == set(J)
    for parameter, part in parts.items():
        assert relative(part, J[parameter] @ J2[parameter].T) < 1e-9
    assert relative(wp.tangent_kernel(model, X, X2 if cross else None), sum(parts.values())) < 1e-14


@pytest.mark.parametrize("name", NETWORKS)
def test_exactly_symmetric_whatever_the_blocks(name: str) -> None:
    model, X = network(name), inputs(11)
    whole = wp.tangent_kernel(model, X)
    for block_size in (1, 4, 11, 100):
        K = wp.tangent_kernel(model, X, block_size=block_size)
        assert torch.equal(K, K.T)
        assert relative(K, whole) < 1e-14
        for part in wp.tangent_kernel(model, X, block_size=block_size, by_parameter=True).values():
            assert torch.equal(part, part.T)
    assert relative(wp.tangent_kernel(model, X, X, block_size=6), whole) < 1e-14


def test_features_in_batches_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, X = TwoLayers(), inputs(11)
    whole = wp.tangent_kernel(model, X)
    monkeypatch.setattr(_closed_form, "LEAST_ROWS", 4)
    monkeypatch.setattr(_closed_form, "FEATURE_BYTES", 0)
    model.calls.clear()
    assert relative(wp.tangent_kernel(model, X), whole) < 1e-15
    assert model.calls == [4, 4, 3]  # each row once, the first batch too
    assert relative(wp.tangent_kernel(model, X, X[:5]), whole[:, :5]) < 1e-15
    method = _closed_form.ClosedFormMethod(model, X)
    assert method.sides[0]["X"].data_ptr() == X.data_ptr()  # the inputs are not copied


def test_more_than_two_factors_and_coefficients() -> None:
    class Cubic(TwoLayers):
        def tangent_features(self, X: Tensor) -> TangentFeatures:
            features = super().tangent_features(X).features
            triple = GramProduct((("P", "Z"), ("X", "X"), ("Z", "P")), -0.5)
            return TangentFeatures(features, {"W": (triple, GramProduct((("P", "P"),), 3.0))})

    model, X, X2 = Cubic(), inputs(6), inputs(5, seed=3)
    with torch.no_grad():
        f, g = model.tangent_features(X).features, model.tangent_features(X2).features
        expected = -0.5 * (f["P"] @ g["Z"].T) * (X @ X2.T) * (f["Z"] @ g["P"].T) + 3.0 * f["P"] @ g["P"].T
    assert relative(wp.tangent_kernel(model, X, X2, block_size=4), expected) < 1e-14


@pytest.mark.parametrize("method", ["closed", "generic"])
def test_only_parameters_that_require_gradients(method: str) -> None:
    model, X = TwoLayers(), inputs(4)
    part = wp.tangent_kernel(model, X, by_parameter=True)["a"]
    model.W.requires_grad_(False)
    assert relative(wp.tangent_kernel(model, X, method=method), part) < 1e-14
    assert list(wp.tangent_kernel(model, X, method=method, by_parameter=True)) == ["a"]
    model.a.requires_grad_(False)
    with pytest.raises(InvalidArgument, match="no parameter of the model requires a gradient"):
        wp.tangent_kernel(model, X, method=method)


@pytest.mark.parametrize("method", ["closed", "generic"])
def test_dtype_follows_the_model(method: str) -> None:
    model = TwoLayers(torch.float32)
    K = wp.tangent_kernel(model, inputs(4, dtype=torch.float32), method=method)
    assert K.dtype == torch.float32 and not K.requires_grad
    assert relative(K.double(), wp.tangent_kernel(TwoLayers(), inputs(4))) < 1e-5


def test_per_output_of_a_single_output() -> None:
    model, X = TwoLayers(), inputs(4)
    assert torch.equal(wp.tangent_kernel(model, X, per_output=True), wp.tangent_kernel(model, X)[None])


def test_one_sample() -> None:
    model, X = TwoLayers(), inputs(1)
    J = dense_jacobian(model, X)
    expected = sum(float(part.square().sum()) for part in J.values())
    for method in ("closed", "generic"):
        K = wp.tangent_kernel(model, X, method=method)
        assert K.shape == (1, 1) and abs(float(K) - expected) < 1e-12 * expected


def test_the_model_is_left_as_it_was() -> None:
    model, X = network("gaussian"), inputs(4)
    X.requires_grad_()
    for method in ("closed", "generic"):
        assert not wp.tangent_kernel(model, X, method=method).requires_grad
    assert all(parameter.grad is None for parameter in model.parameters()) and X.grad is None and model.training


def test_the_memory_is_said_before_the_work(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="wellposed.kernel.empirical"):
        wp.tangent_kernel(TwoLayers(), inputs(4))
    assert "4 x 4" in caplog.text and "of memory" in caplog.text


X = inputs(3)
WRONG = [
    ((TwoLayers(), X[0]), {}, InvalidArgument, r"X must be \(n, d\).*got shape \(5,\)"),
    ((TwoLayers(), X[:0]), {}, InvalidArgument, "at least one sample"),
    ((TwoLayers(), X.float()), {}, InvalidArgument, r"torch\.float64; got torch\.float32"),
    ((TwoLayers(), X.to(torch.complex128)), {}, InvalidArgument, "must be real"),
    ((TwoLayers(), torch.where(X == X[1, 2], torch.nan, X)), {}, InvalidArgument, "NaN or infinity in row 1"),
    ((TwoLayers(), X.numpy()), {}, InvalidType, "must be a torch.Tensor, got ndarray"),
    ((lambda x: x, X), {}, InvalidType, "must be a torch.nn.Module, got function"),
    ((TwoLayers(), X, X[:, :4]), {}, InvalidArgument, r"X2 must have samples of the shape of X, \(5,\); got \(4,\)"),
    ((TwoLayers(), X, X.float()), {}, InvalidArgument, "X2 must have the dtype of X"),
    ((TwoLayers(), X), {"method": "close"}, InvalidArgument, "Did you mean 'closed'"),
    ((nn.Linear(5, 1).double(), X), {"method": "closed"}, InvalidArgument, "Linear has no tangent_features"),
    ((TwoLayers(), X), {"block_size": 0}, InvalidArgument, "block_size must be a positive integer, got 0"),
    ((TwoLayers(), X), {"memory": 1.5}, InvalidArgument, "memory must be a positive integer, got 1.5"),
    ((TwoLayers(), X), {"memory": 1000}, InvalidArgument, "allowed by memory=. Write the kernel into a file"),
]


@pytest.mark.parametrize(("args", "options", "error", "message"), WRONG)
def test_errors_say_what_was_wrong(args: tuple, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        wp.tangent_kernel(*args, **options)


@pytest.mark.parametrize(
    ("features", "factors", "message"),
    [
        ({"Z": torch.ones(3, 2)}, (("Z", "P"),), "names the feature 'P', which is not among them"),
        ({"Z": torch.ones(4, 2)}, (("Z", "Z"),), r"'Z' must be \(3, k\), got \(4, 2\)"),
        ({"Z": torch.ones(3, 2), "P": torch.ones(3, 1)}, (("Z", "P"),), "equal width to be multiplied; got 2 and 1"),
    ],
)
def test_mistakes_in_features_are_named(features: dict, factors: tuple, message: str) -> None:
    class Wrong(TwoLayers):
        def tangent_features(self, X: Tensor) -> TangentFeatures:
            return TangentFeatures(features, {"W": (GramProduct(factors),)})

    with pytest.raises(InvalidArgument, match=message):
        wp.tangent_kernel(Wrong(), X)


def peak_of(run: Callable[[], object]) -> int:
    """The most bytes that torch holds at a time for what `run` makes: they do not depend on the machine, unlike those of
    the process."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))


def test_the_peak_is_that_of_what_is_held() -> None:
    def run() -> Tensor:
        first = torch.zeros(1000)
        del first
        return torch.zeros(3000) + 1  # two of them at a time

    assert 2 * 12000 <= peak_of(run) < 2 * 12000 + 1000


@pytest.mark.slow
def test_peak_memory_at_a_thousand_samples_and_units() -> None:
    model = wp.GaussianDEQ(784, 1000, dtype=torch.float64)
    X = torch.randn(1000, 784, dtype=torch.float64)
    model.check_well_posed()
    assert peak_of(lambda: wp.tangent_kernel(model, X)) < 12 * 1000**2 * 8  # twelve matrices of samples and units


class Scaled(wp.GaussianDEQ):
    """A hundred times the network: another kernel than the formulas of its base give."""

    def forward(self, X: Tensor) -> Tensor:
        return 100 * super().forward(X)


def test_an_overridden_forward_has_its_own_kernel_and_loss() -> None:
    model = Scaled(4, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = wp.tangent_kernel(model, inputs, method="generic")
    torch.testing.assert_close(wp.tangent_kernel(model, inputs), exact, rtol=0, atol=1e-12 * float(exact.abs().max()))
    with pytest.raises(InvalidArgument, match="Scaled has no tangent_features for its own forward"):
        wp.tangent_kernel(model, inputs, method="closed")
    y = torch.ones(5, dtype=torch.float64)
    true = float((model(inputs).detach() - y).square().sum() / 2)
    history = wp.descend(model, inputs, y, step_size=1e-9, steps=1)
    assert abs(history.loss[0] - true) <= 1e-12 * true
