"""The application that commands register with: exit codes, errors as one sentence, and printing."""

from __future__ import annotations

import enum
import functools
import importlib.metadata
import textwrap
import unicodedata
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar, cast

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from wellposed.errors import IllPosed, NotConverged, RunError, WellposedError

__all__ = [
    "ALLOW_CODE",
    "ExitCode",
    "PrintableConsole",
    "app",
    "guarded",
    "message_console",
    "print_labelled",
    "print_message",
    "print_plain",
    "print_table",
    "print_wrapped",
    "printable",
    "result_console",
]

#: Help of the option of that name.
ALLOW_CODE = "Import the class that model.class of the run or configuration names: this runs its code."
#: Text is never squeezed into fewer columns, however narrow the terminal.
LEAST = 30


class ExitCode(enum.IntEnum):
    """The exit code of a command."""

    OK = 0
    NEGATIVE = 1  # not certified, not converged, a check failed
    MISTAKE = 2  # of the caller: a wrong option, key, value or file
    RUN = 3  # a run directory is locked, damaged or cannot be written
    BUG = 4  # an unforeseen error
    INTERRUPTED = 130  # as in shells


EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed train\n\n"
    "  wellposed certify runs/first\n\n"
    "  wellposed reproduce --list\n\n"
    "Exit codes: 0 done; 1 not certified, not converged or a check failed; 2 a mistake in the call or the configuration; 3 a "
    "run directory is locked, damaged or cannot be written; 4 an unforeseen error; 130 interrupted."
)

app = typer.Typer(
    name="wellposed",
    help="Equilibrium networks: train, certify, see.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Command = TypeVar("Command", bound=Callable[..., Any])


class _Settings:
    debug = False


#: Categories of characters that steer a terminal and do not show: control, format (such as directions), half surrogate
#: pairs, private and unassigned ones, and ends of lines and paragraphs.
_STEERING = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def printable(text: str) -> str:
    """The text with U+FFFD for each character that would steer a terminal; line ends and tabs
    stay."""
    if text.isprintable():
        return text
    return "".join(
        "\ufffd" if character not in "\n\t" and unicodedata.category(character) in _STEERING else character
        for character in text
    )


class PrintableConsole(Console):
    """A console whose texts are `printable`; its own colours and movements are not texts."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The parts of what is printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def result_console() -> Console:
    """For results. Made anew, because tests and pipes replace the stream."""
    return PrintableConsole(soft_wrap=True)


def message_console() -> Console:
    """For everything else: progress, hints, errors."""
    return PrintableConsole(stderr=True, soft_wrap=True)


def print_plain(text: str, *, style: str = "") -> None:
    """A result."""
    result_console().print(text, style=style, highlight=False, markup=False)


def print_message(text: str) -> None:
    """A hint or a warning, on stderr."""
    message_console().print(text, highlight=False, markup=False)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(importlib.metadata.version("wellposed"))
        raise typer.Exit()


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    _Settings.debug = debug


def guarded(command: Command) -> Command:
    """A command whose errors become one sentence and an exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            _complain("Interrupted.")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except WellposedError as error:
            if _Settings.debug:
                raise
            from wellposed_lab.runs.config import by_keys

            _complain(by_keys(str(error)))
            negative = isinstance(error, (IllPosed, NotConverged))
            code = ExitCode.RUN if isinstance(error, RunError) else ExitCode.NEGATIVE if negative else ExitCode.MISTAKE
            raise typer.Exit(code) from None
        except Exception as error:
            if _Settings.debug:
                raise
            text = " ".join(str(error).split())
            _complain(f"Unforeseen {type(error).__name__}: {text}. `wellposed --debug ...` shows where; please report it.")
            raise typer.Exit(ExitCode.BUG) from None

    return cast(Command, run)  # `wraps` gives it the signature that typer reads


def _complain(text: str) -> None:
    message_console().print(f"[red]error:[/] {escape(text)}", highlight=False)


def print_labelled(label: str, text: str, *, indent: int, style: str = "") -> None:
    """A label, and the text beside it in a column, wrapped at spaces so that paths can be copied.

    Args:
        label: At most `indent` - 1 letters.
        text: The text.
        indent: Where the column begins.
        style: Of the label.
    """
    console = result_console()
    for number, line in enumerate(_lines(text, console.width - indent)):
        beginning = (label if number == 0 else "").ljust(indent)
        console.print(Text.assemble((beginning, style), line), highlight=False)


def print_wrapped(text: str, *, indent: int = 2, style: str = "") -> None:
    """Lines of text; long ones are wrapped with an indent."""
    width = result_console().width
    for line in text.split("\n"):
        first, *others = _lines(line, width)
        print_plain(first, style=style)
        for other in _lines(" ".join(others), width - indent) if others else []:
            print_plain(f"{'':<{indent}}{other}", style=style)


def print_table(table: Table) -> None:
    """A table with wrapped cells, never cut."""
    for column in table.columns:
        column.overflow = "fold"
    result_console().print(table, soft_wrap=False)


def _lines(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, LEAST), break_long_words=False, break_on_hyphens=False) or [""]
