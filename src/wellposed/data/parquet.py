"""Tables in Parquet files: read column by column, with a size that is known before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from wellposed.data.table import LARGEST, Table, check_header
from wellposed.errors import InvalidArgument, MissingPackage, how_to_install

__all__ = ["read_parquet"]

#: Bytes of a cell in memory: a float64, or the place of a text.
CELL = 8
#: Decimal cells that are Python objects at once.
AT_ONCE = 1 << 16


def read_parquet(path: Path) -> Table:
    """The columns of a Parquet file that hold numbers, truth values or text.

    Text is read as a dictionary, so that a text that repeats is in memory once. Columns of all other kinds are not read: a
    short file can hold lists of any length.

    Args:
        path: A regular file.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackage(f"{path.name} needs pyarrow; install it with: {how_to_install('runs')}.") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, _checked_rows(path, file.metadata)
        names = list(schema.names)
        check_header(path, names)
        if rows == 0:
            raise InvalidArgument(f"{path} has columns and no rows.")
        texts = [name for name in names if _kind(schema.field(name).type) == "text"]
        columns = {}
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:
            for name in names:
                columns[name] = _column(path, file, name, schema.field(name).type, rows)
        return Table(path.name, columns)
    except (pyarrow.ArrowException, OSError) as error:
        raise InvalidArgument(f"{path} cannot be read as a Parquet file ({' '.join(str(error).split())}).") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} cannot be read as a Parquet file: a name in it is not UTF-8 text.") from None


def _checked_rows(path: Path, metadata: Any) -> int:
    """The number of rows, if the file does not unpack to more than is read: runs of equal values take no space in it."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    size = sum(group.total_byte_size for group in groups)
    if size > LARGEST:
        raise InvalidArgument(f"{path} unpacks to {size / 2**30:.1f} GB; at most {LARGEST / 2**30:.0f} GB are read.")
    rows: int = max(metadata.num_rows, sum(group.num_rows for group in groups))
    if rows * metadata.num_columns * CELL > LARGEST:
        raise InvalidArgument(
            f"{path} has {rows:,} rows and {metadata.num_columns:,} columns, {rows * metadata.num_columns * CELL:,} bytes of "
            f"numbers; at most {LARGEST:,} are read."
        )
    return rows


def _kind(of: Any) -> str:
    """ "number", "decimal", "text" or "other"."""
    from pyarrow import types

    of = of.value_type if types.is_dictionary(of) else of
    if types.is_integer(of) or types.is_floating(of) or types.is_boolean(of):
        return "number"
    if types.is_decimal(of):
        return "decimal"
    return "text" if types.is_string(of) or types.is_large_string(of) else "other"


def _column(path: Path, file: Any, name: str, of: Any, rows: int) -> np.ndarray:
    kind = _kind(of)
    if kind == "other":
        # kept as text, so that only its use is a mistake
        return np.full(rows, f"<{of}>", dtype=object)
    column = file.read(columns=[name]).column(name)
    if kind == "text":
        try:
            return np.concatenate([_texts(chunk) for chunk in column.chunks])
        except UnicodeDecodeError:
            raise InvalidArgument(
                f"Column {name!r:.60} of {path} holds text that is not UTF-8; write it again as UTF-8."
            ) from None
    if kind == "decimal":
        return np.fromiter(_decimals(column), dtype=np.float64, count=len(column))
    if hasattr(of, "value_type"):
        column = column.cast(of.value_type)
    found: np.ndarray = column.to_numpy().astype(np.float64)
    return found


def _texts(chunk: Any) -> np.ndarray:
    """(n,) text, empty where a cell is; equal cells are one object."""
    chunk = chunk if hasattr(chunk, "dictionary") else chunk.dictionary_encode()
    words = np.array([*("" if word is None else word for word in chunk.dictionary.to_pylist()), ""], dtype=object)
    found: np.ndarray = words[chunk.indices.fill_null(len(words) - 1).to_numpy(zero_copy_only=False)]
    return found


def _decimals(column: Any) -> Iterator[float]:
    for start in range(0, len(column), AT_ONCE):
        yield from (math.nan if cell is None else float(cell) for cell in column.slice(start, AT_ONCE).to_pylist())
