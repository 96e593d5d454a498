"""Runs in the kernel before a tutorial: a figure is shown when a cell assigns it, a part of one (`<matplotlib.legend.Legend at
0x...>`) is not, warnings are errors."""

from __future__ import annotations

import io
import warnings
from typing import Any

from IPython import get_ipython
from IPython.display import Image, display
from matplotlib.artist import Artist
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure

DPI = 100
_shell: Any = get_ipython()  # type: ignore[no-untyped-call]
_shown: list[Figure] = []  # kept alive, so that an id is never used twice


def before(*_: object) -> None:
    warnings.simplefilter("error")


def after(*_: object) -> None:
    warnings.resetwarnings()
    for value in list(_shell.user_ns.values()):
        if isinstance(value, Figure) and not any(value is old for old in _shown):
            _shown.append(value)
            content = io.BytesIO()
            value.savefig(content, format="png", dpi=DPI)
            display(Image(content.getvalue()))  # type: ignore[no-untyped-call]


for part in (Artist, Colorbar):
    _shell.display_formatter.ipython_display_formatter.for_type(part, lambda part: None)
_shell.events.register("pre_run_cell", before)
_shell.events.register("post_run_cell", after)
