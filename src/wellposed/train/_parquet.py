"""Rows as a Parquet file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["parquet"]


def parquet(rows: Sequence[Mapping[str, Any]]) -> bytes | None:
    """The content of the file, a column for every key; None if pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row))
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in names}), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content
