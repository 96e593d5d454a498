"""Models and data that cannot be certified get one sentence, wherever they come in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.certify import contraction, lipschitz_upper, robustness
from wellposed.errors import InvalidArgument, InvalidType


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data() -> tuple[Tensor, Tensor]:
    X = torch.randn(4, 3, generator=generator(1), dtype=torch.float64)
    return X, torch.randn(4, generator=generator(2), dtype=torch.float64)


def network(kind: Any = wp.GaussianDEQ, **options: Any) -> Any:
    return kind(3, 20, **options)


def classifier(classes: int = 3, **options: Any) -> Any:
    return wp.nn.MonotoneClassifier.dense(3, 12, classes, margin=0.5, generator=generator(0), dtype=torch.float64, **options)


CALLS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "certify": wp.certify,
    "radius": lambda model, X, y: wp.certify(model, X, y, theorem="radius", dynamics="descent"),
    "contraction": lambda model, X, y: wp.certify(model, X, y, theorem="contraction"),
    "suggest": wp.suggest,
    "generalization_bound": wp.generalization_bound,
}
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: network(device="meta"), "parameter W is on the meta device"),
    "float8": (lambda: network().to(torch.float8_e4m3fn), "parameter W is torch.float8_e4m3fn"),
    "complex": (lambda: network().to(torch.complex64), "parameter W is torch.complex64"),
}
INPUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "meta": (lambda X: X.to("meta"), "X is on the meta device"),
    "sparse": (lambda X: X.to_sparse(), "X is torch.sparse_coo"),
    "float8": (lambda X: X.to(torch.float8_e4m3fn), "X is torch.float8_e4m3fn"),
    "complex": (lambda X: X.to(torch.complex128), "X is torch.complex128"),
}


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("call", CALLS)
def test_models_without_real_values(kind: str, call: str) -> None:
    make, message = MODELS[kind]
    with pytest.raises(InvalidType, match=message):
        CALLS[call](make(), *data())
    for function in (lipschitz_upper, contraction):
        with pytest.raises(InvalidType, match=message):
            function(make())


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("call", CALLS)
def test_inputs_without_real_values(kind: str, call: str) -> None:
    convert, message = INPUTS[kind]
    X, y = data()
    with pytest.raises(InvalidType, match=message):
        CALLS[call](network(dtype=torch.float64, generator=generator(0)), convert(X), y)
    with pytest.raises(InvalidType, match=message.replace("X is", "y is")):
        CALLS[call](network(dtype=torch.float64, generator=generator(0)), X, convert(y))


def test_suggest_says_which_networks_it_knows() -> None:
    with pytest.raises(InvalidType, match="suggest knows GaussianDEQ, .* got OptEq"):
        wp.suggest(network(wp.OptEq, dtype=torch.float64, generator=generator(0)), *data())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_opteq_with_parameters_that_are_not_finite(value: float) -> None:
    model = network(wp.OptEq, dtype=torch.float64, generator=generator(0))
    with torch.no_grad():
        model.W[0, 0] = value
    certificate = wp.certify(model, *data())
    assert certificate.verdict is wp.Verdict.UNDECIDED
    assert certificate.note == "A parameter has NaN or infinite entries."


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x.to("meta"), InvalidType, "robustness: x is on the meta device"),
        (lambda x: x.to_sparse(), InvalidType, "robustness: x is torch.sparse_coo"),
        (lambda x: x.int(), InvalidType, "robustness: x must be floating point; got torch.int32"),
        (lambda x: x.float(), InvalidType, "robustness: the classifier has torch.float64 parameters and x is torch.float32"),
        (lambda x: x.numpy(), InvalidType, "robustness: x and y must be tensors; got ndarray and Tensor"),
        (lambda x: x * math.nan, InvalidArgument, "robustness: x has NaN or infinite entries"),
        (lambda x: x * math.inf, InvalidArgument, "robustness: x has NaN or infinite entries"),
        (lambda x: x[:0], InvalidArgument, "robustness: x has no samples"),
        (lambda x: x[:, :2], InvalidArgument, r"expects x of shape \(batch, 3\); got \(4, 2\)"),
    ],
)
def test_samples_of_robustness(change: Callable[[Tensor], Any], error: type[Exception], message: str) -> None:
    x = change(data()[0])
    with pytest.raises(error, match=message):
        robustness(classifier(), x, torch.zeros(len(x), dtype=torch.int64))


def test_classifiers_of_robustness() -> None:
    x, y = data()[0], torch.zeros(4, dtype=torch.int64)
    with pytest.raises(InvalidArgument, match="robustness: the classifier has one class"):
        robustness(classifier(1), x, y)
    model = classifier()
    with torch.no_grad():
        model.cell.U[0, 0] = math.nan
    for function in (lipschitz_upper, lambda model: robustness(model, x, y)):
        with pytest.raises(InvalidArgument, match="a parameter has NaN or infinite entries"):
            function(model)
    with pytest.raises(InvalidType, match="robustness: parameter .* is on the meta device"):
        robustness(classifier().to("meta"), x, y)
