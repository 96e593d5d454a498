"""Kernels in zarr stores, here and on a Dask cluster: what is written, what continues, what a lost worker costs."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.errors import InvalidArgument, InvalidType, MissingPackage, RunError
from wellposed.kernel import _closed_form, _cluster, _zarr, _zarr_record
from wellposed.nn.tangent import GramProduct, TangentFeatures


def network(width: int = 8) -> nn.Module:
    return wp.GaussianDEQ(3, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError

    monkeypatch.setattr("wellposed.errors.importlib.import_module", missing)
    with pytest.raises(MissingPackage, match=r"A kernel in a .zarr store needs zarr.*wellposed\[kernels\]"):
        wp.tangent_kernel(network(), draw(5, 3), out=tmp_path / "k.zarr")


zarr: Any = pytest.importorskip("zarr", reason="the extra 'kernels' is not installed")
#: A digest translated by this differs in every digit.
OTHER_DIGITS = bytes.maketrans(b"0123456789abcdef", b"123456789abcdef0")


def check_same(K: Any, expected: Tensor, terms: int = 64) -> None:
    """Equal to rounding: entries are sums of products of gradients, of size sqrt(K_ii K_jj)."""
    scale = float(expected.abs().max())
    assert np.abs(np.asarray(K[...]) - expected.numpy()).max() <= terms * torch.finfo(expected.dtype).eps * scale


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("block_size", [8, 512])
def test_written_to_a_store(tmp_path: Path, block_size: int) -> None:
    model, X = network(), draw(30, 3)
    K = wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=block_size)
    assert isinstance(K, zarr.Array) and K.shape == (30, 30) and K.chunks == (min(30, block_size),) * 2
    check_same(K, wp.tangent_kernel(model, X))
    assert np.array_equal(K[:], K[:].T)
    assert names(tmp_path) == ["k.zarr"]
    before = K[:]
    check_same(wp.tangent_kernel(model, X[:9], out=tmp_path / "k.zarr"), wp.tangent_kernel(model, X[:9]))  # replaced
    assert before.shape == (30, 30)


def test_parts_cross_kernels_and_outputs(tmp_path: Path) -> None:
    model, X, X2 = network(), draw(9, 3), draw(4, 3)
    parts = wp.tangent_kernel(model, X, X2, by_parameter=True, out=tmp_path / "k.zarr", block_size=4)
    assert names(tmp_path) == ["k.U.zarr", "k.W.zarr", "k.a.zarr"]
    for name, part in wp.tangent_kernel(model, X, X2, by_parameter=True).items():
        check_same(parts[name], part)
    linear = nn.Linear(3, 2).double()  # by the generic method, whose blocks are not chunks
    for per_output in (False, True):
        K = wp.tangent_kernel(linear, X, out=tmp_path / "l.zarr", per_output=per_output)
        check_same(K, wp.tangent_kernel(linear, X, per_output=per_output))


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int) -> list[int]:
    """Blocks computed from now on; that of number `at` is interrupted."""
    calls: list[int] = []
    original = _closed_form.GramBlocks.block

    def block(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return original(self, *args, **options)

    monkeypatch.setattr(_closed_form.GramBlocks, "block", block)
    return calls


def test_an_interrupted_computation_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    model, X = network(), draw(20, 3)
    expected = wp.tangent_kernel(model, X)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, at=5)
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6)
    assert names(tmp_path) == ["k.zarr.part"]  # nothing that looks like a kernel
    with monkeypatch.context() as patch:
        calls = interrupt(patch, at=0)
        K = wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6, progress=True)
        assert len(calls) == 10 - 4  # of the ten blocks below the diagonal and on it, four were done
    check_same(K, expected)
    assert names(tmp_path) == ["k.zarr"] and "100 %" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["model", "activation", "X", "block_size", "X2"])
def test_a_part_of_another_kernel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    model, X, options = network(), draw(20, 3), {"block_size": 6}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, at=3)
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", **options)
    X2 = X if change == "X2" else None
    if change == "model":
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
    elif change == "activation":  # in no tensor, and not printed
        model.activation = wp.nn.Tanh()
    elif change == "X":
        X = X.clone()
        X[-1, -1] += 1e-12
    elif change == "block_size":
        options["block_size"] = 7
    with pytest.raises(InvalidArgument, match="'.*k.zarr.part' holds a part of another kernel: .* Remove it"):
        wp.tangent_kernel(model, X, X2, out=tmp_path / "k.zarr", **options)
    assert names(tmp_path) == ["k.zarr.part"]


def test_the_names_of_parameters_and_inputs_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, X = network(), draw(20, 3)
    model.X = nn.Parameter(torch.zeros(2, dtype=torch.float64))  # takes no part in the kernel, but it might
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, at=3)
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6)
    with torch.no_grad():
        model.X.add_(1.0)
    with pytest.raises(InvalidArgument, match="holds a part of another kernel"):
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6)


def test_a_chunk_that_is_not_whole_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, X = network(), draw(20, 3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, at=5)
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6)
    chunk = tmp_path / "k.zarr.part" / "c" / "1" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-8])
    chunk.with_suffix(".abc.partial").write_bytes(b"half")  # what a killed process leaves
    K = wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6)
    check_same(K, wp.tangent_kernel(model, X))
    assert not list((tmp_path / "k.zarr").rglob("*.partial"))


@pytest.mark.parametrize("where", ["block", "transpose"])
def test_a_chunk_that_was_changed_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It has the right size, and even numbers of this kernel; one bit is wrong, or it is another block."""
    model, X = network(), draw(20, 3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, at=5)
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6)
    chunks = tmp_path / "k.zarr.part" / "c"
    (chunks / "0" / "0").write_bytes((chunks / "1" / "1").read_bytes())
    changed = chunks / ("1/0" if where == "block" else "0/1")
    content = bytearray(changed.read_bytes())
    content[17] ^= 1
    changed.write_bytes(content)
    with monkeypatch.context() as patch:
        calls = interrupt(patch, at=0)
        K = wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6)
        assert len(calls) == 10 - 2  # of four blocks that were done, two are as they were
    check_same(K, wp.tangent_kernel(model, X))
    assert names(tmp_path / "k.zarr") == ["c", "zarr.json"]


