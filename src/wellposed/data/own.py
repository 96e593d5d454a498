"""Data of the user: a file by its path, with what is learned from what, parted and scaled."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np

from wellposed._reading import read_arrays, sha256
from wellposed.data.parquet import read_parquet
from wellposed.data.table import LARGEST, LISTED, Table, check_file, read_csv
from wellposed.errors import InvalidArgument, WellposedWarning, did_you_mean

SUFFIXES = (".csv", ".parquet", ".npz")
#: Columns that are taken as the target if none is named.
USUAL = ("target", "y", "label")
#: Arrays of an archive: to train, and to test if there are any.
ARRAYS = (("X", "y"), ("x", "y"), ("x_train", "y_train"), ("X_train", "y_train"))

Parts = dict[str, np.ndarray]


def own_path(name: str) -> Path:
    """The path that the name of a data set is, with `~` written out; raises unless a file can have
    this name."""
    try:
        if b"\0" in os.fsencode(name):
            raise InvalidArgument(f"data.name={name!r} cannot be the name of a file: it holds a NUL character.")
        return Path(name).expanduser()
    except UnicodeEncodeError:
        raise InvalidArgument(f"data.name={name!r} cannot be the name of a file: it holds half a surrogate pair.") from None
    except RuntimeError:  # ~user without such a user
        raise InvalidArgument(
            f"data.name={name!r} cannot be read: there is no such home folder. Write the whole path."
        ) from None


def checksum(name: str) -> str:
    """sha256 of a file, in hexadecimal."""
    path = own_path(name)
    check_file(path)
    return sha256(path, limit=LARGEST, error=InvalidArgument) or ""


def read_own(
    name: str,
    n: int | None,
    n_test: int | None,
    classes: tuple[int, ...] | None,
    rng: np.random.Generator,
    *,
    target: str | None,
    columns: tuple[str, ...] | None,
    classify: bool | None,
    standardize: bool | None,
) -> tuple[Parts, list[str]]:
    """x_train, y_train, x_test, y_test of float64 (classes: int64 from 0), and what was done.

    Args:
        name: The path.
        n, n_test, classes, target, columns, classify, standardize: As in `load`.
        rng: Draws the test part.
    """
    path = own_path(name)
    if path.suffix.lower() not in SUFFIXES:
        hint = did_you_mean(path.suffix.lower(), SUFFIXES)
        raise InvalidArgument(f"data.name={name!r}: files are read if they end with {', '.join(SUFFIXES)}.{hint}")
    check_file(path)
    archive = path.suffix.lower() == ".npz"
    if archive and (target is not None or columns is not None):
        raise InvalidArgument(f"data.target and data.columns name columns of .csv and .parquet files; {path.name} has arrays.")
    steps = [f"read from {path.name}"]
    if archive:
        X, y, rest = _arrays(path)
    else:
        X, y = _chosen(read_csv(path) if path.suffix.lower() == ".csv" else read_parquet(path), target, columns, steps)
        rest = None
    train = len(X)
    if rest is not None:
        X, y = np.concatenate([X, rest[0]]), np.concatenate([y, rest[1]])
    y, kept = _targets(path.name, y, classes, classify, steps)
    order = np.flatnonzero(kept)
    if rest is not None:
        sides = order[order < train], order[order >= train]
        indices = [_drawn(path.name, side, count, rng) for side, count in zip(sides, (n, n_test), strict=True)]
        steps.append(f"{len(indices[0])} samples to train, {len(indices[1])} to test, parted as in the file")
    else:
        indices = _split(path.name, rng.permutation(order), n, n_test)
        steps.append(f"{len(indices[0])} samples to train, {len(indices[1])} others to test, drawn at random")
    parts = {"x_train": X[indices[0]], "y_train": y[indices[0]], "x_test": X[indices[1]], "y_test": y[indices[1]]}
    if standardize is None:
        standardize = not archive
    if standardize:
        with np.errstate(over="ignore", invalid="ignore"):  # `load` refuses what is not finite
            _standardize(parts, steps)
    return parts, steps


def _chosen(
    table: Table, target: str | None, columns: tuple[str, ...] | None, steps: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    if target is None:
        target = next((name for name in USUAL if name in table.columns), None)
        if target is None:
            raise InvalidArgument(f"data.target must name the column of {table.name} to learn; it has {table.listed()}.")
    y = table.column(target, "data.target")
    inputs = tuple(name for name in table.columns if name != target) if columns is None else columns
    if not inputs:
        raise InvalidArgument(f"{table.name} has no column beside the target {target!r}, so there is nothing to learn from.")
    if target in inputs or len(set(inputs)) < len(inputs):
        raise InvalidArgument(f"data.columns must be different columns without the target {target!r}; got {', '.join(inputs)}.")
    if y.dtype.kind == "f":
        y = table.numbers(target, "data.target")
    elif "" in y:
        row = int(np.flatnonzero(y == "")[0]) + 1
        raise InvalidArgument(f"Row {row} of the target {target!r} of {table.name} is empty; drop the rows or fill the cells.")
    steps.append(f"target {target!r}, inputs {', '.join(map(repr, inputs[:8]))}{' ...' if len(inputs) > 8 else ''}")
    return np.stack([table.numbers(name, "data.columns") for name in inputs], axis=1), y


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
    names: list[str] = []

    def choose(held: list[str]) -> list[str]:
        pair = next((pair for pair in ARRAYS if set(pair) <= set(held)), None)
        if pair is None:
            there = ", ".join(f"{name:.60}" for name in held[:LISTED]) + (", ..." if len(held) > LISTED else "") or "none"
            raise InvalidArgument(f"{path} must hold arrays X and y (or x_train and y_train); it holds {there}.")
        tests = [name.replace("_train", "") + "_test" for name in pair]
        names.extend([*pair, *tests] if set(tests) <= set(held) else pair)
        return names

    says = "{path} cannot be read as a NumPy archive ({reason})."
    arrays = read_arrays(path, limit=LARGEST, error=InvalidArgument, says=says, names=choose) or {}
    found = [arrays[name] for name in names]
    for i in range(0, len(found), 2):
        found[i], found[i + 1] = _checked(path.name, found[i], found[i + 1], found[0])
    return found[0], found[1], (found[2], found[3]) if len(found) == 4 else None


def _checked(name: str, X: np.ndarray, y: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs as float64 and targets as float64 or text, if they fit."""
    if X.dtype.kind not in "biuf" or X.ndim not in (2, 4) or X.size == 0:
        raise InvalidArgument(
            f"X of {name} must be numbers of shape (samples, features), or (samples, channels, height, width); got {X.dtype} "
            f"of shape {X.shape}."
        )
    if y.dtype.kind not in "biufU" or y.shape not in ((len(X),), (len(X), 1)):
        raise InvalidArgument(
            f"y of {name} must be numbers or text of shape ({len(X)},), one for each sample; got {y.dtype} {y.shape}."
        )
    if X.shape[1:] != first.shape[1:]:
        raise InvalidArgument(f"Samples to train and to test of {name} have shapes {first.shape[1:]} and {X.shape[1:]}.")
    y = y.reshape(-1)
    text = y.dtype.kind == "U"
    with np.errstate(over="ignore"):  # a long double beyond float64 becomes infinite, and is refused below
        X, y = X.astype(np.float64), y.astype(object) if text else y.astype(np.float64)
    for label, values in (("X", X.reshape(len(X), -1)), *(() if text else (("y", y[:, None]),))):
        bad = ~np.isfinite(values).all(axis=1)
        if bad.any():
            where = int(np.flatnonzero(bad)[0])
            raise InvalidArgument(f"{label} of {name} is NaN or infinite in {int(bad.sum())} samples (first: index {where}).")
    return X, y


