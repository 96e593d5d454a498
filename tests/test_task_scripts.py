"""The scripts of the tasks: they are short, their pages say how short, and they run."""

from __future__ import annotations

import ast
import io
import re
import runpy
import sys
import tokenize
from pathlib import Path
from typing import Any

import pytest

import wellposed as wp

ROOT = Path(__file__).parents[1]
#: Lines of a script that are not blank, not a comment and not part of a docstring.
MOST_LINES = 60
PAGES = {"chains": "graphs", "deblurring": "imaging", "puzzles": "reasoning", "segmentation": "segmentation"}
PAGES |= {"wikitext": "language"}
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({line for t in tokens if t.type not in BLANK for line in range(t.start[0], t.end[0] + 1)} - documented)


def test_lines_are_counted() -> None:
    module, constant = '"""Of the module.\n\nLonger.\n"""\n\n', 'X = """two\nlines"""\n\n\n'
    function = 'def f():\n    """Doc."""\n    # why\n    return (  # a call\n        1\n    )\n'
    assert [code_lines(text) for text in (module, constant, function, module + constant + function)] == [0, 2, 4, 6]
    assert [_shares_a_line(ast.parse(text).body[0]) for text in (function, "if x: y", "if x:\n    y; z")] == [False, True, True]


@pytest.mark.parametrize("name", PAGES)
def test_a_script_is_short_and_its_page_says_so(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    count = code_lines(text)
    assert count <= MOST_LINES, f"examples/{name}.py has {count} lines of code"
    assert not [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt) and _shares_a_line(node)]
    page = " ".join((ROOT / "docs" / "tasks" / f"{PAGES[name]}.md").read_text(encoding="utf-8").split())
    assert re.findall(r"(\d+) lines of code", page) == [str(count)]


def _shares_a_line(node: ast.stmt) -> bool:
    """Whether two statements of a block begin in one line, or a block in the line of its head."""
    blocks = [block for field in ("body", "orelse", "finalbody") if isinstance(block := getattr(node, field, None), list)]
    lines = [part.lineno for block in blocks for part in block]
    return len(set(lines)) < len(lines) or bool(blocks and blocks[0][0].lineno == node.lineno)


RUNS = {
    "chains": (["--length", "6", "--steps", "2"], "accuracy of all test nodes"),
    "deblurring": (["--steps", "1"], "restored"),
    "sudoku": (["sudoku", "--steps", "2"], "test puzzles are right"),
    "mazes": (["mazes", "--steps", "1"], "test puzzles are right"),
    "segmentation": (["--steps", "1"], "mean intersection over union"),
    "wikitext": (["--text", "{folder}/book.txt", "--words", "6", "--steps", "1", "--test-windows", "2"], "perplexity"),
}


@pytest.mark.filterwarnings("ignore::wellposed.errors.NotConvergedWarning")  # after so few steps
@pytest.mark.parametrize("name", RUNS)
def test_a_script_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load, small = wp.data.load, {"deblurring_leaves": {"size": 16}, "mazes": {"size": 7}}

    def few(given: str, **options: Any) -> Any:
        """The data of the script, but less of them."""
        if given.endswith(".txt"):
            return load(given, **options)
        return load(given, **(options | {"n": 8, "n_test": 3} | small.get(given, {})))

    monkeypatch.setattr(wp.data, "load", few)
    (tmp_path / "book.txt").write_text("one two three four five six " * 200)
    options, says = RUNS[name]
    save = [] if name in ("segmentation", "wikitext") else ["--save", str(tmp_path / "weights")]
    monkeypatch.setattr(sys, "argv", [name, *(option.format(folder=tmp_path) for option in options), *save])
    script = "puzzles" if name in ("sudoku", "mazes") else name
    runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
    assert says in capsys.readouterr().out
    if save:
        assert wp.tasks.load(name, tmp_path / "weights").card["license"] == "MIT"
