"""TensorBoard events where they cannot be written: one sentence, and no traceback of a thread."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from wellposed.errors import RunError
from wellposed_lab.runs._events import Events
from wellposed_lab.runs.config import Config
from wellposed_lab.runs.run import Run

writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
ROW = {"epoch": 1, "train_loss": 0.5, "step": 3}


def full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_in_the_place_of_the_folder_is_one_sentence(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", Config()) as run:
        (tmp_path / "run" / "tensorboard").write_text("junk")
        with pytest.raises(RunError, match=r"tensorboard: a file is .* move it away"), Events(run, enabled=True, after=0):
            pass


@pytest.mark.parametrize("call", ["write", "flush"])
def test_a_full_disk_is_one_sentence(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hook = threading.excepthook
    with Run.create(tmp_path / "run", Config()) as run:
        with pytest.raises(RunError, match="tensorboard: the disk is full"), Events(run, enabled=True, after=0) as events:
            events.add(ROW)
            monkeypatch.setattr(writer.RecordWriter, call, full)
            for _ in range(3):
                events.add(ROW)
    assert threading.excepthook is hook
    assert "Traceback" not in capfd.readouterr().err


def test_a_disk_that_is_full_from_the_start_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer.RecordWriter, "write", full)
    with Run.create(tmp_path / "run", Config()) as run:
        with pytest.raises(RunError, match="tensorboard: the disk is full"), Events(run, enabled=True, after=0) as events:
            events.add(ROW)
    assert "Traceback" not in capfd.readouterr().err


def test_closing_does_not_hide_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Run.create(tmp_path / "run", Config()) as run:
        with pytest.raises(RunError, match="the first"), Events(run, enabled=True, after=0) as events:
            events.add(ROW)
            monkeypatch.setattr(writer.RecordWriter, "flush", full)
            raise RunError("the first")


def test_threads_of_others_still_complain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type.__name__))
    with Run.create(tmp_path / "run", Config()) as run, Events(run, enabled=True, after=0):
        other = threading.Thread(target=full)
        other.start()
        other.join()
    assert seen == ["OSError"]


@pytest.mark.skipif(os.name == "nt", reason="names are not bytes there")
def test_a_folder_whose_name_is_not_utf8_has_no_events(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"r\xff\xfe")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has names of UTF-8 only")
    with Run.create(folder, Config()) as run, Events(run, enabled=True, after=0) as events:
        events.add(ROW)
    assert "No events are written" in (folder / "log.txt").read_text()
