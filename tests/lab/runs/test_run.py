"""A run directory: what is in it, who may write it, what survives."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pyarrow.parquet
import pytest

from wellposed.certify import Certificate, Verdict
from wellposed.errors import InvalidArgument, RunError, RunLocked
from wellposed_lab.runs.config import RunConfig, resolve
from wellposed_lab.runs.records import read_metrics
from wellposed_lab.runs.run import Run, read_config


def rows(run: Run, *epochs: int) -> None:
    for epoch in epochs:
        run.append({"epoch": epoch, "loss": 1 / (3 + epoch), "miou": float("nan") if epoch else 0.5}, 0.25)


def test_what_is_written(tmp_path: Path) -> None:
    config = resolve({}, ["run.threads=1", "run.seed=7"])
    with Run.create(tmp_path / "deep" / "run", config) as run:
        rows(run, 0, 1)
        run.add_certificate(1, Certificate("radius", Verdict.UNDECIDED))
        run.finish({"stop": "epochs"})
    folder = tmp_path / "deep" / "run"
    assert read_config(folder) == config
    session = json.loads((folder / "environment.json").read_text())["sessions"][0]
    assert (session["seed"], session["threads"]) == (7, 1) and session["versions"]["torch"]
    assert read_metrics(folder) == [{"epoch": 0, "loss": 1 / 3, "miou": 0.5}, {"epoch": 1, "loss": 0.25, "miou": None}]
    table = pyarrow.parquet.read_table(folder / "metrics.parquet")
    assert table.to_pylist() == read_metrics(folder)
    certificate = Certificate.from_json((folder / "certificates" / "epoch-00001.json").read_text())
    assert certificate.verdict is Verdict.UNDECIDED
    assert "Finished: epochs." in (folder / "log.txt").read_text()


def test_two_at_once_are_one_too_many(tmp_path: Path) -> None:
    config = RunConfig()
    with Run.create(tmp_path / "run", config) as run:
        rows(run, 0)
        with pytest.raises(RunLocked, match=f"in use by process {os.getpid()} on .*; wait until it ends"):
            Run.open(tmp_path / "run", config)
        rows(run, 1)
    with Run.open(tmp_path / "run", config):
        assert len(read_metrics(tmp_path / "run")) == 2


def test_a_lock_of_the_dead_is_taken_over(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", RunConfig()):
        pass
    (tmp_path / "run" / "lock").write_text('{"pid": 99999999, "host": "here"}')
    with Run.open(tmp_path / "run", RunConfig()) as run:
        assert "Process 99999999 exited without releasing" in (run.folder / "log.txt").read_text()
        assert json.loads((run.folder / "lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / "run" / "lock").read_text() == ""


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", RunConfig()):
        pass
    with pytest.raises(InvalidArgument, match="holds a run already. Continue it by --resume"):
        Run.create(tmp_path / "run", RunConfig())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(InvalidArgument, match="holds other files"):
        Run.create(tmp_path / "mine", RunConfig())
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_advice_where_there_is_no_run(tmp_path: Path) -> None:
    def says(*parts: str) -> str:
        with pytest.raises(InvalidArgument) as caught:
            read_config(tmp_path.joinpath(*parts))
        return str(caught.value)

    with Run.create(tmp_path / "runs" / "first", RunConfig()):
        pass
    (tmp_path / "mine").mkdir()
    assert f"is empty. Start a run there with: wellposed train --out {tmp_path / 'mine'}." in says("mine")
    (tmp_path / "mine" / "thesis.tex").touch()
    assert "holds other files" in says("mine") and "wellposed train" not in says("mine")  # a run would be refused there
    assert f"does not exist, so there is no run. Start a run there with: wellposed train --out {tmp_path}" in says("nowhere")
    assert says("runs", "frist").endswith(f"Did you mean {str(tmp_path / 'runs' / 'first')!r}?")
    assert says("runs").endswith(f"it contains a run: give one, such as {tmp_path / 'runs' / 'first'}.")
    assert says("runs", "first", "config.yaml").endswith(f"Give the folder that it is in: {tmp_path / 'runs' / 'first'}.")


def test_rewind_drops_what_came_after_and_half_a_line(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", RunConfig()) as run:
        rows(run, 0, 1, 2)
        for epoch in (0, 2):
            run.add_certificate(epoch, Certificate("radius", Verdict.UNDECIDED))
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write('{"epoch": 3, "lo')
        text = (run.folder / "metrics.jsonl").read_text()
        run.rewind(1)
        assert (run.folder / "metrics.jsonl").read_text() == "".join(text.splitlines(keepends=True)[:2])
        assert [path.stem for path in (run.folder / "certificates").iterdir()] == ["epoch-00000"]
        with pytest.raises(RunError, match="rows of epochs 0 to 2 are expected, there are 2"):
            run.rewind(2)
        assert len(read_metrics(run.folder)) == 2
        run.rewind(0)
        run.rewind(-1)
        assert read_metrics(run.folder) == []


def test_a_damaged_line_in_the_middle_is_not_skipped(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", RunConfig()) as run:
        (run.folder / "metrics.jsonl").write_text('{"epoch": 0}\n{"ep\n{"epoch": 2}\n')
        with pytest.raises(RunError, match="damaged in line 2"):
            read_metrics(run.folder)


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    with Run.create(tmp_path / "run", RunConfig()) as run:
        rows(run, 0)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="metrics.jsonl: the disk is full.*--resume continues"):
            rows(run, 1)
        monkeypatch.undo()
        run.rewind(0)
        assert [row["epoch"] for row in read_metrics(run.folder)] == [0]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    with pytest.raises(RunError, match="may not be written"):
        Run.create(tmp_path / "closed" / "run", RunConfig())


def test_a_file_in_the_way_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="a part of this path is a file"):
        Run.create(tmp_path / "file" / "run", RunConfig())
