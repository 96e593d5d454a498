"""Runs that are killed, locked out, interrupted or short of space go on to the same bits."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SMALL = [
    "data.name=sphere", "data.classes=null", "data.features=6", "data.n=12", "data.n_test=6", "model.width=12",
    "model.rtol=1e-6", "run.epochs=3", "run.batch_size=5", "run.threads=1", "run.tensorboard=false", "run.certify_every=2",
    "run.theorem=contraction",
]  # fmt: skip


def train(folder: Path, *more: str) -> list[str]:
    """Goes on if there is a run, else starts it: what a person would type after a crash."""
    if (folder / "config.yaml").exists():
        return ["train", "-q", "--no-report", "--resume", str(folder)]
    changes = [word for change in [*SMALL, *more] for word in ("--set", change)]
    return ["train", "-q", "--no-report", "--out", str(folder), *changes]


def content(folder: Path) -> dict[str, bytes]:
    """What must not depend on how often a run was killed: metrics, certificates, and the last checkpoint."""
    files = [
        folder / "metrics.jsonl",
        *folder.glob("certificates/*.json"),
        *folder.glob("checkpoints/*.json"),
        *folder.glob("checkpoints/*.safetensors"),
    ]
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(files)}


@dataclass(frozen=True)
class Finished:
    """A run that nothing disturbed."""

    folder: Path
    content: dict[str, bytes]

    def copy(self, folder: Path) -> Path:
        shutil.copytree(self.folder, folder)
        return folder


@pytest.fixture(scope="module")
def finished(cli: Any, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert cli.run(*train(folder)) == 0, cli.output
    return Finished(folder, content(folder))


@pytest.fixture
def whole(finished: Finished) -> dict[str, bytes]:
    return finished.content


def writes(cli: Any, folder: Path) -> int:
    """After how many syncs and renames a run is complete."""
    low, high = 1, 1000
    while low < high:  # the first count at which it is not killed any more
        middle = (low + high) // 2
        killed = cli.run(*train(folder / str(middle)), kill_at=[middle, False]) == -signal.SIGKILL
        low, high = (middle + 1, high) if killed else (low, middle)
    return low - 1


def check_killed_at(cli: Any, folder: Path, whole: dict[str, bytes], point: list[Any]) -> None:
    assert cli.run(*train(folder), kill_at=point) == -signal.SIGKILL
    assert cli.run(*train(folder)) == 0, cli.output
    assert content(folder) == whole, f"killed at {point}"
    assert not list(folder.rglob(".*.tmp"))


def test_killed_at_some_writes(cli: Any, whole: dict[str, bytes], tmp_path: Path) -> None:
    rng = random.Random(0)
    for count in sorted(rng.sample(range(1, 45), 3)):
        check_killed_at(cli, tmp_path / f"run{count}", whole, [count, rng.random() < 0.5])


@pytest.mark.slow
def test_killed_at_every_write(cli: Any, whole: dict[str, bytes], tmp_path: Path) -> None:
    total = writes(cli, tmp_path)
    assert total > 40
    for count in range(1, total + 1):
        for after in (False, True):
            check_killed_at(cli, tmp_path / f"run{count}{after}", whole, [count, after])


def test_killed_again_and_again(cli: Any, whole: dict[str, bytes], tmp_path: Path) -> None:
    rng, folder, ends = random.Random(1), tmp_path / "run", []
    for count in (1, 2, 3):
        process = cli.start(*train(folder))
        wait_for(lambda count=count: rows(folder) >= count, seconds=120)
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(process, signal.SIGKILL)  # a zombie, if it has ended already
        ends.append(cli.wait(process))
    assert set(ends) <= {0, -signal.SIGKILL} and -signal.SIGKILL in ends
    assert cli.run(*train(folder)) == 0, cli.output
    assert content(folder) == whole


def rows(folder: Path) -> int:
    """Epochs that are recorded."""
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def test_ctrl_c_saves_and_says_how_to_go_on(cli: Any, tmp_path: Path) -> None:
    long = ["run.epochs=12", "run.certify_every=0", "run.checkpoint_every=5"]
    parts, one = tmp_path / "parts", tmp_path / "one"
    process = cli.start(*train(parts, *long))
    wait_for(lambda: (parts / "metrics.jsonl").exists() and len((parts / "metrics.jsonl").read_text().splitlines()) > 1)
    os.kill(process, signal.SIGINT)
    assert cli.wait(process) == 130
    assert f"wellposed train --resume {parts}" in cli.output and "Traceback" not in cli.output
    assert len((parts / "metrics.jsonl").read_text().splitlines()) < 13
    assert cli.run(*train(parts)) == 0
    assert cli.run(*train(one, *long)) == 0
    assert content(parts) == content(one)


@pytest.mark.parametrize("file", ["environment.json", "config.yaml", "summary.json"])
def test_a_signal_before_or_after_training_is_an_interruption(
    cli: Any, whole: dict[str, bytes], file: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert cli.run(*train(folder), signal_at=[file, signal.SIGTERM]) == 130
    assert "Interrupted" in cli.output and "Traceback" not in cli.output
    assert not (folder / file).exists() and not list(folder.rglob(".*.tmp"))
    begun = (folder / "config.yaml").exists()
    assert (f"--resume {folder}" if begun else "nothing is saved. Start it again") in cli.output
    assert cli.run(*train(folder)) == 0, cli.output
    assert content(folder) == whole


def test_files_that_are_deleted_meanwhile(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    metrics = folder / "metrics.jsonl"
    first = cli.start(*train(folder, "run.epochs=400", "run.certify_every=0"))
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
    metrics.unlink(), (folder / "lock").unlink()
    assert cli.run("train", "--resume", folder) == 3 and f"{folder} is in use by" in cli.output
    wait_for(lambda: (folder / "lock").exists() and metrics.exists())
    os.kill(first, signal.SIGTERM)
    assert cli.wait(first) == 130
    epochs = [json.loads(line)["epoch"] for line in metrics.read_text().splitlines()]
    assert epochs == list(range(len(epochs))) and len(epochs) > 2
    assert "metrics.jsonl was deleted while the run wrote it" in (folder / "log.txt").read_text()


def test_a_finished_run_without_checkpoints_is_left_alone(cli: Any, finished: Finished, tmp_path: Path) -> None:
    folder = finished.copy(tmp_path / "run")
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    before = content(folder)
    assert cli.run(*train(folder)) == 3
    assert "no checkpoint to continue from; nothing was changed" in cli.output and "Traceback" not in cli.output
    assert content(folder) == before and "metrics.jsonl" in before and any("certificates" in name for name in before)


def test_two_processes_on_one_run(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = cli.start(*train(folder, "run.epochs=400"))
    wait_for(lambda: (folder / "metrics.jsonl").exists())
    assert cli.run("train", "--resume", folder) == 3
    assert f"in use by process {first}" in cli.output and "Traceback" not in cli.output
    os.kill(first, signal.SIGKILL)
    cli.wait(first)
    # the dead do not hold it
    process = cli.start("train", "-q", "--resume", folder)
    wait_for(lambda: f"Process {first} exited without releasing" in (folder / "log.txt").read_text())
    os.kill(process, signal.SIGKILL)
    cli.wait(process)


def test_no_space_left(cli: Any, whole: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # room for the small files, and none for a checkpoint
    assert cli.run(*train(folder), file_size=9000) == 3
    assert "Cannot write" in cli.output and "ulimit" in cli.output and "Traceback" not in cli.output
    assert cli.run(*train(folder)) == 0, cli.output
    assert content(folder) == whole


def test_a_damaged_checkpoint_costs_time_and_nothing_else(cli: Any, finished: Finished, tmp_path: Path) -> None:
    folder = finished.copy(tmp_path / "run")
    newest = sorted(folder.glob("checkpoints/*.safetensors"))[-1]
    os.truncate(newest, 200)
    assert cli.run(*train(folder)) == 0, cli.output
    assert "A checkpoint is refused" in (folder / "log.txt").read_text()
    assert newest.with_name(f"{newest.name}.refused").stat().st_size == 200
    assert content(folder) == finished.content


def test_when_all_checkpoints_are_foreign_the_run_is_left_alone(cli: Any, finished: Finished, tmp_path: Path) -> None:
    folder = finished.copy(tmp_path / "run")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.0005", "lr: 0.0004"))
    before = content(folder)
    assert cli.run(*train(folder)) == 3
    assert "made with another configuration" in cli.output
    assert content(folder) == before
