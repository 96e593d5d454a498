"""Data of the user for `fuzz_files`: one file of each kind that is read, and whole files with wrong content."""

from __future__ import annotations

import contextlib
import io
import random
import zipfile
from pathlib import Path

import numpy as np

__all__ = ["forge_parquet", "pack", "write_own"]


def write_own(folder: Path, draw: np.random.Generator) -> None:
    """Data of the user, of each kind that is read, with numbers and text."""
    numbers, words = draw.normal(size=(12, 2)), ["up", "down", "é"] * 4
    np.savez(folder / "own.npz", X=numbers, y=np.array(words))
    rows = [f"{a},{b},{word}" for (a, b), word in zip(numbers.tolist(), words, strict=True)]
    (folder / "own.csv").write_text("\n".join(["a,b,y", *rows]) + "\n", encoding="utf-8")
    with contextlib.suppress(ImportError):
        import pyarrow
        import pyarrow.parquet

        columns = {"a": numbers[:, 0], "b": pyarrow.array(range(12)), "y": words}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "own.parquet")


def pack(path: Path, method: int) -> None:
    """The same members, compressed by another method."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def forge_parquet(rng: random.Random, path: Path, content: bytes) -> None:
    """A table that is whole, with a column of another kind."""
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
    ]
    table = plain.set_column(plain.column_names.index(name), rng.choice([name, "", "y", "a.b", "\x1b[2J"]), rng.choice(choices))
    pyarrow.parquet.write_table(table, path)
