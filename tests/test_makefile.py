"""The environments of the Makefile have what their users need."""

from __future__ import annotations

import re
from pathlib import Path

MAKEFILE = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")


def test_make_run_has_what_its_next_steps_need() -> None:
    """After `make run` come `wellposed report`, `landscape` and `reproduce`: data, pages, and pictures."""
    recipe = re.search(r"^\$\(VENV\)/\.installed-run:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
    assert recipe is not None
    extras = re.search(r"\.\[([\w,]+)\]", recipe[1])
    assert extras is not None and {"cli", "data", "plot", "report"} <= set(extras[1].split(","))
