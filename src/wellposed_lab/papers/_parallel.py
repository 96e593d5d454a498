"""Many tasks: one after the other, in processes of this machine, or on a Dask cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from wellposed.errors import InvalidArgument, MissingPackage, how_to_install
from wellposed_lab.papers._experiment import Result, Task
from wellposed_lab.runs.processes import on_threads

__all__ = ["execute", "run_tasks"]


def execute(experiment: str, task: Task) -> Result:
    """One task, on one thread, so that its numbers do not depend on how many run beside it."""
    from wellposed_lab.papers.registry import find  # here, because the registry imports every experiment

    started = time.perf_counter()
    with on_threads(1):
        values = find(experiment).run(task)
    return Result(task, values, time.perf_counter() - started)


def run_tasks(experiment: str, tasks: Sequence[Task], *, jobs: int = 1, dask: str | None = None) -> Iterator[Result]:
    """The results, each as soon as it is there, in any order.

    Args:
        experiment: Its name; processes look it up themselves.
        tasks: What is to be done.
        jobs: Processes on this machine; -1 for one a core. 1 needs no joblib.
        dask: The address of a scheduler, such as "tcp://127.0.0.1:8786"; its workers need the same packages and data.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or (jobs < 1 and jobs != -1):
        raise InvalidArgument(f"jobs must be an integer of at least 1, or -1 for one a core; got {jobs!r}.")
    if not tasks:
        return
    if dask is None and (jobs == 1 or len(tasks) == 1):
        for task in tasks:
            yield execute(experiment, task)
        return
    joblib = _joblib()
    with ExitStack() as stack:
        if dask is not None:
            stack.enter_context(_client(dask))
            stack.enter_context(joblib.parallel_config(backend="dask"))
        workers = joblib.Parallel(n_jobs=-1 if dask is not None else jobs, return_as="generator_unordered", batch_size=1)
        yield from workers(joblib.delayed(execute)(experiment, task) for task in tasks)


def _joblib() -> Any:
    try:
        import joblib
    except ImportError as error:
        raise MissingPackage(
            f"Several processes need joblib; take jobs=1, or install it with: {how_to_install('experiments')}."
        ) from error
    return joblib


def _client(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingPackage(
            f"A Dask cluster needs dask.distributed; install it with: {how_to_install('experiments')}."
        ) from error
    try:
        return Client(address, timeout="10s")
    except (OSError, ValueError, TimeoutError) as error:
        raise InvalidArgument(
            f"No Dask scheduler answers at {address!r} ({type(error).__name__}). Start one with `dask scheduler` and workers "
            "with `dask worker ADDRESS`, or leave the address out to use processes of this machine."
        ) from error
