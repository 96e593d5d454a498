"""`wellposed reproduce`, in this process."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from wellposed_lab.cli.commands import app
from wellposed_lab.papers import EXPERIMENTS, ClaimFinding, ClaimOutcome, Result
from wellposed_lab.papers.ling2022.lemma1 import Lemma1, Lemma1Config

TINY = ["--set", "widths=10,40", "--set", "draws=5", "--set", "seeds=0,1", "--jobs", "1"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["reproduce", *words])


def test_verdicts_files_and_cache(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    result = call("ling2022/lemma1", *TINY)
    folder = tmp_path / "reproduced" / "ling2022" / "lemma1"
    record = json.loads((folder / "record.json").read_text())
    negative = any(check["outcome"] == "not reproduced" for check in record["checks"])
    assert result.exit_code == (1 if negative else 0), result.output
    for check in record["checks"]:
        assert check["text"] in result.stdout and check["measured"] in result.stdout and check["decided_by"] in result.stdout
        assert check["outcome"] in result.stdout
    assert (folder / "figure.png").is_file() and str(Path("reproduced/ling2022/lemma1/figure.png")) in result.stdout
    for kind in ("pdf", "svg"):
        assert str(Path(f"reproduced/ling2022/lemma1/figure.{kind}")) in result.stdout
    again = call("ling2022/lemma1", *TINY)
    assert "4 of them kept from before" in again.stdout


def test_a_claim_that_holds_exits_with_zero(tmp_path: Path) -> None:
    words = ["--set", "directions=5", "--set", "width=4", "--set", "n=2", "--set", "seeds=0", "--jobs", "1", "--no-figure"]
    result = call("xie2021/theorems", *words, "--json", "--out", str(tmp_path / "here"))
    assert result.exit_code == 0, result.output
    assert {check["outcome"] for check in json.loads(result.stdout)["checks"]} == {"reproduced"}
    assert not (tmp_path / "here" / "xie2021" / "theorems" / "figure.png").exists()


@pytest.fixture
def toy() -> Iterator[None]:
    """Two experiments that take no time in the place of all."""

    class Square(Lemma1):
        name = "toy/square"
        quick = Lemma1Config(widths=(4,), draws=2, seeds=(0, 1))

    class Cube(Square):
        name = "toy/cube"

    before = dict(EXPERIMENTS)
    EXPERIMENTS.clear()
    EXPERIMENTS.update({experiment.name: experiment for experiment in (Square(), Cube())})
    yield
    EXPERIMENTS.clear()
    EXPERIMENTS.update(before)  # in their order


def test_without_a_name_all_are_run(toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = call("--quick", "--jobs", "1", "--no-figure")
    records = [json.loads((tmp_path / "reproduced" / "toy" / n / "record.json").read_text()) for n in ("square", "cube")]
    outcomes = [check["outcome"] for record in records for check in record["checks"]]
    last = " ".join(result.stdout.split())
    assert f"2 experiments, 0 s; claims of the papers: {outcomes.count('reproduced')} reproduced, " in last
    assert result.exit_code == (1 if "not reproduced" in outcomes else 0)
    assert max(map(len, result.stdout.splitlines())) <= 80
    both = json.loads(call("toy/cube", "all", "--jobs", "1", "--no-figure", "--json").stdout)
    assert [record["experiment"] for record in both] == ["toy/cube", "toy/square"]
    assert all(result["cached"] for record in both for result in record["results"])


@pytest.fixture
def half_ours(monkeypatch: pytest.MonkeyPatch) -> type[Lemma1]:
    """An experiment with a claim of a paper and a question of ours; `verdicts` decides both."""

    class Half(Lemma1):
        name = "toy/half"
        quick = Lemma1Config(widths=(4,), draws=2, seeds=(0,))
        claims = (dataclasses.replace(Lemma1.claims[0], source="ours"), Lemma1.claims[1])
        verdicts = (ClaimOutcome.NOT_REPRODUCED, ClaimOutcome.REPRODUCED)

        def judge(self, config: Any, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
            return {c.key: ClaimFinding(v, "as told") for c, v in zip(self.claims, self.verdicts, strict=True)}

    monkeypatch.setitem(EXPERIMENTS, Half.name, Half())
    return Half


def test_a_question_of_ours_is_shown_apart_and_does_not_count(half_ours: type[Lemma1]) -> None:
    own, printed = half_ours.claims
    result = call("toy/half", "--jobs", "1", "--no-figure")
    assert result.exit_code == 0, result.output
    place = [result.stdout.index(text) for text in (printed.text, "Not asked in the paper", own.text)]
    assert place == sorted(place), "claims of the paper come first"
    half_ours.verdicts = (ClaimOutcome.REPRODUCED, ClaimOutcome.NOT_REPRODUCED)  # type: ignore[attr-defined]
    assert call("toy/half", "--jobs", "1", "--no-figure").exit_code == 1


def test_without_matplotlib_verdicts_are_printed(
    half_ours: type[Lemma1], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = call("toy/half", "--jobs", "1")
    assert result.exit_code == 0, result.output
    assert all(claim.text in result.stdout for claim in half_ours.claims) and "figure.png" not in result.stdout
    assert "No figure.png will be drawn" in result.stderr and "wellposed[plot]" in result.stderr
    assert (tmp_path / "reproduced" / "toy" / "half" / "record.json").is_file()


def test_mistakes_are_one_sentence() -> None:
    for words, says in [
        (["ling2022/figur1"], "Did you mean 'ling2022/figure1'"),
        (["--full"], "reproduce all --full"),
        (["all", "--set", "widths=3,4"], "Unknown key 'widths'"),
        (["ling2023"], "Did you mean 'ling2022'"),
        (["ling2022/lemma1", "--set", "width=3"], "Did you mean 'widths'"),
        (["ling2022/lemma1", "--jobs", "0"], "jobs must be"),
    ]:
        result = call(*words)
        assert result.exit_code == 2 and says in result.stderr and "Traceback" not in result.stderr


def test_listing_and_help() -> None:
    text, plain = call("--list").stdout, json.loads(call("--list", "--json").stdout)
    assert [row["name"] for row in plain] == list(EXPERIMENTS)
    assert all(claim.text in text for experiment in EXPERIMENTS.values() for claim in experiment.claims)
    assert "--dask" in call("--help").stdout and "Examples" in call("--help").stdout
