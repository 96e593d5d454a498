"""Run a script in percent format and write down what it printed and drew, as a Markdown page.

`# %% [markdown]` opens a cell of text (comment lines), `# %%` a cell of code. All code cells share
one namespace, as they do when the script is run as it is; an exception or a warning in a cell ends
the run. The text printed by a cell follows it, then its figures: those open in pyplot, the figures
newly bound to a name, and the figure its last expression is.

    python percent.py SCRIPT FOLDER     # writes FOLDER/page.md and FOLDER/NAME-1.png, ...
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = re.compile(r"^# %%(?P<kind>.*)$")
DPI = 100


@dataclass(frozen=True)
class Cell:
    text: str  # Markdown, or Python
    is_markdown: bool
    first_line: int  # of the text, in the script; from 1


def cells_of(source: str) -> list[Cell]:
    """Cells of a script, in order. Empty ones are left out, and so are comments above the first
    mark."""
    cells: list[Cell] = []
    lines: list[str] = []
    is_markdown, first_line = False, 1
    for number, line in enumerate([*source.splitlines(), "# %%"], start=1):
        mark = MARK.match(line)
        if mark is None:
            lines.append(line)
            continue
        if any(text.strip() and (first_line > 1 or not text.startswith("#")) for text in lines):
            text = (
                "\n".join(_uncomment(text, first_line + i) for i, text in enumerate(lines)) if is_markdown else "\n".join(lines)
            )
            cells.append(Cell(text.strip("\n"), is_markdown, first_line + _leading_blanks(lines)))
        kind = mark["kind"].strip()
        if kind not in ("", "[markdown]"):
            raise SyntaxError(f"line {number}: a cell opens with '# %%' or '# %% [markdown]'. Got {line!r}.")
        is_markdown, first_line, lines = kind == "[markdown]", number + 1, []
    return cells


def _leading_blanks(lines: list[str]) -> int:
    return next(i for i, line in enumerate(lines) if line.strip())


def _uncomment(line: str, number: int) -> str:
    if line.strip() and not line.startswith("#"):
        raise SyntaxError(f"line {number}: a line of a Markdown cell begins with '#'. Got {line!r}.")
    return line[1:].removeprefix(" ")


def run(script: Path, folder: Path) -> str:
    """Execute `script`; save its figures as `folder/NAME-1.png`, ... and return the page that shows
    them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    source = script.read_text()
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    parts: list[str] = []
    shown: list[Figure] = []  # kept alive, so that an id is never used twice
    count = 0
    for cell in cells_of(source):
        if cell.is_markdown:
            parts.append(cell.text)
            continue
        parts.append(f"```python\n{cell.text.rstrip()}\n```")
        printed, value = _execute(cell, script, namespace)
        if printed.strip():
            parts.append(f"```text\n{printed.rstrip()}\n```")
        candidates = [*map(pyplot.figure, pyplot.get_fignums()), *namespace.values(), value]
        for figure in _new_figures(candidates, shown, Figure):
            count += 1
            name = f"{script.stem}-{count}.png"
            figure.savefig(folder / name, dpi=DPI)
            parts.append(f"![Figure {count}]({name})")
        pyplot.close("all")
    return "\n\n".join(parts) + "\n"


def unexecuted(script: Path) -> str:
    """The page of a script without what it prints and draws; nothing is run."""
    cells = cells_of(script.read_text())
    return "\n\n".join(cell.text if cell.is_markdown else f"```python\n{cell.text.rstrip()}\n```" for cell in cells) + "\n"


def _new_figures(candidates: list[Any], shown: list[Any], kind: type) -> Iterator[Any]:
    for candidate in candidates:
        if isinstance(candidate, kind) and not any(candidate is old for old in shown):
            shown.append(candidate)
            yield candidate


def _execute(cell: Cell, script: Path, namespace: dict[str, Any]) -> tuple[str, Any]:
    """What the cell printed, and the value of its last statement if that is an expression."""
    tree = ast.parse("\n" * (cell.first_line - 1) + cell.text, str(script))
    last = tree.body[-1] if tree.body else None
    value = None
    linecache.checkcache(str(script))
    with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
        warnings.simplefilter("error")
        body = tree.body[:-1] if isinstance(last, ast.Expr) else tree.body
        exec(compile(ast.Module(body, []), str(script), "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(script), "eval"), namespace)
    return out.getvalue(), value


def main(arguments: list[str]) -> None:
    script, folder = map(Path, arguments)
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, os.fspath(script.parent.resolve()))  # as `python SCRIPT` would
    sys.path.remove(os.fspath(Path(__file__).parent.resolve()))
    start, start_cpu = time.perf_counter(), time.process_time()
    page = run(script, folder)
    (folder / "page.md").write_text(page)
    print(f"{time.perf_counter() - start:.1f} {time.process_time() - start_cpu:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
