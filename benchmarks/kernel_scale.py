"""What a tangent kernel of many samples takes: time of its parts by n, and memory with the kernel in a file.

    OMP_NUM_THREADS=1 python benchmarks/kernel_scale.py [--sizes 1000 2000 4000] [--rounds 3] [--stored 20000]

`GaussianDEQ` with 50 inputs and width 1000 in float64, one thread, processor time; the least of the rounds counts. Features are
the equilibria and adjoints of all samples, blocks the products of them, without writing. An exponent p of time ~ n^p is taken
between the two largest sizes. From the largest follow the time a sample and the time an entry, and with them the time that is
predicted for `--stored` samples, whose kernel is then computed into a .npy file by a process of its own: its processor time and
the peak of its resident set, libraries and mapped pages included. Writes results/kernel_scale.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import wellposed as wp
from wellposed.kernel._closed_form import ClosedFormMethod
from wellposed.kernel._method import KernelLayout

RESULTS = Path(__file__).parent / "results" / "kernel_scale.json"
FEATURES, WIDTH = 50, 1000


def problem(n: int) -> tuple[torch.nn.Module, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = wp.GaussianDEQ(FEATURES, WIDTH, generator=generator, dtype=torch.float64)
    return model, torch.randn(n, FEATURES, generator=generator, dtype=torch.float64)


def parts(n: int) -> tuple[float, float]:
    """Processor seconds of the features and of the blocks."""
    model, X = problem(n)
    model(X[:2])  # proves |W| < 1
    began = time.process_time()
    with torch.no_grad():
        method = ClosedFormMethod(model, X)
        assert len(method.sides[0]) > 0
        features = time.process_time() - began
        for block in method.blocks(KernelLayout(False, False, in_memory=True)):
            assert block.parts
    return features, time.process_time() - began - features


def stored(n: int) -> dict[str, Any]:
    """In a process of its own."""
    model, X = problem(n)
    began, clock = time.process_time(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        wp.tangent_kernel(model, X, out=f"{folder}/kernel.npy")
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
    return {
        "n": n,
        "cpu_seconds": round(time.process_time() - began, 1),
        "seconds": round(time.perf_counter() - clock, 1),
        "peak_mib": round(peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 2000, 4000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stored", type=int, default=20_000)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        print(json.dumps(stored(options.stored)))
        return
    parts(200)  # loads everything
    times: dict[int, list[tuple[float, float]]] = {n: [] for n in options.sizes}
    for _ in range(options.rounds):
        for n in options.sizes:
            times[n].append(parts(n))
            print(n, times[n][-1], flush=True)
    least = {n: [min(column) for column in zip(*rows, strict=True)] for n, rows in times.items()}
    small, large = options.sizes[-2:]
    exponents = [math.log(b / a) / math.log(large / small) for a, b in zip(least[small], least[large], strict=True)]
    sample, entry = least[large][0] / large, least[large][1] / large**2
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "width": WIDTH,
        "features": FEATURES,
        "rounds": options.rounds,
        "cpu_seconds": {n: {"features": round(a, 2), "blocks": round(b, 3)} for n, (a, b) in least.items()},
        "exponents": {"features": round(exponents[0], 2), "blocks": round(exponents[1], 2)},
        "milliseconds_a_sample": round(1e3 * sample, 2),
        "nanoseconds_an_entry": round(1e9 * entry, 1),
    }
    words = [sys.executable, __file__, "--measure", "--stored", str(options.stored)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    predicted = sample * options.stored + entry * options.stored**2
    found["stored"] = json.loads(done.stdout.splitlines()[-1]) | {"predicted_cpu_seconds": round(predicted, 1)}
    print(json.dumps(found))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
