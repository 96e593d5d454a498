"""A process that has imported everything and forks: commands start in milliseconds, in real processes that can be killed.

Reads lines of JSON. {"run": [words], "log": path, ...} starts `wellposed words` and answers its process id; {"wait": id}
answers its exit code (minus the signal). `kill_at` ends the process by SIGKILL at its k-th sync or rename, before or after it;
`signal_at` sends a signal when a file gets its name; `file_size` limits the size of files, as a full disk does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import sys
from typing import Any

import pyarrow.parquet  # noqa: F401  (this and the next are imported before the first fork, not after every one)
import safetensors.torch  # noqa: F401
import torch
import torch._dynamo  # noqa: F401
import torch.optim  # noqa: F401

import wellposed_lab.cli
import wellposed_lab.cli.commands  # noqa: F401

with contextlib.suppress(ImportError):  # of several processes; an optional package
    import lightning_fabric.strategies  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import torch.distributed.tensor  # noqa: F401

torch.set_num_threads(1)
# Otherwise every child walks through all of it, and copies its pages: half of the time of a small run.
gc.collect()
gc.freeze()


def kill_at(count: int, after: bool) -> None:
    calls = 0
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def counted(*args: Any, real: Any = real) -> Any:
            nonlocal calls
            calls += 1
            if calls == count and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = real(*args)
            if calls == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        setattr(os, name, counted)


def signal_at(name: str, number: int) -> None:
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if os.path.basename(target) == name:
            os.kill(os.getpid(), number)
        real(source, target)

    os.replace = replace


def child(task: dict[str, Any]) -> None:
    log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(task.get("environment", {}))
    os.chdir(task.get("folder", "."))
    if "kill_at" in task:
        kill_at(*task["kill_at"])
    if "signal_at" in task:
        signal_at(*task["signal_at"])
    if "file_size" in task:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (task["file_size"], task["file_size"]))
    sys.argv = ["wellposed", *task["run"]]
    code = 99
    try:
        wellposed_lab.cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        _, status = os.waitpid(order["wait"], 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    process = os.fork()
    if process == 0:
        child(order)
    print(process, flush=True)
