"""Records for the repository: thin, the same when read again, and compared with a part that is run anew."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wellposed.errors import InvalidArgument
from wellposed_lab.cli.commands import app
from wellposed_lab.papers import EXPERIMENTS, ClaimOutcome, reproduce
from wellposed_lab.papers.claims import decide
from wellposed_lab.papers.gallery import MARKER, claims_table, gallery, without_cause, write_pages
from wellposed_lab.papers.records import _difference, collect, compare, judged_anew
from wellposed_lab.papers.storage import LONGEST, _thin, path_of, store, stored, thinned

from .toy_experiment import Toy


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    experiment = Toy()
    monkeypatch.setitem(EXPERIMENTS, experiment.name, experiment)
    return experiment


def test_thin_columns_keep_their_ends_and_fit_each_other() -> None:
    x, y = [float(i) for i in range(1000)], [i / 3 for i in range(1000)]
    thin = _thin({"x": x, "y": y, "grid": [[0.123456789] * 600] * 300, "word": "a", "none": None, "many": ["a"] * 600})
    assert len(thin["x"]) == len(thin["y"]) == LONGEST
    assert thin["x"][0] == 0 and thin["x"][-1] == 999
    assert all(abs(3 * b - a) <= 1e-4 * max(a, 1) for a, b in zip(thin["x"], thin["y"], strict=True))
    assert len(thin["grid"]) == 300 and len(thin["grid"][0]) == LONGEST and thin["grid"][0][0] == 0.12346
    assert thin["word"] == "a" and thin["none"] is None and len(thin["many"]) == 600
    assert _thin(math.inf) == math.inf and _thin(True) is True and _thin(123456789) == 123456789


def test_store_and_read_again(toy: Toy, tmp_path: Path) -> None:
    record = reproduce(toy.name, changes={"scale": 1 / 3})
    path = store(record, tmp_path)
    assert path == path_of(toy.name, tmp_path) == tmp_path / "toy" / "squares.json"
    again = stored(toy.name, tmp_path)
    assert again.to_json() == thinned(record).to_json() == thinned(again).to_json()
    assert again.results[0].values["square"] == 0.33333 and again.departures[-1] == "Only integers."
    with pytest.raises(InvalidArgument, match="no record of ling2022/figure1 at .*toy/squares"):
        stored("ling2022/figure1", tmp_path)


def test_runs_are_collected_and_judged_by_the_present_rules(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = reproduce(toy.name, changes={"seeds": 0}, out=tmp_path / "runs", figure=False)
    assert judged_anew(record).to_json() == record.to_json()
    monkeypatch.setattr(Toy, "judge", lambda self, config, results: {"even": decide(True, f"{len(results)} numbers")})
    monkeypatch.setattr(Toy, "departures", ("Small ones.",))
    (path,) = collect(tmp_path / "runs", tmp_path / "records")
    again = stored(toy.name, tmp_path / "records")
    assert path == path_of(toy.name, tmp_path / "records")
    assert again.outcome("even") is ClaimOutcome.REPRODUCED and again.checks[0].finding.measured == "3 numbers"
    assert again.departures[-1] == "Small ones." and again.environment == record.environment
    monkeypatch.setattr(Toy, "judge", lambda self, config, results: {"even": decide(False, f"{len(results)} numbers")})
    assert collect(tmp_path / "records", tmp_path / "records") == [path]
    assert stored(toy.name, tmp_path / "records").outcome("even") is ClaimOutcome.NOT_REPRODUCED


def test_difference() -> None:
    assert _difference([1.0, 2.0, None], [1.0, 2.1, None]) == pytest.approx(0.05)
    assert _difference({"a": [1, "x"]}, {"a": [1, "x"]}) == 0
    assert _difference([1.0], [1.0, 2.0]) == _difference([1.0], [None]) == _difference("x", "y") == math.inf
    assert _difference(0.0, 0.0) == 0 and _difference(0.0, 1e-6) == math.inf
    assert _difference([8e-16, 3e-10], [2e-15, 1e-10]) == 0  # relative errors: rounding on both machines
    assert _difference(1e-6, 1.1e-6) == pytest.approx(0.1)  # a small step size is a measurement


def test_compare(toy: Toy, tmp_path: Path) -> None:
    store(reproduce(toy.name), tmp_path)
    found = compare(toy.name, tmp_path)
    assert found.agrees and found.differences == {"square": 0.0}
    plain = json.loads(path_of(toy.name, tmp_path).read_text())
    for result in plain["results"]:
        result["values"]["square"] *= 1.1
    path_of(toy.name, tmp_path).write_text(json.dumps(plain))
    found = compare(toy.name, tmp_path)
    assert not found.agrees and found.differences["square"] == pytest.approx(0.1 / 1.1)


def test_the_command_stores_and_compares(toy: Toy, tmp_path: Path) -> None:
    runner, records = CliRunner(), tmp_path / "records"
    options = ["--out", str(tmp_path / "out"), "--records", str(records), "--no-figure", "--jobs", "1"]
    assert runner.invoke(app, ["reproduce", toy.name, "--store", *options]).exit_code == 1  # a claim is not reproduced
    done = runner.invoke(app, ["reproduce", toy.name, "--compare", "--records", str(records)])
    assert done.exit_code == 0 and "agrees with the record" in done.output
    plain = runner.invoke(app, ["reproduce", toy.name, "--compare", "--json", "--records", str(records)])
    assert json.loads(plain.output)[toy.name]["agrees"] is True


def test_pages_from_records(toy: Toy, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    records, docs = tmp_path / "records", tmp_path / "docs"
    docs.mkdir()
    (docs / "reproduce.md").write_text(f"by hand\n{MARKER}old")
    record = reproduce(toy.name)
    store(record, records)
    assert without_cause(records) == [f"{toy.name}: even"]
    (records / "causes.json").write_text(json.dumps({toy.name: {"even": "False: 1 is odd."}}))
    assert without_cause(records) == []
    write_pages(records, docs)
    page, shown = (docs / "reproduce.md").read_text(), (docs / "gallery.md").read_text()
    assert page == f"by hand\n{MARKER}\n{claims_table(records)}" and shown == gallery(records)
    row = next(line for line in page.splitlines() if "Every square is even." in line)
    assert "| not reproduced | not run | False: 1 is odd. |" in row
    assert "**not reproduced**: Every square is even." in shown and "Cause: False: 1 is odd." in shown
    assert "What [toy] says" in shown and "Seeds: 0, 1, 2" in shown and "- Departure: Only integers." in shown
    assert (docs / "images" / "papers" / "toy-squares.png").read_bytes().startswith(b"\x89PNG")


def test_the_gallery_shows_the_large_run_or_else_the_quick_one(toy: Toy, tmp_path: Path) -> None:
    store(reproduce(toy.name), tmp_path / "quick")
    assert "Size: quick." in gallery(tmp_path) and without_cause(tmp_path) == [f"{toy.name}: even"]
    assert "| not run | not reproduced |" in claims_table(tmp_path)
    store(reproduce(toy.name, "full", changes={"numbers": 2}), tmp_path)
    assert "Size: full, changed." in gallery(tmp_path) and "Size: quick." not in gallery(tmp_path)
    assert without_cause(tmp_path) == [] and "| reproduced | not reproduced |" in claims_table(tmp_path)
