"""The records of a run that a stranger wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from report_problems import certificate, write_by_hand
from wellposed.errors import RunError
from wellposed_lab.runs.records import certificate_files, read_certificate, read_metrics, read_sessions, read_times


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[1]",
        b"3",
        b"null",
        b'"x"',
        b"{}",
        b'{"epoch": null}',
        b'{"epoch": "1"}',
        b'{"epoch": true}',
        b'{"epoch": -1}',
        b'{"epoch": 1.5}',
        b'{"epoch": 1, "train_loss": "x"}',
        b'{"epoch": 1, "train_loss": [1]}',
        b'{"epoch": 1, "train_loss": NaN}',
        b'{"epoch": 1, "train_loss": 1e999}',
        b'{"epoch": 1, "step": 99999999999999999999}',
        b'{"epoch": 1, "\\ud800": 1}',
        b'{"epoch": 1, "certified_by": "\\ud800"}',
        b"[" * 100_000,
        b"9" * 5000,
    ],
)
def test_a_line_that_is_not_a_row_is_one_sentence(line: bytes, tmp_path: Path) -> None:
    good = b'{"epoch": 0, "seconds": 0.5}\n'
    for name, read in (("metrics.jsonl", read_metrics), ("times.jsonl", read_times)):
        (tmp_path / name).write_bytes(good + line + b"\n" + good)
        with pytest.raises(RunError, match=f"{name} is damaged in line 2"):
            read(tmp_path)


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    for end in (b'{"epo', b"\xff", b""):
        (tmp_path / "metrics.jsonl").write_bytes(b'{"epoch": 0, "certified_by": "radius", "certified_rate": null}\n' + end)
        assert read_metrics(tmp_path) == [{"epoch": 0, "certified_by": "radius", "certified_rate": None}]


def test_times_without_seconds_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "times.jsonl").write_text('{"epoch": 0}\n{"epoch": 1, "seconds": 2}\n')
    with pytest.raises(RunError, match="damaged in line 1"):
        read_times(tmp_path)


@pytest.mark.parametrize("text", ['{"sessions": null}', '{"sessions": 3}', "[]", "{", "\x00", '{"sessions": [1, null]}'])
def test_an_environment_that_cannot_be_read_is_empty(text: str, tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(text)
    assert read_sessions(tmp_path) == []


def test_certificates_are_those_with_a_number(tmp_path: Path) -> None:
    run = write_by_hand(tmp_path / "run", [1.0], certificates={5: certificate(0.5), 100000: certificate(0.5)})
    for name in ("epoch-x.json", "epoch-.json", "epoch-1e3.json", "epoch-\u0663.json", "other.json"):
        (run / "certificates" / name).write_text("{}")
    assert [epoch for epoch, _ in certificate_files(run)] == [5, 100000]


def test_a_damaged_certificate_is_one_sentence(tmp_path: Path) -> None:
    run = write_by_hand(tmp_path / "run", [1.0], certificates={0: certificate(0.5)})
    path = run / "certificates" / "epoch-00000.json"
    good = json.loads(path.read_text())
    broken = [
        [],
        {},
        good | {"verdict": "maybe"},
        good | {"hypotheses": [3]},
        good | {"hypotheses": None},
        good | {"rate": "fast"},
        good | {"step_size": {"W": []}},
        good | {"measured": {"W": None}},
        good | {"others": [1]},
        good | {"rate": 10**400},
        good | {"licenses": [1]},
        good | {"note": 1},
        good | {"measured": None, "theorem": 3},
        good | {"hypotheses": [good["hypotheses"][0] | {"relation": "=="}]},
    ]
    for plain in broken:
        path.write_text(json.dumps(plain))
        with pytest.raises(RunError, match=r"epoch-00000\.json"):
            read_certificate(run, path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match="a named pipe"):
        read_certificate(run, path)


def test_a_certificate_of_numbers_that_prove_nothing_is_undecided(tmp_path: Path) -> None:
    run = write_by_hand(tmp_path / "run", [1.0], certificates={0: certificate(0.5)})
    path = run / "certificates" / "epoch-00000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rate": 1.5}))
    found = read_certificate(run, path)
    assert not found.certified and found.rate is None and "1.5" in found.note
