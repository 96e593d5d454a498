"""Data of the user for `fuzz_files`: one file of each kind that is read, and whole files with wrong content."""

from __future__ import annotations

import contextlib
import datetime
import io
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import wellposed as wp
from wellposed.data.own import checksum

__all__ = ["forge_csv", "forge_parquet", "load_own", "pack", "write_own"]


def write_own(folder: Path, draw: np.random.Generator) -> None:
    """Data of the user, of each kind that is read: `words` with text as the target, the others with numbers."""
    folder.mkdir()
    numbers, words = draw.normal(size=(12, 2)), ["up", "down", "é"] * 4
    np.savez(folder / "words.npz", X=numbers, y=np.array(words))
    np.savez(folder / "arrays.npz", X=draw.standard_normal((12, 3)), y=draw.standard_normal(12))
    rows = [f"{a},{b},{word}" for (a, b), word in zip(numbers.tolist(), words, strict=True)]
    (folder / "words.csv").write_text("\n".join(["a,b,y", *rows]) + "\n", encoding="utf-8")
    table = {"size": draw.standard_normal(12), "rooms": draw.integers(1, 9, 12), "town": np.array(["n", "s"] * 6)}
    table["y"] = table["size"] - table["rooms"]
    rows = [",".join(table), *(",".join(map(str, row)) for row in zip(*table.values(), strict=True))]
    (folder / "table.csv").write_text("\n".join(rows))
    with contextlib.suppress(ImportError):
        import pyarrow
        import pyarrow.parquet

        columns = {"a": numbers[:, 0], "b": pyarrow.array(range(12)), "y": words}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "words.parquet")
        pyarrow.parquet.write_table(pyarrow.table(table), folder / "table.parquet")


def load_own(rng: random.Random, path: Path) -> None:
    """Reads such a file as training does; a table with numbers for regression and for classes."""
    checksum(str(path))
    if path.stem == "words":
        wp.data.load(str(path), 4, n_test=2, classify=rng.random() < 0.5 or None)
        return
    table = path.stem == "table"
    wp.data.load(str(path), 6, n_test=3, columns=("size", "rooms") if table else None)
    if table:
        wp.data.load(str(path), target="town", columns=("size",), classify=True)


def pack(path: Path, method: int) -> None:
    """The same members, compressed by another method."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def forge_csv(rng: random.Random, path: Path, content: bytes, nasty: Sequence[Any]) -> None:
    """A table with one cell, or one line, replaced."""
    rows = [line.split(",") for line in content.decode().splitlines()]
    row = rng.randrange(len(rows))
    rows[row][rng.randrange(len(rows[row]))] = str(rng.choice(nasty))
    if rng.random() < 0.2:
        rows[row] = rows[row] * rng.choice([0, 2, 500])
    path.write_text("\n".join(",".join(cells) for cells in rows), errors="replace")


def forge_parquet(rng: random.Random, path: Path, content: bytes) -> None:
    """A table that is whole, with a column of another kind, or without one."""
    import pyarrow
    import pyarrow.parquet

    plain = pyarrow.parquet.read_table(io.BytesIO(content))
    n, name = plain.num_rows, rng.choice(plain.column_names)
    places = pyarrow.py_buffer(np.arange(n + 1, dtype=np.int32).tobytes())
    choices = [
        pyarrow.Array.from_buffers(pyarrow.utf8(), n, [None, places, pyarrow.py_buffer(b"\xff" * n)]),
        pyarrow.array([[1, 2]] * n),
        pyarrow.nulls(n),
        pyarrow.array([float("inf")] * n),
        pyarrow.array([2**64 - 1] * n, pyarrow.uint64()),
        pyarrow.array(["x" * 5000] * n).dictionary_encode(),
        pyarrow.array([True, None] * (n // 2)),
        pyarrow.array([b"\x00"] * n),
        pyarrow.array([0] * n, pyarrow.timestamp("ns")),
        pyarrow.array(["x"] * n),
        pyarrow.array([{"a": 1}] * n),
        pyarrow.array([float("nan")] * n),
        pyarrow.array([datetime.date(2001, 1, 1)] * n),
        pyarrow.array([None, *range(n - 1)]),
    ]
    if rng.random() < 0.1:
        pyarrow.parquet.write_table(plain.drop_columns([name]), path)
        return
    table = plain.set_column(plain.column_names.index(name), rng.choice([name, "", "y", "a.b", "\x1b[2J"]), rng.choice(choices))
    pyarrow.parquet.write_table(table, path)
