"""`import wellposed` costs little more than `import torch`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: CPU time of `import wellposed`, in that of `import torch`.
MOST = 1.25
REPEATS = 3


def cpu_seconds(module: str, cache: Path) -> float:
    """User and system time of importing a module in a new process, all threads and the start of Python included."""
    code = f"import {module}, resource; u = resource.getrusage(resource.RUSAGE_SELF); print(u.ru_utime + u.ru_stime)"
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return float(result.stdout.split()[-1])


@pytest.mark.slow  # torch is compiled into the temporary folder first
def test_import_costs_little_more_than_torch(tmp_path: Path) -> None:
    for module in ("torch", "wellposed"):
        cpu_seconds(module, tmp_path)  # writes the bytecode
    # in turn, so that a busy machine is busy for both
    seconds = [(cpu_seconds("torch", tmp_path), cpu_seconds("wellposed", tmp_path)) for _ in range(REPEATS)]
    torch, wellposed = (min(times) for times in zip(*seconds, strict=True))
    assert wellposed <= MOST * torch, f"import wellposed takes {wellposed:.2f} s of CPU time, import torch {torch:.2f} s"