@pytest.mark.parametrize(
    ("record", "kept"), [(b"", 0), (b"\xff\x00\n0 0\n", 0), (None, 0), ("torn", 2), ("others", 0)], ids=repr
)
def test_a_damaged_record_costs_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Any, kept: int) -> None:
    model, X = network(), draw(20, 3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, at=4)
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6)
    path = tmp_path / "k.zarr.part" / "blocks.txt"
    lines = path.read_bytes()
    assert lines.count(b"\n") == 3
    if record is None:
        path.unlink()
    else:
        others = re.sub(rb"[0-9a-f]{32}", lambda digest: digest[0].translate(OTHER_DIGITS), lines)
        path.write_bytes({"torn": lines[:-9], "others": others}.get(record, record))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        calls = interrupt(patch, at=10 - kept)
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6)
    assert len(calls) == 10 - kept
    with monkeypatch.context() as patch:
        calls = interrupt(patch, at=0)
        K = wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6)
        assert len(calls) == 1  # the line after a torn one was read
    check_same(K, wp.tangent_kernel(model, X))


def test_a_record_of_a_million_samples_can_be_read() -> None:
    """In blocks of the default size; a longer file is refused, and the computation could not continue."""
    across = -(-(10**6) // _closed_form.BLOCK_SIZE)
    line = f"{10**6} {10**6} {_zarr_record.digest_of([np.zeros(1)])}\n"
    assert len(line) * across * (across + 1) // 2 < _zarr_record._LARGEST


def test_a_store_is_replaced_only_by_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted while the old store is removed: there is no half of it under its name."""
    model, X, rmtree = network(), draw(9, 3), shutil.rmtree
    wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=4)

    def interrupted(path: Path, **options: Any) -> None:
        if (path / "c").is_dir():
            (path / "c" / "0" / "0").unlink()
            raise KeyboardInterrupt
        rmtree(path, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", interrupted)
        wp.tangent_kernel(model, 2 * X, out=tmp_path / "k.zarr", block_size=4)
    check_same(zarr.open_array(tmp_path / "k.zarr", mode="r"), wp.tangent_kernel(model, 2 * X))
    wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=4)
    assert names(tmp_path) == ["k.zarr"] and names(tmp_path / "k.zarr") == ["c", "zarr.json"]


def test_two_writers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused while the first writes, and when the first ends between its two looks."""
    model, X, lock = network(), draw(9, 3), _zarr.try_lock
    options: Any = {"block_size": 4, "key": "", "norms": ()}
    with _zarr.ZarrStorage(tmp_path / "l.zarr", (1, 9, 9), (9, 9), torch.float64, **options):
        handles = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
        with pytest.raises(InvalidArgument, match="another process is writing"):
            _zarr.ZarrStorage(tmp_path / "l.zarr", (1, 9, 9), (9, 9), torch.float64, **options).__enter__()
        assert not handles or len(os.listdir("/proc/self/fd")) == handles  # and nothing is left open

    def ended(handle: int) -> bool:
        (tmp_path / "k.zarr.part").rename(tmp_path / "k.zarr")  # by the first, which is done
        return lock(handle)

    monkeypatch.setattr(_zarr, "try_lock", ended)
    with pytest.raises(InvalidArgument, match="another process is writing"):
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=4)


