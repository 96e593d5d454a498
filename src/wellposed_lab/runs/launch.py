"""Starts the processes of a run on this machine, as torchrun does, and watches them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence

import torch

from wellposed.errors import InvalidArgument, required
from wellposed_lab.runs.processes import NEEDED

__all__ = ["launch"]

#: Seconds that a process has to end by itself after another one died; then it is killed.
GRACE = 15


def launch(devices: int, words: Sequence[str]) -> tuple[int, str]:
    """Runs `wellposed words` in several processes of this machine, by torch's elastic launcher.

    When a process dies the others are ended, within `GRACE` seconds.

    Args:
        devices: The number of processes.
        words: The command.

    Returns:
        The exit code, and what happened to a process that a signal ended; empty without one.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        raise InvalidArgument("This torch has no distributed training with gloo; use run.devices=1.")
    required("lightning_fabric", NEEDED, extra="lightning")  # before every process says so
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the launcher's messages are pages; ours is one sentence
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a hint about speed that does not concern us
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // devices)))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they are all on this machine
    with tempfile.TemporaryDirectory(prefix="wellposed-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=devices,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "wellposed", *words)
        except ChildFailedError as error:
            return _explained({rank: failure.exitcode for rank, failure in error.failures.items()}, devices)
        except SignalException:
            return 130, ""
        finally:
            logging.disable(logging.NOTSET)
    return 0, ""


def _explained(codes: Mapping[int, int], devices: int) -> tuple[int, str]:
    """The exit code of a run, and what happened, given the exit codes of processes that failed.

    The launcher itself ends the others by SIGTERM when one fails, and SIGALRM ends those that do
    not stop in time: neither is the cause if there is another one.
    """
    own = {rank: code for rank, code in codes.items() if code > 0}
    later = (-signal.SIGTERM, -signal.SIGALRM) if hasattr(signal, "SIGALRM") else (-signal.SIGTERM,)
    for rank, code in sorted(codes.items(), key=lambda pair: pair[1] in later):
        if code < 0 and (code not in later or not own):
            name = signal.Signals(-code).name
            return 3, f"Process {rank} of {devices} was ended by {name}, so the others were ended too."
    return own.get(0, next(iter(own.values()))), ""  # the first process knows best
