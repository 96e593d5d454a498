"""Starts the processes of a run on this machine, as torchrun does, and watches them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence

import torch

from wellposed.errors import InvalidArgument

__all__ = ["launch"]

#: Seconds that a process has to end by itself after another one died; then it is killed.
GRACE = 20


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
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            for rank, code in codes.items():
                if code < 0:
                    name = signal.Signals(-code).name
                    return 3, f"Process {rank} of {devices} was ended by {name}, so the others were ended too."
            return codes.get(0, next(iter(codes.values()))), ""  # the first process knows best
        except SignalException:
            return 130, ""
        finally:
            logging.disable(logging.NOTSET)
    return 0, ""
