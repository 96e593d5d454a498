"""The command line: parse, call, print; no mathematics. `commands` gathers the commands."""

from __future__ import annotations

import signal
import sys
import warnings
from types import FrameType
from typing import NoReturn

__all__ = ["main"]

#: What `wellposed` alone prints.
GUIDE = """\
wellposed: equilibrium networks with verified convergence

First steps
  wellposed doctor                 check the installation
  wellposed train                  train on images of digits, and write a page about the run
  wellposed train --prove 20       the same, and prove that descent on 20 of them ends at zero loss
  wellposed certify runs/NAME      what is proved about a trained network
  wellposed report runs/NAME       write its page again

Your own data and network
  wellposed train --set data.name=table.csv --set data.target=price
  wellposed train --set model.class=my_package.MyCell

The papers
  wellposed reproduce --list       their experiments and claims

wellposed --help lists all commands; wellposed COMMAND --help shows examples of one.
"""


def main() -> None:
    """The entry point `wellposed`. Version and guide are printed without importing torch."""
    words = sys.argv[1:]
    if words == ["--version"]:
        import importlib.metadata

        print(importlib.metadata.version("wellposed"))
        return
    if not words:
        print(GUIDE, end="")
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # not where the caller chose to ignore it
        signal.signal(signal.SIGTERM, _terminate)
    try:
        from wellposed_lab.cli._app import printable
        from wellposed_lab.cli.commands import app
    except KeyboardInterrupt:  # torch takes seconds to import
        print("Interrupted before anything was done.", file=sys.stderr)
        raise SystemExit(130) from None
    except ImportError as error:
        missing = error.name or getattr(error.__cause__, "name", None)  # of `MissingPackage`: its cause
        if missing not in ("pydantic", "rich", "typer", "yaml"):
            raise
        from wellposed.errors import how_to_install

        print(f"The command line needs {missing}; install it with: {how_to_install('cli')}.", file=sys.stderr)
        raise SystemExit(2) from None  # 1 would mean "not certified"
    as_usual = warnings.formatwarning
    warnings.formatwarning = lambda *args, **options: printable(as_usual(*args, **options))
    # `wellposed train --debug` means the same as `wellposed --debug train`
    app(["--debug", *(word for word in words if word != "--debug")] if "--debug" in words else words)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends a command like Ctrl-C: files stay whole, locks are released, exit code 130."""
    raise KeyboardInterrupt