@pytest.mark.skipif(os.name == "nt", reason="folders are not locked there")
def test_two_writers_at_the_very_start(tmp_path: Path) -> None:
    """The first has a folder, and no metadata in it yet: the second must not advise to remove it. If it was killed there, the
    next one continues."""
    model, X, part = network(), draw(9, 3), tmp_path / "k.zarr.part"
    part.mkdir()
    (part / "zarr.json.0123.partial").write_text("{")
    handle = os.open(part, os.O_RDONLY)
    assert _zarr.try_lock(handle)
    with pytest.raises(InvalidArgument, match="another process is writing .* Wait for it to end"):
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=4)
    os.close(handle)
    check_same(wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=4), wp.tangent_kernel(model, X))
    assert names(tmp_path) == ["k.zarr"] and names(tmp_path / "k.zarr") == ["c", "zarr.json"]


class Scaled(wp.GaussianDEQ):
    """A network with a number that only the terms of its kernel depend on, and a choice of their factors."""

    scale, turned = 1.0, False

    def tangent_features(self, X: Tensor) -> TangentFeatures:
        found = super().tangent_features(X)
        terms = {
            name: tuple(
                GramProduct(term.factors[::-1] if self.turned else term.factors, self.scale**2 * term.coefficient)
                for term in products
            )
            for name, products in found.terms.items()
        }
        return TangentFeatures(found.features, terms)


@pytest.mark.parametrize(("name", "value"), [("scale", 1.001), ("scale", -3.0), ("turned", True), ("scale", 1.0)])
def test_a_part_with_other_terms_is_refused(tmp_path: Path, monkeypatch: Any, name: str, value: float) -> None:
    model, X = Scaled(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64), draw(20, 3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, at=3)
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6)
    setattr(model, name, value)
    if value == 1.0 and name == "scale":  # the same
        check_same(wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6), wp.tangent_kernel(model, X))
        return
    with pytest.raises(InvalidArgument, match="holds a part of another kernel"):
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6)


@pytest.mark.filterwarnings("ignore::wellposed.errors.WellposedWarning")
def test_features_that_are_not_finite_are_not_those_of_another_kernel(tmp_path: Path) -> None:
    model = network()
    original = model.tangent_features

    def broken(X: Tensor) -> Any:
        found = original(X)
        next(iter(found.features.values())).fill_(torch.nan)
        return found

    model.tangent_features = broken
    K = wp.tangent_kernel(model, draw(9, 3), out=tmp_path / "k.zarr", block_size=4)
    assert np.isnan(K[:]).all()


def test_bad_targets(tmp_path: Path) -> None:
    model, X = network(), draw(5, 3)
    (tmp_path / "k.zarr").mkdir()
    with pytest.raises(InvalidArgument, match="exists and is not a zarr store"):
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr")
    (tmp_path / "l.zarr.part").write_text("x")
    with pytest.raises(InvalidArgument, match="cannot write .*l.zarr.part"):
        wp.tangent_kernel(model, X, out=tmp_path / "l.zarr")


