"""The data of the papers."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from wellposed.data import Dataset, load
from wellposed.data.files import FILES, digits, path_of, read
from wellposed.errors import InvalidArgument

__all__ = ["channels_of", "images", "samples", "ten_classes", "two_classes"]

CLASSES = (0, 1)


@functools.lru_cache(maxsize=8)
def samples(name: str, n: int, n_test: int, *, paper: str, seed: int, dtype: torch.dtype = torch.float32) -> Dataset:
    """Classes 0 and 1 with targets -1 and +1, as the paper prepares them.

    "sphere" is the synthetic data of [ling2022, Section 5]: uniform on the sphere of radius
    sqrt(d), d = n, with standard normal labels. A data set with fewer samples gives what it has,
    the same number of both classes.
    """
    if name == "sphere":
        data = load("sphere", n, seed=seed, n_test=n_test, features=n, dtype=dtype)
        scale = math.sqrt(n)
        assert data.X_test is not None
        steps = (*data.steps, "every sample scaled to norm sqrt(d)")
        return Dataset(data.name, data.X * scale, data.y, data.X_test * scale, data.y_test, steps)
    most, most_test = _most(name, CLASSES) if name == "digits" or name in FILES else (n, n_test)
    return load(name, min(n, most), CLASSES, seed=seed, n_test=min(n_test, most_test), paper=paper, dtype=dtype)


def _most(name: str, classes: tuple[int, ...]) -> tuple[int, int]:
    """How many samples a data set has to train and to test, the same number of each class."""
    parts, _ = digits() if name == "digits" else read(name)
    counts = (np.bincount(parts[key], minlength=max(classes) + 1)[list(classes)] for key in ("y_train", "y_test"))
    most, most_test = (len(classes) * int(count.min()) for count in counts)
    return most, most_test


def _sizes(name: str, n: int, n_test: int, classes: tuple[int, ...], notes: list[str]) -> tuple[int, int]:
    """Sizes that a data set has; adds a note if they are less than what is asked for."""
    most, most_test = _most(name, classes)
    each = "both classes" if len(classes) == 2 else "each class"
    used, used_test = min(n, most), min(n_test, most_test)
    if n > most or n_test > most_test:
        notes.append(
            f"{used} samples of {name} to train and {used_test} to test are used, of {n} and {n_test} that were asked for: it "
            f"has {most} and {most_test}, the same number of {each}"
        )
    return used, used_test


def two_classes(names: tuple[str, ...], n: int, n_test: int, *, paper: str) -> tuple[tuple[str, ...], int, int, list[str]]:
    """The data sets, digits in the place of those that are not available; sizes that at least one
    of them has; and notes."""
    found, notes = [], []
    for name in names:
        try:
            samples(name, 2, 2, paper=paper, seed=0)
        except InvalidArgument as error:
            path = path_of(name)
            if name not in FILES or (path is not None and path.is_file()):
                raise  # an unknown name, or a file that exists and is wrong
            notes.append(f"scikit-learn's digits take the place of {name}: {error}")
            name = "digits"
        if name not in found:
            found.append(name)
    sizes = [(n, n_test) if name == "sphere" else _sizes(name, n, n_test, CLASSES, notes) for name in found]
    return tuple(found), max(size for size, _ in sizes), max(size for _, size in sizes), notes


def ten_classes(name: str, n: int, n_test: int) -> tuple[str, int, int, list[str]]:
    """The data set, or digits if it is not available; sizes that it has, the same number of each
    class; and notes.

    Args:
        name: Of the data set.
        n, n_test: What is asked for.
    """
    (found,), _, _, notes = two_classes((name,), 2, 2, paper="gao2022")
    return found, *_sizes(found, n, n_test, tuple(range(10)), notes), notes


def channels_of(name: str) -> int:
    """Channels of the images of a data set."""
    return 3 if name in ("cifar10", "svhn") else 1


def images(
    name: str, n: int, n_test: int, *, size: int, seed: int, classes: int = 10
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(X, y) to train and to test: (n, channels, size, size), standardised; class indices.

    Args:
        name: Of the data set.
        n, n_test: How many.
        size: Of the images.
        seed: Of the choice.
        classes: The first so many, at least 3.
    """
    data = load(name, n, tuple(range(classes)), seed=seed, n_test=n_test, size=size, flatten=False)
    assert data.X_test is not None and data.y_test is not None
    mean, spread = data.X.mean(dim=(0, 2, 3), keepdim=True), data.X.std(dim=(0, 2, 3), keepdim=True)
    return ((data.X - mean) / spread, data.y), ((data.X_test - mean) / spread, data.y_test)
