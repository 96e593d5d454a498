"""Records grow over several runs: what is stored is taken, says who measured it, is judged anew, and is never lost."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wellposed.errors import InvalidArgument, RunError
from wellposed_lab.cli.commands import app
from wellposed_lab.papers import EXPERIMENTS, ClaimOutcome, reproduce
from wellposed_lab.papers.claims import decide
from wellposed_lab.papers.experiment import Result
from wellposed_lab.papers.record import program
from wellposed_lab.papers.storage import RecordFolder, path_of, store, stored, thinned

from .toy_experiment import Toy


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    experiment = Toy()
    monkeypatch.setitem(EXPERIMENTS, experiment.name, experiment)
    return experiment


def other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("record", "run"):
        monkeypatch.setattr(f"wellposed_lab.papers.{module}.program", lambda: "wellposed 99")
    monkeypatch.setattr("wellposed_lab.papers.run._commit", lambda: "c" * 40)


def test_a_second_seed_costs_only_its_own_tasks_and_all_are_judged(toy: Toy, tmp_path: Path) -> None:
    first = reproduce(toy.name, changes={"seeds": 0, "numbers": (2, 4)}, records=tmp_path)
    assert first.outcome("even") is ClaimOutcome.REPRODUCED and toy.asked == [2, 4]
    before = path_of(toy.name, tmp_path).read_text()
    second = reproduce(toy.name, changes={"seeds": (0, 1), "numbers": (2, 3, 4)}, records=tmp_path)
    assert sorted(toy.asked[2:]) == [2, 3, 3, 4]
    assert second.outcome("even") is ClaimOutcome.NOT_REPRODUCED  # judged over the results of both runs
    assert [r.cached for r in second.results] == [True, False, False, False, True, False]
    again = stored(toy.name, tmp_path)
    assert [r.values["square"] for r in again.results] == [4, 4, 9, 9, 16, 16] and again.config["seeds"] == [0, 1]
    assert [r.seconds for r in again.results if r.cached] == [r["seconds"] for r in json.loads(before)["results"]]
    assert [path.name for path in tmp_path.rglob("*.json")] == ["squares.json"]


def test_results_of_other_code_are_taken_and_said(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = reproduce(toy.name, changes={"seeds": 0}, records=tmp_path)
    mine = record.results[0].commit
    assert {r.program for r in record.results} == {program()} and not any("other code" in note for note in record.notes)
    other_code(monkeypatch)
    grown = reproduce(toy.name, changes={"seeds": (0, 1)}, records=tmp_path, out=tmp_path / "out", figure=False)
    assert len(toy.asked) == 6
    assert [(r.program, r.commit) for r in grown.results[:2]] == [(program(), mine), ("wellposed 99", "c" * 40)]
    (note,) = (note for note in grown.notes if "other code" in note)
    assert note.startswith("3 of 6 results were measured by other code than the one that judges them: 3 by wellposed ")
    assert f"(commit {(mine or 'unknown')[:10]})" in note  # the source of a distribution has no history
    assert stored(toy.name, tmp_path).to_json() == thinned(grown).to_json()  # per result, also in the file
    fresh = reproduce(toy.name, changes={"seeds": (0, 1)}, records=tmp_path, fresh=True)
    assert len(toy.asked) == 12 and {r.program for r in fresh.results} == {"wellposed 99"}


def test_an_interrupted_run_keeps_its_results_in_the_folder_of_records(toy: Toy, tmp_path: Path) -> None:
    reproduce(toy.name, changes={"numbers": 5}, records=tmp_path)
    before = path_of(toy.name, tmp_path).read_text()
    toy.fails_at, toy.asked = 3, []
    with pytest.raises(KeyboardInterrupt):
        reproduce(toy.name, changes={"numbers": (5, 1, 2, 3)}, records=tmp_path)
    assert toy.asked == [1, 1, 1, 2, 2, 2]
    assert path_of(toy.name, tmp_path).read_text() == before  # the finished record stays as it is
    assert len(RecordFolder(tmp_path, toy).begun()) == 6
    toy.fails_at, toy.asked = None, []
    record = reproduce(toy.name, changes={"numbers": (5, 1, 2, 3)}, records=tmp_path)
    assert toy.asked == [3, 3, 3] and len(record.results) == 12
    assert [path.name for path in tmp_path.rglob("*.json")] == ["squares.json"]


def test_results_of_another_size_stay_apart_when_a_record_is_complete(toy: Toy, tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path, toy)
    folder.keep(Result({"number": 7, "seed": 0, "scale": 1.0}, {"square": math.nan}, 1.0))
    folder.keep(Result({"number": 7, "seed": 0, "scale": 1.0}, {"square": 49.0}, 1.0))
    reproduce(toy.name, changes={"seeds": 0}, records=tmp_path)
    assert [r.values for r in folder.begun()] == [{"square": 49.0}]


def test_a_record_is_not_replaced_by_a_smaller_one(toy: Toy, tmp_path: Path) -> None:
    reproduce(toy.name, records=tmp_path)
    asked = len(toy.asked)
    with pytest.raises(InvalidArgument, match=r"squares\.json has 6 results that this run does not ask for.*--fresh"):
        reproduce(toy.name, changes={"seeds": 1}, records=tmp_path)
    assert len(toy.asked) == asked  # nothing was measured before the refusal
    reproduce(toy.name, changes={"seeds": 1}, records=tmp_path, fresh=True)
    assert stored(toy.name, tmp_path).config["seeds"] == [1]


def test_experiments_that_share_tasks_share_stored_results(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Twin(Toy):
        name, tasks_of = "toy/twin", "toy/both"

    twin = Twin()
    monkeypatch.setattr(Toy, "tasks_of", "toy/both")
    monkeypatch.setitem(EXPERIMENTS, twin.name, twin)
    reproduce(toy.name, changes={"seeds": 0}, records=tmp_path)
    reproduce(twin.name, changes={"seeds": 0, "numbers": (1, 2, 3, 4)}, records=tmp_path)
    assert twin.asked == [4]


def test_numbers_are_kept_whole_if_thin_ones_would_be_judged_otherwise(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(self: Toy, config: object, results: list[Result]) -> object:
        return {"positive": decide(results[0].values["square"] < 1 / 3, "below a third")}

    monkeypatch.setattr(Toy, "judge", judge)
    changes = {"numbers": 1, "scale": 1 / 3 - 1e-9, "seeds": 0}
    store(reproduce(toy.name, changes=changes), tmp_path)
    assert stored(toy.name, tmp_path).results[0].values["square"] == 0.33333
    monkeypatch.setattr(
        Toy, "judge", lambda self, config, results: {"positive": decide(results[0].values["square"] > 0.33333, "above")}
    )
    store(reproduce(toy.name, changes=changes), tmp_path)
    assert stored(toy.name, tmp_path).results[0].values["square"] == 1 / 3 - 1e-9


def test_old_results_without_a_measurement_ask_for_fresh_ones(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reproduce(toy.name, records=tmp_path)
    monkeypatch.setattr(Toy, "judge", lambda self, config, results: {"even": decide(results[0].values["cube"] > 0, "")})
    with pytest.raises(RunError, match=r"'cube'.*--fresh"):
        reproduce(toy.name, records=tmp_path)
    with pytest.raises(KeyError):  # of this run alone it is a mistake of the experiment
        reproduce(toy.name)


def test_the_command_extends_and_finds_all_mistakes_before_it_measures(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hungry(Toy):
        name = "toy/hungry"

        def available(self, config: object) -> tuple[object, list[str]]:
            raise InvalidArgument("The data file is wrong.")

    monkeypatch.setitem(EXPERIMENTS, Hungry.name, Hungry())
    options = ["--store", "--records", str(tmp_path / "records"), "--out", str(tmp_path / "out"), "--no-figure", "--jobs", "1"]
    done = CliRunner().invoke(app, ["reproduce", toy.name, Hungry.name, *options])
    assert done.exit_code == 2 and "The data file is wrong." in done.output and toy.asked == []
    CliRunner().invoke(app, ["reproduce", toy.name, "--set", "seeds=0", *options])
    done = CliRunner().invoke(app, ["reproduce", toy.name, "--set", "seeds=0,1", *options])
    assert len(toy.asked) == 6 and "3 of them kept from before" in done.output
    assert stored(toy.name, tmp_path / "records").config["seeds"] == [0, 1]
