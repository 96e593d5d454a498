"""Mutated files of every kind that is read: each gives a result or one sentence, never another error, a hang or damage.

`python tests/fuzz_files.py 10000` runs so many cases and prints their count by outcome.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import yaml

import wellposed as wp
from fuzz_data import forge_parquet, pack, write_own
from wellposed.errors import WellposedError
from wellposed.landscape import Surface
from wellposed_lab import report
from wellposed_lab.report._read import read_run
from wellposed_lab.runs._run_files import certificate_files, read_certificate, read_metrics, read_sessions, read_times
from wellposed_lab.runs.checkpoint import _checksum, load, restore
from wellposed_lab.runs.config import resolve
from wellposed_lab.runs.optimizers import make_optimizer
from wellposed_lab.runs.run import read_config
from wellposed_lab.runs.setup import prepare
from wellposed_lab.runs.training import load_run, train

__all__ = ["Findings", "fuzz"]

#: A case that takes longer hangs, even on a busy machine.
SECONDS = 60
#: Every so many cases the expensive readers are called as well: the page with its network, and going on with the run.
EVERY = 10
#: A sentence, not a dump.
LENGTH = 4000

NASTY: list[Any] = [
    None, True, -1, 0, 1e308, -1e308, float("inf"), -float("inf"), float("nan"), 2**31, 2**63, 2**64, 10**400, "", "x",
    "\x00", "\ud800", "../../x", "<script>", "inf", "nan", "2001-13-45", [], {}, [[]], [1, "a", None], {"a": {"b": [1]}},
    "9" * 5000,
]  # fmt: skip
TOKENS = [
    b"", b"\x00", b"\xff\xfe", b"null", b"{", b"[" * 3000, b"]", b"}", b'"', b"\\", b"\n", b"\r", b"\t", b": ", b"- ", b"&a ",
    b"*a", b"<<: *a", b"!!float x", b"!!python/object:os.system ", b"9" * 5000, b"1e999", b"-0", b"NaN", b"2001-01-01",
    b"2001-13-45", b"0x" + b"f" * 4000, b"%", b"---", b"...", b"\xe2\x80\xa8", b'{"epoch": 0}', b'{"sessions": null}',
    b"PK\x03\x04", b"PK\x05\x06",
]  # fmt: skip


class Hang(BaseException):
    """A case took too long."""


@dataclass
class Findings:
    """What came of the cases.

    Attributes:
        outcomes: How many by kind of file and outcome.
        failures: Descriptions of what must not happen.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def fuzz(folder: Path, cases: int, seed: int = 0, every: int = EVERY) -> Findings:
    """Runs so many cases in an empty folder, every so many with the expensive readers."""
    bench = Bench(folder, random.Random(seed), every)
    for case in range(cases):
        bench.run(case)
    return bench.found


