"""Copy measured tables into the pages that quote them.

    python benchmarks/tables.py [--check]

A page has a place for a table:

    <!-- table of benchmarks/results/own_cell.json: peers: cell, / loop = time / hand-written loop -->

    | ... |

The comment names a list of rows of a results file and columns of it, with other headings after `=`. The table below it is
written anew. `--check` changes nothing and fails if a page quotes other numbers than the results.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/certificates.md", "docs/choosing.md", "docs/speed.md")
PAGES += tuple(f"docs/tasks/{name}.md" for name in ("graphs", "imaging", "language", "reasoning"))
PLACE = re.compile(r"(<!-- table of (\S+\.json): (\w+): (.+?) -->\n\n)((?:\|.*\n)+)")


def text(cell: Any) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def mean_and_error(values: list[float], digits: int, scale: float = 1.0) -> str:
    """Mean and standard error, times `scale`; without an error if there is one value."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{scale * mean:.{digits}f}"
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    return f"{scale * mean:.{digits}f} ± {scale * spread:.{digits}f}"


def table(rows: list[dict[str, Any]], columns: str) -> str:
    """The rows as Markdown; `columns` as in a page."""
    chosen = [column.partition(" = ") for column in columns.split(", ")]
    lines = [[heading or name for name, _, heading in chosen], ["---"] * len(chosen)]
    lines += [[text(row[name]) for name, _, _ in chosen] for row in rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def quoted(page: str, root: Path = ROOT) -> str:
    """The page with its tables written anew."""

    def write(found: re.Match[str]) -> str:
        opening, file, key, columns, _ = found.groups()
        return opening + table(json.loads((root / file).read_text())[key], columns)

    return PLACE.sub(write, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    old = [name for name in PAGES if quoted((ROOT / name).read_text()) != (ROOT / name).read_text()]
    for name in old:
        print(f"{name}: {'quotes other numbers; run `make tables`' if options.check else 'written anew'}")
        if not options.check:
            (ROOT / name).write_text(quoted((ROOT / name).read_text()))
    return int(options.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
