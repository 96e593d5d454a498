"""Runs of image networks: they train by few steps unless told otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from wellposed.errors import InvalidArgument
from wellposed.nn import EquilibriumLayer, MultiscaleDEQ, ResidualDEQ
from wellposed_lab.cli.train import equilibria
from wellposed_lab.report._charts import measure
from wellposed_lab.report._read import read_run
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


PUZZLES = ["data.name=sudoku", "data.n=24", "data.n_test=12", "model.width=4", "model.max_steps=6", "model.on_failure=ignore"]


@pytest.mark.parametrize("settings", [SMALL, [*PUZZLES, "run.batch_size=8", "run.dtype=float32"]], ids=["residual", "sudoku"])
def test_few_steps_of_training_are_not_counted_as_equilibria(settings: list[str], tmp_path: Path) -> None:
    trained = train(resolve({}, [*settings, *QUICK, "run.epochs=1"]), tmp_path / "run")
    rows, model, (X, _) = read_metrics(tmp_path / "run"), trained.problem.model, trained.problem.parts.test
    assert all("unconverged" not in row for row in rows) and trained.summary["unconverged"] is None
    assert rows[-1]["equilibrium_steps"] > 1  # evaluations of a training step
    with torch.no_grad():
        model.eval()(X)  # the last thing that the run did, too
    layer = next(part for part in model.modules() if isinstance(part, EquilibriumLayer))
    solution = layer.last_solution
    assert rows[-1]["test_unconverged"] == int((~solution.converged).sum())
    assert rows[-1]["test_equilibrium_steps"] == pytest.approx(float(solution.num_steps.double().mean()))
    assert {"train_unconverged", "train_equilibrium_steps"} <= rows[0].keys()


def test_solves_of_training_are_counted_as_before(tmp_path: Path) -> None:
    trained = train(resolve({}, [*SMALL, *QUICK, "loss.residual=0", "run.epochs=1"]), tmp_path / "run")
    last = read_metrics(tmp_path / "run")[-1]
    assert "unconverged" in last and "test_unconverged" not in last and trained.summary["unconverged"] == last["unconverged"]


@pytest.mark.parametrize(
    ("failed", "says"), [(0, r"test 7\.5 evaluations on average, all found"), (3, r"test 7\.5 .*average, 3 of 12 not found")]
)
def test_the_table_and_the_report_say_where_equilibria_were_looked_for(failed: int, says: str) -> None:
    last = {"equilibrium_steps": 9.0, "test_equilibrium_steps": 7.5, "test_unconverged": failed}
    summary = {"last": last, "unconverged": None, "samples": {"train": 24, "test": 12}}
    assert re.fullmatch(rf"{says}; training takes 9\.0 and looks for none", equilibria(summary))


def test_the_report_does_not_call_few_steps_equilibria(tmp_path: Path) -> None:
    train(resolve({}, [*PUZZLES, *QUICK, "run.batch_size=8", "run.dtype=float32", "run.epochs=1"]), tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    figure = measure([read_run(tmp_path / "run")], "equilibrium_steps")
    assert figure is not None
    said = f"Training takes few steps and looks for no equilibria; of the last test samples {rows[-1]['test_unconverged']} were"
    assert said in figure.caption