class Bench:
    """A small run, a data set, and what reads their files."""

    def __init__(self, folder: Path, rng: random.Random, every: int) -> None:
        self.rng, self.every, self.found = rng, every, Findings()
        self.folder, self.outside = folder / "run", folder / "outside"
        self.outside.mkdir()
        (self.outside / "private.txt").write_text("SECRET: yes\n")
        keys = ["data.name=sphere", "data.n=4", "data.n_test=3", "data.features=3", "model.width=4", "run.epochs=2"]
        keys += ["run.batch_size=2", "run.certify_every=1", "run.tensorboard=false", "optimizer.schedule=constant"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(resolve({}, keys), self.folder)
            self.loaded = load_run(self.folder)
            problem = self.loaded[1]
            X, y = problem.parts.train
            wp.landscape.surface(
                problem.model, torch.nn.functional.mse_loss, X, y, num=2, file=self.folder / "figures" / "landscape.npz"
            )
        draw = np.random.default_rng(0)
        parts = {f"x_{part}": draw.integers(0, 256, (20, 28, 28)).astype(np.uint8) for part in ("train", "test")}
        parts |= {f"y_{part}": np.arange(20).astype(np.uint8) % 10 for part in ("train", "test")}
        np.savez_compressed(self.folder / "mnist.npz", **parts)
        write_own(self.folder, draw)
        self.good = _contents(self.folder)
        self.around = _contents(self.outside)

    def run(self, case: int) -> None:
        """One case: a file is mutated, read, and put back."""
        name = self.rng.choice([name for name in self.good if name != "metrics.parquet" and not name.endswith("lock")])
        other = self._mutate(name)
        before = _contents(self.folder)
        readers = dict(self._readers(name))
        if case % self.every == 0:
            readers["page"] = lambda: report.write(self.folder, self.outside.parent / "page.html")
            readers["resume"] = self._resume
        for reader, call in readers.items():
            self._outcome(f"case {case}: {name}, {other}, {reader}", call)
        if _contents(self.folder) != before or _contents(self.outside) != self.around:
            self.found.failures.append(f"case {case}: {name}, {other}: files were changed")
        for changed, content in self.good.items():
            if before.get(changed) != content:
                self._put_back(changed)

    def _mutate(self, name: str) -> str:
        rng, path, content = self.rng, self.folder / name, self.good[name]
        if rng.random() < 0.08:
            return self._replace_by_special(path)
        if path.suffix in _FORGERS and rng.random() < 0.6:
            _FORGERS[path.suffix](rng, path, content)
            return "forged"
        path.write_bytes(_mutated(rng, content))
        return "bytes"

    def _replace_by_special(self, path: Path) -> str:
        path.unlink()
        kind = self.rng.choice(["link", "endless", "pipe", "folder", "nothing", "huge"])
        if kind == "link":
            path.symlink_to(self.outside / "private.txt")
        elif kind == "endless":
            path.symlink_to("/dev/zero")
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "huge":
            with path.open("wb") as file:
                file.truncate(1 << 42)  # sparse: it takes no space
        return kind

    def _put_back(self, name: str) -> None:
        path = self.folder / name
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        elif os.path.lexists(path):
            path.unlink()
        path.write_bytes(self.good[name])

    def _readers(self, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
        folder = self.folder
        if name == "mnist.npz":
            yield "data", lambda: _with_data(folder)
            return
        if name.startswith("own."):
            yield "own", lambda: wp.data.load(str(folder / name), 4, n_test=2, classify=self.rng.random() < 0.5 or None)
            return
        if name.endswith("landscape.npz"):
            yield "surface", lambda: repr(Surface.load(folder / name))
            return
        yield "page files", lambda: self._no_secret(read_run(folder))
        if name == "config.yaml":
            yield "config", lambda: prepare(read_config(folder))
        elif name.startswith("checkpoints"):
            yield "checkpoint", lambda: self._restored((folder / name).with_suffix(".json"))
            yield "network", lambda: load_run(folder)
        elif name.startswith("certificates"):
            yield "certificates", lambda: [str(read_certificate(folder, path)) for _, path in certificate_files(folder)]
        else:
            yield "records", lambda: (read_metrics(folder), read_times(folder), read_sessions(folder))

    def _restored(self, path: Path) -> None:
        config, problem, _ = self.loaded
        restore(load(path), problem.model, make_optimizer(problem.model, config.optimizer))

    def _no_secret(self, run: Any) -> None:
        assert "SECRET" not in repr(run), "a foreign file is on the page"

    def _resume(self) -> None:
        copy = self.folder.with_name("copy")
        shutil.copytree(self.folder, copy, symlinks=True, copy_function=_copied)
        try:
            train(read_config(copy).model_copy(), copy, resume=True)
        finally:
            shutil.rmtree(copy)

    def _outcome(self, where: str, call: Callable[[], Any]) -> None:
        kind = where.split(", ")[-1]
        try:
            with _alarm(SECONDS), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
            self.found.outcomes[f"{kind}: read"] += 1
        except WellposedError as error:
            text = str(error)
            self.found.outcomes[f"{kind}: {type(error).__name__}"] += 1
            if not text or "\n" in text or len(text) > LENGTH:
                self.found.failures.append(f"{where}: not a sentence: {text[:200]!r}")
        except Hang:
            self.found.failures.append(f"{where}: it hangs")
        except Exception:
            self.found.failures.append(f"{where}: {traceback.format_exc()[-1500:]}")


def _copied(source: str, target: str) -> None:
    """A copy of a regular file; pipes are made again, and huge files stay sparse."""
    if Path(source).is_fifo():
        os.mkfifo(target)
    elif os.stat(source).st_size > 1 << 30:
        with open(target, "wb") as file:
            file.truncate(os.stat(source).st_size)
    else:
        shutil.copyfile(source, target)


def _contents(folder: Path) -> dict[str, bytes]:
    """Content by name; of what is not a regular file, or is huge, a mark."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = b"link " + os.readlink(path).encode()
        elif path.is_file():
            found[name] = path.read_bytes() if path.stat().st_size < 1 << 30 else b"huge"
        elif not path.is_dir():
            found[name] = b"special"
    return found


@contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _with_data(folder: Path) -> None:
    before = os.environ.get("WELLPOSED_DATA")
    os.environ["WELLPOSED_DATA"] = str(folder)
    try:
        if (folder / "mnist.npz").is_file():  # without it OpenML is asked
            wp.data.load("mnist", 4, (0, 1), n_test=2)
    finally:
        os.environ.pop("WELLPOSED_DATA") if before is None else os.environ.update(WELLPOSED_DATA=before)


def _mutated(rng: random.Random, content: bytes) -> bytes:
    """Bytes flipped, cut, doubled, moved or replaced, one to four times."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice([1, 4, 30, 400]))
        how = rng.randrange(6)
        if how == 0 and data:
            data[start % len(data)] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[start:end]
        elif how == 2:
            data[start:start] = data[start:end]
        elif how == 3:
            data[start:end] = rng.choice(TOKENS)
        elif how == 4:
            del data[start:]
        else:
            data[start:end] = rng.randbytes(end - start)
    return bytes(data)


def _change(rng: random.Random, plain: Any) -> Any:
    """JSON with one node replaced, removed, or put elsewhere."""
    places: list[tuple[Any, Any]] = []
    level = [plain]
    while level:
        node = level.pop()
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        places += [(node, key) for key in keys]
        level += [node[key] for key in keys if isinstance(node[key], (dict, list))]
    if not places or rng.random() < 0.05:
        return rng.choice(NASTY)
    node, key = rng.choice(places)
    if rng.random() < 0.2:
        del node[key]
    elif rng.random() < 0.2 and isinstance(node, dict):
        node[rng.choice(["", "x", "epoch", "\ud800"])] = rng.choice(NASTY)
    else:
        node[key] = rng.choice(NASTY)
    return plain


def _forge_json(rng: random.Random, path: Path, content: bytes) -> None:
    """A record that is JSON; of a checkpoint with the right checksum."""
    plain = _change(rng, json.loads(content))
    if path.name.startswith("step-") and isinstance(plain, dict):
        plain.pop("sha256", None)
        plain["sha256"] = _checksum(plain)
    path.write_text(json.dumps(plain))


def _forge_yaml(rng: random.Random, path: Path, content: bytes) -> None:
    path.write_text(yaml.safe_dump(_change(rng, yaml.safe_load(content))))


def _forge_lines(rng: random.Random, path: Path, content: bytes) -> None:
    rows = [json.loads(line) for line in content.splitlines()]
    index = rng.randrange(len(rows))
    rows[index] = _change(rng, rows[index])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _forge_tensors(rng: random.Random, path: Path, content: bytes) -> None:
    """Tensors that are replaced, with right checksums in both files."""
    tensors = safetensors.torch.load(content)
    name = rng.choice(list(tensors))
    choices = [
        lambda t: torch.zeros(0), lambda t: torch.zeros(3, 3, 3), lambda t: t.to(torch.float16), lambda t: t.to(torch.int64),
        lambda t: torch.full_like(t, 255), lambda t: torch.full_like(t, -1) if t.dtype != torch.uint8 else t + 1,
        lambda t: t.flatten()[:-1], lambda t: t.double() * float("nan"), lambda t: t.to(torch.complex64),
    ]  # fmt: skip
    how = rng.randrange(len(choices) + 2)
    if how < len(choices):
        tensors[name] = choices[how](tensors[name]).contiguous()
    else:
        moved = tensors.pop(name)
        if how > len(choices):
            tensors[
                rng.choice(["x", "optimizer/0/evil", "optimizer/x/y", "optimizer/0", "optimizer/99/exp_avg", "random/torch"])
            ] = moved
    new = _mutated(rng, content) if rng.random() < 0.3 else safetensors.torch.save(tensors)
    path.write_bytes(new)
    beside = path.with_suffix(".json")
    record = json.loads(beside.read_text())
    record.pop("sha256")
    record["tensors"] = {"bytes": len(new), "sha256": hashlib.sha256(new).hexdigest()}
    record["sha256"] = _checksum(record)
    beside.write_text(json.dumps(record))


def _forge_archive(rng: random.Random, path: Path, content: bytes) -> None:
    """An archive that is whole, with an array or its text replaced."""
    with np.load(io.BytesIO(content)) as archive:
        arrays = {name: archive[name] for name in archive.files}
    name = rng.choice(list(arrays))
    if name == "__record__":
        arrays[name] = np.array(json.dumps(_change(rng, json.loads(str(arrays[name])))).replace("\x00", ""))
    else:
        old = arrays[name] if arrays[name].dtype.kind != "U" else np.zeros(arrays[name].shape)
        choices = [
            np.array(1.0),
            old.astype(np.float32),
            old.astype(np.complex64),
            old[:0],
            np.zeros((2, 2, 2)),
            np.full_like(old, 99),
            np.array(["a"]),
            np.array([None]),
            np.zeros((1 << 22,)),
            old[..., None],
            np.array([(1, 2.0)], dtype="i4,f8"),
            np.full(old.shape, 0x7FFFFFFF, np.uint32).view("<U1"),
            np.full(old.shape, np.longdouble("1e4000")),
        ]
        arrays[name] = choices[rng.randrange(len(choices))]
    if rng.random() < 0.2:
        del arrays[rng.choice(list(arrays))]
    with path.open("wb") as file:
        (np.savez if rng.random() < 0.5 else np.savez_compressed)(file, **arrays)
    if rng.random() < 0.1:
        pack(path, rng.choice([zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]))


_FORGERS = {
    ".json": _forge_json,
    ".jsonl": _forge_lines,
    ".yaml": _forge_yaml,
    ".safetensors": _forge_tensors,
    ".npz": _forge_archive,
    ".parquet": forge_parquet,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        findings = fuzz(Path(place), int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for outcome, count in sorted(findings.outcomes.items()):
        print(f"{count:7d}  {outcome}")
    print("\n".join(findings.failures[:20]))
    print(f"{len(findings.failures)} failures")
