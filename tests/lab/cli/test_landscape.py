"""`wellposed landscape`: what it writes is the loss of the run, what it marks is not, and it goes on where it stopped."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from wellposed._progress import ProgressDisplay
from wellposed.landscape import CellStatus, Surface, filter_normalized, random_direction
from wellposed.landscape.curvature import HessianProduct
from wellposed_lab.cli.commands import app
from wellposed_lab.runs.training import load_run

SMALL = ["data.n=12", "data.n_test=null", "run.epochs=2", "run.tensorboard=false", "run.certify_every=0", "model.width=10"]
CLASSIFIER = ["model.name=monotone_classifier", "data.classes=null", "model.width=6", "data.n=20"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)


def call(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def train(folder: Path, *changes: str) -> Path:
    words = [word for change in [*SMALL, *changes] for word in ("--set", change)]
    result = call("train", "-q", "--no-report", "--out", folder, *words)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "theory")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "classifier", *CLASSIFIER)


def failed(result: Any, code: int, *says: str) -> None:
    """One sentence on stderr, nothing on stdout, no traceback."""
    assert result.exit_code == code, result.output
    for part in says:
        assert part in result.stderr
    assert "Traceback" not in result.output and result.stdout == ""


def last_loss(run: Path) -> float:
    return float(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["train_loss"])


def squared(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (output - y).square().mean() / 2


@pytest.mark.parametrize(
    ("name", "loss"), [("run", squared), ("classifier", torch.nn.functional.cross_entropy)], ids=["theory", "classifier"]
)
def test_the_values_are_the_losses_of_the_run(
    name: str, loss: Callable[..., torch.Tensor], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(name)
    words = ["--points", 5, "--radius", 0.1, "--seed", 3, "--no-sharpness", "--out", tmp_path / "o"]
    result = call("landscape", folder, *words, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said == json.loads((tmp_path / "o" / "landscape.json").read_text())
    found = Surface.load(said["files"]["record"])
    assert said["points"] == [5, 5] and said["counts"] == {"VALID": 25} == found.counts()
    assert said["centre"]["loss"] == pytest.approx(last_loss(folder), rel=1e-6)
    assert found.values[2, 2] == pytest.approx(said["centre"]["loss"], rel=1e-6)
    assert said["range"] == [found.values.min(), found.values.max()]
    assert Path(said["files"]["picture"]).read_bytes().startswith(b"\x89PNG")
    # a corner by hand
    _, problem, _ = load_run(folder)
    generator = torch.Generator().manual_seed(3)
    drawn = [filter_normalized(problem.model, random_direction(problem.model, generator=generator)) for _ in range(2)]
    X, y = problem.parts.train
    with torch.no_grad():
        for key, parameter in problem.model.named_parameters():
            parameter += 0.1 * drawn[0][key] - 0.1 * drawn[1][key]
        assert found.values[4, 0] == pytest.approx(float(loss(problem.model(X), y)), rel=1e-5)


def test_the_table_and_the_default_folder(run: Path) -> None:
    result = call("landscape", run, "--points", 5)
    assert result.exit_code == 0, result.output
    found = Surface.load(run / "figures" / "landscape.npz")
    for status, count in found.counts().items():
        assert f"{count}: {CellStatus[status].message}" in result.stdout
    for words in ("gaussian on digits, after epoch 2", "5 x 5, filter directions", "Squared of 12", "largest eigenvalues"):
        assert words in result.stdout
    assert f"{last_loss(run):.6g}" in result.stdout and str(run / "figures" / "landscape.png") in result.stdout
    assert all(str(run / "figures" / f"landscape.{kind}") in result.stdout for kind in ("pdf", "svg"))
    failed(call("landscape", run, "--points", 5), 2, "holds a landscape already", "--resume")


def test_a_data_file_is_named_without_its_folder(tmp_path: Path) -> None:
    rows = ["a,b,y", *(f"{i},{i % 3},{i % 2}" for i in range(20))]
    (tmp_path / "mine.csv").write_text("\n".join(rows))
    own = train(tmp_path / "own", f"data.name={tmp_path / 'mine.csv'}", "data.target=y", "data.classes=null", "data.n=null")
    result = call("landscape", own, "--points", 3, "--no-sharpness", "--out", tmp_path / "o")
    assert result.exit_code in (0, 1) and "gaussian on mine, after epoch 2" in result.stdout, result.output
    assert "mine.csv" not in (tmp_path / "o" / "landscape.json").read_text()


def test_an_interruption_is_resumed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(display: ProgressDisplay, done: float, *_: object, **__: object) -> None:
        if done == 7:
            raise KeyboardInterrupt

    words = ["landscape", run, "--points", 5, "--radius", 0.1, "--no-sharpness"]
    assert call(*words, "--out", tmp_path / "whole").exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(ProgressDisplay, "update", interrupt)
        failed(call(*words, "--out", tmp_path / "part"), 130, "Interrupted", "--resume")
    file = tmp_path / "part" / "landscape.npz"
    part = Surface.load(file)
    assert part.counts() == {"PENDING": 18, "VALID": 7} and not (tmp_path / "part" / "landscape.json").exists()
    part.values[0, 0] = 123.0  # whoever evaluates it again will not find this
    part.save(file)
    result = call(*words, "--out", tmp_path / "part", "--resume", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["counts"] == {"VALID": 25}
    resumed, whole = Surface.load(file), Surface.load(tmp_path / "whole" / "landscape.npz")
    assert resumed.values[0, 0] == 123.0
    np.testing.assert_allclose(resumed.values.ravel()[1:], whole.values.ravel()[1:], rtol=1e-5)
    failed(call(*words, "--out", tmp_path / "part", "--resume", "--seed", 1), 2, "a surface of something else")
    file.write_bytes(file.read_bytes()[:500])
    failed(call(*words, "--out", tmp_path / "part", "--resume"), 2, "holds no record of a surface")


def test_a_line_along_the_largest_curvature_bends_as_the_hessian_says(tmp_path: Path) -> None:
    h = 1e-3
    run = train(tmp_path / "run", "data.name=sphere", "data.classes=null", "data.features=3", "model.width=6")
    words = ["landscape", run, "--line", "--points", 3, "--radius", h, "--direction", "hessian", "--out", tmp_path / "o"]
    result = call(*words, "--sharpness", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    _, problem, _ = load_run(run)
    H = HessianProduct(problem.model, squared, *problem.parts.train).dense()
    largest = float(torch.linalg.eigvalsh((H + H.mT) / 2)[-1])
    assert said["points"] == [3] and said["sharpness"]["eigenvalues"][0] == pytest.approx(largest, rel=1e-5)
    before, centre, after = Surface.load(tmp_path / "o" / "landscape.npz").values
    assert (before - 2 * centre + after) / h**2 == pytest.approx(largest, rel=0.05)
    assert Path(said["files"]["picture"]).exists()


def test_random_directions_have_length_one(run: Path, tmp_path: Path) -> None:
    words = ["--line", "--points", 3, "--radius", 1e-4, "--direction", "random", "--samples", 5, "--no-sharpness"]
    result = call("landscape", run, *words, "--out", tmp_path / "o", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["samples"] == 5
    _, problem, _ = load_run(run)
    X, y = (part[:5] for part in problem.parts.train)
    drawn = random_direction(problem.model, generator=torch.Generator().manual_seed(0))
    d = torch.cat([drawn[name].flatten() for name, _ in problem.model.named_parameters()])
    slope = float(HessianProduct(problem.model, squared, X, y).gradient @ d / d.norm())
    before, _, after = Surface.load(tmp_path / "o" / "landscape.npz").values
    assert (after - before) / 2e-4 == pytest.approx(slope, rel=1e-3)


def test_without_matplotlib_there_is_no_picture(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = call("landscape", run, "--points", 2, "--radius", 0.1, "--no-sharpness", "--out", tmp_path / "o", "--json")
    assert result.exit_code == 0 and "There is no picture" in result.stderr and "wellposed[plot]" in result.stderr
    assert json.loads(result.stdout)["files"]["picture"] is None and not (tmp_path / "o" / "landscape.png").exists()


def test_a_centre_without_an_equilibrium_is_said(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, problem, checkpoint = load_run(run)
    with torch.no_grad():
        for parameter in problem.model.parameters():
            parameter *= 100.0
    monkeypatch.setattr("wellposed_lab.cli.landscape.load_run", lambda folder, **options: (config, problem, checkpoint))
    result = call("landscape", run, "--points", 3, "--radius", 0.01, "--out", tmp_path / "o")
    assert result.exit_code == 1 and "9: the solve of some sample failed" in result.stdout
    assert "unknown: the solve of some" in result.stdout and "no loss at the centre" in result.stdout
    said = json.loads((tmp_path / "o" / "landscape.json").read_text())
    assert said["centre"] == {"loss": None, "status": "NOT_CONVERGED"} and said["range"] is None and said["sharpness"] is None


def test_mistakes(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    failed(call("landscape", "nowhere"), 2, "nowhere does not exist")
    failed(call("landscape", "empty"), 2, "empty is not a run directory")
    failed(call("landscape", run, "--direction", "hesian"), 2, "Did you mean 'hessian'?")
    failed(call("landscape", run, "--at", "first"), 2, "--at must be last or best")
    failed(call("landscape", run, "--samples", 13), 2, "--samples must be from 1 to 12", "got 13")
    failed(call("landscape", run, "--radius", 0, "--out", "o"), 2, "must be positive and finite")
    failed(call("landscape", run, "--points", 1), 2, "--points")
    failed(call("landscape", run, "--out", tmp_path / "file" / "o"), 3, "a part of this path is a file")
    failed(call("landscape", run, "--at", "best", "--out", "o"), 3, "best")


def test_help_has_an_example() -> None:
    assert "wellposed landscape runs/first" in call("landscape", "--help").stdout


@pytest.mark.parametrize("name", ["figures", "figures/landscape.png", "figures/landscape.svg"])
def test_no_picture_is_drawn_through_a_link(run: Path, name: str, tmp_path: Path) -> None:
    copy, victim = tmp_path / "copy", tmp_path / "victim"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("landscape*"))
    if name == "figures":
        (copy / name).rmdir()
        victim.mkdir()
    else:
        victim.write_text("mine")
    (copy / name).symlink_to(victim)
    failed(
        call("landscape", copy, "--line", "--points", "3", "--quiet"), 3, f"{name} is a link, and nothing in a run is followed"
    )
    assert not list(victim.iterdir()) if name == "figures" else victim.read_text() == "mine"
