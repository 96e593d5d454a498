"""Pages of runs with absurd numbers, endless records or data that cannot be read: a page and a sentence, and soon."""

from __future__ import annotations

import io
import json
import struct
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.lib import format as npy

from checkpoint_problems import forge
from report_problems import parse_file, train_tiny, write_by_hand
from wellposed_lab.report import write
from wellposed_lab.report._network import predictions
from wellposed_lab.report._state import NetworkState
from wellposed_lab.runs.checkpoint import find
from wellposed_lab.runs.config import resolve
from wellposed_lab.runs.run import read_config
from wellposed_lab.runs.training import train


@pytest.mark.parametrize("data", ["sphere", "digits"])
@pytest.mark.parametrize("value", [1e308, -1.7e308, float("inf"), float("nan")])
def test_parameters_of_any_size_give_a_page(data: str, value: float, tmp_path: Path) -> None:
    keys = ["data.n=6", "data.n_test=4", "model.width=6", "run.epochs=1", "run.certify_every=0", "run.tensorboard=false"]
    train(resolve({}, [f"data.name={data}", *keys]), tmp_path / "run")
    forge(find(tmp_path / "run" / "checkpoints")[0], lambda r, t: t.update({"model/a": torch.full_like(t["model/a"], value)}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "Predictions" in parse_file(write(tmp_path / "run")).words()


@pytest.mark.parametrize("kind", ["numbers", "signs"])
@pytest.mark.parametrize(
    "outputs",
    [[1e308, -1e308], [1.7e308, 1.7e308], [float("inf"), 1.0], [float("nan"), 1.0], [float("nan"), float("nan")], [0.0, 0.0]],
)
def test_predictions_of_any_size_are_shown(kind: str, outputs: list[float]) -> None:
    state = NetworkState(kind=kind, predictions={"train": (outputs, [-1.0, 1.0])})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = predictions(state)
    assert isinstance(shown, list) or "finite" in shown


def test_the_error_of_large_predictions_is_their_root_mean_square() -> None:
    state = NetworkState(kind="numbers", predictions={"train": ([3e200, 4e200], [0.0, 0.0])})
    shown = predictions(state)
    assert isinstance(shown, list) and f"error {np.sqrt(12.5) * 1e200:.4g} on 2 samples" in shown[0].alt


def test_times_beyond_all_numbers_are_left_out(tmp_path: Path) -> None:
    run = write_by_hand(tmp_path / "run", [1.0, 0.5])
    (run / "times.jsonl").write_text('{"epoch": 0, "seconds": 1e308}\n' * 2)
    assert "times.jsonl: the times are left out, because their sum is not finite." in parse_file(write(run)).words()


def test_a_run_with_such_times_goes_on(tmp_path: Path) -> None:
    run = train_tiny(tmp_path / "run", "optimizer.schedule=constant", "run.certify_every=0")
    lines = [json.dumps({"epoch": epoch, "seconds": 1e308}) for epoch in range(5)]
    (run / "times.jsonl").write_text("\n".join(lines) + "\n")
    config = read_config(run)
    longer = config.model_copy(update={"run": config.run.model_copy(update={"epochs": 5})})
    assert train(longer, run, resume=True).summary["seconds"] is None
    assert json.loads((run / "summary.json").read_text())["seconds"] is None


def test_thousands_of_sessions_are_counted_and_not_shown(tmp_path: Path) -> None:
    run = write_by_hand(tmp_path / "run", [1.0, 0.5])
    sessions = [{f"key{i}": i, "started": f"time{i}."} for i in range(3000)]
    (run / "environment.json").write_text(json.dumps({"sessions": sessions}))
    began = time.process_time()
    page = write(run)
    assert time.process_time() - began < 20 and page.stat().st_size < 1e7  # there were 9 million cells
    words = parse_file(page).words()
    assert "the last 10 of 3000 sessions" in words
    assert "time2999." in words and "time2990." in words and "time2989." not in words
    (run / "environment.json").write_text(json.dumps({"sessions": [{f"key{i}.": i for i in range(3000)}]}))
    words = parse_file(write(run)).words()
    assert "the first 200 of 3000 entries" in words and "key199." in words and "key200." not in words


def test_data_that_cannot_be_read_leave_the_rest_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    npy.write_array_header_1_0(content, {"descr": "<U1", "fortran_order": False, "shape": (10,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        for name, value in (("X", np.zeros((10, 3))), ("y", None)):
            part = io.BytesIO()
            if value is None:
                part.write(content.getvalue() + struct.pack("<I", 0x7FFFFFFF) * 10)
            else:
                np.save(part, value)
            file.writestr(f"{name}.npy", part.getvalue())
    config = {"data": {"name": str(tmp_path / "a.npz")}, "model": {"name": "dense", "width": 3}}
    run = write_by_hand(tmp_path / "run", [1.0, 0.5], config=config)
    assert "is not Unicode text" in parse_file(write(run)).words()

    def broken(*args: object, **options: object) -> None:
        raise SystemError("what no one foresaw")

    # whatever the readers of a data file raise, the records of the run can be shown
    monkeypatch.setattr("wellposed_lab.report._state.prepare", broken)
    page = parse_file(write(run))
    assert "could not be loaded or evaluated. what no one foresaw" in page.words()
