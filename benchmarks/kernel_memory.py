"""Peak memory of a tangent kernel above its data and parameters, each contender in a fresh process.

    python benchmarks/kernel_memory.py wellposed 1000 1000 float64     prints {"peak_mib": ...}

The peak is that of the resident set (VmHWM) above its level when data and parameters are there and a small kernel has
loaded every library.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from memory import resident_mib
from problems import RTOL, Problem, build


def measure(python: str, contender: str, samples: int, width: int, dtype: str) -> float | str:
    """MiB, or the reason why there is no number."""
    command = [python, __file__, contender, str(samples), str(width), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        return "failed: " + (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return float(json.loads(done.stdout.strip().splitlines()[-1])["peak_mib"])


def main(contender: str, samples: int, width: int, dtype: str) -> None:
    from contenders.kernel_ours import CONTENDERS

    def prepared(n: int, m: int) -> Callable[[], object]:
        arrays = {name: array.astype(dtype) for name, array in build(Problem("memory", "gaussian", n, m)).items()}
        rtol = RTOL if dtype == "float32" else 1e-12
        # The steps are for torch.func, which unrolls; 20 is about what the tolerance of float32 needs.
        return CONTENDERS[contender](arrays | {"rtol": np.asarray(rtol), "forward_steps": 20, "adjoint_steps": 20})

    prepared(5, 20)()
    run = prepared(samples, width)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_mib("VmRSS")
    run()
    print(json.dumps({"peak_mib": round(resident_mib("VmHWM") - before, 1)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
