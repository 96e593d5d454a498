"""What the commands print: no text out of a file steers the terminal, and what only a file says is not claimed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from report_problems import certificate, train_tiny
from wellposed_lab import cli
from wellposed_lab.cli import commands
from wellposed_lab.cli._app import _complain, message_console, result_console
from wellposed_lab.cli.commands import app
from wellposed_lab.runs.run import read_metrics

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\ud800\r\x00"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def call(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def is_plain(text: str) -> bool:
    return not any(character in text for character in HOSTILE.replace("[2J", "").replace("]0;owned", "").replace("31m", ""))


def test_control_characters_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title=f"t{HOSTILE}")
    table.add_row(HOSTILE, Text(HOSTILE))
    for console in (result_console(), message_console()):
        console.print(f"a{HOSTILE}b", markup=False)
        console.print(table)
    _complain(f"c{HOSTILE}d")
    for text in capsys.readouterr():
        assert is_plain(text) and "a\ufffd[2J" in text


def test_words_of_all_languages_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    text = "naïve Größe 深層 équilibre\u00a0≤ 1 λ‖W‖ ✓\tx"
    result_console().print(text, highlight=False)
    assert capsys.readouterr().out.replace("\t", "").replace(" ", "") == f"{text}\n".replace("\t", "").replace(" ", "")
    result_console().print("one\ntwo")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_hostile_header_of_a_table_is_shown_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\x1b[2J\x1b]0;owned\x07,b\n1,2\n")
    result = call("train", "--set", f"data.name={tmp_path / 'a.csv'}", "-q", "--out", tmp_path / "run")
    assert result.exit_code == 2 and "owned" in result.output and is_plain(result.output)


def test_warnings_are_shown_as_text_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    monkeypatch.setattr(commands, "app", lambda words: None)
    monkeypatch.setattr(sys, "argv", ["wellposed", "data"])
    cli.main()
    shown = warnings.formatwarning("x\x1b[2Jy", UserWarning, "file.py", 3)
    assert "x\ufffd[2Jy\n" in shown and is_plain(shown)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "run", "data.name=sphere", "data.features=3", "run.epochs=2")


def unwrapped(text: str) -> str:
    """Without the lines and line breaks of a table."""
    return " ".join(text.replace("│", " ").split())


def test_an_invented_certificate_of_a_finished_run_is_not_believed(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert not read_metrics(run)[-1]["certified"]
    (run / "certificates" / "epoch-00002.json").write_text(certificate(0.5).to_json())
    result = call("train", "--resume", run, "-q", "--no-report")
    assert result.exit_code == 0, result.output
    said = unwrapped(result.output)
    assert "CERTIFIED by" not in said and "epoch None" not in said
    assert "contradicts metrics.jsonl" in said and "as recorded in epoch-00002.json" in said
    found = json.loads((run / "summary.json").read_text())["certificate"]
    assert (found["verdict"], found["as_recorded"], found["rate"]) == ("undecided", True, None)


def test_a_true_certificate_of_a_finished_run_is_as_recorded(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = json.loads((run / "summary.json").read_text())["certificate"]
    assert before["as_recorded"] is False
    result = call("train", "--resume", run, "-q", "--no-report")
    said = unwrapped(result.output)
    assert "as recorded in epoch-00002.json" in said and "contradicts" not in said
    assert json.loads((run / "summary.json").read_text())["certificate"] == {**before, "as_recorded": True}


def test_rows_that_agree_with_an_invented_certificate_do_not_make_an_epoch_none(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "certificates" / "epoch-00002.json").write_text(certificate(0.5).to_json())
    rows = read_metrics(run)
    rows[-1] |= {"certified": True, "certified_by": "radius", "certified_rate": 0.5}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = call("train", "--resume", run, "-q", "--no-report")
    said = unwrapped(result.output)
    assert "CERTIFIED by radius, first at epoch 2" in said and "as recorded in epoch-00002.json" in said


@pytest.mark.parametrize("name", ["landscape.png", "landscape.json", "landscape.npz"])
def test_a_landscape_is_refused_before_the_work(
    name: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*args: object, **options: object) -> None:
        raise AssertionError("it began")

    monkeypatch.setattr("wellposed_lab.cli.landscape.surface", work)
    (tmp_path / "out" / name).mkdir(parents=True)
    result = call("landscape", finished, "--points", 2, "--line", "-q", "--out", tmp_path / "out")
    assert result.exit_code == 3, result.output
    assert f"{name}: a folder is in the place of this file" in result.output and "--resume" not in result.output


def test_a_landscape_that_cannot_be_written_does_not_speak_of_a_run(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("wellposed_lab.cli.landscape._sharpness", lambda *args: (monkeypatch.setattr(os, "fsync", full), {})[1])
    result = call("landscape", finished, "--points", 2, "--line", "-q", "--no-sharpness", "--out", tmp_path / "out")
    assert result.exit_code == 3, result.output
    assert "the disk is full" in result.output and "--resume" not in result.output and "checkpoint" not in result.output
