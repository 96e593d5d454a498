"""Images: from files or OpenML, and from pixels to the inputs that the papers train on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed._reading import read_arrays, sha256
from wellposed.errors import InvalidArgument, required

#: name -> (shape of an image, number of classes or 0 without labels, name at OpenML)
FILES: dict[str, tuple[tuple[int, ...], int, str | None]] = {
    "mnist": ((28, 28), 10, "mnist_784"),
    "fashion_mnist": ((28, 28), 10, "Fashion-MNIST"),
    "cifar10": ((32, 32, 3), 10, "CIFAR_10"),
    "svhn": ((32, 32, 3), 10, "SVHN"),
    "camvid": ((96, 128, 3), 12, None),
    "natural64": ((64, 64, 3), 0, None),
    "cbsd68": ((160, 160, 3), 0, None),
}
#: sha256 of files that are known to be whole.
CHECKSUMS = {
    "b5c627e817a52a6b682087265bbf6e22183d26ea38e4e4a8e336ea7507fea785": "camvid",
    "41b077a753f42c4f98186651302142b987d5400c323463a22bca94f31eb37091": "cbsd68",
    "f9ca5f39945c90c177586c2910afb0a22405d4c6f26e11ac83153fd5fa5c1fff": "cifar10",
    "57f450de1055e3d0a8253e168edac7718f4e75c8457ad9ea68ae983c7ba49d47": "fashion_mnist",
    "06af5dfe73b70e3bc1c36439982b18a8d76803db9b544f6fdf838a37fbb01b64": "mnist",
    "fb0d7be9067d799fd6bce9a54efc0fa4104812879955706e9e3efe09a694a781": "natural64",
    "73f962d142f785ff5e06b07e664b5a3cb7d519f2eab5ad2b31811d6ae5b67c9b": "svhn",
}
#: The largest size of a file and of its arrays; the largest that we know, SVHN with its extra
#: images, has 1.9e9.
BYTES = 1 << 31
KEYS = ("x_train", "y_train", "x_test", "y_test")
#: Of files without labels.
UNLABELLED = {"natural64": ("x_train", "x_test"), "cbsd68": ("x_test",)}

Parts = dict[str, np.ndarray]


def digits() -> tuple[Parts, str]:
    """scikit-learn's 1797 digits of 8x8 pixels; every fifth sample is to test."""
    datasets = _scikit_learn("digits")
    bunch = datasets.load_digits()
    images, labels = (bunch.images / 16 * 255).round().astype(np.uint8), bunch.target.astype(np.uint8)
    test = np.arange(len(labels)) % 5 == 4
    parts = {"x_train": images[~test], "y_train": labels[~test], "x_test": images[test], "y_test": labels[test]}
    return parts, "digits of scikit-learn, every fifth sample to test"


def path_of(name: str) -> Path | None:
    """Where the file of a data set is expected; None if WELLPOSED_DATA is not set."""
    folder = os.environ.get("WELLPOSED_DATA")
    return Path(folder) / f"{name}.npz" if folder else None


def read(name: str) -> tuple[Parts, str]:
    """The arrays of a data set, checked, and where they come from."""
    path = path_of(name)
    if path is not None and path.is_file():
        return _from_file(name, path)
    where = f"{path} does not exist" if path is not None else "WELLPOSED_DATA is not set"
    return _from_openml(name, where)


def _from_file(name: str, path: Path) -> tuple[Parts, str]:
    says = "{path} cannot be read as a NumPy archive ({reason}); fetch it again."
    keys = UNLABELLED.get(name, KEYS)
    parts = read_arrays(path, limit=BYTES, error=InvalidArgument, says=says, names=keys)
    if parts is None:
        raise InvalidArgument(f"{path} does not exist.")
    if missing := [key for key in keys if key not in parts]:
        raise InvalidArgument(f"{path} has no {', '.join(missing)}; expected the arrays {', '.join(keys)}.")
    _check(name, parts, str(path))
    known = CHECKSUMS.get(sha256(path, limit=BYTES, error=InvalidArgument) or "") == name
    return parts, f"read from {path.name} ({'checksum known' if known else 'checksum unknown, shapes and ranges checked'})"


def _check(name: str, parts: Parts, where: str) -> None:
    shape, classes, _ = FILES[name]
    for part in ("train", "test"):
        if f"x_{part}" not in parts:
            continue
        x = parts[f"x_{part}"]
        if x.dtype != np.uint8 or x.shape[1:] != shape:
            raise InvalidArgument(
                f"x_{part} of {where} must be uint8 of shape (N, {', '.join(map(str, shape))}); got {x.dtype} {x.shape}."
            )
        if name in UNLABELLED:
            continue
        y = parts[f"y_{part}"]
        ndim, of = (3, "pixel") if name == "camvid" else (1, "image")
        if y.ndim != ndim:
            raise InvalidArgument(f"y_{part} of {where} must have one label for each {of}; got the shape {y.shape}.")
        if len(x) != len(y) or len(x) == 0:
            raise InvalidArgument(
                f"x_{part} and y_{part} of {where} must have the same length, not 0; got {len(x)} and {len(y)}."
            )
        if not np.issubdtype(y.dtype, np.integer) or int(y.max()) >= classes or int(y.min()) < 0:
            raise InvalidArgument(
                f"y_{part} of {where} must hold classes 0 to {classes - 1}; got {y.dtype} in [{y.min()}, {y.max()}]."
            )


