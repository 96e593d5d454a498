"""A text by configuration: the network, its loss, the Jacobian penalty, a resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wellposed.errors import InvalidArgument
from wellposed.implicit import PhantomGradient
from wellposed.nn import TransformerDEQ, jacobian_penalty
from wellposed_lab.runs.config import read, resolve
from wellposed_lab.runs.losses import NextToken
from wellposed_lab.runs.penalty import noted_inputs, penalty_of
from wellposed_lab.runs.records import read_metrics
from wellposed_lab.runs.run import read_config
from wellposed_lab.runs.setup import prepare
from wellposed_lab.runs.training import load_run, train

SMALL = ["data.name=wikitext2", "data.length=6", "model.width=8", "model.heads=2", "model.rtol=1e-6", "run.batch_size=8"]
QUICK = ["run.tensorboard=false", "run.certify_every=0", "run.threads=1", "run.dtype=float32", "optimizer.lr=1e-2"]


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wikitext2").mkdir()
    for name, times in (("valid.txt", 20), ("test.txt", 6)):
        (tmp_path / "wikitext2" / name).write_text("one two three four five\n" * times)
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))


def test_the_network_follows_the_text() -> None:
    problem = prepare(resolve({}, [*SMALL, "data.words=5", "model.gradient_steps=3"]))
    assert isinstance(problem.model, TransformerDEQ) and isinstance(problem.loss, NextToken)
    assert len(problem.data.tokens) == len(problem.model.E) == 5 and problem.model.length == 6
    assert problem.model.layer.gradient == PhantomGradient(3, damping=1.0)
    assert problem.parts.train[0].dtype == torch.int64
    with pytest.raises(InvalidArgument, match="the next token at every position"):
        prepare(resolve({}, [*SMALL[:2], "model.name=dense"]))
    with pytest.raises(InvalidArgument, match="is for language"):
        prepare(resolve({}, ["model.name=transformer", "data.n=10"]))


def test_a_run_learns_and_continues(tmp_path: Path) -> None:
    changes = [*SMALL, *QUICK, "loss.penalty=0.5", "run.epochs=3", "optimizer.schedule=constant"]
    train(resolve({}, changes), tmp_path / "whole")
    whole = read_metrics(tmp_path / "whole")
    assert whole[-1]["test_loss"] < 0.8 * whole[0]["test_loss"]
    assert whole[-1]["test_perplexity"] == pytest.approx(torch.tensor(whole[-1]["test_loss"]).exp().item(), rel=1e-5)
    train(resolve({}, [*changes, "run.epochs=1"]), tmp_path / "parts")
    begun = read_config(tmp_path / "parts")
    longer = begun.model_copy(update={"run": begun.run.model_copy(update={"epochs": 3})})
    train(longer, tmp_path / "parts", resume=True)
    assert read_metrics(tmp_path / "parts") == whole  # also what the penalty draws
    _, problem, _ = load_run(tmp_path / "whole")
    prompt = problem.parts.train[0][:1, :3]
    assert torch.equal(problem.model.generate(prompt, 3), problem.model.generate(prompt, 3, reuse=False))


def test_the_penalty_is_that_of_the_layers() -> None:
    problem = prepare(resolve({}, SMALL))
    x = problem.parts.train[0][:4]
    with noted_inputs(problem.model) as inputs:
        problem.model(x)
    torch.manual_seed(0)
    found = penalty_of(inputs)
    torch.manual_seed(0)
    cell, z = problem.model.layer.cell, problem.model.layer.last_solution.value
    torch.testing.assert_close(found, jacobian_penalty(cell, z, problem.model.embedded(x)))
    assert not problem.model.layer._forward_hooks
    with (
        pytest.raises(InvalidArgument, match="loss.penalty is for networks with an EquilibriumLayer"),
        noted_inputs(torch.nn.Linear(2, 2)),
    ):
        pass


def test_the_example_is_a_configuration() -> None:
    config = read(Path(__file__).parents[3] / "examples" / "wikitext.yaml", ["data.n=10", "data.n_test=2", "data.length=6"])
    problem = prepare(config)
    assert problem.model(problem.parts.train[0]).shape == (9, 6, 7)
