"""Kernels in files, what they take, and how the work is reported."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from syncs import synced
from wellposed._io import Temporary
from wellposed._memory import available_memory, readable
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.kernel import _closed_form, kernel_memory


def network(dtype: torch.dtype = torch.float64, width: int = 8) -> nn.Module:
    return wp.GaussianDEQ(3, width, generator=torch.Generator().manual_seed(0), dtype=dtype)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def check_same(K: np.ndarray, expected: Tensor, terms: int = 8) -> None:
    """Equal to rounding: an entry is a sum of products, so its error is a multiple of eps |J_i| |J_j|, even where it cancels.

    Args:
        K: (n, n) or (n, n2) kernel.
        expected: The same, computed otherwise.
        terms: Of a sum, one a unit; both kernels round it, and both factors of each product.
    """
    scale = expected.diagonal().sqrt().outer(expected.diagonal().sqrt()) if K.shape[0] == K.shape[1] else expected.abs().max()
    assert np.all(np.abs(K - expected.numpy()) <= 4 * terms * torch.finfo(expected.dtype).eps * scale.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_written_to_a_file(tmp_path: Path, dtype: torch.dtype) -> None:
    model, X = network(dtype), draw(30, 3, dtype=dtype)
    expected = wp.tangent_kernel(model, X)
    K = wp.tangent_kernel(model, X, out=tmp_path / "kernel.npy", block_size=8)
    assert isinstance(K, np.memmap) and Path(K.filename).name == "kernel.npy"
    check_same(K, expected)
    assert np.array_equal(K, K.T)
    stored = np.load(tmp_path / "kernel.npy")
    assert stored.dtype == expected.numpy().dtype and np.array_equal(stored, K)
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.npy"]


def test_a_file_per_parameter_and_cross_kernels(tmp_path: Path) -> None:
    model, X, X2 = network(), draw(9, 3), draw(4, 3)
    parts = wp.tangent_kernel(model, X, X2, by_parameter=True, out=str(tmp_path / "k.npy"), block_size=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k.U.npy", "k.W.npy", "k.a.npy"]
    for name, part in wp.tangent_kernel(model, X, X2, by_parameter=True).items():
        check_same(parts[name], part)


def test_outputs_in_a_file(tmp_path: Path) -> None:
    model, X = nn.Linear(3, 2).double(), draw(5, 3)
    for per_output in (False, True):
        K = wp.tangent_kernel(model, X, out=tmp_path / "k.npy", per_output=per_output)
        assert np.allclose(K, wp.tangent_kernel(model, X, per_output=per_output).numpy())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type) -> None:
    calls = 0
    original = _closed_form.GramBlocks.block

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            parts = list(tmp_path.iterdir())
            assert len(parts) == 1 and parts[0].suffix == ".part"  # nothing that looks like a kernel meanwhile
            raise error
        return original(self, *args, **options)

    monkeypatch.setattr(_closed_form.GramBlocks, "block", interrupted)
    with pytest.raises(error):
        wp.tangent_kernel(network(), draw(20, 3), out=tmp_path / "k.npy", block_size=6)
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_survives_an_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = np.array(wp.tangent_kernel(network(), draw(5, 3), out=tmp_path / "k.npy"))

    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr(_closed_form.GramBlocks, "block", broken)
    with pytest.raises(RuntimeError):
        wp.tangent_kernel(network(), draw(20, 3), out=tmp_path / "k.npy")
    assert np.array_equal(np.load(tmp_path / "k.npy"), before)


def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    dead = [tmp_path / ".k.npy.123.part", tmp_path / ".k.npy.123-0123abcd.part"]
    for path in dead:
        path.write_bytes(b"x" * 1000)
    kept = [Temporary(tmp_path / "k.npy", "part"), Temporary(tmp_path / "other.npy", "part")]  # their writers live
    (tmp_path / ".other.npy.123.part").touch()
    wp.tangent_kernel(network(), draw(5, 3), out=tmp_path / "k.npy")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"k.npy", ".other.npy.123.part", *(part.path.name for part in kept)}
    for part in kept:
        part.discard()


def test_a_kernel_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert synced(monkeypatch, lambda: wp.tangent_kernel(network(), draw(5, 3), out=tmp_path / "k.npy")) == [
        "fsync file",
        "replace",
        "fsync folder",
    ]


def test_a_small_disk_is_noticed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(free=100))
    with pytest.raises(InvalidArgument, match="out needs 3.125 KiB in .* where 100 bytes are free"):
        wp.tangent_kernel(network(), draw(20, 3), out=tmp_path / "k.npy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        ("k.txt", InvalidArgument, "must end in .npy or .zarr, got 'k.txt'"),
        ("nowhere/k.npy", InvalidArgument, "does not exist. Create it first"),
        (3, InvalidType, "path of a .npy file or a .zarr store, got int"),
    ],
)
def test_wrong_targets(out: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        wp.tangent_kernel(network(), draw(2, 3), out=out)


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "k.npy").mkdir()
    with pytest.raises(InvalidArgument, match="is a folder"):
        wp.tangent_kernel(network(), draw(2, 3), out=tmp_path / "k.npy")


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot reserve space")
def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InvalidArgument, match=r"cannot write out=.*No space left"):
        wp.tangent_kernel(network(), draw(2, 3), out=tmp_path / "k.npy")
    assert list(tmp_path.iterdir()) == []


def test_the_estimate_counts_what_there_is() -> None:
    model, X = network(width=50), draw(600, 3)
    estimate = kernel_memory(model, X)
    assert estimate.kernel == 600 * 600 * 8 and estimate.disk == 0
    assert estimate.features == 600 * (50 + 50 + 3) * 8  # Z, P and X
    assert estimate.blocks == (3 + 1 + 2) * 512**2 * 8  # three Gram blocks, one sum, two for symmetry
    assert estimate.total == estimate.kernel + estimate.features + estimate.blocks + estimate.work
    assert kernel_memory(model, X, by_parameter=True).kernel == 3 * estimate.kernel
    assert kernel_memory(model, X, X[:100]).features == 700 * 103 * 8
    on_disk = kernel_memory(model, X, out="k.npy")
    assert on_disk.kernel == 0 and on_disk.disk == estimate.kernel
    assert "on disk 2.747 MiB" in str(on_disk)


def test_twenty_thousand_samples_fit() -> None:
    model = wp.GaussianDEQ(10, 1000, dtype=torch.float32, on_ill_posed="ignore")  # the proof takes seconds
    X = torch.zeros(1, 10).expand(20000, 10)  # a view: no memory of its own
    estimate = kernel_memory(model, X)
    assert estimate.kernel == 1_600_000_000
    assert estimate.total < 12 * 1024**3 // 4
    with pytest.raises(InvalidArgument, match="1 GiB are allowed by memory="):
        wp.tangent_kernel(model, X, memory=1024**3)


def test_available_memory_is_plausible() -> None:
    have = available_memory(torch.device("cpu"))
    assert have is None or 2**20 < have < 2**50


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (2**52, "4096 TiB")]
)
def test_readable(size: int, text: str) -> None:
    assert readable(size) == text


def test_progress_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = builtins.__import__

    def without_rich(name: str, *args: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    wp.tangent_kernel(network(), draw(20, 3), progress=True, block_size=8)
    shown = capsys.readouterr().err
    assert "about" in shown and "of memory" in shown and "tangent kernel: 100 %" in shown


@pytest.mark.parametrize("cross", [False, True])
def test_progress_reaches_the_end(monkeypatch: pytest.MonkeyPatch, cross: bool) -> None:
    from wellposed.kernel import empirical

    totals, amounts = [], []

    class Recorder:
        def __init__(self, title: str, total: int, **options: Any) -> None:
            totals.append(total)

        def __enter__(self) -> Any:
            return self

        def advance(self, amount: int) -> None:
            amounts.append(amount)

        def __exit__(self, *exception: object) -> None:
            return None

    monkeypatch.setattr(empirical, "progress_display", Recorder)
    for model in (network(), nn.Linear(3, 2).double()):
        for options in ({}, {"by_parameter": True}, {"per_output": True}):
            totals.clear(), amounts.clear()
            wp.tangent_kernel(model, draw(20, 3), draw(7, 3) if cross else None, block_size=6, **options)
            assert sum(amounts) == totals[0]


def test_progress_with_rich(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    wp.tangent_kernel(network(), draw(20, 3), progress=True, block_size=8)
    captured = capsys.readouterr()
    assert "tangent kernel: 100 %" in captured.err and captured.out == ""
