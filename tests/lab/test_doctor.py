"""The checks of an installation: each is seen to find the fault that it is for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import wellposed as wp
from wellposed.data._load import NAMES
from wellposed.data.available import files_of
from wellposed_lab import doctor
from wellposed_lab.cli.commands import app


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real probe starts a process that imports torch; one test below has it."""
    monkeypatch.setattr(doctor, "PROBE", "print(1e-6, 1e-6)")


def found(check: Any) -> doctor.Finding:
    (finding,) = check()
    return finding


def test_this_installation_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0 and "Nothing is wrong." in shown.output
    assert torch.__version__ in shown.output and wp.__version__ in shown.output
    findings = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert {"torch", "threads", "arithmetic", "batched LU", "equilibrium", "GPU", "extra cli", "data"} <= {
        finding["name"] for finding in findings
    }
    assert all(finding["level"] in ("good", "note") for finding in findings)
    assert all(finding["advice"] for finding in findings if finding["level"] == "note")


def test_flushed_numbers_are_wrong() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        assert found(doctor._arithmetic).level == "wrong"
        assert CliRunner().invoke(app, ["doctor"]).exit_code == 1
    finally:
        torch.set_flush_denormal(False)
    assert found(doctor._arithmetic).level == "good"


def test_a_wrong_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(doctor._equilibrium).level == "good"
    monkeypatch.setattr(wp, "ImplicitGradient", lambda rtol: wp.JacobianFree())
    finding = found(doctor._equilibrium)
    assert finding.level == "wrong" and "reinstall torch" in finding.advice


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        ("print(1.0, 1e-6)", "residual 1e+00, one by one 1e-06"),
        ("raise SystemExit(3)", "failed"),
        ("print('no number')", "failed"),
        ("import time; time.sleep(60)", "did not end within 1 s"),
    ],
)
def test_a_bad_batched_solve_is_noted(monkeypatch: pytest.MonkeyPatch, probe: str, says: str) -> None:
    monkeypatch.setattr(doctor, "PROBE", probe)
    monkeypatch.setattr(doctor, "PATIENCE", 1 if "sleep" in probe else 100)
    finding = found(doctor._batched_lu)
    assert finding.level == "note" and says in finding.found and "wellposed avoids it" in finding.advice


def test_more_threads_than_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    finding = found(doctor._threads)
    assert finding.level == "note" and "OMP_NUM_THREADS=" in finding.advice


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.extras()["flow"] == ["torchdiffeq"]
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "torchdiffeq" else "1.0")
    (flow,) = (finding for finding in doctor._extras() if finding.name == "extra flow")
    assert (
        flow.level == "note"
        and flow.found == "without torchdiffeq"
        and "pip install -c constraints.txt '.[flow]'" in flow.advice
    )


def test_data_are_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WELLPOSED_DATA", raising=False)
    built_in, files = doctor._data()
    assert built_in.level == "good" and files.found == "WELLPOSED_DATA is not set"
    assert {*_words(built_in.found), *_words(files.advice)} >= set(NAMES)
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    assert [finding.level for finding in doctor._data()] == ["good", "note"]
    (tmp_path / "mnist.npz").write_bytes(b"")
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "valid.txt").write_text("a part of two")
    _, files = doctor._data()
    assert files.level == "good" and files.found.startswith("mnist in WELLPOSED_DATA; not deblurring, fashion_mnist")
    (tmp_path / "wikitext2" / "test.txt").write_text("the other part")
    _, files = doctor._data()
    assert files.found.startswith("mnist, wikitext2 in WELLPOSED_DATA; not")
    listed = json.loads(CliRunner().invoke(app, ["data", "list", "--json"]).stdout)
    there = [row["name"] for row in listed if row["available"]]
    assert set(there) == {*_words(built_in.found), "mnist", "wikitext2"}
    for name in NAMES:
        for file in files_of(name):
            (tmp_path / file).write_bytes(b"")
    assert "not" not in _words(list(doctor._data())[1].found)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def test_digits_need_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    built_in, _ = doctor._data()
    assert built_in.level == "note" and "digits" not in built_in.found and "For digits: pip install" in built_in.advice


@pytest.mark.slow
def test_the_real_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert found(doctor._batched_lu).found
