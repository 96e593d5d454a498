"""load: the one entry point to data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed.data import synthetic
from wellposed.data._dataset import Dataset
from wellposed.data.files import FILES, digits, read
from wellposed.data.own import SUFFIXES, is_path, read_own
from wellposed.data.preprocess import NORMS, choose, normalise, part_parallel, pixels
from wellposed.errors import InvalidArgument, did_you_mean

__all__ = ["NAMES", "PAPERS", "load"]

NAMES = ("sphere", "digits", "moons", *FILES)
#: What each paper does to images: grey, 28x28, rows of this norm, parallel ones parted.
PAPERS = {"ling2022": "sqrt_d", "gao2022": "unit", "gao2023": "unit"}


def load(
    name: str,
    n: int | None = None,
    classes: tuple[int, ...] | None = None,
    *,
    seed: int = 0,
    n_test: int | None = None,
    paper: str | None = None,
    grey: bool = False,
    size: int | None = None,
    norm: str | None = None,
    flatten: bool = True,
    features: int = 50,
    noise: float = 0.1,
    target: str | None = None,
    columns: tuple[str, ...] | None = None,
    classify: bool | None = None,
    standardize: bool | None = None,
    dtype: torch.dtype = torch.float32,
) -> Dataset:
    r"""Data, and what was done to them.

        >>> import wellposed as wp
        >>> data = wp.data.load("sphere", n=10, seed=1)
        >>> data.X.shape, data.y.shape
        (torch.Size([10, 50]), torch.Size([10]))

    Built in: "sphere" (unit sphere, standard normal labels), "moons", "digits" (needs scikit-learn). "mnist", "fashion_mnist",
    "cifar10", "svhn", "camvid" come from `<name>.npz` in the folder $WELLPOSED_DATA, or from OpenML through scikit-learn (which
    caches them). Pixels are scaled to [0, 1]. A path that ends with .csv or .parquet is a table with named columns, and a
    .npz file holds arrays X and y (and X_test, y_test, if there is a test part).

    Args:
        name: One of the above.
        n: Training samples, of each class as nearly the same number as can be; all if not given (100 for "sphere", 200 for
            "moons"). Of a file without a test part a fifth is kept to test, or all others if n is given.
        classes: Which classes; all if not given. With two classes the targets are -1 and +1, else class indices.
        seed: Of every draw.
        n_test: Test samples; all that there are if not given (as many as n for "sphere" and "moons").
        paper: "ling2022", "gao2022" or "gao2023": that paper's preprocessing (grey, 28x28, rows of norm sqrt(d) or 1, parallel
            samples parted and counted) instead of `grey`, `size` and `norm`.
        grey: Colours to luminance.
        size: Images resized to this height and width.
        norm: Rows of norm 1 ("unit") or sqrt(d) ("sqrt_d").
        flatten: (n, d) rows instead of (n, channels, height, width) images.
        features: d of "sphere".
        noise: Standard deviation of "moons".
        target: Of a table, the column to learn; "target", "y" or "label" if not given.
        columns: Of a table, the columns to learn from; all others if not given.
        classify: Of a file, whether the target holds classes (text or integers); text does and numbers do not, if not given.
        standardize: Of a file, whether inputs and targets that are numbers get mean 0 and standard deviation 1 over the
            training samples; those of a table do, if not given.
        dtype: Of the inputs, and of targets that are not class indices.
    """
    _check(name, n, classes, n_test, paper, norm)
    own = is_path(name)
    if own and (paper is not None or grey or size is not None):
        raise InvalidArgument(f"paper, grey and size are for images of the built-in data sets; omit them for {name!r}.")
    if not own and any(option is not None for option in (target, columns, classify, standardize)):
        raise InvalidArgument(
            f"target, columns, classify and standardize are for files ({', '.join(SUFFIXES)}); {name} has none."
        )
    if paper is not None:
        grey, size, norm, flatten = True, 28, PAPERS[paper], True
    rng = np.random.default_rng(seed)
    if own:
        options: dict[str, Any] = {"target": target, "columns": columns, "classify": classify, "standardize": standardize}
        found, steps = read_own(name, n, n_test, classes, rng, **options)
        X = [torch.from_numpy(found[f"x_{part}"]) for part in ("train", "test")]
        y = [torch.from_numpy(found[f"y_{part}"]) for part in ("train", "test")]
    elif name in ("sphere", "moons"):
        X, y, steps = _synthetic(name, n, n_test, features, noise, rng)
    else:
        X, y, steps = _images(name, n, classes, n_test, grey, size, rng)
    if flatten and name != "camvid":
        X = [part.flatten(1) for part in X]
    if norm is not None:
        X = [normalise(part.flatten(1), norm).reshape(part.shape) for part in X]
        steps.append(f"every sample scaled to norm {'1' if norm == 'unit' else 'sqrt(d)'}")
    if paper is not None:
        generator = torch.Generator().manual_seed(seed)
        X[0], parted = part_parallel(X[0], generator)
        steps.append(f"{parted} of {len(X[0])} training samples were parallel to another one and were moved a little")
    X = [part.to(dtype) for part in X]
    y = [part.to(dtype) if part.is_floating_point() else part for part in y]
    if own and not all(bool(torch.isfinite(part).all()) for part in (*X, *y)):
        raise InvalidArgument(f"Some numbers of {name} are too large for {dtype}; standardize them, or take float64.")
    return Dataset(Path(name).name if own else name, X[0], y[0], X[1], y[1], tuple(steps))


def _synthetic(
    name: str, n: int | None, n_test: int | None, features: int, noise: float, rng: np.random.Generator
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    train = n if n is not None else (100 if name == "sphere" else 200)
    test = train if n_test is None else n_test
    parts = [
        synthetic.sphere(size, features, rng) if name == "sphere" else synthetic.moons(size, noise, rng)
        for size in (train, test)
    ]
    X, y = [torch.from_numpy(x) for x, _ in parts], [torch.from_numpy(t) for _, t in parts]
    if name == "sphere":
        return X, y, [f"uniform on the unit sphere of R^{features}, standard normal labels"]
    return X, [2.0 * t - 1 for t in y], [f"two half circles with noise of standard deviation {noise:g}, targets -1 and +1"]


def _images(
    name: str,
    n: int | None,
    classes: tuple[int, ...] | None,
    n_test: int | None,
    grey: bool,
    size: int | None,
    rng: np.random.Generator,
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    parts, origin = digits() if name == "digits" else read(name)
    steps = [origin]
    X, y = [], []
    for part, number in (("train", n), ("test", n_test)):
        images, labels = parts[f"x_{part}"], parts[f"y_{part}"]
        if name == "camvid":
            index = rng.permutation(len(images))[:number]
            y.append(torch.from_numpy(labels[index].astype(np.int64)))
        else:
            kept = tuple(int(c) for c in np.unique(labels)) if classes is None else classes
            index = choose(labels, kept, number, rng)
            y.append(_targets(labels[index], classes))
        X.append(pixels(images[index], grey=grey, size=size))
    if classes is not None:
        words = f"classes {', '.join(map(str, classes))}"
        steps.append(f"{words}{', targets -1 and +1 in this order' if len(classes) == 2 else ''}")
    all_or_some = ["all" if number is None else "drawn at random, the same number of each class" for number in (n, n_test)]
    steps.append(f"{len(X[0])} samples to train ({all_or_some[0]}), {len(X[1])} to test ({all_or_some[1]})")
    steps.append("pixels scaled to [0, 1]" + (", grey" if grey else "") + (f", {size}x{size}" if size is not None else ""))
    return X, y, steps


def _targets(labels: np.ndarray, classes: tuple[int, ...] | None) -> Tensor:
    """-1 and +1 for two classes, else class indices in the order in which the classes were given."""
    if classes is None:
        return torch.from_numpy(labels.astype(np.int64))
    if len(classes) == 2:
        return torch.from_numpy(np.where(labels == classes[1], 1.0, -1.0))
    rank = {c: i for i, c in enumerate(classes)}
    return torch.tensor([rank[int(c)] for c in labels], dtype=torch.int64)


def _check(name: Any, n: Any, classes: Any, n_test: Any, paper: Any, norm: Any) -> None:
    if name not in NAMES and not (isinstance(name, str) and is_path(name)):
        known = f"known are {', '.join(NAMES)}, or a file ({', '.join(SUFFIXES)})"
        raise InvalidArgument(f"Unknown data set {name!r}; {known}.{did_you_mean(str(name), NAMES)}")
    for option, value in (("n", n), ("n_test", n_test)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidArgument(f"{option} must be an integer of at least 1, or None for all; got {value!r}.")
    if norm is not None and norm not in NORMS:
        raise InvalidArgument(f"norm must be 'unit', 'sqrt_d' or None; got {norm!r}.")
    if paper is not None and not is_path(name) and (paper not in PAPERS or name in ("sphere", "moons", "camvid")):
        raise InvalidArgument(
            f"paper must be one of {', '.join(PAPERS)}, for images of one class each; got {paper!r} for {name!r}."
        )
    if classes is None or is_path(name):
        return
    if name in ("sphere", "moons", "camvid"):
        raise InvalidArgument(f"{name} has no classes to choose from; leave classes out.")
    count = 10 if name == "digits" else FILES[name][1]
    whole = isinstance(classes, (tuple, list)) and all(type(c) is int and 0 <= c < count for c in classes)
    if not whole or not classes or len(set(classes)) != len(classes):
        raise InvalidArgument(f"classes must be different integers from 0 to {count - 1}, such as (0, 1); got {classes!r}.")
