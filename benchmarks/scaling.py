"""How training steps and tangent kernels grow with the width m and the number n of samples.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py [--suite NAME ...] [--rounds N]

Of `GaussianDEQ` in float32, one thread, one process. Sizes take turns; a growth is the exponent p of time ~ size^p between the
least and the largest size, from the medians. "first" is the first pass of a new network, with the proof that |W| < 1; the
others come after it. The bars: m^2.1 between 1000 and 4000, and n^1.2 as long as the n^2 m of a kernel does not dominate; a
first pass has factorizations, of m^3.
Writes results/scaling.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import wellposed as wp

RESULTS = Path(__file__).parent / "results"
FEATURES = 100
#: Name -> sizes (m, n), which of the two grows, and the bar of its exponent.
SUITES: dict[str, tuple[list[tuple[int, int]], str, float]] = {
    "step in m": ([(1000, 100), (2000, 100), (4000, 100)], "m", 2.1),
    "kernel in m": ([(1000, 100), (2000, 100), (4000, 100)], "m", 2.1),
    "step in n": ([(1000, 100), (1000, 200), (1000, 400)], "n", 1.2),
    "kernel in n": ([(1000, 100), (1000, 200), (1000, 400)], "n", 1.2),
    "first in m": ([(1000, 100), (2000, 100), (4000, 100)], "m", 3.0),
}


def data(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    X = torch.randn(n, FEATURES, generator=generator)
    return X / X.norm(dim=1, keepdim=True) * FEATURES**0.5, torch.randn(n, generator=generator)


def network(m: int) -> wp.GaussianDEQ:
    return wp.GaussianDEQ(FEATURES, m, generator=torch.Generator().manual_seed(m))


def step(m: int, n: int) -> Callable[[], Any]:
    """Five steps of descent: their solves start at the last solutions."""
    model, (X, y) = network(m), data(n)
    return lambda: wp.descend(model, X, y, step_size=0.1 / (m * n), steps=5)


def kernel(m: int, n: int) -> Callable[[], Any]:
    model, (X, _) = network(m), data(n)
    return lambda: wp.tangent_kernel(model, X)


def first(m: int, n: int) -> Callable[[], Any]:
    X, _ = data(n)

    def run() -> None:
        network(m)(X)

    return run


def measure(suite: str, rounds: int) -> dict[str, Any]:
    sizes, grows, bar = SUITES[suite]
    make = {"step": step, "kernel": kernel, "first": first}[suite.split()[0]]
    runs = {size: make(*size) for size in sizes}
    seconds: dict[tuple[int, int], list[float]] = {size: [] for size in sizes}
    for number in range(rounds + 1):
        for size, run in runs.items():
            if number == 0 and suite.startswith("first"):
                continue
            began = time.perf_counter()
            run()
            if number:  # the first one proves |W| < 1
                seconds[size].append(time.perf_counter() - began)
    medians = {size: statistics.median(times) for size, times in seconds.items()}
    index = 0 if grows == "m" else 1
    low, high = sizes[0], sizes[-1]
    exponent = math.log(medians[high] / medians[low]) / math.log(high[index] / low[index])
    relative = {f"m = {m}, n = {n}": round(medians[m, n] / medians[low], 2) for m, n in sizes}
    return {"suite": suite, "exponent": round(exponent, 2), "bar": bar, "time / least size": relative, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", action="append", choices=list(SUITES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "scaling.json"
    found = {row["suite"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    for suite in options.suite or SUITES:
        found[suite] = measure(suite, options.rounds)
        print(found[suite], flush=True)
        rows = [found[name] for name in SUITES if name in found]
        setting = {"torch": torch.__version__, "threads": 1, "features": FEATURES, "dtype": "float32"}
        path.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
