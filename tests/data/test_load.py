"""Data: reproducible, balanced, checked, and honest about what was done."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import wellposed as wp
from wellposed.data.files import part_parallel, pixels


def archive(folder: Path, name: str = "mnist", per_class: int = 12, **changes: np.ndarray) -> Path:
    """A small file in the format of the real ones."""
    rng = np.random.default_rng(3)
    shape = {"mnist": (28, 28), "cifar10": (32, 32, 3), "camvid": (96, 128, 3)}[name]
    parts = {}
    for part in ("train", "test"):
        labels = np.tile(np.arange(10), per_class).astype(np.uint8)
        parts[f"x_{part}"] = rng.integers(1, 256, (len(labels), *shape)).astype(np.uint8)
        parts[f"y_{part}"] = labels if name != "camvid" else rng.integers(0, 12, (len(labels), 96, 128)).astype(np.uint8)
    np.savez(folder / f"{name}.npz", **(parts | changes))
    return folder / f"{name}.npz"


def test_sphere_has_unit_rows_and_depends_on_the_seed_alone() -> None:
    one, again, other = (wp.data.load("sphere", n=20, seed=seed, features=7, dtype=torch.float64) for seed in (1, 1, 2))
    assert torch.equal(one.X, again.X) and torch.equal(one.y, again.y)
    assert not torch.equal(one.X, other.X)
    torch.testing.assert_close(one.X.norm(dim=1), torch.ones(20, dtype=torch.float64))
    assert one.X_test is not None and not torch.equal(one.X, one.X_test)


def test_moons_lie_on_their_half_circles() -> None:
    data = wp.data.load("moons", n=50, noise=0.0, dtype=torch.float64)
    upper, lower = data.X[data.y < 0], data.X[data.y > 0]
    torch.testing.assert_close(upper.norm(dim=1), torch.ones(25, dtype=torch.float64))
    torch.testing.assert_close((lower - torch.tensor([1.0, 0.5])).norm(dim=1), torch.ones(25, dtype=torch.float64))
    assert bool((upper[:, 1] >= 0).all()) and bool((lower[:, 1] <= 0.5).all())


def test_digits_are_balanced_and_unpack() -> None:
    pytest.importorskip("sklearn")
    X, y = wp.data.load("digits", n=101, classes=(3, 8))
    assert X.shape == (101, 64) and X.dtype == torch.float32
    assert 0 <= float(X.min()) and float(X.max()) <= 1
    assert (int((y == -1).sum()), int((y == 1).sum())) == (51, 50)


def test_digits_train_and_test_are_apart() -> None:
    pytest.importorskip("sklearn")
    data = wp.data.load("digits")
    assert data.X_test is not None
    assert len(data.X) + len(data.X_test) == 1797
    assert data.y.dtype == torch.int64 and set(data.y.tolist()) == set(range(10))


def test_papers_preprocessing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    path = archive(tmp_path, "cifar10")
    with np.load(path) as original:
        x = original["x_train"].copy()
    x[1] = x[11]  # two equal samples of class 1
    archive(tmp_path, "cifar10", x_train=x)
    data = wp.data.load("cifar10", n=24, classes=(0, 1), paper="ling2022", dtype=torch.float64)
    assert data.X.shape == (24, 784)
    torch.testing.assert_close(data.X.norm(dim=1), torch.full((24,), 28.0, dtype=torch.float64))
    assert "1 of 24 training samples were parallel" in data.steps[-1]
    cosines = (data.X @ data.X.t() / 784).fill_diagonal_(0)
    assert float(cosines.max()) < 1 - 1e-8
    unit = wp.data.load("cifar10", n=4, classes=(0, 1), paper="gao2023", dtype=torch.float64)
    torch.testing.assert_close(unit.X.norm(dim=1), torch.ones(4, dtype=torch.float64))


def test_parallel_samples_keep_their_norm_and_others_are_untouched() -> None:
    X = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    X[4] = -2.5 * X[1]
    moved, count = part_parallel(X, torch.Generator().manual_seed(1))
    assert count == 1
    same = [0, 1, 2, 3, 5]
    assert torch.equal(moved[same], X[same])
    assert math.isclose(float(moved[4].norm()), float(X[4].norm()), rel_tol=1e-12)
    assert not torch.equal(moved[4], X[4])


def test_grey_is_luminance_and_resizing_keeps_a_constant() -> None:
    image = np.zeros((1, 32, 32, 3), dtype=np.uint8)
    image[..., 1] = 200
    grey = pixels(image, grey=True, size=28)
    torch.testing.assert_close(grey, torch.full((1, 1, 28, 28), 0.587 * 200 / 255, dtype=torch.float64))


def test_images_keep_their_shape_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    archive(tmp_path, "camvid", per_class=1)
    data = wp.data.load("camvid", n=3, n_test=2)
    assert data.X.shape == (3, 3, 96, 128) and data.y.shape == (3, 96, 128)
    archive(tmp_path, "cifar10")
    images = wp.data.load("cifar10", n=10, flatten=False, classes=(5, 2, 7))
    assert images.X.shape == (10, 3, 32, 32)
    assert torch.bincount(images.y).tolist() == [4, 3, 3]  # in the order given: class 5 first


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "minst"}, "Did you mean 'mnist'"),
        ({"name": "sphere", "n": 0}, "at least 1"),
        ({"name": "sphere", "classes": (0, 1)}, "no classes"),
        ({"name": "digits", "classes": (0, 10)}, "from 0 to 9"),
        ({"name": "digits", "classes": (1, 1)}, "different integers"),
        ({"name": "digits", "norm": "l2"}, "'unit', 'sqrt_d'"),
        ({"name": "digits", "n": 10**6, "classes": (0, 1)}, "lower n"),
        ({"name": "sphere", "paper": "ling2022"}, "paper must be"),
    ],
)
def test_bad_requests_get_one_sentence(options: dict, sentence: str) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(wp.InvalidArgument, match=sentence):
        wp.data.load(**options)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"x_train": np.zeros((120, 27, 28), np.uint8)}, "x_train .* must be uint8 of shape"),
        ({"x_test": np.zeros((120, 28, 28), np.float32)}, "x_test .* must be uint8"),
        ({"y_train": np.full(120, 10, np.uint8)}, "classes 0 to 9"),
        ({"y_test": np.zeros(3, np.uint8)}, "same length"),
        ({"y_test": np.array(3, np.uint8)}, r"one label for each image; got the shape \(\)"),
        ({"y_train": np.zeros((120, 1), np.uint8)}, r"one label for each image; got the shape \(120, 1\)"),
    ],
)
def test_wrong_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, np.ndarray], sentence: str
) -> None:
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    archive(tmp_path, **changes)
    with pytest.raises(wp.InvalidArgument, match=sentence):
        wp.data.load("mnist")


def test_truncated_or_incomplete_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    path = archive(tmp_path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(wp.InvalidArgument, match="cannot be read"):
        wp.data.load("mnist")
    np.savez(path, x_train=np.zeros(3))
    with pytest.raises(wp.InvalidArgument, match="has no y_train"):
        wp.data.load("mnist")


def test_a_missing_file_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("sklearn.datasets")

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.delenv("WELLPOSED_DATA", raising=False)
    monkeypatch.setattr(datasets, "fetch_openml", unreachable)
    with pytest.raises(wp.InvalidArgument, match="Set WELLPOSED_DATA to a folder with mnist.npz"):
        wp.data.load("mnist")
    with pytest.raises(wp.InvalidArgument, match="not on OpenML"):
        wp.data.load("camvid")


def test_a_zero_image_has_no_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    archive(tmp_path, x_train=np.zeros((120, 28, 28), np.uint8))
    with pytest.raises(wp.InvalidArgument, match="no direction"):
        wp.data.load("mnist", norm="unit")