def test_only_what_a_kernel_wrote_is_replaced(tmp_path: Path) -> None:
    model, X, place = network(), draw(5, 3), tmp_path / "k.zarr"
    zarr.open_group(place, mode="w").create_array("mine", shape=(3,), dtype="f8")
    with pytest.raises(InvalidArgument, match="a zarr store that no kernel wrote, and is not replaced"):
        wp.tangent_kernel(model, X, out=place)
    assert names(place) == ["mine", "zarr.json"]
    wp.tangent_kernel(model, X, out=tmp_path / "l.zarr")
    (tmp_path / "l.zarr" / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match="l.zarr' holds 'notes.txt', which no kernel wrote"):
        wp.tangent_kernel(model, X, out=tmp_path / "l.zarr")
    (tmp_path / "m.zarr").symlink_to(tmp_path / "l.zarr")
    with pytest.raises(InvalidArgument, match="m.zarr' is a link"):
        wp.tangent_kernel(model, X, out=tmp_path / "m.zarr")
    assert names(tmp_path) == ["k.zarr", "l.zarr", "m.zarr"]  # before any work: no part is left


_HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shape": lambda found: {**found, "shape": [2, 2]},
    "codecs": lambda found: {**found, "codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]},
    "data_type": lambda found: {**found, "data_type": "float32"},
    "chunk_grid": lambda found: {**found, "chunk_grid": None},
    "storage_transformers": lambda found: {**found, "storage_transformers": [{"name": "x"}]},
    "extra": lambda found: {**found, "extra": 1},
    "another kernel": lambda found: {**found, "attributes": [1]},
    "must hold a JSON object": lambda found: [],
}


@pytest.mark.parametrize("wrong", _HOSTILE)
def test_a_part_with_other_metadata_is_refused(tmp_path: Path, wrong: str) -> None:
    options: Any = {"block_size": 4, "key": "k", "norms": (1.0, 0.5)}
    storage = _zarr.ZarrStorage(tmp_path / "k.zarr", (1, 9, 9), (9, 9), torch.float64, **options)
    storage._create(storage.part)
    description = storage.part / "zarr.json"
    description.write_text(json.dumps(_HOSTILE[wrong](json.loads(description.read_text()))))
    with pytest.raises(InvalidArgument, match=wrong) as refusal:
        storage.__enter__()
    assert str(refusal.value).count("zarr.part") == 1  # one sentence, not one inside another


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("name", ["zarr.json", "c/0/0", "c", "blocks.txt"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_part_with_links_or_pipes_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    options: Any = {"block_size": 4, "key": "k", "norms": ()}
    storage = _zarr.ZarrStorage(tmp_path / "k.zarr", (1, 9, 9), (9, 9), torch.float64, **options)
    storage._create(storage.part)
    place = storage.part / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    if kind == "link":
        place.symlink_to(tmp_path)
    else:
        os.mkfifo(place)
    with pytest.raises(InvalidArgument, match="which no kernel wrote"):
        storage.__enter__()


dask: Any = pytest.importorskip("dask", reason="the extra 'kernels' is not installed")
distributed: Any = pytest.importorskip("distributed", reason="the extra 'kernels' is not installed")


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A cluster inside this process, for what does not need processes."""
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def wait_until_idle(client: Any) -> None:
    """What was running when a call failed ends; the scheduler has forgotten it."""
    while any(client.run(lambda dask_worker: dask_worker.state.executing_count).values()):
        time.sleep(0.01)


def test_a_client_needs_a_store_and_a_closed_form(tmp_path: Path, client: Any) -> None:
    with pytest.raises(InvalidType, match="must be a dask.distributed.Client, got str"):
        wp.tangent_kernel(network(), draw(5, 3), out=tmp_path / "k.zarr", client="tcp://127.0.0.1:8786")
    for out in (None, tmp_path / "k.npy"):
        with pytest.raises(InvalidArgument, match="out must end in .zarr"):
            wp.tangent_kernel(network(), draw(5, 3), out=out, client=client)
    with pytest.raises(InvalidArgument, match="client= needs a model with tangent_features"):
        wp.tangent_kernel(nn.Linear(3, 1).double(), draw(5, 3), out=tmp_path / "k.zarr", client=client)


def test_on_a_cluster(tmp_path: Path, client: Any) -> None:
    model, X, X2 = network(), draw(20, 3), draw(7, 3)
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "6 kB"}):  # below the size of the network
        K = wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6, client=client)
    check_same(K, wp.tangent_kernel(model, X))
    assert np.array_equal(K[:], K[:].T)
    parts = wp.tangent_kernel(model, X, X2, out=tmp_path / "p.zarr", block_size=6, by_parameter=True, client=client)
    for name, part in wp.tangent_kernel(model, X, X2, by_parameter=True).items():
        check_same(parts[name], part)
    assert names(tmp_path) == ["k.zarr", "p.U.zarr", "p.W.zarr", "p.a.zarr"]  # and no features are left


def test_one_parameter_by_parameter_on_a_cluster(tmp_path: Path, client: Any) -> None:
    model, X = network(), draw(9, 3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "W")
    parts = wp.tangent_kernel(model, X, out=tmp_path / "p.zarr", block_size=4, by_parameter=True, client=client)
    assert list(parts) == ["W"] and names(tmp_path) == ["p.W.zarr"]
    check_same(parts["W"], wp.tangent_kernel(model, X))


def test_a_cluster_continues_with_the_features_it_had(tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of this process are the workers, so what they compute can be counted here."""
    model, X, solved = network(), draw(20, 3), []
    features_of, block_task = _cluster.features_of, _cluster.block_task

    def counted(model: nn.Module, X: Tensor) -> Any:
        solved.append(len(X))
        return features_of(model, X)

    def fails_on_the_last_row(left: Any, right: Any, terms: Any, rows: slice, *args: Any, **options: Any) -> Any:
        if rows.start == 18:
            raise KeyError("out of order")
        return block_task(left, right, terms, rows, *args, **options)

    monkeypatch.setattr(_cluster, "features_of", counted)
    with monkeypatch.context() as patch:
        patch.setattr(_cluster, "block_task", fails_on_the_last_row)
        with pytest.raises(KeyError, match="out of order"):
            wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6, client=client)
    assert names(tmp_path) == ["k.zarr.part"]
    wait_until_idle(client)
    assert solved and len(solved) <= 4
    K = wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6, client=client)
    assert sorted(solved) == [2, 6, 6, 6]  # no feature is computed twice
    check_same(K, wp.tangent_kernel(model, X))
    assert names(tmp_path) == ["k.zarr"]


