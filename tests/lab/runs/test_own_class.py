"""A class of the user in a configuration: trained, checked, and never imported without permission."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import wellposed as wp
from wellposed_lab.cli.commands import app
from wellposed_lab.runs.config import resolve
from wellposed_lab.runs.setup import prepare

CODE = """
import pathlib
import torch

pathlib.Path(__file__).with_name("imported").touch()  # what a stranger's code could do


class MyCell(torch.nn.Module):
    def __init__(self, in_features, width, rank=2, *, needed=0):
        super().__init__()
        self.P, self.Q = torch.nn.Linear(rank, width, bias=False), torch.nn.Linear(width, rank, bias=False)
        self.U = torch.nn.Linear(in_features, width)
        with torch.no_grad():
            self.P.weight.mul_(0.3)

    def forward(self, z, x):
        return torch.tanh(self.P(self.Q(z)) + self.U(x))


class Network(torch.nn.Module):
    def __init__(self, in_features, classes):
        super().__init__()
        self.linear = torch.nn.Linear(in_features, classes)

    def forward(self, x):
        return self.linear(x)


class Needs(torch.nn.Module):
    def __init__(self, gauge):
        super().__init__()


class Widening(MyCell):
    def forward(self, z, x):
        return torch.cat((super().forward(z, x), x), 1)


def function():
    return None
"""
SMALL = ["data.name=moons", "data.n=12", "data.n_test=4", "model.width=5", "run.epochs=1", "run.tensorboard=false"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The present folder, which holds my_cells.py and is not among the places of imports."""
    (tmp_path / "my_cells.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    yield tmp_path
    sys.modules.pop("my_cells", None)


def command(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, " ".join(result.output.split())


def changes(*more: str) -> list[str]:
    return [part for change in (*SMALL, *more) for part in ("--set", change)]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("MyCell", ["model.arguments={rank: 3}"]),
        ("Network", []),
        ("MyCell", ["data.name=digits", "data.classes=null", "loss.name=cross_entropy"]),
    ],
)
def test_training(folder: Path, name: str, more: list[str]) -> None:
    code, output = command("train", "-q", "--no-report", "--out", "run", *changes(f"model.class=my_cells.{name}", *more))
    assert code == 0, output
    assert (folder / "imported").exists() and str(folder) not in sys.path
    text = (folder / "run" / "config.yaml").read_text()
    assert f"class: my_cells.{name}" in text and "name: own_" in text


def test_a_run_of_a_stranger_is_not_imported(folder: Path) -> None:
    assert command("train", "-q", "--no-report", "--out", "run", *changes("model.class=my_cells.MyCell"))[0] == 0
    (folder / "imported").unlink()
    del sys.modules["my_cells"]
    refused = "model.class names code to run, 'my_cells.MyCell'"
    for words in (
        ["train", "-q", "--resume", "run", "--set", "run.patience=null"],
        ["certify", "run"],
        ["certify", "run/config.yaml"],
        ["landscape", "run"],
    ):
        code, output = command(*words)
        assert code == 2 and refused in output and "--allow-code" in output, output
    code, output = command("report", "run")
    page = (folder / "run" / "report.html").read_text()
    assert code == 0 and "model.class names code to run" in page and "report never imports" in page
    with pytest.raises(wp.InvalidArgument, match="model.class names code"):
        prepare(resolve({}, [*SMALL, "model.class=my_cells.MyCell"]))
    assert not (folder / "imported").exists() and "my_cells" not in sys.modules
    assert command("train", "-q", "--no-report", "--resume", "run", "--allow-code")[0] == 0
    assert (folder / "imported").exists()


def test_a_network_with_an_own_cell_is_certified_as_in_python(folder: Path) -> None:
    code, output = command("train", "-q", "--no-report", "--out", "run", *changes("model.class=my_cells.MyCell"))
    assert code == 0 and "CERTIFIED by contraction: For every x of shape" in output and "nothing about training" in output
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("certified") for row in rows] == [None, True], "at the end of the run only"
    code, output = command("certify", "run", "--allow-code")
    assert code == 0 and "contraction: CERTIFIED" in output, output
    code, output = command("certify", "run", "--allow-code", "--theorem", "contraction")
    assert code == 0 and "contraction: CERTIFIED" in output, output
    code, output = command("certify", "run", "--allow-code", "--theorem", "radius")
    assert code == 2 and "There is no certificate for OwnNetwork" in output


def test_the_same_seed_draws_the_same_network(folder: Path) -> None:
    config = resolve({}, [*SMALL, "model.class=my_cells.MyCell"])
    first = prepare(config, allow_code=True).model.state_dict()
    torch.rand(3)
    second = prepare(config, allow_code=True).model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["model.class=my_cells.MyCell", "model.arguments={rnak: 3}"],
            "has no argument 'rnak' (in model.arguments); it takes in_features, width, rank, needed. Did you mean 'rank'?",
        ),
        (["model.class=my_cells.Needs"], "Needs needs the argument 'gauge'; give it in model.arguments."),
        (["model.class=my_cells.Absent"], "The module 'my_cells' has no 'Absent'."),
        (["model.class=my_cells.function"], "must be a class of torch.nn.Module; it is function"),
        (["model.class=my_cells.Widening"], "Widening(z, x) keeps the shape of z neither for z of (5,)"),
        (["model.class=nowhere.Cell"], "'nowhere.Cell' cannot be imported: No module named 'nowhere'"),
        (["model.class=__import__('os')"], "An import path has the form package.Class"),
        (["model.class=my_cells.MyCell", "model.name=dense"], "are two networks; omit one of them"),
        (["model.arguments={rank: 3}"], "model.arguments are those of model.class, which is not given"),
        (["model.name=own_regression"], "needs model.class"),
        (["model.clas=my_cells.MyCell"], "Did you mean 'class'?"),
    ],
)  # fmt: skip
def test_mistakes(folder: Path, more: list[str], message: str) -> None:
    with pytest.raises(wp.WellposedError) as caught:
        prepare(resolve({}, [*SMALL, *more]), allow_code=True)
    assert message in str(caught.value)


def test_a_configuration_without_a_class_keeps_its_fingerprint() -> None:
    """Checkpoints of runs before the key existed stay usable."""
    plain = resolve({}, SMALL).model_dump()
    assert "class" in plain["model"] and "class_" not in plain["model"]
    assert resolve({}, SMALL).fingerprint() == resolve(plain).fingerprint()
    assert resolve({}, [*SMALL, "model.class=a.B"]).fingerprint() != resolve({}, SMALL).fingerprint()
