"""The page of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from report_problems import certificate, figures, parse_file, trace, train_tiny, write_by_hand
from wellposed.errors import InvalidArgument
from wellposed_lab import report
from wellposed_lab.report._charts import losses, margin, norm_lines
from wellposed_lab.report._read import read_run


def test_two_runs_share_the_figures(tmp_path: Path) -> None:
    first = train_tiny(tmp_path / "first", "run.epochs=2")
    second = train_tiny(tmp_path / "second", "run.epochs=1", "model.width=20")
    path = report.compare([first, second], tmp_path / "comparison.html")
    page = parse_file(path)
    drawn = figures(page)
    assert set(drawn) == {"loss", "accuracy", "equilibrium-steps", "margin", "spectrum", "norms"}
    for figure in drawn.values():
        names = [one["name"] for one in figure["data"]]
        assert any(name.startswith("first: ") for name in names) and any(name.startswith("second: ") for name in names)
    (table,) = [table for table in page.find("table") if "that differ" in table.find("caption")[0].text]
    cells = [[cell.text for cell in row.children] for row in table.find("tr")]
    assert cells == [["key", "first", "second"], ["model.width", "16", "20"], ["run.epochs", "2", "1"]]
    assert path.stat().st_size < 5_500_000


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    one = write_by_hand(tmp_path / "a" / "run", [2.0, 1.0], certificates={0: certificate(0.9)})
    other = write_by_hand(tmp_path / "b" / "run", [4.0, 3.0], certificates={0: certificate(None)})
    page = parse_file(report.compare([one, other], tmp_path / "page.html"))
    assert trace(page, "loss", "run: train")["y"] == [2.0, 1.0]
    assert trace(page, "loss", "run (2): train")["y"] == [4.0, 3.0]
    assert trace(page, "loss", "run: certified")["y"][:2] == [2.0, pytest.approx(2.0 * 0.9**6)]
    assert "The configurations are equal" in page.words()
    (table,) = [table for table in page.find("table") if table.find("caption")[0].text == "Runs"]
    assert [span.text for span in table.find("span") if "badge" in (span.attributes.get("class") or "")] == [
        "✓ CERTIFIED as recorded",
        "? UNDECIDED as recorded",
    ]


def looks(traces: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """What tells lines apart; a longer dash is seen as a dash, and small dots (which long runs do not have) are not seen."""
    marks = [t["marker"]["symbol"].replace("circle", "") if "markers" in t["mode"] else "" for t in traces]
    lines = [(t["line"]["color"], t["line"].get("dash", "solid").replace("long", "")) for t in traces]
    return [(*one, mark) for one, mark in zip(lines, marks, strict=True)]


@pytest.mark.parametrize("count", [2, 10])
def test_no_two_lines_look_alike(count: int, tmp_path: Path) -> None:
    runs = []
    for i in range(count):
        certificates = {0: certificate(0.5), 2: certificate(0.25)}
        folder = write_by_hand(tmp_path / f"run{i}", [1.0, 0.5, 0.25], certificates=certificates)
        rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        full = [row | {f"{part}_loss": 0.5 + i for part in ("validation", "test")} for row in rows]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in full))
        runs.append(read_run(folder))
    for figure, lines in ((losses(runs), 4), (margin(runs), 1), (norm_lines(runs), 2)):
        assert not isinstance(figure, str)
        seen = looks(figure.traces)
        assert len(seen) >= lines * count and len(set(seen)) == len(seen), figure.title


def test_one_run_is_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="two or more"):
        report.compare([write_by_hand(tmp_path / "run", [1.0])], tmp_path / "page.html")
