"""Source files that can be read at once."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
#: Lines of a source file.
MOST_LINES = 300


def test_no_source_file_is_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert lengths
    long = [f"{path.relative_to(SOURCE)}: {count} lines" for path, count in sorted(lengths.items()) if count > MOST_LINES]
    assert not long, f"at most {MOST_LINES} lines a file; split {', '.join(long)}"
