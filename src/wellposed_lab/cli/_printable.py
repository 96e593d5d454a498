"""Text that cannot control the terminal: names and values out of files are printed as if a stranger had written them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

__all__ = ["PrintableConsole", "printable"]

#: Categories of characters that steer and do not show: control, format (such as directions), half surrogate pairs, private and
#: unassigned ones, and ends of lines and paragraphs.
_STEERING = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
#: Ends of lines and tabs are meant.
_MEANT = "\n\t"


def printable(text: str) -> str:
    """The text with U+FFFD in the place of each character that would steer a terminal."""
    if text.isprintable():
        return text
    return "".join(
        "\ufffd" if character not in _MEANT and unicodedata.category(character) in _STEERING else character
        for character in text
    )


class PrintableConsole(Console):
    """A console whose texts are `printable`; its own colours and movements are not texts."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The parts of what is printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
