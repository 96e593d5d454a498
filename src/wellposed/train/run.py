"""A run is a directory.

| file | what |
| --- | --- |
| config.yaml | the configuration, every key resolved |
| environment.json | versions, git state, threads, seed, command line; one entry a session |
| metrics.jsonl | one row an epoch, on the disk before the epoch counts as done; no times, so equal runs have equal files |
| times.jsonl | seconds an epoch, with its evaluation and certificate |
| metrics.parquet, summary.json | written at the end |
| certificates/epoch-00005.json | certificates |
| checkpoints/ | see `wellposed.train.checkpoint` |
| tensorboard/, figures/, log.txt | events, pictures, what happened |
| lock | held while a process trains here |
"""

from __future__ import annotations

import difflib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.certify import Certificate
from wellposed.errors import InvalidArgument, RunError, how_to_install
from wellposed.train._atomic import append_line, is_temporary, write_whole, writing
from wellposed.train._environment import environment
from wellposed.train._lock import Lock
from wellposed.train._run_files import certificate_files, read_metrics, read_sessions, read_times

if TYPE_CHECKING:
    from wellposed.train.config import Config

__all__ = ["Run", "read_config", "read_metrics"]

FOLDERS = ("certificates", "checkpoints", "figures")


class Run:
    """A run directory that this process may write. Use it as a context: it is given free at the end.

    Made by `Run.create` or `Run.open`.

    Attributes:
        folder: Where it is.
        config: With every key resolved.
    """

    def __init__(self, folder: Path, config: Config, lock: Lock) -> None:
        self.folder, self.config, self._lock = folder, config, lock

    @classmethod
    def create(cls, folder: Path, config: Config) -> Run:
        """A new run; refused where there is something already.

        Args:
            folder: Does not exist, or is empty.
            config: Its `run.threads` must be resolved.
        """
        with writing(folder, begun=False):
            folder.mkdir(parents=True, exist_ok=True)
            foreign = sorted(part.name for part in folder.iterdir() if not _is_own(part.name))
            if foreign and not (folder / "config.yaml").exists():
                raise InvalidArgument(f"{folder} holds other files ({', '.join(foreign[:3])}); choose an empty folder.")
            for name in FOLDERS:
                (folder / name).mkdir(exist_ok=True)
        lock = Lock(folder)
        try:
            if (folder / "config.yaml").exists():
                raise InvalidArgument(
                    f"{folder} holds a run already. Go on with it by --resume {folder}, or choose another folder by --out."
                )
            run = cls(folder, config, lock)
            run._sweep()
            run.log("Begins.")
            run._begin_session()
            # last, because it is what makes the folder a run
            write_whole(folder / "config.yaml", config.to_yaml().encode())
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(cls, folder: Path, config: Config) -> Run:
        """A run that goes on.

        Args:
            folder: Of the run.
            config: From `read_config`; what was changed in it is written back.
        """
        lock = Lock(folder)
        try:
            run = cls(folder, config, lock)
            run._sweep()
            if lock.left_by is not None:
                run.log(f"Process {lock.left_by.get('pid')} ended without giving the directory free; it is taken over.")
            run._begin_session()
            if read_config(folder) != config:
                write_whole(folder / "config.yaml", config.to_yaml().encode())
        except BaseException:
            lock.release()
            raise
        return run

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def log(self, text: str) -> None:
        """A line in log.txt, with the time."""
        append_line(self.folder / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def append(self, row: Mapping[str, Any], seconds: float) -> None:
        """A row of metrics.jsonl: on the disk when this returns. NaN and infinities become null."""
        append_line(self.folder / "metrics.jsonl", json.dumps({key: _finite(value) for key, value in row.items()}))
        append_line(self.folder / "times.jsonl", json.dumps({"epoch": row["epoch"], "seconds": round(seconds, 6)}))

    def add_certificate(self, epoch: int, certificate: Certificate) -> None:
        """certificates/epoch-00005.json."""
        write_whole(self.folder / "certificates" / f"epoch-{epoch:05d}.json", certificate.to_json().encode())

    def rewind(self, epoch: int) -> None:
        """Drops what was written after the end of an epoch, half-written lines included; -1 drops all.

        Raises:
            RunError: Rows are missing that must be there.
        """
        rows = [row for row in read_metrics(self.folder) if row["epoch"] <= epoch]
        if len(rows) != epoch + 1 or any(row["epoch"] != k for k, row in enumerate(rows)):
            raise RunError(
                f"{self.folder / 'metrics.jsonl'} is damaged: rows of epochs 0 to {epoch} are expected, there are {len(rows)}. "
                "Put a good copy back, or start a new run."
            )
        for name in ("metrics.jsonl", "times.jsonl"):
            kept = rows if name == "metrics.jsonl" else [t for t in read_times(self.folder) if t["epoch"] <= epoch]
            write_whole(self.folder / name, "".join(json.dumps(row) + "\n" for row in kept).encode())
        for certified, path in certificate_files(self.folder):
            if certified > epoch:
                path.unlink()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """summary.json, and metrics.parquet made from metrics.jsonl (if pyarrow is installed)."""
        write_whole(self.folder / "summary.json", json.dumps(_finite(dict(summary)), indent=2).encode())
        self._write_parquet()
        self.log(f"Finished: {summary.get('stop')}.")

    def _write_parquet(self) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            self.log(f"metrics.parquet is left out: pyarrow is not installed; {how_to_install('runs')}.")
            return
        rows = read_metrics(self.folder)
        names = list(dict.fromkeys(name for row in rows for name in row))
        try:
            table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        except pyarrow.ArrowException as error:
            self.log(f"metrics.parquet is left out: the rows of metrics.jsonl do not fit together ({error}).")
            return
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(table, sink)
        write_whole(self.folder / "metrics.parquet", sink.getvalue().to_pybytes())

    def _sweep(self) -> None:
        """Removes what a process that was killed had not finished writing."""
        for folder in (self.folder, *(self.folder / name for name in FOLDERS)):
            for path in folder.glob(".*.tmp"):
                if is_temporary(path.name):
                    path.unlink(missing_ok=True)

    def _begin_session(self) -> None:
        path = self.folder / "environment.json"
        sessions = read_sessions(self.folder)
        now = environment(self.config.run.seed, self.config.run.threads)
        if sessions and sessions[-1].get("versions") != now["versions"]:
            self.log("The versions are others than in the session before; numbers may differ in their last digits.")
        write_whole(path, json.dumps({"sessions": [*sessions, now]}, indent=2).encode())


def _is_own(name: str) -> bool:
    """Whether a run that was killed while it was created may have left this."""
    return name in ("lock", "log.txt", "environment.json", *FOLDERS) or is_temporary(name)


def read_config(folder: Path) -> Config:
    """The configuration of a run."""
    from wellposed.train.config import read

    if not os.path.lexists(folder / "config.yaml"):
        raise InvalidArgument(_no_run(folder))
    return read(folder / "config.yaml", within=folder)


def _no_run(folder: Path) -> str:
    """Why there is no run, and what to do in this case."""
    if folder.is_file():
        beside = f" Give the folder that it is in: {folder.parent}." if (folder.parent / "config.yaml").is_file() else ""
        return f"{folder} is a file; a run is a directory with a config.yaml.{beside}"
    if not folder.is_dir():
        start = f"Start a run there with: wellposed train --out {folder}"
        return f"{folder} does not exist, so there is no run.{_near(folder.parent, folder.name) or f' {start}.'}"
    inside = sorted(path.parent for path in folder.glob("*/config.yaml"))
    if inside:
        return f"{folder} is no run, but holds {len(inside)} of them: give one, such as {inside[-1]}."
    if any(folder.iterdir()):
        return f"{folder} is no run: it holds other files and no config.yaml. Give the directory of a run."
    return f"{folder} is no run: it is empty. Start one there with: wellposed train --out {folder}."


def _near(parent: Path, name: str) -> str:
    """` Did you mean 'runs/first'?` if a run of nearly this name lies beside."""
    names = [path.parent.name for path in parent.glob("*/config.yaml")] if parent.is_dir() else []
    near = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {str(parent / near[0])!r}?" if near else ""


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
