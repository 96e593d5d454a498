"""A function on many tasks: in this process, in several of this machine, or on a Dask cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from wellposed.errors import InvalidArgument, RunError, required

__all__ = ["check_workers", "unordered"]

Task = TypeVar("Task")
Answer = TypeVar("Answer")


def unordered(
    function: Callable[[Task], Answer], tasks: Sequence[Task], *, jobs: int = 1, dask: str | None = None
) -> Iterator[Answer]:
    """The answers, each as soon as it is there, in any order.

    Args:
        function: Other processes must be able to import it.
        tasks: Its arguments.
        jobs: Processes on this machine; -1 for one per core. 1 needs no joblib.
        dask: The address of a scheduler, for example "tcp://127.0.0.1:8786"; its workers need the
            same packages and files.
    """
    _check_jobs(jobs)
    if not tasks:
        return
    if dask is None and (jobs == 1 or len(tasks) == 1):
        for task in tasks:
            yield function(task)
        return
    joblib = required("joblib", "Several processes need joblib, and jobs=1 does not", extra="experiments")
    with ExitStack() as stack:
        if dask is not None:
            stack.enter_context(_client(dask))
            stack.enter_context(joblib.parallel_config(backend="dask"))
        workers = joblib.Parallel(n_jobs=-1 if dask is not None else jobs, return_as="generator_unordered", batch_size=1)
        with _explained():
            yield from workers(joblib.delayed(function)(task) for task in tasks)


def check_workers(jobs: int, dask: str | None) -> None:
    """Raises what `unordered` would raise for want of workers: before anything is written."""
    _check_jobs(jobs)
    if dask is not None:
        _client(dask).close()


@contextmanager
def _explained() -> Iterator[None]:
    """Turns what happens to workers into a sentence."""
    try:
        yield
    except BrokenProcessPool as error:
        raise RunError(
            "A process that was at work was ended from outside, possibly for want of memory. What is finished is kept; "
            "continue, if need be with fewer processes (--jobs)."
        ) from error


def _check_jobs(jobs: Any) -> None:
    if isinstance(jobs, bool) or not isinstance(jobs, int) or (jobs < 1 and jobs != -1):
        raise InvalidArgument(f"jobs must be an integer of at least 1, or -1 for one per core; got {jobs!r}.")


def _client(address: str) -> Any:
    distributed = required("distributed", "A Dask cluster needs dask.distributed", extra="experiments")
    try:
        client = distributed.Client(address, timeout="10s")
    except (OSError, ValueError, TimeoutError) as error:
        raise InvalidArgument(
            f"No Dask scheduler answers at {address!r} ({type(error).__name__}). Start one with `dask scheduler` and workers "
            "with `dask worker ADDRESS`, or omit the address to use processes of this machine."
        ) from error
    try:
        client.wait_for_workers(1, timeout=10)
    except TimeoutError as error:
        client.close()
        raise InvalidArgument(
            f"The Dask scheduler at {address!r} has no workers. Start some with: dask worker {address} --nthreads 1"
        ) from error
    return client