def test_a_cluster_does_not_take_over_what_was_changed(tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk, features that are damaged, and features of other rows."""
    model, X, write_chunks, written = network(), draw(20, 3), _cluster.write_chunks, []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, at=5)
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6)
    part = tmp_path / "k.zarr.part"
    (part / "c" / "0" / "0").write_bytes(bytes(6 * 6 * 8))
    (part / "features").mkdir()
    (part / "features" / "0-0.npz").write_bytes(b"half")
    options: Any = {"dtype": torch.float64, "names": ("Z", "P"), "owner": "others"}
    _cluster.features_task(pickle.dumps(model), X[:6].numpy(), str(part / "features" / "0-6.npz"), **options)

    def counted(array: Any, block: Tensor, rows: slice, columns: slice, **options: Any) -> str:
        written.append((rows.start, columns.start))
        return write_chunks(array, block, rows, columns, **options)

    monkeypatch.setattr(_cluster, "write_chunks", counted)
    K = wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=6, client=client)
    assert sorted(written) == [(0, 0), (12, 6), (12, 12), (18, 0), (18, 6), (18, 12), (18, 18)]  # three are as they were
    check_same(K, wp.tangent_kernel(model, X))


@pytest.mark.filterwarnings("ignore::wellposed.errors.WellposedWarning")
def test_a_cluster_writes_blocks_of_nan(tmp_path: Path, client: Any) -> None:
    """zarr leaves out chunks that hold nothing else, and they are not missing."""
    model = network()
    with torch.no_grad():
        model.a.fill_(torch.nan)
    K = wp.tangent_kernel(model, draw(9, 3), out=tmp_path / "k.zarr", block_size=4, client=client)
    assert np.isnan(K[:]).all()


def test_features_that_come_late_do_not_block_the_store(tmp_path: Path) -> None:
    """Of a task that was running when a later call gave the store its name."""
    model, X = network(), draw(9, 3)
    wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=4)
    (tmp_path / "k.zarr" / "features").mkdir()
    (tmp_path / "k.zarr" / "features" / "0-0.npz").write_bytes(b"late")
    check_same(wp.tangent_kernel(model, 2 * X, out=tmp_path / "k.zarr", block_size=4), wp.tangent_kernel(model, 2 * X))
    assert names(tmp_path / "k.zarr") == ["c", "zarr.json"]


def test_a_class_that_workers_cannot_import(tmp_path: Path, client: Any) -> None:
    """One of a script or a notebook is sent whole; one of a module that a worker lacks is one sentence."""

    class OfAScript(wp.GaussianDEQ):
        pass

    model, X = OfAScript(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64), draw(9, 3)
    K = wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=4, client=client)
    check_same(K, wp.tangent_kernel(model, X))
    for missing in (b"cno_such_module\nThing\n.", b"ctorch\nNoSuchThing\n."):
        with pytest.raises(InvalidArgument, match=r"a worker cannot load the model \(.*(?i:no_?such).*\). Install") as caught:
            options: Any = {"dtype": torch.float64, "names": (), "owner": "another"}
            _cluster.features_task(missing, X.numpy(), str(tmp_path / "f.npz"), **options)
        assert "\n" not in str(caught.value)


def test_features_of_another_network_are_not_taken_over(tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster stops; the rest is done without it, or the part is removed; then comes another network."""
    X, block_task = draw(20, 3), _cluster.block_task

    def fails(left: Any, right: Any, terms: Any, rows: slice, *args: Any, **options: Any) -> Any:
        if rows.start == 18:
            raise KeyError("out of order")
        return block_task(left, right, terms, rows, *args, **options)

    for end in ("without a cluster", "removed"):
        out, model = tmp_path / f"{end}.zarr", network()
        with monkeypatch.context() as patch, pytest.raises(KeyError, match="out of order"):
            patch.setattr(_cluster, "block_task", fails)
            wp.tangent_kernel(model, X, out=out, block_size=6, client=client)
        wait_until_idle(client)
        if end == "removed":
            shutil.rmtree(tmp_path / f"{end}.zarr.part")
        else:
            check_same(wp.tangent_kernel(model, X, out=out, block_size=6), wp.tangent_kernel(model, X))
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)
        check_same(wp.tangent_kernel(model, X, out=out, block_size=6, client=client), wp.tangent_kernel(model, X))


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        (
            lambda: distributed.comm.CommClosedError("in <TCP>"),
            "The Dask scheduler cannot be reached any more. What is done is kept",
        ),
        (lambda: distributed.CancelledError("block"), "The Dask scheduler cannot be reached any more"),
        (lambda: distributed.KilledWorker("block", None, 3), "A task ended every worker .* take a smaller block_size"),
    ],
    ids=["scheduler", "cancelled", "workers"],
)
def test_a_lost_cluster_is_one_sentence(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch, lost: Callable[[], Exception], says: str
) -> None:
    model, X = network(), draw(9, 3)
    with monkeypatch.context() as patch, pytest.raises(RunError, match=says) as caught:

        def gone(*args: Any, **options: Any) -> None:
            raise lost()

        patch.setattr(distributed, "as_completed", gone)
        wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=4, client=client)
    assert "\n" not in str(caught.value)
    check_same(wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=4), wp.tangent_kernel(model, X))


