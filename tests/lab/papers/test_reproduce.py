"""Verdicts, caching, resumption, configuration and names, on an experiment that takes no time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import wellposed_lab
from wellposed.errors import InvalidArgument, RunError, WellposedWarning
from wellposed_lab.papers import EXPERIMENTS, ClaimOutcome, Record, changes_of, find, reproduce
from wellposed_lab.papers.claims import slope, spread
from wellposed_lab.papers.experiment import Result
from wellposed_lab.papers.record import TaskCache, program, source_hash

from .toy_experiment import Toy


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    experiment = Toy()
    monkeypatch.setitem(EXPERIMENTS, experiment.name, experiment)
    return experiment


def test_a_claim_that_fails_is_reported_as_such(toy: Toy) -> None:
    record = reproduce(toy.name)
    assert record.outcome("even") is ClaimOutcome.NOT_REPRODUCED
    assert record.outcome("positive") is ClaimOutcome.REPRODUCED
    assert record.outcome("proof") is ClaimOutcome.NOT_TESTED
    assert reproduce(toy.name, changes={"numbers": (2, 4)}).outcome("even") is ClaimOutcome.REPRODUCED
    text = str(record)
    assert "NOT REPRODUCED" in text and "6 of 9 are odd" in text and "no square is odd" in text and "Only integers." in text
    sizes = "the verdicts are about these sizes: numbers [1, 2, 3]; --full has numbers [1, 2, 3, 4, 5, 6, 7, 8, 9]"
    assert sizes in record.departures
    assert not any("these sizes" in note for note in reproduce(toy.name, "full").departures)
    with pytest.raises(InvalidArgument, match="no claim 'odd'"):
        record.outcome("odd")


def test_a_finding_without_a_claim_is_a_mistake(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "claims", Toy.claims[1:])
    with pytest.raises(AssertionError, match="does not state: even"):
        reproduce(toy.name)


def test_the_second_run_measures_nothing(toy: Toy, tmp_path: Path) -> None:
    first = reproduce(toy.name, out=tmp_path)
    assert len(toy.asked) == 9 and len(list((tmp_path / "toy" / "squares" / "tasks").glob("*.json"))) == 9
    assert not any(result.cached for result in first.results)
    second = reproduce(toy.name, out=tmp_path)
    assert len(toy.asked) == 9 and all(result.cached for result in second.results)
    assert [r.values for r in first.results] == [r.values for r in second.results]
    assert [c.to_dict() for c in first.checks] == [c.to_dict() for c in second.checks]
    reproduce(toy.name, out=tmp_path, fresh=True)
    assert len(toy.asked) == 18
    reproduce(toy.name, changes={"numbers": (1, 2, 3, 4)}, out=tmp_path)
    assert toy.asked[18:] == [4, 4, 4]
    reproduce(toy.name, changes={"scale": 2.0}, out=tmp_path)
    assert len(toy.asked) == 30


def test_other_code_has_other_results(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reproduce(toy.name, out=tmp_path)
    monkeypatch.setattr("wellposed_lab.papers.record.program", lambda: "wellposed 99")
    reproduce(toy.name, out=tmp_path)
    assert len(toy.asked) == 18


def test_the_source_of_both_packages_counts(tmp_path: Path) -> None:
    """Of the library, too: a result of another solver must not be taken for one of this."""
    files = ["wellposed/solve/loop.py", "wellposed_lab/papers/run.py", "wellposed/plot/lines.py", "wellposed_lab/cli/app.py"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n", encoding="utf-8")
    before = source_hash(tmp_path)
    for name, counts in zip(files, (True, True, False, False), strict=True):
        (tmp_path / name).write_text("x = 2\n", encoding="utf-8")
        after = source_hash(tmp_path)
        assert (after != before) is counts, name
        before = after


def test_a_release_names_its_source_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files may be edited, and its number stays on the branch until the next one is begun."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1.0")
    root = Path(str(wellposed_lab.__file__)).parents[1]
    assert program.__wrapped__() == f"wellposed 0.1.0, torch {torch.__version__}, source {source_hash(root)}"


def test_an_interrupted_run_continues(toy: Toy, tmp_path: Path) -> None:
    toy.fails_at = 3
    with pytest.raises(KeyboardInterrupt):
        reproduce(toy.name, out=tmp_path)
    assert toy.asked == [1, 1, 1, 2, 2, 2]
    toy.fails_at = None
    seen: list[tuple[int, int]] = []
    record = reproduce(toy.name, out=tmp_path, listener=lambda done, total, latest: seen.append((done, total)))
    assert toy.asked == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert seen == [(6, 9), (7, 9), (8, 9), (9, 9)]
    assert [c.to_dict() for c in record.checks] == [c.to_dict() for c in reproduce(toy.name).checks]


@pytest.mark.parametrize("damage", ["", "{", '{"key": 1}', '{"key": {"task": 0}, "values": {}, "seconds": 0}', "[]"])
def test_damaged_results_are_measured_again(toy: Toy, tmp_path: Path, damage: str) -> None:
    reproduce(toy.name, out=tmp_path)
    victim = TaskCache(tmp_path / "toy" / "squares" / "tasks", toy.name).path({"number": 2, "seed": 1, "scale": 1.0})
    victim.write_text(damage)
    record = reproduce(toy.name, out=tmp_path)
    assert toy.asked[9:] == [2] and record.results[4].values == {"square": 4.0}


def test_a_result_under_a_foreign_name_is_not_believed(tmp_path: Path) -> None:
    cache = TaskCache(tmp_path, "toy/squares")
    cache.put(Result({"number": 1}, {"square": 1}, 0.1))
    cache.path({"number": 1}).rename(cache.path({"number": 2}))
    assert cache.get({"number": 2}) is None and cache.get({"number": 1}) is None


def test_a_folder_that_cannot_be_written(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "toy").write_text("a file")
    with pytest.raises(RunError, match=r"Cannot write .*Choose another folder"):
        reproduce(toy.name, out=tmp_path)


def test_the_record_survives_json_and_is_drawn(toy: Toy, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    record = reproduce(toy.name, out=tmp_path)
    text = (tmp_path / "toy" / "squares" / "record.json").read_text()
    again = Record.from_json(text)
    assert again.to_dict() == json.loads(text) and again.outcome("even") is ClaimOutcome.NOT_REPRODUCED
    assert again.config == record.config and again.environment["program"] == record.environment["program"]
    starts = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}
    first = {ending: (tmp_path / "toy" / "squares" / f"figure{ending}").read_bytes() for ending in starts}
    assert all(first[ending].startswith(start) for ending, start in starts.items())
    reproduce(toy.name, out=tmp_path)
    for ending in (".pdf", ".svg"):  # equal figures are equal files: no time of day in them
        assert (tmp_path / "toy" / "squares" / f"figure{ending}").read_bytes() == first[ending]


def test_without_matplotlib_the_record_is_kept_and_the_warning_comes_first(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    toy.fails_at = 1  # the first task: nothing is measured before the warning
    with (
        pytest.warns(WellposedWarning, match=r"No figure\.png will be drawn: .*wellposed\[plot\]"),
        pytest.raises(KeyboardInterrupt),
    ):
        reproduce(toy.name, out=tmp_path)
    toy.fails_at = None
    with pytest.warns(WellposedWarning, match="No figure"):
        assert reproduce(toy.name, out=tmp_path).outcome("even") is ClaimOutcome.NOT_REPRODUCED
    assert sorted(path.name for path in (tmp_path / "toy" / "squares").iterdir()) == ["record.json", "tasks"]
    reproduce(toy.name, out=tmp_path, figure=False)
    reproduce(toy.name)  # without a folder there is nothing to draw, and no warning


def test_unknown_names() -> None:
    with pytest.raises(InvalidArgument, match="Unknown experiment 'ling2022/figur1'.*Did you mean 'ling2022/figure1'"):
        reproduce("ling2022/figur1")
    with pytest.raises(InvalidArgument, match="'quick' or 'full'; got 'quik'. Did you mean 'quick'"):
        reproduce("ling2022/lemma1", "quik")
    with pytest.raises(InvalidArgument, match="Unknown key 'width'.*Did you mean 'widths'"):
        reproduce("ling2022/lemma1", changes={"width": 3})
    with pytest.raises(InvalidArgument, match="jobs must be"):
        reproduce("ling2022/lemma1", jobs=0)
    assert find("ling2022/figure1") is EXPERIMENTS["ling2022/figure1"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"draws": "many"}, "draws must be of type int, for example 40; got 'many'"),
        ({"draws": 2.5}, "draws must be of type int"),
        ({"draws": True}, "draws must be of type int"),
        ({"draws": -1}, "draws must be positive and finite; got -1"),
        ({"draws": 0}, "draws must be positive"),
        ({"seeds": (0, -1)}, "seeds must be positive"),
        ({"seeds": (1, 2, 1)}, r"seeds must not have a value twice; got \(1, 2, 1\)"),
        ({"widths": ()}, "widths must not be empty"),
        ({"widths": (1, "a")}, "widths must be of type int"),
    ],
)
def test_values_of_another_kind_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        EXPERIMENTS["ling2022/lemma1"].quick.changed(changes)


def test_changes_as_text() -> None:
    assert changes_of(["widths=50,100", "step = 0.5", "data=mnist,digits", "x=word"]) == {
        "widths": (50, 100),
        "step": 0.5,
        "data": ("mnist", "digits"),
        "x": "word",
    }
    changed = EXPERIMENTS["ling2022/figure1"].quick.changed(changes_of(["widths=50", "data=digits", "step=1"]))
    assert changed.widths == (50,) and changed.data == ("digits",) and changed.step == 1.0  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgument, match="key=value"):
        changes_of(["widths"])


def test_numbers() -> None:
    assert spread([0.5]) == "0.5 (1 seed)" and spread([]) == "nothing" and "nan" in spread([1.0, float("inf")])
    assert slope([1, 10, 100], [5, 0.5, 0.05]) == pytest.approx(-1)
