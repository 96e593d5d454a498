"""The command line: parse, call, print; no mathematics. One file a command; each registers itself with `app`."""

from wellposed.errors import how_to_install as _how_to_install

try:
    import pydantic as _pydantic  # noqa: F401
    import typer as _typer  # noqa: F401
    import yaml as _yaml  # noqa: F401
except ImportError as error:
    raise SystemExit(f"The command line needs {error.name}; install it with: {_how_to_install('cli')}.") from None

from wellposed_lab.cli import audit, bench, certify, data, landscape, report, reproduce, train
from wellposed_lab.cli._app import app, main

__all__ = ["app", "audit", "bench", "certify", "data", "landscape", "main", "report", "reproduce", "train"]
