"""Runs of image networks: they train by few steps unless told otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wellposed.errors import InvalidArgument
from wellposed.nn import MultiscaleDEQ, ResidualDEQ
from wellposed_lab.runs.config import resolve
from wellposed_lab.runs.losses import RESIDUAL, residual_weight
from wellposed_lab.runs.penalty import objective
from wellposed_lab.runs.records import read_metrics
from wellposed_lab.runs.setup import prepare
from wellposed_lab.runs.training import train

SMALL = ["model.name=residual", "model.width=4", "data.n=24", "run.batch_size=8", "run.dtype=float32", "optimizer.lr=1e-2"]
QUICK = ["run.tensorboard=false", "run.certify_every=0", "run.threads=1"]


@pytest.mark.parametrize(("name", "network"), [("residual", ResidualDEQ), ("multiscale", MultiscaleDEQ)])
def test_the_objective_is_that_of_few_steps(name: str, network: type) -> None:
    problem = prepare(config := resolve({}, [*SMALL, f"model.name={name}"]))
    model, (X, y) = problem.model, problem.parts.train
    assert isinstance(model, network) and residual_weight(model, None) == RESIDUAL and residual_weight(model, 0.0) == 0.0
    total, count = objective(model, problem.loss, config.loss)(X, y)
    prediction, penalty = model.regularized(X, weight=RESIDUAL)
    expected = problem.loss.total(prediction, y)
    torch.testing.assert_close(total, expected)  # the penalty is not part of what is reported
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(value, parameters) for value in (total, expected + count * penalty))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_run_takes_few_steps_by_default_and_solves_if_asked(tmp_path: Path) -> None:
    rows = {}
    for residual in ("null", "0"):
        train(resolve({}, [*SMALL, *QUICK, f"loss.residual={residual}", "run.epochs=2"]), tmp_path / residual)
        rows[residual] = read_metrics(tmp_path / residual)
    assert rows["null"][-1]["equilibrium_steps"] == 8.0 != rows["0"][-1]["equilibrium_steps"]
    assert rows["null"][-1]["train_loss"] < rows["null"][0]["train_loss"]


def test_what_does_not_fit_is_refused() -> None:
    config = resolve({}, [*SMALL, "loss.penalty=0.5"])
    problem = prepare(config)
    with pytest.raises(InvalidArgument, match=r"loss.penalty=0.5 is for equilibria, and ResidualDEQ trains by few steps"):
        objective(problem.model, problem.loss, config.loss)
    with pytest.raises(InvalidArgument, match=r"loss.residual=2 is for networks .* Linear has none. Omit it"):
        residual_weight(torch.nn.Linear(2, 2), 2.0)
    with pytest.raises(InvalidArgument, match=r"model.name='residual' needs images"):
        prepare(resolve({}, [*SMALL, "data.flatten=true"]))
