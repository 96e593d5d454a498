"""Data of the papers' experiments, and what to do where they are not at hand."""

from __future__ import annotations

import functools
import math

import torch

from wellposed.data import Dataset, load
from wellposed.errors import InvalidArgument, MissingPackage

__all__ = ["at_hand", "samples"]

CLASSES = (0, 1)


@functools.lru_cache(maxsize=8)
def samples(name: str, n: int, n_test: int, *, paper: str, seed: int, dtype: torch.dtype = torch.float32) -> Dataset:
    """Classes 0 and 1 with targets -1 and +1, as the paper prepares them.

    "sphere" is the synthetic data of [ling2022, Section 5]: uniform on the sphere of radius sqrt(d), d = n, with standard
    normal labels.
    """
    if name == "sphere":
        data = load("sphere", n, seed=seed, n_test=n_test, features=n, dtype=dtype)
        scale = math.sqrt(n)
        assert data.X_test is not None
        steps = (*data.steps, "every sample scaled to norm sqrt(d)")
        return Dataset(data.name, data.X * scale, data.y, data.X_test * scale, data.y_test, steps)
    return load(name, n, CLASSES, seed=seed, n_test=n_test, paper=paper, dtype=dtype)


def at_hand(names: tuple[str, ...], n: int, n_test: int, *, paper: str) -> tuple[tuple[str, ...], int, int, list[str]]:
    """The data sets with digits in the place of those that are not at hand, sizes that all of them have, and notes."""
    found, notes = [], []
    for name in names:
        try:
            samples(name, 2, 2, paper=paper, seed=0)
        except (InvalidArgument, MissingPackage) as error:
            if "is not available" not in str(error) or name == "digits":
                raise
            notes.append(f"scikit-learn's digits take the place of {name}: {error}")
            name = "digits"
        if name not in found:
            found.append(name)
    if "digits" in found:
        most, most_test = _sizes_of_digits()
        if n > most or n_test > most_test:
            notes.append(
                f"digits has {most} samples to train and {most_test} to test, the same number of both classes; "
                f"{n} and {n_test} were asked for"
            )
        n, n_test = min(n, most), min(n_test, most_test)
    return tuple(found), n, n_test, notes


def _sizes_of_digits() -> tuple[int, int]:
    """How many samples of two classes there are at most, to train and to test."""
    data = load("digits", None, CLASSES)
    parts = (data.y, data.y_test)
    most, most_test = (2 * min(int((y < 0).sum()), int((y > 0).sum())) for y in parts if y is not None)
    return most, most_test
