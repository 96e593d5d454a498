"""Estimators of a module of the user: by object, by class, by import path, a cell or a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wellposed as wp

X = np.random.RandomState(0).randn(16, 3)
Y = X[:, 0]
QUICK: dict[str, Any] = {"max_iter": 2, "n_iter_no_change": 2, "tol": 0.0, "random_state": 0}

pytestmark = pytest.mark.filterwarnings("ignore:.*the loss still fell after max_iter")


class Cell(nn.Module):
    """Takes neither generator nor dtype."""

    def __init__(self, in_features: int, width: int, gain: float = 0.3) -> None:
        super().__init__()
        self.W, self.U, self.gain = nn.Linear(width, width), nn.Linear(in_features, width), gain

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.gain * self.W(z) + self.U(x))


@pytest.mark.parametrize(
    "family", [Cell(3, 5), Cell, nn.Sequential(nn.Linear(3, 4), nn.Tanh())], ids=["object", "class", "network"]
)
def test_objects_and_classes(family: Any) -> None:
    model = wp.EquilibriumRegressor(family, 5, **QUICK).fit(X, Y)
    again = wp.EquilibriumRegressor(family, 5, **QUICK).fit(X, Y)
    assert np.array_equal(model.predict(X), again.predict(X)), "the same seed gives the same numbers"
    layers = [part for part in model.model_.modules() if isinstance(part, wp.EquilibriumLayer)]
    assert len(layers) == (0 if isinstance(family, nn.Sequential) else 1)
    assert all(p.dtype == torch.float64 for p in model.model_.parameters())


def test_the_certificate_of_an_own_cell_is_that_of_certify() -> None:
    model = wp.EquilibriumClassifier(Cell, 5, family_options={"gain": 0.1}, **QUICK).fit(X, Y > 0)
    found = wp.certify(model.model_)
    assert found.certified and model.certificate_ is not None and model.certificate_.to_dict() == found.to_dict()
    assert model.certificate_reason_.startswith("about equilibria")


def test_an_interrupted_fit_leaves_no_older_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wp.EquilibriumRegressor(Cell, 5, **QUICK).fit(X, Y)
    assert model.certificate_ is not None and model.certificate_.certified

    before = model.model_

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wp.EquilibriumRegressor, "_epochs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.fit(100 * X, Y)
    assert model.model_ is not before and model.certificate_ is None and model.certificate_reason_


def test_an_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["import torch", "class Mine(torch.nn.Linear):", "    def forward(self, z, x):"]
    code = "\n".join([*lines, "        return 0.2 * super().forward(z).tanh() + x", ""])
    (tmp_path / "sklearn_own_cells.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    options = {"out_features": 3}
    model = wp.EquilibriumClassifier("sklearn_own_cells.Mine", 3, family_options=options, **QUICK).fit(X, Y > 0)
    assert model.predict(X).shape == (16,)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (Cell, {"gian": 1.0}, r"Cell has no argument 'gian' \(in family_options\).*Did you mean 'gain'"),
        ("nowhere.Cell", {}, "'nowhere.Cell' cannot be imported"),
        ("gausian", {}, "Unknown family 'gausian'.*import paths such as.*Did you mean 'gaussian'"),
        ("torch.relu", {}, "must be a class of torch.nn.Module"),
        (Cell(3, 5), {"gain": 1.0}, "no effect on a module"),
        (Cell(3, 8), {}, r"neither for z of \(5,\).*: give width=8, or wrap it: EquilibriumLayer\(cell, state_shape=\(8,\)\)"),
        (nn.Bilinear(4, 3, 5), {}, r"Give the width that it has, or wrap it: EquilibriumLayer\(cell, state_shape=\.\.\.\)"),
    ],
)
def test_mistakes(family: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(wp.WellposedError, match=message):
        wp.EquilibriumRegressor(family, 5, family_options=options, **QUICK).fit(X, Y)
