"""Data sets by name, with what was done to them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed._memory import enough_memory
from wellposed.data.files import FILES, NORMS, choose, digits, part_parallel, pixels, read
from wellposed.data.own import SUFFIXES, read_own
from wellposed.data.puzzles import PUZZLES, draw
from wellposed.data.restoration import IMAGES, PAIRS, images, pairs
from wellposed.data.text import SUFFIX, TEXTS, text_windows
from wellposed.errors import InvalidArgument, did_you_mean


def is_path(name: str) -> bool:
    """Whether the name of a data set is that of a file."""
    return Path(name).suffix != "" or os.sep in name


def is_text(name: str) -> bool:
    """Whether a name of a data set is that of a text, or of a file with one."""
    return name in TEXTS or Path(name).suffix.lower() == SUFFIX


def short_name(name: str) -> str:
    """The name of a data set without the folder and the suffix of its file."""
    return Path(name).stem if is_path(name) else name


@dataclass(frozen=True)
class Dataset:
    """Samples in rows, and where they come from. `X, y = load(...)` unpacks the training part.

    Attributes:
        name: Of the data set.
        X: (n, ...) training inputs. y: (n, ...) training targets.
        X_test: (n_test, ...) test inputs. y_test: (n_test, ...) their targets; both None if there
            is no test part.
        steps: What was done, in order, one sentence each.
        tokens: Of a text, the character or word of each number; empty otherwise.
    """

    name: str
    X: Tensor
    y: Tensor
    X_test: Tensor | None
    y_test: Tensor | None
    steps: tuple[str, ...]
    tokens: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.X, self.y))

    def __str__(self) -> str:
        test = "no test part" if self.X_test is None else f"{len(self.X_test)} to test"
        lines = [f"{self.name}: {len(self.X)} samples of shape {tuple(self.X.shape[1:])}, {test}"]
        return "\n".join([*lines, *(f"- {step}" for step in self.steps)])


def sphere(n: int, features: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(n, d) points uniform on the unit sphere, (n,) standard normal labels."""
    X = rng.standard_normal((n, features))
    return X / np.linalg.norm(X, axis=1, keepdims=True), rng.standard_normal(n)


