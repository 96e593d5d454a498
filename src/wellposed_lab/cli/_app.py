"""The application that commands register with, exit codes, and errors as one sentence."""

from __future__ import annotations

import enum
import functools
import importlib.metadata
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any, NoReturn, TypeVar, cast

import typer
from rich.console import Console

from wellposed.errors import IllPosed, NotConverged, RunError, WellposedError
from wellposed_lab.cli._printable import PrintableConsole, printable

__all__ = ["ExitCode", "app", "guarded", "main", "out", "say"]


class ExitCode(enum.IntEnum):
    """What a script learns from a command."""

    OK = 0
    NEGATIVE = 1  # not certified, not converged, a check failed
    MISTAKE = 2  # of the caller: a wrong option, key, value or file
    RUN = 3  # a run directory is locked, damaged or cannot be written
    BUG = 4  # an error that nobody foresaw
    INTERRUPTED = 130  # as the shells have it


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


def out() -> Console:
    """Where results go. Made anew, because tests and pipes replace the stream."""
    return PrintableConsole(soft_wrap=True)


def say() -> Console:
    """Where everything else goes: progress, hints, errors."""
    return PrintableConsole(stderr=True, soft_wrap=True)


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
            # an argument of the library is no option of the command line
            _complain(str(error).replace("pass on_ill_posed='warn' to go on without proof", "take a smaller optimizer.lr"))
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
    say().print(f"[red]error:[/] {_escape(text)}", highlight=False)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends a command as Ctrl-C does: files are left whole, the directory is given free, the exit code is 130."""
    raise KeyboardInterrupt


def main() -> None:
    """The entry point `wellposed`."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # not where the caller chose to ignore it
        signal.signal(signal.SIGTERM, _terminated)
    as_usual = warnings.formatwarning
    warnings.formatwarning = lambda *args, **options: printable(as_usual(*args, **options))
    # `wellposed train --debug` means the same as `wellposed --debug train`
    words = sys.argv[1:]
    if "--debug" in words:
        words = ["--debug", *(word for word in words if word != "--debug")]
    app(words)
