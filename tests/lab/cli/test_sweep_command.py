"""`wellposed sweep` as a command: a table, a page, and how to continue."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

SMALL = [
    "data.name=sphere", "data.features=5", "data.n=8", "data.n_test=4", "model.width=10", "model.rtol=1e-6", "run.epochs=2",
    "run.batch_size=4", "run.tensorboard=false", "run.certify_every=0",
]  # fmt: skip


def words(folder: Path, *more: str) -> list[str]:
    changes = [word for change in [*SMALL, *more] for word in ("--set", change)]
    return ["sweep", "-q", "--jobs", "1", "--grid", "optimizer.lr=1e-3,1e-2", "--seeds", "2", "--out", str(folder), *changes]


def test_a_sweep_prints_mean_and_spread_and_makes_a_page(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    assert cli.run(*words(folder)) == 0, cli.output
    assert "±" in cli.output and "2 of 2" in cli.output and "0 of 2" not in cli.output  # no certificate was made
    page = Path(cli.output.splitlines()[-1])
    assert page == folder / "comparison.html" and "Sweep of 4 runs" in page.read_text()
    points = json.loads((folder / "results.json").read_text())["points"]
    assert cli.run("sweep", "-q", "--resume", folder, "--json", "--no-report") == 0
    assert json.loads(cli.output)["points"] == points


def test_an_interrupted_sweep_says_how_to_continue(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    process = cli.start(*words(folder, "run.epochs=300"))
    end = time.monotonic() + 120
    while not list(folder.glob("runs/*/metrics.jsonl")):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(process, signal.SIGINT)
    assert cli.wait(process) == 130
    assert f"wellposed sweep --resume {folder}" in cli.output and "Traceback" not in cli.output
    assert not (folder / "results.json").exists()


def test_failed_runs_are_named(cli: Any, tmp_path: Path) -> None:
    assert cli.run(*words(tmp_path / "sweep", "optimizer.name=sgd"), "--grid", "optimizer.momentum=0.5,-1") == 2
    assert "optimizer.momentum" in cli.output and not (tmp_path / "sweep").exists()
    assert cli.run(*words(tmp_path / "sweep", "model.on_failure=raise", "model.max_steps=1")) == 1
    assert "000-optimizer.lr=1e-3-seed=0: " in cli.output and "0 of 2" in cli.output and "Traceback" not in cli.output
    page = (tmp_path / "sweep" / "comparison.html").read_text()
    assert "000-optimizer.lr=1e-3-seed=0 is not averaged: " in page
