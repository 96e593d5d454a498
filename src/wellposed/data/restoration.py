"""Images to restore: pairs of a blurred image with noise, and the image."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from wellposed.data.files import luminance, pixels, read
from wellposed.errors import InvalidArgument

#: Images that are their own targets, and pairs (blurred with noise, image).
IMAGES, PAIRS = ("natural64", "cbsd68"), ("deblurring", "deblurring_leaves")
#: Standard deviation of the blur in pixels, side of its kernel, standard deviation of the noise.
BLUR, SIDE, NOISE = 1.0, 7, 0.1

Parts = tuple[list[Tensor], list[Tensor], list[str]]


def images(name: str, n: int | None, n_test: int | None, grey: bool, size: int | None, rng: np.random.Generator) -> Parts:
    """Images of a file as inputs and as targets; those of cbsd68 are one part, and none to test."""
    found, origin = read(name)
    if name == "cbsd68" and n_test is not None:
        raise InvalidArgument(f"cbsd68 has 68 images and no test part; choose how many by n, and omit n_test={n_test}.")
    keys = ("x_test",) if name == "cbsd68" else ("x_train", "x_test")
    X = [
        pixels(found[key][_some(len(found[key]), count, rng)], grey=grey, size=size)
        for key, count in zip(keys, (n, n_test), strict=False)
    ]
    return X, X, [origin, "pixels scaled to [0, 1]; the targets are the images" + (", grey" if grey else "")]


def pairs(
    name: str,
    n: int | None,
    n_test: int | None,
    *,
    grey: bool,
    size: int | None,
    noise: float | None,
    rng: np.random.Generator,
) -> Parts:
    """Blurred images with noise, and the images, to train and to test.

    Args:
        name: "deblurring": natural64 to train and cbsd68 to test. "deblurring_leaves": drawn, see
            `leaves`.
        n, n_test: How many.
        grey: Whether colours become luminance, before the blur.
        size: To which images are resized; height and width of those that are drawn, 64 if None.
        noise: Its standard deviation; `NOISE` if None.
        rng: Of all draws. The noise of the test part does not depend on n.
    """
    noise = NOISE if noise is None else noise
    colours = "grey" if grey else "red, green and blue"
    of_train, of_test = (np.random.default_rng(int(k)) for k in rng.integers(2**62, size=2))
    if name == "deblurring_leaves":
        side = 64 if size is None else size
        if type(side) is not int or side < SIDE:
            raise InvalidArgument(f"size must be an integer of at least {SIDE}, the side of the blur; got {size!r}.")
        counts = 1000 if n is None else n, 100 if n_test is None else n_test
        y = [torch.from_numpy(leaves(count, side, r)) for count, r in zip(counts, (of_train, of_test), strict=True)]
        y = [luminance(part) for part in y] if grey else y
        steps = [f"{len(y[0])} drawn images of overlapping discs to train, {len(y[1])} to test, {colours}, {side}x{side}"]
    else:
        y, steps = [], []
        for file, part, count, r in (("natural64", "x_train", n, of_train), ("cbsd68", "x_test", n_test, of_test)):
            found, origin = read(file)
            y.append(pixels(found[part][_some(len(found[part]), count, r)], grey=grey, size=size))
            steps.append(f"{len(y[-1])} images of {file} to {part[2:]}, {origin}, {colours}, scaled to [0, 1]")
    X = [
        blur(part) + noise * torch.from_numpy(r.standard_normal(part.shape))
        for part, r in zip(y, (of_train, of_test), strict=True)
    ]
    about = f"inputs: Gaussian blur of standard deviation {BLUR:g} ({SIDE}x{SIDE}, periodic), noise of {noise:g}"
    return X, y, [*steps, f"{about}; targets: the images"]


def blur(images: Tensor) -> Tensor:
    """Convolution with the Gaussian kernel of the data set; images are continued periodically."""
    offsets = torch.arange(SIDE, dtype=images.dtype) - SIDE // 2
    profile = torch.exp(-offsets.square() / (2 * BLUR**2))
    profile = profile / profile.sum()
    for axis in (-2, -1):
        images = sum(float(w) * images.roll(int(k), axis) for w, k in zip(profile, offsets, strict=True))  # type: ignore[assignment]
    return images


def leaves(n: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """(n, 3, size, size) "dead leaves" in [0, 1]: discs that cover each other, with radii of
    density r^-3, as sizes of things in photographs [lee2001]. Each has a colour, whose brightness
    changes linearly; colours are near grey, as most of those in photographs are."""
    grid = np.arange(size)
    found = np.empty((n, 3, size, size))
    for image in found:
        image[:] = rng.random()
        number = max(size * size // 16, 16)
        radii = np.minimum(1.5 / np.sqrt(rng.random(number)), size / 2)
        centres, slopes = rng.random((number, 2)) * size, rng.normal(0, 0.15, (number, 2)) / size
        colours = rng.random((number, 1)) + rng.normal(0, 0.12, (number, 3))
        for r, (a, b), colour, slope in zip(radii, centres, colours, slopes, strict=True):
            rows, columns = (slice(max(int(c - r) - 1, 0), int(c + r) + 2) for c in (a, b))
            y, x = grid[rows, None] - a, grid[None, columns] - b
            cover = np.clip(r + 0.5 - np.sqrt(y * y + x * x), 0, 1)  # part of a pixel at the border
            level = colour[:, None, None] + slope[0] * y + slope[1] * x
            image[:, rows, columns] += cover * (level - image[:, rows, columns])
    return found.clip(0, 1)


def _some(total: int, count: int | None, rng: np.random.Generator) -> np.ndarray:
    """Indices of images: all in order, or some in random order."""
    if not total:
        raise InvalidArgument("The file of the images holds none; put a good copy in its place.")
    if count is not None and count > total:
        raise InvalidArgument(f"{count} images are wanted, but there are {total}; lower n or n_test.")
    return np.arange(total) if count is None else rng.permutation(total)[:count]
