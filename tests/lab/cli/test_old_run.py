"""A run directory and a checkpoint written by an earlier version: they resume, report and certify as if written today."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

STORED = Path(__file__).parents[2] / "fixtures" / "run"

# Epochs 5 and 6, as the version that wrote the directory continued it (at commit 01df368).
CONTINUED = [(0.7190218723551131, 0.5257887899251353), (0.7178588362565644, 0.5258789494027304)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(STORED, folder)
    return folder


def test_it_resumes_with_the_same_numbers(cli, run: Path) -> None:  # type: ignore[no-untyped-def]
    assert cli.run("train", "--resume", run, "--set", "run.epochs=6", "-q", "--no-report") == 0, cli.output
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    for row, (train, test) in zip(rows[-2:], CONTINUED, strict=True):
        # two steps of Adam and solves to rtol 1e-9 in another order of sums
        assert row["train_loss"] == pytest.approx(train, rel=1e-7)
        assert row["test_loss"] == pytest.approx(test, rel=1e-7)


def test_it_reports(cli, run: Path) -> None:  # type: ignore[no-untyped-def]
    assert cli.run("report", run) == 0, cli.output
    assert "0.7234" in (run / "report.html").read_text()


def test_it_certifies(cli, run: Path) -> None:  # type: ignore[no-untyped-def]
    assert cli.run("certify", run, "--json") == 1, cli.output  # not certified, as recorded
    found = json.loads(cli.output)
    stored = json.loads((run / "certificates" / "epoch-00004.json").read_text())
    assert found["verdict"] == stored["verdict"]
    # the bound of the radius is sharper than that of the record
    names = [[h["name"].partition(" >= ")[0] for h in certificate["hypotheses"]] for certificate in (found, stored)]
    assert names[0] == names[1]