def test_a_late_task_does_not_write_into_another_kernel(tmp_path: Path) -> None:
    wp.tangent_kernel(network(), draw(9, 3), out=tmp_path / "k.zarr")
    with pytest.raises(InvalidArgument, match="belongs to another kernel by now"):
        _zarr.open_part(str(tmp_path / "k.zarr"), "another")


@pytest.mark.slow
def test_a_killed_worker_costs_only_its_blocks(tmp_path: Path) -> None:
    """Two real processes, one killed with SIGKILL in the middle."""
    model, X, block_size = network(200), draw(3000, 3), 150
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        pids = list(client.run(os.getpid).values())
        part = tmp_path / "k.zarr.part"

        def kill_when_some_chunks_are_there() -> None:
            while len(list(part.glob("c/*/*"))) < 20:
                time.sleep(0.01)
            os.kill(pids[0], signal.SIGKILL)

        killer = threading.Thread(target=kill_when_some_chunks_are_there, daemon=True)
        killer.start()
        K = wp.tangent_kernel(model, X, out=tmp_path / "k.zarr", block_size=block_size, client=client)
        killer.join(timeout=5)
        assert not killer.is_alive(), "the worker was not killed before the end: take more samples"
        assert pids[0] not in client.run(os.getpid).values()
    check_same(K, wp.tangent_kernel(model, X), terms=1024)
