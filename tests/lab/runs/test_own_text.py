"""A run on a text file of the user."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wellposed.errors import InvalidArgument
from wellposed.nn import TransformerDEQ
from wellposed_lab.runs.config import resolve
from wellposed_lab.runs.setup import prepare
from wellposed_lab.runs.training import load_run, train

QUICK = [
    "run.tensorboard=false",
    "run.certify_every=0",
    "run.threads=1",
    "run.epochs=2",
    "run.dtype=float32",
    "run.batch_size=4",
]
SMALL = ["model.width=8", "model.heads=2", "model.rtol=1e-2", "model.on_failure=ignore", "optimizer.lr=1e-2", "data.length=8"]


@pytest.mark.parametrize("words", ["null", "6"], ids=["characters", "words"])
def test_a_run_on_a_text_learns_and_continues_a_prompt(words: str, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("one two three four " * 40)
    trained = train(resolve({}, [f"data.name={path}", f"data.words={words}", *SMALL, *QUICK]), tmp_path / "run")
    rows = trained.outcome.rows
    assert isinstance(trained.problem.model, TransformerDEQ) and rows[-1]["test_loss"] < rows[0]["test_loss"]
    config, problem, checkpoint = load_run(tmp_path / "run")
    assert checkpoint is not None and config.data.name == str(path) and config.data.sha256 is not None
    numbers = {token: i for i, token in enumerate(problem.data.tokens)}
    prompt = torch.tensor([[numbers[token] for token in (["one", "two"] if words == "6" else "one ")]])
    assert problem.model.generate(prompt, 3).shape == (1, prompt.shape[1] + 3)
    path.write_text("another text " * 40)
    with pytest.raises(InvalidArgument, match="has changed since this configuration was made"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["model.name=gaussian"], r"the targets of .*book.txt are the next token at every position.* transformer"),
        (["data.target=y"], "data.target is for tables and arrays"),
        (["data.standardize=true"], "data.standardize is for tables and arrays"),
        (["data.classes=[0, 1]"], "is a text: it takes n, n_test, words and length only"),
    ],
)
def test_what_does_not_fit_a_text_is_refused(changes: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one two three four " * 40)
    with pytest.raises(InvalidArgument, match=says):
        prepare(resolve({}, [f"data.name={tmp_path / 'book.txt'}", *SMALL, *changes]))


def test_a_table_with_the_wrong_network_names_texts_too(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("x,y\n" + "1,2\n3,4\n" * 5)
    with pytest.raises(InvalidArgument, match=r"transformer"):
        prepare(resolve({}, [f"data.name={tmp_path / 'table.csv'}", "model.name=transformer"]))