def moons(n: int, noise: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(n, 2) two half circles, (n,) classes 0 and 1 in turn, as scikit-learn's `make_moons`."""
    y = np.arange(n) % 2
    angle = np.pi * rng.random(n)
    upper, lower = np.stack([np.cos(angle), np.sin(angle)], 1), np.stack([1 - np.cos(angle), 0.5 - np.sin(angle)], 1)
    X = np.where((y == 0)[:, None], upper, lower)
    return X + noise * rng.standard_normal((n, 2)), y


NAMES = ("sphere", "digits", "moons", *PUZZLES, *PAIRS, *FILES, *TEXTS)
#: Data without classes to choose from.
WITHOUT_CLASSES = ("sphere", "moons", "camvid", *PUZZLES, *IMAGES, *PAIRS, *TEXTS)
#: The norm that each paper gives to the rows of grey 28x28 images; parallel rows are separated.
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
    noise: float | None = None,
    givens: tuple[int, ...] | None = None,
    target: str | None = None,
    columns: tuple[str, ...] | None = None,
    classify: bool | None = None,
    standardize: bool | None = None,
    words: int | None = None,
    length: int = 48,
    dtype: torch.dtype = torch.float32,
) -> Dataset:
    r"""Data, and what was done to them.

        >>> import wellposed as wp
        >>> data = wp.data.load("sphere", n=10, seed=1)
        >>> data.X.shape, data.y.shape
        (torch.Size([10, 50]), torch.Size([10]))

    Built in: "sphere" (unit sphere, standard normal labels), "moons", "digits" (needs
    scikit-learn), and with a label for every node or cell "chains", "sudoku" (4x4) and "mazes".
    "deblurring_leaves" has drawn images to restore; "deblurring" has photographs, of the files
    natural64 to train and cbsd68 to test. "natural64" and "cbsd68" are images that are their own
    targets. These two, "mnist", "fashion_mnist", "cifar10", "svhn", "camvid" come from `<name>.npz`
    in the folder $WELLPOSED_DATA, or from OpenML through scikit-learn, which caches them; pixels
    are scaled to [0, 1]. "wikitext2" comes from `wikitext2/valid.txt` (to train) and
    `wikitext2/test.txt` in that folder: windows of token numbers in order, and for each position
    the next token. A path that ends with .csv or .parquet is a table with named columns; a .npz
    file holds arrays X and y, and X_test and y_test if it has a test part. A .txt file is a text,
    whose last fifth is kept to test.

    Args:
        name: One of the above.
        n: Training samples, as equally many of each class as possible; all if not given (100 for
            "sphere" and "chains", 200 for "moons", 1000 for others that are drawn). A file without
            a test part keeps a fifth to test, or all samples that remain if n is given.
        classes: Which classes; all if not given. Two classes have targets -1 and +1, others
            indices.
        seed: Of every draw.
        n_test: Test samples; all if not given (as many as n of data that are drawn).
        paper: "ling2022", "gao2022" or "gao2023": the preprocessing of that paper (grey, 28x28,
            rows of norm sqrt(d) or 1, parallel samples separated) instead of `grey`, `size` and
            `norm`.
        grey: Whether colours become luminance.
        size: Height and width to which images are resized; nodes of a chain (100 if not given),
            height and width of a maze (9) and of drawn images (64).
        norm: Rows of norm 1 ("unit") or sqrt(d) ("sqrt_d").
        flatten: (n, d) rows instead of (n, channels, height, width) images.
        features: d of "sphere".
        noise: Standard deviation in "moons" and "chains" (0.1 if not given), and in images to
            restore (0.1).
        givens: Numbers of given cells of "sudoku"; 6 to 10 if not given.
        target, columns: Columns of a table: to learn ("target", "y" or "label" if not given), and
            to learn from (all others).
        classify: Whether the target of a file holds classes; by default text does, numbers do not.
        standardize: Whether numbers of a file get mean 0 and standard deviation 1 over the training
            samples; by default those of a table do.
        words: Of a text: the size of the vocabulary of words, of which 0 is every other word;
            characters if not given.
        length: Of a text: tokens of a window.
        dtype: Of the inputs, and of targets that are not class indices.
    """
    _check(name, n, classes, n_test, paper, norm)
    if noise is not None and not (type(noise) in (int, float) and 0 <= noise < math.inf):
        raise InvalidArgument(f"noise is a standard deviation: a finite number of at least 0; got {noise!r}.")
    if is_text(name):
        others = (size, classes, paper, norm, givens, target, columns, classify, standardize)
        if grey or any(option is not None for option in others):
            raise InvalidArgument(f"{name} is a text: it takes n, n_test, words and length only.")
        texts, following, tokens, done = text_windows(name, n, n_test, words, length)
        return Dataset(Path(name).name, texts[0], following[0], texts[1], following[1], tuple(done), tokens)
    if words is not None:
        raise InvalidArgument(f"words is for texts ({', '.join(TEXTS)}, or a {SUFFIX} file); omit it for {name!r}.")
    if (own := is_path(name)) and (paper is not None or grey or size is not None):
        raise InvalidArgument(f"paper, grey and size are for images of the built-in data sets; omit them for {name!r}.")
    if not own and any(option is not None for option in (target, columns, classify, standardize)):
        raise InvalidArgument(
            f"target, columns, classify and standardize are for files ({', '.join(SUFFIXES)}); {name} has none."
        )
    if givens is not None and name not in PUZZLES:
        raise InvalidArgument(f"givens are the given cells of sudoku; omit them for {name!r}.")
    if paper is not None:
        grey, size, norm, flatten = True, 28, PAPERS[paper], True
    rng = np.random.default_rng(seed)
    if own:
        options: dict[str, Any] = {"target": target, "columns": columns, "classify": classify, "standardize": standardize}
        found, steps = read_own(name, n, n_test, classes, rng, **options)
        X = [torch.from_numpy(found[f"x_{part}"]) for part in ("train", "test")]
        y = [torch.from_numpy(found[f"y_{part}"]) for part in ("train", "test")]
    elif name in ("sphere", "moons"):
        with enough_memory(n, n_test):
            X, y, steps = _synthetic(name, n, n_test, features, 0.1 if noise is None else noise, rng)
    elif name in PUZZLES:
        train = n if n is not None else (100 if name == "chains" else 1000)
        test = train if n_test is None else n_test
        with enough_memory(n, n_test):
            drawn = draw(name, train, test, size=size, givens=givens, noise=0.1 if noise is None else noise, rng=rng)
        X, y, steps = [torch.from_numpy(x) for x in drawn[0]], [torch.from_numpy(t) for t in drawn[1]], drawn[2]
    elif name in PAIRS:
        with enough_memory(n, n_test):
            X, y, steps = pairs(name, n, n_test, grey=grey, size=size, noise=noise, rng=rng)
    elif name in IMAGES:
        X, y, steps = images(name, n, n_test, grey, size, rng)
    else:
        X, y, steps = _images(name, n, classes, n_test, grey, size, rng)
    if flatten and name not in ("camvid", *PUZZLES, *IMAGES, *PAIRS):
        X = [part.flatten(1) for part in X]
    if norm is not None:
        X = [_normalise(part.flatten(1), norm).reshape(part.shape) for part in X]
        steps.append(f"every sample scaled to norm {'1' if norm == 'unit' else 'sqrt(d)'}")
    if paper is not None:
        generator = torch.Generator().manual_seed(seed)
        X[0], parted = part_parallel(X[0], generator)
        steps.append(f"{parted} of {len(X[0])} training samples were parallel to another one and were moved a little")
    X = [part.to(dtype) for part in X]
    y = [part.to(dtype) if part.is_floating_point() else part for part in y]
    if own and not all(bool(torch.isfinite(part).all()) for part in (*X, *y)):
        raise InvalidArgument(f"Some numbers of {name} are too large for {dtype}; standardize them, or take float64.")
    X_test, y_test = (X[1], y[1]) if len(X) > 1 else (None, None)
    return Dataset(Path(name).name if own else name, X[0], y[0], X_test, y_test, tuple(steps))