def _targets(
    name: str, y: np.ndarray, classes: tuple[int, ...] | None, classify: bool | None, steps: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers, class indices, or -1 and +1; and which samples have a chosen class."""
    everything = np.ones(len(y), dtype=bool)
    text = y.dtype.kind != "f"
    if classes is None and not (text if classify is None else classify):
        if text:
            raise InvalidArgument(
                f"The target of {name} is text ({y[0]!r:.60}), so it is a class: choose model.name=dense or another "
                "classifier, two classes by data.classes=[0, 1], or for a class of your own loss.name=cross_entropy."
            )
        if classify is False and 2 < len(values := np.unique(y)) <= 20 and bool((values == np.round(values)).all()):
            warnings.warn(
                f"The target of {name} has {len(values)} different integers, and is learned as a number. If these are classes, "
                "choose model.name=dense.",
                WellposedWarning,
                stacklevel=2,
            )
        return y, everything
    values, index = np.unique(y, return_inverse=True)
    if not text and bool((values != np.round(values)).any()):
        odd = float(values[values != np.round(values)][0])
        raise InvalidArgument(
            f"Classes are integers or text; the target of {name} has {odd:g}. Choose model.name=gaussian for numbers."
        )
    if len(values) < 2:
        raise InvalidArgument(f"The target of {name} has one class only ({values[0]!s:.60}); at least two are needed.")
    labels = [f"{value!s:.60}" if text else f"{value:g}" for value in values]
    if classes is None:
        steps.append(f"{len(values)} classes: {', '.join(f'{i} is {label}' for i, label in enumerate(labels[:10]))}")
        return index.astype(np.int64), everything
    if not classes or len(set(classes)) != len(classes) or not all(type(c) is int and 0 <= c < len(values) for c in classes):
        raise InvalidArgument(
            f"data.classes must be different integers from 0 to {len(values) - 1}, the places of the sorted classes "
            f"({', '.join(labels[:10])}); got {list(classes)}."
        )
    steps.append(
        f"classes {', '.join(labels[c] for c in classes)}{', targets -1 and +1 in this order' if len(classes) == 2 else ''}"
    )
    kept = np.isin(index, classes)
    if len(classes) == 2:
        return np.where(index == classes[1], 1.0, -1.0), kept
    rank = {c: i for i, c in enumerate(classes)}
    return np.array([rank.get(int(i), -1) for i in index], dtype=np.int64), kept


def _split(name: str, order: np.ndarray, n: int | None, n_test: int | None) -> list[np.ndarray]:
    """Disjoint samples to train and to test: as many as asked for, else a fifth to test."""
    total = len(order)
    if total < 2:
        raise InvalidArgument(
            f"{name} has {total} usable row{'' if total == 1 else 's'}; at least 2 are needed, to train and to test."
        )
    test = n_test if n_test is not None else max(1, total // 5) if n is None else max(1, total - n)
    train = total - test if n is None else n
    if train < 1 or train + test > total:
        raise InvalidArgument(
            f"{name} has {total} usable rows: too few for data.n={n} to train and {test} to test. Lower data.n or data.n_test."
        )
    return [order[:train], order[train : train + test]]


def _drawn(name: str, side: np.ndarray, count: int | None, rng: np.random.Generator) -> np.ndarray:
    if len(side) < (count or 1):
        raise InvalidArgument(
            f"A part of {name} has {len(side)} usable samples, and {count or 1} are wanted; lower data.n or data.n_test."
        )
    return rng.permutation(side)[:count]


def _standardize(parts: Parts, steps: list[str]) -> None:
    """Inputs and numerical targets to mean 0 and standard deviation 1 over training samples."""
    mean, size = _moments(parts["x_train"])
    for key in ("x_train", "x_test"):
        parts[key] = (parts[key] - mean) / size
    steps.append("inputs shifted and scaled to mean 0 and standard deviation 1 over the training samples")
    y = parts["y_train"]
    if y.dtype.kind == "f" and bool((np.abs(y) != 1).any()):
        mean, size = _moments(y)
        for key in ("y_train", "y_test"):
            parts[key] = (parts[key] - mean) / size
        steps.append(f"targets too: a prediction p stands for {float(mean):.6g} + {float(size):.6g} p")


def _moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # of a constant the standard deviation is a rounding error
    return values.mean(axis=0), np.where(np.ptp(values, axis=0) > 0, values.std(axis=0), 1.0)
