"""One self-contained HTML page per run, or per comparison of runs, for screen and print."""

from wellposed_lab.report._page import can_draw
from wellposed_lab.report._sweep import certified_text, spread_text, sweep_page
from wellposed_lab.report._write import compare, write

__all__ = ["can_draw", "certified_text", "compare", "spread_text", "sweep_page", "write"]
