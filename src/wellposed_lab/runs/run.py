"""A run is a directory.

| file | what |
| --- | --- |
| config.yaml | the configuration, every key resolved |
| environment.json | versions, git commits, threads, seed, command line; one entry a session |
| metrics.jsonl | one row an epoch, on the disk before the epoch counts as done; no times, so equal runs have equal files |
| times.jsonl | seconds an epoch, with its evaluation and certificate |
| metrics.parquet, summary.json | written at the end |
| certificates/epoch-00005.json | certificates |
| checkpoints/ | see `wellposed_lab.runs.checkpoint` |
| tensorboard/, figures/, log.txt | events, pictures, what happened |
| lock | held while a process trains here |
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed._io import append_line, is_temporary, refuse_special_files, sweep, write_whole, writing
from wellposed.certify import Certificate
from wellposed.errors import InvalidArgument, MissingPackage, RunError
from wellposed_lab.runs._environment import environment
from wellposed_lab.runs._lines import LineFile
from wellposed_lab.runs._lock import Lock
from wellposed_lab.runs._no_run import no_run
from wellposed_lab.runs._parquet import parquet
from wellposed_lab.runs._run_files import certificate_files, read_metrics, read_sessions, read_times

if TYPE_CHECKING:
    from wellposed_lab.runs.config import Config

__all__ = ["Run", "read_config", "read_metrics", "refuse_foreign"]

FOLDERS = ("certificates", "checkpoints", "figures")


def refuse_foreign(folder: Path) -> None:
    """Raises `RunError` if something in a run would lead out of it: a run may come from anywhere, and is written."""
    refuse_special_files(folder, (*FOLDERS, "tensorboard"), in_place=("lock", "log.txt"))


class Run:
    """A run directory that this process may write. Use it as a context: it is given free at the end.

    Made by `Run.create` or `Run.open`.

    Attributes:
        folder: Where it is.
        config: With every key resolved.
    """

    def __init__(self, folder: Path, config: Config, lock: Lock) -> None:
        self.folder, self.config, self._lock = folder, config, lock
        self._metrics, self._times = (LineFile(folder / name, self.log) for name in ("metrics.jsonl", "times.jsonl"))

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
        refuse_foreign(folder)
        lock = Lock(folder)
        try:
            with writing(folder, begun=False):
                for name in FOLDERS:
                    (folder / name).mkdir(exist_ok=True)
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
        refuse_foreign(folder)
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
        text = text.encode("utf-8", errors="backslashreplace").decode()  # names of files need not be UTF-8
        append_line(self.folder / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def append(self, row: Mapping[str, Any], seconds: float) -> None:
        """A row of metrics.jsonl: on the disk when this returns. NaN and infinities become null."""
        self.check()
        self._metrics.add(json.dumps({key: _finite(value) for key, value in row.items()}))
        self._times.add(json.dumps({"epoch": row["epoch"], "seconds": round(seconds, 6)}))

    def check(self) -> None:
        """Makes sure that the directory is this process's own and its rows are there; rows that are not are put back.

        Raises:
            RunError: Another process may be in the directory.
        """
        if self._lock.renew():
            self.log("The lock file was deleted; it is made again.")
        for lines in (self._metrics, self._times):
            lines.restore()

    def add_certificate(self, epoch: int, certificate: Certificate) -> None:
        """certificates/epoch-00005.json."""
        write_whole(self.folder / "certificates" / f"epoch-{epoch:05d}.json", certificate.to_json().encode())

    def rewind(self, epoch: int) -> None:
        """Drops what was written after the end of an epoch, half-written lines included.

        Args:
            epoch: The last one that is kept; -1 drops what a process left that was killed before its first checkpoint.

        Raises:
            RunError: Rows are missing that must be there; or with -1 there is more than that: checkpoints were lost, and what
                they belong to is not dropped.
        """
        if epoch < 0:
            self._refuse_to_begin_again()
        rows = [row for row in read_metrics(self.folder) if row["epoch"] <= epoch]
        if len(rows) != epoch + 1 or any(row["epoch"] != k for k, row in enumerate(rows)):
            raise RunError(
                f"{self.folder / 'metrics.jsonl'} is damaged: rows of epochs 0 to {epoch} are expected, there are {len(rows)}. "
                "Put a good copy back, or start a new run."
            )
        times = [time for time in read_times(self.folder) if time["epoch"] <= epoch]
        for lines, kept in ((self._metrics, rows), (self._times, times)):
            lines.set("".join(json.dumps(row) + "\n" for row in kept).encode())
        for certified, path in certificate_files(self.folder):
            if certified > epoch:
                path.unlink()

    def _refuse_to_begin_again(self) -> None:
        """The first checkpoint is written right after the row of epoch 0: with more than that there, checkpoints were lost."""
        epochs = [row["epoch"] for row in read_metrics(self.folder)] + [epoch for epoch, _ in certificate_files(self.folder)]
        if max(epochs, default=0) > 0 or (self.folder / "summary.json").exists():
            raise RunError(
                f"{self.folder} has results up to epoch {max(epochs, default=0)} and no checkpoint to continue from; nothing "
                f"was changed. Put checkpoints/ back, or start a new run with: wellposed train {self.folder / 'config.yaml'}"
            )

    def finish(self, summary: Mapping[str, Any]) -> None:
        """summary.json, and metrics.parquet made from metrics.jsonl (if pyarrow is installed)."""
        write_whole(self.folder / "summary.json", json.dumps(_finite(dict(summary)), indent=2).encode())
        try:
            write_whole(self.folder / "metrics.parquet", parquet(read_metrics(self.folder)))
        except (InvalidArgument, MissingPackage) as error:
            self.log(f"metrics.parquet is left out: {error}")
        self.log(f"Finished: {summary.get('stop')}.")

    def _sweep(self) -> None:
        """Removes what a process that was killed had not finished writing."""
        for folder in (self.folder, *(self.folder / name for name in FOLDERS)):
            sweep(folder)

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
    from wellposed_lab.runs.config import read

    if not os.path.lexists(folder / "config.yaml"):
        raise InvalidArgument(no_run(folder))
    return read(folder / "config.yaml", within=folder)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
