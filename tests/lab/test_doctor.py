"""The checks of an installation: each is seen to find the fault that it is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import wellposed as wp
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
    assert flow.level == "note" and flow.found == "without torchdiffeq" and "pip install 'wellposed[flow]'" in flow.advice


def test_data_are_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WELLPOSED_DATA", raising=False)
    assert found(doctor._data).found == "WELLPOSED_DATA is not set"
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    assert found(doctor._data).level == "note"
    (tmp_path / "mnist.npz").write_bytes(b"")
    assert found(doctor._data).found == "mnist in WELLPOSED_DATA"


@pytest.mark.slow
def test_the_real_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert found(doctor._batched_lu).found
