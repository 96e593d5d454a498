"""A figure as the content of files: PNG for the screen, PDF and SVG for papers."""

from __future__ import annotations

import io
from typing import Any

#: Endings, with what keeps the time of day out of a file, so that equal figures are equal files.
FORMATS: dict[str, dict[str, None]] = {".png": {}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}

#: Fonts as TrueType: many journals refuse Type 3, the default of matplotlib. The SVG has shapes, which need no font.
SETTINGS: dict[Any, Any] = {"svg.hashsalt": "wellposed", "pdf.fonttype": 42, "svg.fonttype": "path"}


def rendered(figure: Any, *, dpi: int = 150) -> dict[str, bytes]:
    """The content of a file for each ending.

    Args:
        figure: Of matplotlib.
        dpi: Of the PNG, and of what is not a line or a text in the others.
    """
    import matplotlib

    found = {}
    for ending, metadata in FORMATS.items():
        content = io.BytesIO()
        with matplotlib.rc_context(SETTINGS):
            figure.savefig(content, format=ending[1:], dpi=dpi, metadata=metadata)
        found[ending] = content.getvalue()
    return found
