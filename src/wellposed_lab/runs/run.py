"""A run is a directory.

| file | what |
| --- | --- |
| config.yaml | the configuration, every key resolved |
| environment.json | versions, git commits, threads, seed, command line; one entry a session |
| metrics.jsonl | one row an epoch, without times, so equal runs have equal files |
| times.jsonl | seconds an epoch, with its evaluation and certificate |
| metrics.parquet, summary.json | written at the end |
| certificates/epoch-00005.json | certificates |
| checkpoints/ | see `wellposed_lab.runs.checkpoint` |
| tensorboard/, figures/, log.txt | events, pictures, messages |
| lock | held while a process trains here |
"""

from __future__ import annotations

import difflib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed._io import append_line, is_temporary, refuse_special_files, sweep, write_whole, writing
from wellposed.certify import Certificate
from wellposed.errors import InvalidArgument, MissingPackage, RunError, how_to_install
from wellposed_lab.runs.processes import environment
from wellposed_lab.runs.records import certificate_files, finite, read_metrics, read_sessions, read_times
from wellposed_lab.runs.run_files import LineFile, RunLock

if TYPE_CHECKING:
    from wellposed_lab.runs.config_sections import RunConfig

__all__ = ["Run", "read_config", "read_metrics", "refuse_foreign"]

FOLDERS = ("certificates", "checkpoints", "figures")


def refuse_foreign(folder: Path) -> None:
    """Raises `RunError` if a run contains links or special files, which writes would follow."""
    refuse_special_files(folder, (*FOLDERS, "tensorboard"), in_place=("lock", "log.txt"))


