"""The page about reproduction and the gallery are those of the records, and name every experiment and claim."""

from __future__ import annotations

from pathlib import Path

from wellposed_lab.papers import EXPERIMENTS
from wellposed_lab.papers.gallery import MARKER, QUICK, causes_of, claims_table, gallery, records_in, shown_in, without_cause
from wellposed_lab.papers.storage import thinned
from wellposed_lab.papers.xie2021.segmentation_table import segmentation_table

ROOT = Path(__file__).parents[3]
RECORDS, DOCS = ROOT / "records", ROOT / "docs"
PAGE = (DOCS / "reproduce.md").read_text(encoding="utf-8")


def test_the_pages_are_those_of_the_records() -> None:
    assert PAGE.partition(MARKER)[2] == f"\n{claims_table(RECORDS)}", "run `make gallery`"
    assert (DOCS / "gallery.md").read_text(encoding="utf-8") == gallery(RECORDS), "run `make gallery`"
    task = (DOCS / "tasks" / "segmentation.md").read_text(encoding="utf-8")
    assert task.partition(MARKER)[2] == f"\n{segmentation_table(shown_in(RECORDS))}", "run `make gallery`"
    for name in shown_in(RECORDS):
        assert (DOCS / "images" / "papers" / f"{name.replace('/', '-')}.png").is_file(), "run `make gallery`"


def test_every_claim_is_on_the_page() -> None:
    page = PAGE.replace("\\|", "|")
    for experiment in EXPERIMENTS.values():
        assert f"`{experiment.name}`" in page
        for claim in experiment.claims:
            assert claim.text in page, f"docs/reproduce.md does not contain: {claim.text}"


def test_records_are_thin_and_belong_to_experiments() -> None:
    kinds = [(part, ending) for part in ("", QUICK) for ending in (".json", ".partial.json")]
    known = {RECORDS / part / f"{name}{ending}" for name in EXPERIMENTS for part, ending in kinds} | {RECORDS / "causes.json"}
    assert set(RECORDS.rglob("*.json")) <= known
    for folder in (RECORDS, RECORDS / QUICK):
        for name, record in records_in(folder).items():
            assert record.experiment == name and record.departures and record.environment["commit"]
            assert thinned(record).to_json() == record.to_json()
            assert all(result.program and result.commit for result in record.results)


def test_every_claim_that_is_not_reproduced_has_a_cause() -> None:
    assert without_cause(RECORDS) == []
    for name, causes in causes_of(RECORDS).items():
        assert set(causes) <= {claim.key for claim in EXPERIMENTS[name].claims}
        assert all(cause.endswith(".") for cause in causes.values())


def test_quick_takes_at_most_ten_minutes_on_two_cores() -> None:
    """By the CPU times of the records of --quick; a task that two tables share runs once and counts twice."""
    records = records_in(RECORDS / QUICK)
    assert set(records) == set(EXPERIMENTS)
    assert sum(result.seconds for record in records.values() for result in record.results) <= 2 * 600
