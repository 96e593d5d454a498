"""Tables of the user: columns by name, and those of .csv files."""

from __future__ import annotations

import csv
import itertools
import math
import os
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wellposed.errors import InvalidArgument, did_you_mean

#: Bytes of a file, and of what it unpacks to.
LARGEST = 4 * 2**30
#: Names of columns that a message lists.
LISTED = 12


@dataclass(frozen=True)
class Table:
    """Columns of equal length.

    Attributes:
        name: Of the file, for messages.
        columns: By name: (n,) of float64, NaN where a cell is empty; or of text.
    """

    name: str
    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, key: str, option: str) -> np.ndarray:
        """A column, by a name that `option` gave."""
        if key not in self.columns:
            hint = did_you_mean(key, self.columns)
            raise InvalidArgument(f"{option}={key!r}: {self.name} has no such column; it has {self.listed()}.{hint}")
        return self.columns[key]

    def numbers(self, key: str, option: str) -> np.ndarray:
        """(n,) a column whose cells are all finite numbers."""
        values = self.column(key, option)
        if values.dtype.kind != "f":
            i = next((i for i, cell in enumerate(values) if not _is_number(cell)), 0)
            remedy = "Choose the inputs by data.columns=[...] without it, or write numbers in its place."
            if _is_number(str(values[i]).replace(",", ".", 1)):
                remedy = "Numbers need a decimal point: replace the decimal commas."
            raise InvalidArgument(
                f"Column {key!r:.60} of {self.name} holds text ({values[i]!r:.60} in row {i + 1}), where numbers are "
                f"expected. {remedy}"
            )
        if not np.isfinite(values).all():
            i = int(np.flatnonzero(~np.isfinite(values))[0])
            cell, count = "is empty or NaN" if math.isnan(values[i]) else f"is {values[i]}", int((~np.isfinite(values)).sum())
            raise InvalidArgument(
                f"Row {i + 1} of column {key!r:.60} of {self.name} {cell} ({count} of {len(values)} cells are not finite). "
                "Drop these rows or fill the cells, or omit the column by data.columns=[...]."
            )
        return values

    def listed(self) -> str:
        """The names, or the first of them."""
        names = list(self.columns)
        return ", ".join(f"{name:.60}" for name in names[:LISTED]) + (
            f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        )


def check_file(path: Path) -> None:
    """Raises unless it is a regular file of a size that can be read: a pipe would never end."""
    try:
        found = os.stat(path)
    except OSError as error:
        near = [other.name for other in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        raise InvalidArgument(
            f"data.name={str(path)!r} cannot be read: {error.strerror}.{did_you_mean(path.name, near)}"
        ) from None
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgument(f"data.name={str(path)!r} is not a file; give a .csv, .parquet, .npz or .txt file.")
    if found.st_size == 0:
        raise InvalidArgument(f"{path} is empty.")
    if found.st_size > LARGEST:
        raise InvalidArgument(f"{path} has {found.st_size / 2**30:.1f} GB; at most {LARGEST / 2**30:.0f} GB are read.")


def read_csv(path: Path) -> Table:
    """The columns of a file with names in its first row; a comma, semicolon or tab separates
    cells."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            mark = max(",;\t", key=first.count)  # the first of equals, so a single column has a comma
            rows = csv.reader(itertools.chain([first], file), delimiter=mark, strict=True)
            header = [name.strip() for name in next(rows, [])]
            check_header(path, header)
            cells: list[list[str]] = []
            for row in rows:
                if not row:
                    continue
                if len(row) != len(header):
                    raise InvalidArgument(
                        f"{path}, line {rows.line_num}: {len(row)} cells where the first row has {len(header)} names."
                    )
                cells.append(row)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not a .csv file: byte {error.start} is not UTF-8 text.") from None
    except csv.Error as error:
        raise InvalidArgument(f"{path} is not a .csv file: {error}.") from None
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}.") from None
    if not cells:
        raise InvalidArgument(f"{path} has names of columns and no rows.")
    return Table(path.name, {name: _parsed(column) for name, column in zip(header, zip(*cells, strict=True), strict=True)})


def check_header(path: Path, names: list[str]) -> None:
    """Raises unless all columns have different names."""
    if not names:
        raise InvalidArgument(f"{path} has no columns.")
    if all(_is_number(name) for name in names):
        raise InvalidArgument(
            f"The first row of {path} must hold the names of the columns; it holds numbers ({names[0]!r:.60}, ...)."
        )
    if "" in names:
        raise InvalidArgument(f"Column {names.index('') + 1} of {path} has no name; name every column.")
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise InvalidArgument(f"{path} has the column {twice!r:.60} twice; rename one of them.")


def _parsed(cells: tuple[str, ...]) -> np.ndarray:
    """float64 if every cell is a number or empty, else text."""
    try:
        return np.array([float(cell) if cell.strip() else math.nan for cell in cells], dtype=np.float64)
    except ValueError:
        return np.array([cell.strip() for cell in cells], dtype=object)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return not cell.strip()
    return True