class Run:
    """A run directory that this process may write, a context that releases it at the end.

    Made by `Run.create` or `Run.open`.

    Attributes:
        folder: Where it is.
        config: With every key resolved.
    """

    def __init__(self, folder: Path, config: RunConfig, lock: RunLock) -> None:
        self.folder, self.config, self._lock = folder, config, lock
        self._metrics, self._times = (LineFile(folder / name, self.log) for name in ("metrics.jsonl", "times.jsonl"))

    @classmethod
    def create(cls, folder: Path, config: RunConfig) -> Run:
        """A new run; refused in a folder with other content.

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
        lock = RunLock(folder)
        try:
            with writing(folder, begun=False):
                for name in FOLDERS:
                    (folder / name).mkdir(exist_ok=True)
            if (folder / "config.yaml").exists():
                raise InvalidArgument(
                    f"{folder} holds a run already. Continue it by --resume {folder}, or choose another folder by --out."
                )
            run = cls(folder, config, lock)
            run._sweep()
            run.log("Begins.")
            run._begin_session()
            # last, because it makes the folder a run
            write_whole(folder / "config.yaml", config.to_yaml().encode())
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(cls, folder: Path, config: RunConfig) -> Run:
        """A run that continues.

        Args:
            folder: Of the run.
            config: From `read_config`; what was changed in it is written back.
        """
        refuse_foreign(folder)
        lock = RunLock(folder)
        try:
            run = cls(folder, config, lock)
            run._sweep()
            if lock.left_by is not None:
                run.log(f"Process {lock.left_by.get('pid')} exited without releasing the lock; the directory is taken over.")
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
        """A row of metrics.jsonl, on the disk when this returns. NaN and infinities become null."""
        self.check()
        self._metrics.add(json.dumps(finite(dict(row))))
        self._times.add(json.dumps({"epoch": row["epoch"], "seconds": round(seconds, 6)}))

    def check(self) -> None:
        """Checks the lock, and restores missing rows.

        Raises:
            RunError: Another process may be using the directory.
        """
        if self._lock.renew():
            self.log("The lock file was deleted; it is made again.")
        for lines in (self._metrics, self._times):
            lines.restore()

    def add_certificate(self, epoch: int, certificate: Certificate) -> None:
        """certificates/epoch-00005.json."""
        write_whole(self.folder / "certificates" / f"epoch-{epoch:05d}.json", certificate.to_json().encode())

    def rewind(self, epoch: int) -> None:
        """Removes what was written after an epoch, half-written lines included.

        Args:
            epoch: The last one that is kept; -1 starts again, after a process that was killed
                before its first checkpoint.

        Raises:
            RunError: Rows are missing; or with -1 there are results, whose checkpoints were lost.
        """
        if epoch < 0:
            self._refuse_to_start_again()
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

    def _refuse_to_start_again(self) -> None:
        """The first checkpoint follows the row of epoch 0: with more, checkpoints were lost."""
        epochs = [row["epoch"] for row in read_metrics(self.folder)] + [epoch for epoch, _ in certificate_files(self.folder)]
        if max(epochs, default=0) > 0 or (self.folder / "summary.json").exists():
            raise RunError(
                f"{self.folder} has results up to epoch {max(epochs, default=0)} and no checkpoint to continue from; nothing "
                f"was changed. Put checkpoints/ back, or start a new run with: wellposed train {self.folder / 'config.yaml'}"
            )

    def finish(self, summary: Mapping[str, Any]) -> None:
        """summary.json, and metrics.parquet made from metrics.jsonl (if pyarrow is installed)."""
        write_whole(self.folder / "summary.json", json.dumps(finite(dict(summary)), indent=2).encode())
        try:
            write_whole(self.folder / "metrics.parquet", _parquet(read_metrics(self.folder)))
        except (InvalidArgument, MissingPackage) as error:
            self.log(f"metrics.parquet is omitted: {error}")
        self.log(f"Finished: {summary.get('stop')}.")

    def _sweep(self) -> None:
        """Removes the temporary files of a killed process."""
        for folder in (self.folder, *(self.folder / name for name in FOLDERS)):
            sweep(folder)

    def _begin_session(self) -> None:
        path = self.folder / "environment.json"
        sessions = read_sessions(self.folder)
        now = environment(self.config.run.seed, self.config.run.threads)
        if sessions and sessions[-1].get("versions") != now["versions"]:
            self.log("The versions differ from the session before; numbers may differ in their last digits.")
        write_whole(path, json.dumps({"sessions": [*sessions, now]}, indent=2).encode())


def _is_own(name: str) -> bool:
    """Whether a process that was killed while it created a run may have left this."""
    return name in ("lock", "log.txt", "environment.json", *FOLDERS) or is_temporary(name)


def read_config(folder: Path) -> RunConfig:
    """The configuration of a run."""
    from wellposed_lab.runs.config import read

    if not os.path.lexists(folder / "config.yaml"):
        raise InvalidArgument(_why_no_run(folder))
    return read(folder / "config.yaml", within=folder)


def _why_no_run(folder: Path) -> str:
    """Why a folder is not a run directory, and what to do."""
    if folder.is_file():
        beside = f" Give the folder that it is in: {folder.parent}." if (folder.parent / "config.yaml").is_file() else ""
        return f"{folder} is a file; a run is a directory with a config.yaml.{beside}"
    if not folder.is_dir():
        start = f"Start a run there with: wellposed train --out {folder}"
        return f"{folder} does not exist, so there is no run.{_near(folder.parent, folder.name) or f' {start}.'}"
    inside = sorted(path.parent for path in folder.glob("*/config.yaml"))
    if inside:
        count = f"{len(inside)} runs" if len(inside) > 1 else "a run"
        return f"{folder} is not a run directory; it contains {count}: give one, such as {inside[-1]}."
    if any(folder.iterdir()):
        return f"{folder} is not a run directory: it holds other files and no config.yaml. Give the directory of a run."
    return f"{folder} is not a run directory: it is empty. Start a run there with: wellposed train --out {folder}."


def _near(parent: Path, name: str) -> str:
    """` Did you mean 'runs/first'?` if a run beside it has a similar name."""
    names = [path.parent.name for path in parent.glob("*/config.yaml")] if parent.is_dir() else []
    near = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {str(parent / near[0])!r}?" if near else ""


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The rows as the content of a Parquet file, a column for every key.

    Raises:
        MissingPackage: pyarrow is not installed.
        InvalidArgument: A column has values of different kinds.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingPackage(f"pyarrow is not installed; {how_to_install('runs')}.") from None
    names = list(dict.fromkeys(name for row in rows for name in row))
    sink = pyarrow.BufferOutputStream()
    try:
        pyarrow.parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in names}), sink)
    except pyarrow.ArrowException as error:
        raise InvalidArgument(f"the rows do not fit together ({' '.join(str(error).split()).rstrip('.')}).") from None
    content: bytes = sink.getvalue().to_pybytes()
    return content
