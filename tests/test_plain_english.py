"""Plain English: a word list over README, docs, docstrings and messages, and prose of at most 100 columns.

The rule: a tired engineer whose second language is English understands a sentence at first reading. The list has
words that had to be decoded, with what to write instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WIDTH = 100
#: What ends a phrase: "a page of its own." and "X is no network, but ..."; "its own matrix" is plain.
_END = r"(?=[.,;:)\]]|$| (?:and|or|but|which|that|with|in|for)\b)"
#: Pattern -> what to write instead.
WORDS = {
    r"\bdear(?:er|est)?\b": "expensive",
    r"\btells\b": "reports, shows, is",
    r"\b(?:go|goes|went|going) on\b": "continue",
    r"\bat hand\b": "available",
    r"\b(?:no|some|every)body\b": "name the part",
    r"\b(?:leave|leaves|leaving|left) (?:\w+ ){0,2}away\b": "omit",
    r"(?<!there )(?<!where )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b)\w+" + _END: "is not a ...",
    r"\bof (?:its|their) own" + _END: "its own ..., a separate ...",
    r"\b(?:change|changes|changed) (?:its|their) mind\b": "switches on or off",
    r"\b(?:give|gives|giving|gave) (?:\w+ ){1,2}free\b": "release",
    r"\b(?:sets?|decides?) the volume\b": "controls reporting",
    r"\btells? the truth\b|\bnever lies?\b": "what is verified?",
    r"\b(?:fares?|fared|faring)\b": "name the result",
}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / ".github").glob("**/*.md")),
    *sorted((ROOT / "src").glob("**/*.md")),
]
SCRIPTS = [*sorted((ROOT / "docs" / "tutorials").glob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]
PACKAGES = sorted(
    path for package in (ROOT / "src").iterdir() for path in package.iterdir() if not path.name.startswith("__pyc")
)

Lines = Iterable[tuple[int, str]]


def markdown_prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines of a page without code, tables, images, HTML and directives."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not re.match(r"\s{4,}\S|\s*\||\s*!\[|\s*<|:::", line):
            yield number, line


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Lines of docstrings without examples, tables, and formulas (blocks that are indented after an empty line)."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not node.body:
            continue
        first = node.body[0]
        if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)):
            continue
        formula = False
        for number in range(first.lineno, (first.end_lineno or first.lineno) + 1):
            line = lines[number - 1]
            deep = len(line) - len(line.lstrip()) >= first.col_offset + 4
            formula = deep and (formula or not lines[number - 2].strip()) and number > first.lineno
            if not formula and not line.lstrip().startswith((">>>", "...", "|")):
                yield number, line


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Lines that are comments: the text of a tutorial."""
    for number, line in enumerate(source.splitlines(), start=1):
        if re.match(r"# (?!%%)", line):
            yield number, line


def messages(source: str) -> Iterator[tuple[int, str]]:
    """All texts of several words: docstrings, error messages, help."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, " ".join(node.value.split())


def unplain(lines: Lines) -> list[str]:
    """What the word list finds, with what to write instead."""
    return [
        f"line {number}: {match[0]!r}; better: {better}"
        for number, line in lines
        for pattern, better in WORDS.items()
        for match in re.finditer(pattern, line, re.IGNORECASE)
    ]


def too_wide(lines: Lines) -> list[str]:
    """Lines that are too long and could be broken."""
    return [f"line {n}: {len(line)} columns" for n, line in lines if len(line) > WIDTH and " " in line.strip()[:WIDTH]]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert unplain(markdown_prose(text)) + too_wide(markdown_prose(text)) == []


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_tutorials_and_examples(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    prose = [*comments(text), *docstrings(text)]
    assert unplain(prose) + too_wide(prose) == []


@pytest.mark.parametrize("package", PACKAGES, ids=name)
def test_sources(package: Path) -> None:
    found = []
    for path in sorted(package.rglob("*.py")) if package.is_dir() else [package]:
        if path.suffix == ".py":
            text = path.read_text(encoding="utf-8")
            found += [f"{name(path)}, {what}" for what in unplain(messages(text)) + too_wide(docstrings(text))]
    assert found == []


@pytest.mark.parametrize(
    "sentence",
    [
        "This solver is dear.",
        "The status tells what happened.",
        "It warns and goes on.",
        "mnist is not at hand: set WELLPOSED_DATA.",
        "Nobody reads this.",
        "Leave the bias away.",
        "That is no run, but holds three.",
        "It has a page of its own.",
        "a unit that changes its mind",
        "ended without giving the directory free",
    ],
)
def test_the_list_finds(sentence: str) -> None:
    assert len(unplain([(1, sentence)])) == 1


@pytest.mark.parametrize(
    "sentence",
    [
        "There is no equilibrium.",
        "It is no longer random.",
        "f is no more expensive than a product.",
        "the time of its own matrix products",
        "where there is no bound, and elsewhere",
    ],
)
def test_the_list_lets_pass(sentence: str) -> None:
    assert unplain([(1, sentence)]) == []


def test_code_tables_and_formulas_may_be_wide() -> None:
    wide = "x " * 60
    assert too_wide(markdown_prose(f"```python\n{wide}\n```\n| {wide} |\n    {wide}\n")) == []
    assert len(too_wide(markdown_prose(wide))) == 1
    assert too_wide(docstrings(f'"""Title.\n\n    {wide}\n"""\n')) == []
    assert len(too_wide(docstrings(f'"""Title.\n\n{wide}\n"""\n'))) == 1
