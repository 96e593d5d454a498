"""The estimators as scikit-learn's own checks and its users see them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import make_moons
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks

import wellposed as wp
from wellposed.sklearn._estimator import BOUND, SpectralProjection
from wellposed.sklearn._families import NETWORKS, Headed

# An epoch is one step on the small data of most checks, and several on those that ask for a good score.
QUICK: dict[str, Any] = {"width": 6, "max_iter": 6, "batch_size": 50, "learning_rate": 0.1, "rtol": 1e-4}
QUICK["family_options"] = {"bound": 0.4}  # equilibria in few evaluations


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # few epochs: that is what it is for
@parametrize_with_checks([wp.EquilibriumClassifier("dense", **QUICK), wp.EquilibriumRegressor("dense", **QUICK)])
def test_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(NETWORKS))
@pytest.mark.parametrize("kind", [wp.EquilibriumClassifier, wp.EquilibriumRegressor])
def test_checks_of_scikit_learn_for_every_family(kind: Any, family: str) -> None:
    options: dict[str, Any] = {"width": 16, "max_iter": 12, "batch_size": 30, "learning_rate": 0.05, "rtol": 1e-4}
    if family == "implicit_only":
        options = {}  # a fixed read-out learns slowly: it needs the default width and epochs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        results = check_estimator(kind(family, **options), on_skip=None)
    assert {result["status"] for result in results} <= {"passed", "skipped"}


def wave(n: int = 24) -> tuple[np.ndarray, np.ndarray]:
    X = np.random.RandomState(0).randn(n, 3)
    return X, 5 + 100 * np.abs(X[:, 0]) + 30 * X[:, 1]


def quietly(estimator: Any, X: Any, y: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(X, y)


@pytest.mark.parametrize("family", list(NETWORKS))
def test_every_family_learns(family: str) -> None:
    X, y = wave()
    model = quietly(wp.EquilibriumRegressor(family, 24, max_iter=20, learning_rate=0.05, random_state=0), X, y)
    assert model.score(X, y) > 0.5
    assert model.loss_curve_[-1] < 0.7 * model.loss_curve_[0]
    labels = np.where(y > np.median(y), "high", "low")
    model = quietly(wp.EquilibriumClassifier(family, 24, max_iter=12, learning_rate=0.1, random_state=0), X, labels)
    assert model.score(X, labels) > 0.85
    first = model.predict_proba(X)
    assert np.allclose(first.sum(1), 1)
    assert np.array_equal(first, model.predict_proba(X))  # solving leaves nothing behind that changes answers
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(first, again.predict_proba(X))


@pytest.mark.parametrize(
    "family",
    [
        wp.SkipDEQ,
        wp.GaussianDEQ(3, 12, dtype=torch.float64),
        wp.EquilibriumLayer(wp.nn.DenseCell(3, 12, wp.nn.Tanh(), weight=wp.nn.Monotone(0.5))),
        lambda d, m, **made: wp.DeepOptEq(d, [m, m], **made),
    ],
    ids=["class", "network", "layer", "function"],
)
def test_families_as_objects(family: Any) -> None:
    X, y = wave()
    before = {name: p.clone() for name, p in family.named_parameters()} if isinstance(family, torch.nn.Module) else {}
    for kind, target in ((wp.EquilibriumRegressor, y), (wp.EquilibriumClassifier, y > 60)):
        model = quietly(clone(kind(family, 8, max_iter=6, learning_rate=0.05, random_state=0)), X, target)
        assert model.loss_curve_[-1] < model.loss_curve_[0]
        assert next(model.model_.parameters()).dtype == torch.float64
    assert all(torch.equal(p, before[name]) for name, p in (family.named_parameters() if before else ()))  # a copy is trained


def test_predictions_are_those_of_the_network_and_standardization_is_undone() -> None:
    X, y = wave()
    model = quietly(wp.EquilibriumRegressor("gaussian", 16, max_iter=5, random_state=0), X, y)
    net = model.model_
    z = np.zeros((len(X), 16))
    W, U, a = (p.detach().numpy() for p in (net.W, net.U, net.a))
    for _ in range(2000):
        z = np.maximum(z @ W.T + X @ U.T, 0)  # the equilibrium, by hand
    assert np.allclose(model.predict(X), z @ a * np.std(y) + np.mean(y), rtol=1e-9)


def test_probabilities_by_hand() -> None:
    X, y = wave()
    model = quietly(wp.EquilibriumClassifier("dense", 6, max_iter=3, random_state=0), X, np.digitize(y, [40, 90]))
    assert isinstance(model.model_, Headed)
    cell = model.model_.features.cell
    with torch.no_grad():
        W, U, b = cell.recurrent().numpy(), cell.U.numpy(), cell.b.numpy()
        V, v = model.model_.weight.numpy(), model.model_.bias.numpy()
    z = np.zeros((len(X), 6))
    for _ in range(500):
        z = np.maximum(z @ W.T + X @ U.T + b, 0)
    logits = z @ V.T + v
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert np.allclose(model.predict_proba(X), expected, rtol=1e-9)
    assert np.array_equal(model.predict(X), model.classes_[expected.argmax(1)])
    assert np.allclose(model.decision_function(X), logits)


def test_random_state_decides_everything() -> None:
    X, y = wave()
    options: dict[str, Any] = {"width": 8, "max_iter": 3, "batch_size": 10}
    first, again, other = (
        quietly(wp.EquilibriumRegressor(**options, random_state=seed), X, y).predict(X) for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again) and not np.allclose(first, other)
    torch.manual_seed(3)  # no hidden global seed
    assert np.array_equal(first, quietly(wp.EquilibriumRegressor(**options, random_state=0), X, y).predict(X))
    stream = np.random.RandomState(5)
    twins = [quietly(wp.EquilibriumRegressor(**options, random_state=stream), X, y).predict(X) for _ in range(2)]
    assert not np.allclose(*twins)  # a stream goes on


def test_pipeline_grid_search_and_cross_validation() -> None:
    X, y = make_moons(60, noise=0.1, random_state=0)
    pipe = make_pipeline(StandardScaler(), wp.EquilibriumClassifier("dense", 8, max_iter=12, learning_rate=0.1, random_state=0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        search = GridSearchCV(pipe, {"equilibriumclassifier__width": [2, 8]}, cv=2).fit(X, y)
        scores = cross_val_score(search.best_estimator_, X, y, cv=2)
    assert search.best_score_ > 0.7 and scores.shape == (2,) and scores.min() > 0.6
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    assert np.array_equal(again.predict_proba(X), search.best_estimator_.predict_proba(X))


def test_clone_has_the_parameters_and_nothing_else() -> None:
    X, y = wave()
    model = quietly(wp.EquilibriumRegressor("skip", 8, family_options={"gamma": 0.1}, max_iter=2), X, y)
    twin = clone(model)
    assert twin.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        twin.predict(X)


def test_partial_fit_goes_on_also_after_pickling() -> None:
    X, y = wave()
    straight, broken = (wp.EquilibriumRegressor("gaussian", 8, random_state=0) for _ in range(2))
    for _ in range(6):
        straight.partial_fit(X, y)
    for _ in range(3):
        broken.partial_fit(X, y)
    broken = pickle.loads(pickle.dumps(broken))  # with the state of Adam and of the order
    for _ in range(3):
        broken.partial_fit(X, y)
    assert np.array_equal(straight.predict(X), broken.predict(X))
    assert straight.n_iter_ == 6 and straight.loss_curve_[-1] < straight.loss_curve_[0]
    assert straight.certificate_ is None and "part of the data" in straight.certificate_reason_


def test_partial_fit_needs_all_classes_once() -> None:
    X, y = wave()
    model = wp.EquilibriumClassifier("dense", 4, random_state=0)
    with pytest.raises(wp.InvalidArgument, match="classes="):
        model.partial_fit(X, y > 60)
    model.partial_fit(X[:2], ["a", "b"], classes=["a", "b", "c"])
    assert model.predict_proba(X).shape == (len(X), 3)
    with pytest.raises(wp.InvalidArgument, match="not what the first call had"):
        model.partial_fit(X[:2], ["a", "b"], classes=["a", "b"])
    with pytest.raises(wp.InvalidArgument, match="'d'"):
        model.partial_fit(X[:2], ["a", "d"])


def test_certificate_of_regression_is_that_of_certify() -> None:
    X, y = wave(6)
    model = quietly(wp.EquilibriumRegressor("gaussian", 64, max_iter=30, random_state=0), X, y)
    target = torch.tensor((y - y.mean()) / y.std())
    expected = wp.certify(model.model_, torch.tensor(X), target)
    assert model.certificate_.verdict is expected.verdict and model.certificate_.measured == expected.measured
    assert "training" in model.certificate_reason_


def test_long_training_is_certified() -> None:
    X, y = wave(6)
    X = X / np.linalg.norm(X, axis=1, keepdims=True) * np.sqrt(3)
    model = quietly(wp.EquilibriumRegressor("gaussian", 200, max_iter=250, tol=0.0, random_state=0), X, y)
    assert model.certificate_.verdict is wp.Verdict.CERTIFIED


def test_other_certificates_are_about_equilibria() -> None:
    X, y = wave()
    for family in ("gaussian", "monotone", "dense", "opteq"):
        model = quietly(wp.EquilibriumClassifier(family, 6, max_iter=2, random_state=0), X, y > 60)
        assert model.certificate_.certified and "equilibria" in model.certificate_reason_
    layer = wp.EquilibriumLayer(torch.nn.Bilinear(3, 3, 3))
    with torch.no_grad():
        layer.cell.weight.mul_(0.05)
    model = quietly(wp.EquilibriumRegressor(layer, max_iter=2, random_state=0), X, y)
    assert model.certificate_.to_dict() == wp.certify(model.model_).to_dict(), (
        "the answer of certify, also where it is undecided"
    )
    model = quietly(wp.EquilibriumRegressor(torch.nn.Linear(3, 3), max_iter=2, random_state=0), X, y)
    assert model.certificate_ is None and "Linear holds no EquilibriumLayer" in model.certificate_reason_
    model = quietly(wp.EquilibriumRegressor("dense", 6, max_iter=2, certify=False), X, y)
    assert model.certificate_ is None and model.certificate_reason_ == "certify=False"


def test_convergence_warnings_tell_what_failed() -> None:
    X, y = wave()
    with pytest.warns(ConvergenceWarning, match="still fell after max_iter=3"):
        wp.EquilibriumRegressor("dense", 8, max_iter=3, random_state=0).fit(X, y)
    for epochs in (10, 100):  # neither "raise max_iter" nor silence
        with pytest.warns(
            ConvergenceWarning, match=r"the loss rose from .* so training diverged; take a smaller learning_rate"
        ):
            wp.EquilibriumRegressor("gaussian", 8, learning_rate=100.0, max_iter=epochs, random_state=0).fit(X, y)
    with pytest.warns(ConvergenceWarning, match="not finite in epoch"):
        wp.EquilibriumRegressor("dense", 8, learning_rate=1e300, random_state=0).fit(X, y)
    short = {"max_steps": 2}
    with pytest.warns(ConvergenceWarning) as said:
        model = wp.EquilibriumRegressor("gaussian", 8, family_options=short, tol=10.0, random_state=0).fit(X, y)
        model.predict(X)
    texts = [str(warning.message) for warning in said]
    assert any("of the last epoch did not converge" in text for text in texts)
    assert any(f"{len(X)} of {len(X)} equilibria did not converge" in text for text in texts)


def test_one_class_is_learned_at_once_and_without_a_warning() -> None:
    X, _ = wave()
    model = wp.EquilibriumClassifier("dense", 6, max_iter=5, random_state=0).fit(X, ["only"] * len(X))
    assert model.n_iter_ == 1 and model.loss_curve_ == [0.0] and (model.predict(X) == "only").all()


def test_no_warning_when_training_ends_by_itself() -> None:
    X, y = wave()
    model = wp.EquilibriumRegressor("dense", 8, tol=0.05, n_iter_no_change=3, random_state=0).fit(X, y)
    assert model.n_iter_ < model.max_iter


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.floats(0.1, 30.0), st.sampled_from(["gaussian", "skip", "implicit_only"]))
def test_the_projection_keeps_contractions(seed: int, scale: float, family: str) -> None:
    made = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64, "on_ill_posed": "ignore"}
    network = NETWORKS[family](3, 6, **made)
    projection = SpectralProjection(network)
    for factor in (scale, 1.001):
        with torch.no_grad():
            (network.W if family == "gaussian" else network.A).mul_(factor)
            before = network.recurrent().clone()
        projection.apply()
        after = network.recurrent().detach()
        norm, allowed = torch.linalg.matrix_norm(before, ord=2), BOUND * (1 + 1e-9)
        assert torch.linalg.matrix_norm(after, ord=2) <= allowed
        if norm < BOUND * (1 - 1e-9):
            assert torch.equal(after, before)  # what is inside is left alone


def test_float32() -> None:
    X, y = wave()
    model = quietly(wp.EquilibriumRegressor("dense", 8, max_iter=10, dtype="float32", random_state=0), X, y)
    assert next(model.model_.parameters()).dtype == torch.float32 and model.predict(X).dtype == np.float64


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"family": "gausian"}, "Did you mean 'gaussian'"),
        ({"family": 3}, "family must be a name"),
        ({"family": lambda d, m, **made: 3}, "must make a torch.nn.Module"),
        ({"family": wp.GaussianDEQ(7, 4)}, "a module for 7 features, and X has 3"),
        ({"family": wp.GaussianDEQ(3, 4), "family_options": {"gamma": 1}}, "no effect on a module"),
        ({"width": 0}, "width must be a positive integer"),
        ({"learning_rate": 0.0}, "learning_rate must be a positive number"),
        ({"tol": -1.0}, "tol must be a non-negative number"),
        ({"dtype": "float16"}, "dtype must be"),
    ],
)
def test_mistakes_are_explained(options: dict[str, Any], sentence: str) -> None:
    X, y = wave()
    with pytest.raises(wp.WellposedError, match=sentence):
        wp.EquilibriumRegressor(**options).fit(X, y)


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("wellposed.sklearn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delattr(wp, "sklearn", raising=False)
    with pytest.raises(wp.errors.MissingPackage, match=r"wellposed\[sklearn\]"):
        wp.EquilibriumRegressor  # noqa: B018


def test_lazy_names() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        wp.nothing_of_the_kind  # noqa: B018
    assert "EquilibriumRegressor" in dir(wp)


@pytest.mark.slow
def test_import_needs_no_scikit_learn() -> None:
    program = (
        "import sys; sys.modules['sklearn'] = None\nimport wellposed\nfrom wellposed import *\nprint(GaussianDEQ.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "GaussianDEQ"


@pytest.mark.parametrize(
    ("backend", "cases"), [("threading", range(2)), pytest.param("loky", range(50), marks=pytest.mark.slow)]
)
def test_grid_search_with_two_jobs_is_that_with_one(backend: str, cases: range) -> None:
    """Scores, choices and predictions bit for bit; 50 data sets with four fits each are 200 cases. Processes start slowly."""
    with warnings.catch_warnings(), joblib.parallel_config(backend):
        warnings.simplefilter("ignore", ConvergenceWarning)
        for seed in cases:
            g = np.random.RandomState(seed)
            kind = (wp.EquilibriumRegressor, wp.EquilibriumClassifier)[seed % 2]
            X = g.randn(20, 3)
            y = X[:, 0] + g.randn(20) if seed % 2 == 0 else np.arange(20) % 2
            estimator = kind("dense", 4, max_iter=3, rtol=1e-4, random_state=seed)
            searches = [GridSearchCV(estimator, {"learning_rate": [0.01, 0.1]}, cv=2, n_jobs=n).fit(X, y) for n in (1, 2)]
            one, two = searches
            for name in ("mean_test_score", "split0_test_score", "split1_test_score"):
                assert np.array_equal(one.cv_results_[name], two.cv_results_[name]), (seed, name)
            assert one.best_params_ == two.best_params_
            assert np.array_equal(one.predict(X), two.predict(X))
