"""Images to restore: the blur and noise that are stated, files without labels, drawn images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import wellposed as wp
from wellposed.data import restoration
from wellposed.data.restoration import BLUR, NOISE, SIDE, blur
from wellposed.errors import InvalidArgument


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    photographs = rng.integers(0, 256, (5, 64, 64, 3), dtype=np.uint8)
    np.savez(tmp_path / "natural64.npz", x_train=photographs, y_train=np.arange(5), x_test=photographs[:2])
    np.savez(tmp_path / "cbsd68.npz", x_test=rng.integers(0, 256, (3, 160, 160, 3), dtype=np.uint8))
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    return tmp_path


def test_the_blur_of_the_data_is_that_of_imaging() -> None:
    x = torch.rand(2, 1, 9, 12, generator=torch.Generator().manual_seed(0))
    operator = wp.imaging.Blur(wp.imaging.gaussian_kernel(BLUR, SIDE))
    torch.testing.assert_close(blur(x), operator.A(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["deblurring", "deblurring_leaves"])
def test_inputs_are_blurred_targets_with_noise(name: str, files: Path) -> None:
    data = wp.data.load(name, n=4, n_test=3, dtype=torch.float64)
    side = 160 if name == "deblurring" else 64
    assert data.y.shape == (4, 3, 64, 64) and data.y_test.shape == data.X_test.shape == (3, 3, side, side)
    noise = torch.cat([(data.X - blur(data.y)).flatten(), (data.X_test - blur(data.y_test)).flatten()])
    assert abs(float(noise.std()) - NOISE) < 5 * NOISE / (2 * len(noise)) ** 0.5
    assert 0 <= float(data.y.min()) and float(data.y.max()) <= 1 and "noise of 0.1" in str(data)
    quiet = wp.data.load(name, n=2, n_test=3, noise=0.0, dtype=torch.float64)
    torch.testing.assert_close(quiet.X, blur(quiet.y))
    more = wp.data.load(name, n=1, n_test=3, dtype=torch.float64)
    assert torch.equal(more.X_test, data.X_test)  # does not depend on n


def test_photographs_are_in_the_order_of_the_file(files: Path) -> None:
    data, grey = (wp.data.load("deblurring", grey=grey, dtype=torch.float64) for grey in (False, True))
    stored = np.load(files / "cbsd68.npz")["x_test"] / 255
    np.testing.assert_allclose(data.y_test.movedim(1, 3).numpy(), stored, rtol=1e-12)
    np.testing.assert_allclose(grey.y_test[:, 0].numpy(), stored @ np.array([0.299, 0.587, 0.114]), rtol=1e-12)


def test_drawn_images_have_colours_or_their_luminance() -> None:
    colours, grey = (wp.data.load("deblurring_leaves", n=2, n_test=1, size=16, grey=grey).y for grey in (False, True))
    assert grey.shape == (2, 1, 16, 16) and float((colours[:, 0] - colours[:, 1]).abs().max()) > 0.05
    torch.testing.assert_close(grey, torch.tensordot(torch.tensor([0.299, 0.587, 0.114]), colours, ([0], [1]))[:, None])


def test_files_without_labels_have_their_images_as_targets(files: Path) -> None:
    data = wp.data.load("natural64", n=3)
    assert data.X.shape == (3, 3, 64, 64) and data.X_test.shape == (2, 3, 64, 64) and torch.equal(data.X, data.y)
    data = wp.data.load("cbsd68", grey=True)
    assert data.X.shape == (3, 1, 160, 160) and data.X_test is None and data.y_test is None


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("natural64", {"n": 6}, "6 images are wanted, but there are 5"),
        ("cbsd68", {"n_test": 2}, "no test part"),
        ("deblurring", {"classes": (0, 1)}, "no classes to choose from"),
        ("deblurring_leaves", {"size": 5}, "at least 7"),
    ],
)
def test_wrong_options_get_one_sentence(name: str, options: dict[str, object], says: str, files: Path) -> None:
    with pytest.raises(wp.InvalidArgument, match=says):
        wp.data.load(name, **options)


def test_wrong_files_get_one_sentence(files: Path) -> None:
    np.savez(files / "cbsd68.npz", x_train=np.zeros((1, 160, 160, 3), dtype=np.uint8))
    with pytest.raises(wp.InvalidArgument, match="has no x_test"):
        wp.data.load("deblurring")
    np.savez(files / "cbsd68.npz", x_test=np.zeros((1, 60, 160, 3), dtype=np.uint8))
    with pytest.raises(wp.InvalidArgument, match=r"uint8 of shape \(N, 160, 160, 3\)"):
        wp.data.load("cbsd68")
    (files / "cbsd68.npz").unlink()
    with pytest.raises(wp.InvalidArgument, match=r"cbsd68 is not available: .* does not exist"):
        wp.data.load("deblurring")


def test_a_file_without_images_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="holds none"):
        restoration._some(0, None, np.random.default_rng(0))
