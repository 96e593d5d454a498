"""Text that stays readable in a narrow terminal: wrapped at words, continued under its beginning."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from wellposed_lab.cli._app import out

__all__ = ["print_labelled", "print_table", "print_wrapped"]

#: Text is never squeezed into less than this, however narrow the terminal.
LEAST = 30


def print_labelled(label: str, text: str, *, indent: int, style: str = "", console: Console | None = None) -> None:
    """A label at the left, and the text beside it in lines of its own column.

    Args:
        label: At most `indent` - 1 letters.
        text: Is wrapped at spaces only, so that paths and formulas can be copied.
        indent: Where the column begins.
        style: Of the label.
        console: Where to; standard output if not given.
    """
    console = out() if console is None else console
    for number, line in enumerate(_lines(text, console.width - indent)):
        beginning = (label if number == 0 else "").ljust(indent)
        console.print(Text.assemble((beginning, style), line), highlight=False)


def print_wrapped(text: str, *, indent: int = 2, style: str = "") -> None:
    """Lines of text, each continued with an indent where it is too long."""
    console = out()
    for line in text.split("\n"):
        first, *others = _lines(line, console.width)
        console.print(first, style=style, highlight=False, markup=False)
        for other in _lines(" ".join(others), console.width - indent) if others else []:
            console.print(f"{'':<{indent}}{other}", style=style, highlight=False, markup=False)


def print_table(table: Table) -> None:
    """A table whose cells are wrapped, and never cut."""
    for column in table.columns:
        column.overflow = "fold"
    out().print(table, soft_wrap=False)


def _lines(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, LEAST), break_long_words=False, break_on_hyphens=False) or [""]
