"""Peak memory of forward + backward against the number of steps, each point in a fresh process.

    python benchmarks/memory.py implicit 100     prints {"steps": 100, "peak_mib": ...}

The map smooths with |W| = 0.9999, so no solve finishes early: every step asked for is made. The peak is that
of the resident set (VmHWM) above its level before the pass, after a warm-up pass has loaded every library.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

STEPS = (10, 100, 1000)
KINDS = {"implicit": "wellposed, implicit gradient", "unrolled": "the same map, unrolled"}
SAMPLES, WIDTH = 200, 500
STATUS = Path("/proc/self/status")


def measure_all(python: str) -> dict[str, list[dict[str, float]] | str]:
    """{kind: one record per number of steps}, or the reason why there is none."""
    table: dict[str, list[dict[str, float]] | str] = {}
    for kind, title in KINDS.items():
        records = []
        for steps in STEPS:
            command = [python, __file__, kind, str(steps)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
                table[title] = f"failed: {reason}"
                break
            records.append(json.loads(done.stdout.strip().splitlines()[-1]))
        else:
            table[title] = records
    return table


def resident_mib(field: str) -> float:
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in {STATUS}")


def one_pass(kind: str, steps: int) -> int:
    """Forward and backward with `steps` steps; returns the steps really made."""
    import numpy as np
    import torch

    from problems import weight

    torch.set_num_threads(2)
    rng = np.random.default_rng(0)
    W = torch.tensor(weight("smoothing", WIDTH, rng, norm=0.9999), dtype=torch.float32, requires_grad=True)
    c = torch.tensor(rng.normal(size=(SAMPLES, WIDTH)), dtype=torch.float32)
    if kind == "unrolled":
        z, made = torch.zeros_like(c), steps
        for _ in range(steps):
            z = torch.relu(z @ W.T + c)
    else:
        import wellposed as wp

        gradient = wp.ImplicitGradient(wp.Neumann(), rtol=1e-30, max_steps=steps)
        layer = wp.EquilibriumLayer(
            lambda z, c: torch.relu(z @ W.T + c),
            solver=wp.Picard(),
            gradient=gradient,
            rtol=1e-30,
            max_steps=steps,
            on_failure="ignore",
        )
        z = layer(c)
        made = int(layer.last_solution.num_steps.max())
    z.square().sum().backward()
    return made


def main(kind: str, steps: int) -> None:
    one_pass(kind, 3)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # give back what the warm-up left free, or the pass would hide in it
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = resident_mib("VmRSS")
    made = one_pass(kind, steps)
    print(json.dumps({"steps": made, "peak_mib": round(resident_mib("VmHWM") - before, 1)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
