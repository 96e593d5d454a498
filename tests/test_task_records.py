"""Records of the tasks: strict JSON, rows that follow from their runs, weights that are opened again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wellposed_lab.tasks.language_rows import generation_rows, rows

pytest.importorskip("safetensors", reason="safetensors is not installed")
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@pytest.fixture(scope="module")
def reasoning() -> Iterator[Any]:
    """The script benchmarks/task_reasoning.py, with the modules that it imports, for these tests alone."""
    known, path = dict(sys.modules), list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import task_reasoning  # type: ignore[import-not-found]

        yield task_reasoning
    finally:
        sys.path[:] = path
        for name in ("task_reasoning", "tables", "puzzles"):
            if name not in known:
                sys.modules.pop(name, None)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_is_strict_json(path: Path) -> None:
    json.loads(path.read_text(), parse_constant=refuse)


def test_the_rows_of_reasoning_follow_from_its_runs(reasoning: Any) -> None:
    found = json.loads((RESULTS / "reasoning.json").read_text())
    made = reasoning.tables(found["runs"])
    assert made and all(found[key] == value for key, value in made.items())
    halted = [row["fixed_exact"].split()[0] for row in made["mazes_accuracy"]]
    assert halted == ["52.7", "17.8", "4.3", "0.7"]


def test_the_rows_of_language_follow_from_its_runs() -> None:
    found = json.loads((RESULTS / "language.json").read_text())
    for name in ("words", "characters"):
        assert found[name] == rows([run for run in found["runs"] if run["tokens"] == name])
    assert found["generate"] == [row for name in ("words", "characters") for row in generation_rows(name, found["runs"])]


def test_weights_of_an_earlier_call_are_opened(reasoning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def train(*given: Any, **options: Any) -> float:
        calls.append(options["seed"])
        return 1.5

    monkeypatch.setattr(reasoning, "train", train)
    monkeypatch.setattr(reasoning, "LEVELS", {"sudoku": [10]})
    monkeypatch.setattr(reasoning, "MARKS", {"sudoku": [1, 2]})
    first = reasoning.run("sudoku", 3, True, tmp_path)
    again = reasoning.run("sudoku", 3, True, tmp_path)
    assert calls == [3]
    assert again["seconds"] == first["seconds"] == 1.5
    assert again["levels"]["10"]["curve"] == first["levels"]["10"]["curve"]
