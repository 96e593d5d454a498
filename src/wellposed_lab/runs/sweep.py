"""A sweep trains a configuration for every value of a grid and for several seeds.

| file | what |
| --- | --- |
| sweep.json | the configuration, the grid, the number of seeds |
| runs/ | a run directory for every point of the grid and every seed |
| results.json | at the end: mean and spread over the seeds at every point |
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed._io import try_lock, write_whole, writing
from wellposed._reading import parse_json, read_text
from wellposed.data._load import is_path
from wellposed.data.own import own_path
from wellposed.errors import InvalidArgument, RunError, RunLocked, WellposedError
from wellposed_lab.runs.config import by_keys, parse_yaml, resolve
from wellposed_lab.runs.config_sections import RunConfig
from wellposed_lab.runs.parallel import check_workers, unordered
from wellposed_lab.runs.records import RECORD
from wellposed_lab.runs.setup import resolve_auto
from wellposed_lab.runs.sweep_ended import check_same, ended
from wellposed_lab.runs.sweep_results import spreads
from wellposed_lab.runs.training import train

__all__ = ["Sweep", "SweepRun", "absolute", "parse_grid", "read_sweep", "run_sweep", "spreads"]

#: Runs of one sweep: more are a mistake in the grid.
MOST = 10_000


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        name: Of its directory in runs/.
        point: The values of the grid by key.
        config: With the seed, and one thread if none were given: runs beside it change no numbers.
    """

    name: str
    point: dict[str, Any]
    config: RunConfig


