"""The configurations of the tasks in examples/, at seconds size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wellposed.errors import InvalidArgument
from wellposed_lab.runs.config import read, resolve
from wellposed_lab.runs.setup import prepare, resolve_auto
from wellposed_lab.runs.training import load_run, train

EXAMPLES = Path(__file__).parents[3] / "examples"
QUICK = ["run.tensorboard=false", "run.threads=1", "run.epochs=1", "data.n=20", "data.n_test=10", "run.batch_size=10"]
SMALL = {"chains": ["data.size=6", "model.width=8"], "sudoku": ["model.width=4"], "mazes": ["data.size=7", "model.width=4"]}
SMALL["deblurring"] = ["data.size=12", "model.width=4"]


@pytest.mark.parametrize("name", SMALL)
def test_a_task_is_trained_from_its_configuration(name: str, tmp_path: Path) -> None:
    config = read(EXAMPLES / f"{name}.yaml", [*QUICK, *SMALL[name], "model.on_failure=ignore"])
    trained = train(config, tmp_path / "run")
    measure, most = ("psnr", 60) if name == "deblurring" else ("accuracy", 1)
    assert trained.outcome.stop == "epochs" and 0 <= trained.summary["last"][f"test_{measure}"] <= most
    again = load_run(tmp_path / "run")[1].model
    for key, value in trained.problem.model.state_dict().items():
        assert again.state_dict()[key].equal(value)


def test_pixels_are_classified_from_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    images = {key: rng.integers(0, 256, (2, 96, 128, 3), dtype=np.uint8) for key in ("x_train", "x_test", "x_val")}
    classes = {key: rng.integers(0, 12, (2, 96, 128), dtype=np.uint8) for key in ("y_train", "y_test", "y_val")}
    np.savez(tmp_path / "camvid.npz", **images, **classes)
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    small = ["run.tensorboard=false", "run.threads=1", "run.epochs=1", "run.batch_size=2", "model.width=2", "model.max_steps=8"]
    config = read(EXAMPLES / "camvid.yaml", [*small, "model.on_failure=ignore"])
    trained = train(config, tmp_path / "run")
    assert 0 <= trained.summary["last"]["test_accuracy"] <= 1
    with pytest.raises(InvalidArgument, match="needs images, as of data.name=camvid"):
        prepare(resolve({}, ["data.name=chains", "data.n=2", "model.name=multiscale_segmenter"]))


@pytest.mark.parametrize("name", SMALL)
def test_the_network_follows_the_data(name: str) -> None:
    named = read(EXAMPLES / f"{name}.yaml").model.name
    config = resolve_auto(resolve({}, [f"data.name={read(EXAMPLES / f'{name}.yaml').data.name}"]))
    assert (config.model.name, config.data.norm, config.data.flatten) == (named, None, False)
    assert config.data.noise == 0.1
    assert resolve_auto(resolve({}, [f"data.name={config.data.name}", "data.noise=0.3"])).data.noise == 0.3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["data.name=mazes", "model.name=sudoku_solver"], r"shape \(n, 4, 4, 4\).* Choose data.name=sudoku"),
        (["data.name=sudoku", "model.name=maze_solver"], "Choose data.name=mazes"),
        (["data.name=sudoku", "model.name=node_classifier"], "needs chains of nodes"),
        (["data.name=deblurring_leaves", "data.n_test=1", "model.name=segmenter"], "of deblurring_leaves are images"),
        (["data.name=moons", "model.name=deblurring"], "targets of moons are two classes"),
        (["data.name=sudoku", "data.givens=[2]"], "givens must be integers from 4 to 15"),
        (["data.name=chains", "data.size=2000000000"], "data.features need at least"),
    ],
)
def test_parts_that_do_not_fit_get_one_sentence(changes: list[str], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        prepare(resolve({}, ["data.n=4", *changes]))