def _from_openml(name: str, where: str) -> tuple[Parts, str]:
    shape, _, remote = FILES[name]
    if remote is None:
        advice = f"Put {name}.npz into a folder, and name the folder in WELLPOSED_DATA."
        raise InvalidArgument(f"{name} is not available: {where}, and it is not on OpenML. {advice}")
    datasets = _scikit_learn(name)
    try:
        bunch = datasets.fetch_openml(remote, version=1, as_frame=False, parser="liac-arff")
    except Exception as error:  # no network, a server's error, a full disk: many kinds
        raise InvalidArgument(
            f"{name} is not available: {where}, and OpenML could not be reached ({type(error).__name__}: {error}). "
            f"Set WELLPOSED_DATA to a folder with {name}.npz, or connect to the internet."
        ) from error
    images = _images(np.asarray(bunch.data), shape)
    labels = np.asarray(bunch.target).astype(np.int64).astype(np.uint8)
    cut = len(labels) * 6 // 7
    parts = {"x_train": images[:cut], "y_train": labels[:cut], "x_test": images[cut:], "y_test": labels[cut:]}
    _check(name, parts, f"OpenML's {remote}")
    return parts, f"fetched from OpenML ({remote}), the last seventh to test"


def _images(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of pixels as images; colour planes come first there."""
    if len(shape) == 2:
        return rows.reshape(-1, *shape).astype(np.uint8)
    return rows.reshape(-1, shape[2], shape[0], shape[1]).transpose(0, 2, 3, 1).astype(np.uint8)


def _scikit_learn(name: str) -> Any:
    return required("sklearn.datasets", f"{name} needs scikit-learn", extra="data")


NORMS = ("unit", "sqrt_d")
#: Rows whose cosine is nearer to 1 or -1 than this count as parallel.
PARALLEL = 1e-10
#: Relative size of what is added to the later one of two parallel rows.
NUDGE = 1e-3


def choose(y: np.ndarray, classes: tuple[int, ...], n: int | None, rng: np.random.Generator) -> np.ndarray:
    """Indices of n samples in random order, equally many of each class (or one more)."""
    pools = [rng.permutation(np.flatnonzero(y == c)) for c in classes]
    if n is None:
        return rng.permutation(np.concatenate(pools))
    wanted = [n // len(classes) + (i < n % len(classes)) for i in range(len(classes))]
    for c, pool, number in zip(classes, pools, wanted, strict=True):
        if len(pool) < number:
            raise InvalidArgument(f"{number} samples of class {c} are wanted for n={n}, but there are {len(pool)}; lower n.")
    return rng.permutation(np.concatenate([pool[:number] for pool, number in zip(pools, wanted, strict=True)]))


def luminance(x: Tensor) -> Tensor:
    """(n, 3, height, width) red, green and blue -> (n, 1, height, width)."""
    return (x * torch.tensor([0.299, 0.587, 0.114], dtype=x.dtype).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)


def pixels(images: np.ndarray, *, grey: bool, size: int | None) -> Tensor:
    """(n, H, W[, 3]) uint8 -> (n, channels, h, w) in [0, 1]; grey by luminance, resized."""
    x = torch.from_numpy(np.ascontiguousarray(images)).to(torch.float64) / 255
    x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2)
    if grey and x.shape[1] == 3:
        x = luminance(x)
    if size is not None and tuple(x.shape[2:]) != (size, size):
        x = torch.nn.functional.interpolate(x, (size, size), mode="bilinear", antialias=True, align_corners=False).clamp(0, 1)
    return x


def part_parallel(X: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
    """(n, d) without parallel rows, and their number: noise moves the later of two."""
    length = torch.linalg.vector_norm(X, dim=1, keepdim=True)
    U = X / length
    C = (U @ U.t()).abs().tril(-1)
    later = (C > 1 - PARALLEL).any(dim=1)
    if not bool(later.any()):
        return X, 0
    noise = torch.randn(X.shape, generator=generator, dtype=X.dtype)
    noise = noise / torch.linalg.vector_norm(noise, dim=1, keepdim=True) * NUDGE
    moved = U + noise * later.unsqueeze(1)
    moved = moved / torch.linalg.vector_norm(moved, dim=1, keepdim=True) * length
    return torch.where(later.unsqueeze(1), moved, X), int(later.sum())