@dataclass(frozen=True)
class Sweep:
    """What is trained.

    Attributes:
        base: The keys that were given, by section.
        grid: Values by "section.key"; every combination is a point.
        seeds: Runs at a point, with `run.seed` and the numbers after it.
    """

    base: dict[str, Any]
    grid: dict[str, list[Any]]
    seeds: int = 1

    def __post_init__(self) -> None:
        count = self.seeds * math.prod(len(values) for values in self.grid.values())
        if self.seeds < 1:
            raise InvalidArgument(f"--seeds is the number of runs at every point, at least 1; got {self.seeds}.")
        if count > MOST:
            raise InvalidArgument(f"The sweep has {count:,} runs; at most {MOST:,} are allowed. Take fewer values.")
        if "run.seed" in self.grid and self.seeds > 1:
            raise InvalidArgument("--seeds and --grid run.seed=... both choose the seed; omit one of them.")

    def runs(self) -> list[SweepRun]:
        """All runs; a mistake in any configuration is found here, before anything is trained."""
        found: list[SweepRun] = []
        for point in self.points():
            config = resolve(self.base, [f"{key}={json.dumps(value)}" for key, value in point.items()])
            if config.run.devices > 1:
                raise InvalidArgument(f"A sweep trains each run in one process; got run.devices={config.run.devices}.")
            config = resolve_auto(config)
            for seed in range(config.run.seed, config.run.seed + self.seeds):
                threads = 1 if config.run.threads == "auto" else config.run.threads
                changes = {"seed": seed, "threads": threads}
                words = [f"{key}={_short(value)}" for key, value in point.items()] + [f"seed={seed}"] * (self.seeds > 1)
                name = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", "-".join([f"{len(found):03d}", *words]))[:120]
                found.append(SweepRun(name, point, config.model_copy(update={"run": config.run.model_copy(update=changes)})))
        _check_different(found)
        return found

    def points(self) -> list[dict[str, Any]]:
        """Every combination of the values."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]


def parse_grid(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Values by key from texts such as "optimizer.lr=1e-3,1e-2"."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not equals or "." not in key or not values:
            raise InvalidArgument(f"--grid needs section.key=value,value, e.g. optimizer.lr=1e-3,1e-2; got {text!r}.")
        if key in grid:
            raise InvalidArgument(f"--grid has {key} twice; give all its values together.")
        found = parse_yaml(f"[{values}]", f"--grid {key}")
        if any(found.count(value) > 1 for value in found):
            raise InvalidArgument(f"--grid {key} has a value twice: {values}.")
        grid[key] = found
    return grid


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    jobs: int = 1,
    dask: str | None = None,
    allow_code: bool = False,
    listener: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Trains what is missing, and resumes what was interrupted.

    Args:
        sweep: What is trained.
        folder: Of the sweep; a new one, or that of the same sweep.
        jobs: Processes on this machine; -1 for one per core.
        dask: The address of a Dask scheduler, whose workers can write in the folder.
        allow_code: Whether `model.class` may be imported.
        listener: Is called with the number of finished runs, and of all.

    Returns:
        The summary of every run in the order of `Sweep.runs`, or {"error": why it has none}.
    """
    runs = sweep.runs()
    check_workers(jobs, dask)
    _begin(sweep, folder)
    with _alone(folder):
        folders = [(folder / "runs" / run.name).absolute() for run in runs]
        found: dict[int, dict[str, Any]] = {}
        for index, (run, place) in enumerate(zip(runs, folders, strict=True)):
            if (summary := ended(run.config, place)) is not None:
                found[index] = summary
        missing = [(index, runs[index].config, folders[index]) for index in range(len(runs)) if index not in found]
        if listener is not None:
            listener(len(found), len(runs))
        for index, summary in unordered(functools.partial(_train_one, allow_code), missing, jobs=jobs, dask=dask):
            if summary.get("stop") == "interrupted":
                raise KeyboardInterrupt
            found[index] = summary
            if listener is not None:
                listener(len(found), len(runs))
        results = [found[index] for index in range(len(runs))]
        content = {"points": spreads(runs, results), "runs": {run.name: found[index] for index, run in enumerate(runs)}}
        write_whole(folder / "results.json", json.dumps(content, indent=1).encode())
    return results


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps a second process out of the sweep: runs of the first would count as failed there."""
    if os.name == "nt":  # a folder cannot be opened, and so not locked
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            if not try_lock(handle):
                raise RunLocked(f"{folder} is in use by another process, which runs this sweep. Wait for it to end.")
        yield
    finally:
        os.close(handle)


def read_sweep(folder: Path) -> Sweep:
    """The sweep of a folder."""
    path = folder / "sweep.json"
    text = read_text(path, limit=RECORD, error=RunError, within=folder) if folder.is_dir() else None
    if text is None:
        raise InvalidArgument(f"{folder} is not the folder of a sweep: it has no sweep.json. Start one with: wellposed sweep")
    plain = parse_json(text, str(path), error=RunError)
    good = isinstance(plain, dict) and isinstance(plain.get("base"), dict) and isinstance(plain.get("grid"), dict)
    if not good or not all(isinstance(v, list) and v for v in plain["grid"].values()) or type(plain.get("seeds")) is not int:
        raise RunError(f"{path} is damaged: it has no base, grid and seeds. Put a good copy back, or start a new sweep.")
    return Sweep(plain["base"], plain["grid"], plain["seeds"])


def absolute(plain: dict[str, Any]) -> dict[str, Any]:
    """The keys of a configuration, with the full path of a data file, for a resume elsewhere."""
    name = plain.get("data", {}).get("name")
    return plain | {"data": plain["data"] | {"name": str(own_path(name).absolute())}} if name and is_path(name) else plain


def _begin(sweep: Sweep, folder: Path) -> None:
    """Writes sweep.json, or compares it."""
    if (folder / "sweep.json").exists():
        if read_sweep(folder) != sweep:
            raise InvalidArgument(
                f"{folder} holds another sweep. Continue it with: wellposed sweep --resume {folder}, or choose another --out."
            )
        return
    with writing(folder, begun=False):
        folder.mkdir(parents=True, exist_ok=True)
        if names := sorted(path.name for path in folder.iterdir()):
            raise InvalidArgument(f"{folder} holds other files ({', '.join(names[:3])}); choose an empty folder.")
    content = {"base": sweep.base, "grid": sweep.grid, "seeds": sweep.seeds}
    write_whole(folder / "sweep.json", json.dumps(content, indent=1).encode())


def _check_different(runs: Sequence[SweepRun]) -> None:
    """Raises if two points are the same configuration, written as 1e-3 and as 0.001."""
    seen: dict[str, SweepRun] = {}
    for run in runs:
        other = seen.setdefault(run.config.model_dump_json(), run)  # whole: the length of a run is no part of its fingerprint
        if other is not run:
            raise InvalidArgument(f"--grid has a configuration twice: {_key(other.point)} and {_key(run.point)}. Omit one.")


def _train_one(allow_code: bool, task: tuple[int, RunConfig, Path]) -> tuple[int, dict[str, Any]]:
    """Trains one run, or resumes it; a mistake in one, whatever it is, does not end the others."""
    index, config, folder = task
    try:
        resume = (folder / "config.yaml").exists()
        if resume:
            check_same(config, folder)
        return index, train(config, folder, resume=resume, allow_code=allow_code).summary
    except WellposedError as error:
        return index, {"error": by_keys(str(error))}
    except Exception as error:  # of a class of the user's own, or of memory
        return index, {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _key(point: Mapping[str, Any]) -> str:
    return json.dumps(point, sort_keys=True)


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
