"""Rows as a Parquet file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wellposed.errors import InvalidArgument, MissingPackage, how_to_install

__all__ = ["parquet"]


def parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The content of the file, a column for every key.

    Raises:
        MissingPackage: pyarrow is not installed.
        InvalidArgument: A column has values of different kinds.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingPackage(f"pyarrow is not installed; {how_to_install('runs')}.") from None
    names = list(dict.fromkeys(name for row in rows for name in row))
    sink = pyarrow.BufferOutputStream()
    try:
        pyarrow.parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in names}), sink)
    except pyarrow.ArrowException as error:
        raise InvalidArgument(f"the rows do not fit together ({' '.join(str(error).split()).rstrip('.')}).") from None
    content: bytes = sink.getvalue().to_pybytes()
    return content