def _synthetic(
    name: str, n: int | None, n_test: int | None, features: int, noise: float, rng: np.random.Generator
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    train = n if n is not None else (100 if name == "sphere" else 200)
    test = train if n_test is None else n_test
    parts = [sphere(size, features, rng) if name == "sphere" else moons(size, noise, rng) for size in (train, test)]
    X, y = [torch.from_numpy(x) for x, _ in parts], [torch.from_numpy(t) for _, t in parts]
    if name == "sphere":
        return X, y, [f"uniform on the unit sphere of R^{features}, standard normal labels"]
    return X, [2.0 * t - 1 for t in y], [f"two half circles with noise of standard deviation {noise:g}, targets -1 and +1"]


def _images(
    name: str, n: int | None, classes: Any, n_test: int | None, grey: bool, size: int | None, rng: np.random.Generator
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    parts, origin = digits() if name == "digits" else read(name)
    steps, X, y = [origin], [], []
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
    """-1 and +1 for two classes, else class indices in the order of `classes`."""
    if classes is None:
        return torch.from_numpy(labels.astype(np.int64))
    if len(classes) == 2:
        return torch.from_numpy(np.where(labels == classes[1], 1.0, -1.0))
    return torch.tensor([classes.index(int(c)) for c in labels], dtype=torch.int64)


def _check(name: Any, n: Any, classes: Any, n_test: Any, paper: Any, norm: Any) -> None:
    if name not in NAMES and not (isinstance(name, str) and is_path(name)):
        known = f"known are {', '.join(NAMES)}, or a file ({', '.join((*SUFFIXES, SUFFIX))})"
        raise InvalidArgument(f"Unknown data set {name!r}; {known}.{did_you_mean(str(name), NAMES)}")
    for option, value in (("n", n), ("n_test", n_test)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidArgument(f"{option} must be an integer of at least 1, or None for all; got {value!r}.")
    if norm is not None and norm not in NORMS:
        raise InvalidArgument(f"norm must be 'unit', 'sqrt_d' or None; got {norm!r}.")
    if paper is not None and not is_path(name) and (paper not in PAPERS or name in WITHOUT_CLASSES):
        raise InvalidArgument(
            f"paper must be one of {', '.join(PAPERS)}, for images of one class each; got {paper!r} for {name!r}."
        )
    if classes is None or is_path(name):
        return
    if name in WITHOUT_CLASSES:
        raise InvalidArgument(f"{name} has no classes to choose from; leave classes out.")
    count = 10 if name == "digits" else FILES[name][1]
    whole = isinstance(classes, (tuple, list)) and all(type(c) is int and 0 <= c < count for c in classes)
    if not whole or not classes or len(set(classes)) != len(classes):
        raise InvalidArgument(f"classes must be different integers from 0 to {count - 1}, such as (0, 1); got {classes!r}.")


def _normalise(X: Tensor, norm: str) -> Tensor:
    """(n, d) rows of Euclidean norm 1 ("unit") or sqrt(d) ("sqrt_d")."""
    length = torch.linalg.vector_norm(X, dim=1, keepdim=True)
    if bool((length == 0).any()):
        zero = int((length == 0).nonzero()[0, 0])
        raise InvalidArgument(f"Sample {zero} is zero, so it has no direction to scale to norm={norm!r}; leave norm out.")
    return X / length * (1.0 if norm == "unit" else math.sqrt(X.shape[1]))
