"""certify: the right theorem, the strongest verdict, and one sentence for every mistake."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from certificate_problems import FAMILIES, problem, train
from wellposed.certify import Certificate, Verdict
from wellposed.errors import InvalidArgument, InvalidType

PAPERS = {"gaussian": ["ling2022"], "skip": ["gao2022"], "monotone": ["nguyen2022", "nguyen2022"], "implicit": ["gao2023"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_tries_what_fits_and_lists_it(family: str) -> None:
    model, X, y = problem(family, 0)
    before = copy.deepcopy(model.state_dict())
    found = wp.certify(model, X, y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    tried = [(found.theorem, found.dynamics), *((other.theorem, other.dynamics) for other in found.others)]
    assert {("radius", "flow"), ("radius", "descent")} <= set(tried)
    well_posed = "monotone" if family == "monotone" else "contraction"
    assert sorted(name for name, _ in tried) == sorted(["radius", "radius", *PAPERS[family], well_posed])
    assert all(other.others == () for other in found.others)
    # well-posedness alone never counts as the strongest
    assert found.theorem != well_posed


def test_auto_returns_the_strongest() -> None:
    model, X, y = problem("gaussian", 1)
    start = wp.certify(model, X, y)
    # at the start the plain flow is not proved, descent with layer-wise steps is
    assert start.certified and (start.theorem, start.dynamics) == ("radius", "descent")
    assert next(other for other in start.others if other.dynamics == "flow").verdict is Verdict.UNDECIDED
    train(model, X, y, 40)
    end = wp.certify(model, X, y)
    assert end.certified and (end.theorem, end.dynamics) == ("radius", "flow")
    assert next(other for other in end.others if other.dynamics == "descent").certified


def test_auto_says_why_nothing_holds() -> None:
    model, X, y = problem("gaussian", 2)
    X[1] = X[0]
    found = wp.certify(model, X, y)
    assert found.verdict is Verdict.UNDECIDED and (found.theorem, found.dynamics) == ("radius", "flow")
    assert "Rows 0 and 1 of X are equal" in found.note
    assert any(other.theorem == "contraction" and other.certified for other in found.others)


def test_each_theorem_by_name() -> None:
    model, X, y = problem("gaussian", 3)
    assert wp.certify(model, X, y, theorem="radius", dynamics="descent") == wp.certify.radius(model, X, y, dynamics="descent")
    for theorem in ("radius", "ling2022", "contraction", "monotone", "perron_frobenius"):
        found = wp.certify(model, X, y, theorem=theorem)
        assert isinstance(found, Certificate) and found.theorem.startswith(theorem)


def test_the_package_is_the_function() -> None:
    model, X, y = problem("gaussian", 4)
    assert callable(wp.certify) and wp.certify(model, X, y) == wp.certify.certify(model, X, y)
    assert wp.certify.radius(model, X, y).theorem == "radius"
    assert wp.certify.suggest is wp.suggest
    assert "theorem" in (type(wp.certify).__call__.__doc__ or "")


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_models_are_certified_in_float64(family: str) -> None:
    model, X, y = problem(family, 5)
    train(model, X, y, 60)
    single = copy.deepcopy(model).float()
    X32, y32 = X.float(), y.float()
    found = wp.certify(single, X32, y32, theorem="radius", hidden_rate="largest")
    # the float32 numbers taken as exact, in float64: the very same certificate
    twin = copy.deepcopy(single).double()
    again = wp.certify(twin, X32.double(), y32.double(), theorem="radius", hidden_rate="largest")
    assert found == again and next(single.parameters()).dtype == torch.float32
    assert found.errors["|r - r*|"] < 1e-8  # far below what float32 could compute


def test_printing_and_json() -> None:
    model, X, y = problem("gaussian", 6)
    found = wp.certify(model, X, y)
    assert Certificate.from_json(found.to_json()) == found
    text = str(found)
    assert text.startswith("radius (descent): CERTIFIED") and "also tried" in text and "step size" in text


def wrong(model: Any, X: Any, y: Any, **options: Any) -> None:
    wp.certify(model, X, y, **options)


def test_unknown_theorem() -> None:
    model, X, y = problem("gaussian", 7)
    with pytest.raises(InvalidArgument, match="Unknown theorem 'radios'.*Did you mean 'radius'"):
        wrong(model, X, y, theorem="radios")
    with pytest.raises(InvalidType, match="theorem must be a name or a callable .* got int 7"):
        wrong(model, X, y, theorem=7)


@pytest.mark.parametrize(
    ("theorem", "options", "message"),
    [
        ("radius", {"dynamic": "flow"}, "Did you mean 'dynamics'"),
        ("auto", {"dynamics": "flow"}, "takes no options; got 'dynamics'"),
        ("contraction", {"margin": 1.0}, "takes no options; got 'margin'"),
        ("ling2022", {"dynamics": "flow"}, "theorem='ling2022' takes"),
    ],
)
def test_unknown_option(theorem: str, options: dict[str, Any], message: str) -> None:
    model, X, y = problem("gaussian", 8)
    with pytest.raises(InvalidArgument, match=message):
        wrong(model, X, y, theorem=theorem, **options)


def _change(X: Tensor, y: Tensor, which: str) -> tuple[Any, Any]:
    changes: dict[str, tuple[Any, Any]] = {
        "list": (X.tolist(), y),
        "columns": (X[:, 1:], y),
        "vector": (X[0], y),
        "empty": (X[:0], y[:0]),
        "labels": (X, y[1:]),
        "matrix labels": (X, y.unsqueeze(1)),
        "integer labels": (X, y.long()),
        "nan": (X * float("nan"), y),
        "inf": (X, y / 0.0),
    }
    return changes[which]


@pytest.mark.parametrize(
    ("which", "error", "message"),
    [
        ("list", InvalidType, "X and y must be tensors; got list"),
        ("columns", InvalidArgument, r"X must have shape \(n, 6\); got \(4, 5\)"),
        ("vector", InvalidArgument, r"X must have shape \(n, 6\); got \(6,\)"),
        ("empty", InvalidArgument, "no samples"),
        ("labels", InvalidArgument, r"y must have shape \(4,\).*got \(3,\)"),
        ("matrix labels", InvalidArgument, r"got \(4, 1\)"),
        ("integer labels", InvalidType, "y must be floating point; got torch.int64"),
        ("nan", InvalidArgument, "X has NaN"),
        ("inf", InvalidArgument, "y has NaN or infinite"),
    ],
)
@pytest.mark.parametrize("theorem", ["auto", "radius", "ling2022", "contraction"])
def test_wrong_data(which: str, error: type[Exception], message: str, theorem: str) -> None:
    model, X, y = problem("gaussian", 9)
    with pytest.raises(error, match=message):
        wrong(model, *_change(X, y, which), theorem=theorem)


def test_wrong_model() -> None:
    _, X, y = problem("gaussian", 10)
    with pytest.raises(InvalidType, match="got Linear"):
        wrong(torch.nn.Linear(6, 1), X, y)
    with pytest.raises((InvalidType, InvalidArgument), match="MonotoneDEQ|GaussianDEQ"):
        wrong(problem("monotone", 10)[0], X, y, theorem="ling2022")


def test_the_package_is_called_and_pickles() -> None:
    assert pickle.loads(pickle.dumps(wp.certify)) is wp.certify
    bound = functools.partial(wp.certify, theorem="contraction")
    model = wp.GaussianDEQ(3, 5, weight_variance=0.01, dtype=torch.float64)
    X, y = torch.ones(2, 3, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert pickle.loads(pickle.dumps(bound))(model, X, y).theorem == "contraction"
    assert list(inspect.signature(wp.certify).parameters) == ["model", "X", "y", "z0", "theorem", "options"]


def test_every_known_theorem_is_documented() -> None:
    model, X, y = problem("gaussian", 3)
    with pytest.raises(wp.InvalidArgument, match="Unknown theorem 'ling'") as error:
        wp.certify(model, X, y, theorem="ling")
    known = str(error.value).partition("known are ")[2].partition(".")[0].split(", ")
    page = (Path(__file__).parents[2] / "docs" / "certificates.md").read_text(encoding="utf-8")
    assert "well_posed" in known and all(f'`"{name}"' in page for name in known)


def test_the_well_posedness_that_fits() -> None:
    X, y = torch.ones(2, 3), torch.ones(2)
    models = [wp.GaussianDEQ(3, 5, weight_variance=0.01), wp.MonotoneDEQ(3, 5), wp.OptEq(3, 5)]
    found = [wp.certify(model, X, y, theorem="well_posed") for model in models]
    assert [certificate.theorem for certificate in found] == ["contraction", "monotone", "contraction"]
    assert all(certificate.certified for certificate in found)


def test_an_opteq_without_a_proof_of_training_has_one_of_its_equilibrium() -> None:
    model = wp.OptEq(3, 5, dtype=torch.float64)
    X, y = torch.ones(2, 3, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)  # equal rows
    certificate = wp.certify(model, X, y)
    assert certificate.theorem == "contraction" and certificate.certified
    assert [(other.theorem, other.dynamics) for other in certificate.others] == [("radius", "flow"), ("radius", "descent")]


def test_a_certificate_of_equilibria_says_that_targets_were_not_read() -> None:
    cell = wp.nn.DenseCell(4, 8, weight=wp.nn.Spectral(0.9))
    own = torch.nn.Sequential(wp.EquilibriumLayer(cell), torch.nn.Linear(8, 1))
    X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    impossible = torch.arange(4.0)  # equal inputs, other targets
    found = wp.certify(own, X, impossible)
    assert found.certified and "y was not read" in str(found) and "No theorem about its training" in found.note
    assert "y was not read" not in str(wp.certify(own)) + str(wp.certify(own, X))
