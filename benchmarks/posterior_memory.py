"""The posterior mean of a Gaussian process at many samples, by conjugate gradients: time, memory and residual.

    OMP_NUM_THREADS=1 python benchmarks/posterior_memory.py [--samples 20000] [--kernel wide network] [--rtol 1e-8]

Each kernel in a process of its own, in float64: `WideKernel` (10 inputs; half of the entries are kept between products), and
`NetworkKernel` of a `GaussianDEQ` of width 1000 (no entries at all). The noise is 1 % of the mean of the diagonal. Memory is
the peak of the resident set of the whole process, libraries included. The residual is measured twice: over all samples by a
product of the operator, and at 500 samples by rows of the kernel that `deq_ntk` or `tangent_kernel` computes. Processor time.
Writes results/posterior_memory.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results" / "posterior_memory.json"
FEATURES, NEW, WIDTH, WEIGHT_VARIANCE, CHECKED = 10, 1000, 1000, 0.1, 500
#: Bytes for entries of WideKernel: half of the matrix of 20,000 samples takes 1.6e9.
MEMORY = 3 * 2**29


def resident(key: str) -> float:
    """VmRSS or VmHWM in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


def truth(X: torch.Tensor) -> torch.Tensor:
    return torch.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2]


def measure(name: str, n: int, rtol: float) -> dict[str, Any]:
    """In a process of its own."""
    import wellposed as wp
    from wellposed.gpytorch import KernelOperator, NetworkKernel, WideKernel, solve
    from wellposed.kernel import deq_ntk, tangent_kernel

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    X, X_new = (torch.randn(k, FEATURES, generator=generator, dtype=torch.float64) for k in (n, NEW))
    y = truth(X) + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    kernel: Any
    options: dict[str, Any] = {}
    if name == "wide":
        kernel = WideKernel().double()
        kernel.weight_variance = WEIGHT_VARIANCE
        options["memory"] = MEMORY
    else:
        kernel = NetworkKernel(wp.GaussianDEQ(FEATURES, WIDTH, generator=generator, dtype=torch.float64))

    def exact(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        if name == "wide":
            return deq_ntk(rows, columns, weight_variance=float(kernel.weight_variance))
        return tangent_kernel(kernel._network[0], rows, columns)

    products, matmul = [0], KernelOperator._matmul

    def counted(self: Any, rhs: torch.Tensor) -> torch.Tensor:
        products[0] += 1
        return matmul(self, rhs)

    KernelOperator._matmul = counted  # type: ignore[method-assign]
    before, began, clock = resident("VmRSS"), time.process_time(), time.perf_counter()
    with torch.no_grad():
        operator = kernel.operator(X, **options)
        noise = 0.01 * operator.diagonal().mean()
        weights = solve(operator.add_diagonal(noise), y, rtol=rtol)
        mean = kernel.operator(X_new, X, **(dict.fromkeys(options, 0))) @ weights  # one product: nothing is kept
        seconds, wall, peak, steps = time.process_time() - began, time.perf_counter() - clock, resident("VmHWM"), products[0]
        residual = float((operator @ weights + noise * weights - y).norm() / y.norm())
        some = torch.randperm(n, generator=generator)[:CHECKED]
        rows = exact(X[some], X) @ weights + noise * weights[some] - y[some]
    error = (mean - truth(X_new)).square().mean().sqrt() / truth(X_new).std()
    return {
        "kernel": name,
        "n": n,
        "rtol": rtol,
        "products": steps,
        "cpu_seconds": round(seconds, 1),
        "seconds": round(wall, 1),
        "peak_mib": round(peak),
        "libraries_mib": round(before),
        "residual": float(f"{residual:.2g}"),
        "residual_of_rows": float(f"{float(rows.norm() / y[some].norm()):.2g}"),
        "error_of_the_mean": float(f"{float(error):.3g}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--kernel", nargs="+", choices=["wide", "network"], default=["wide", "network"])
    parser.add_argument("--rtol", type=float, default=1e-8)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.kernel[0], options.samples, options.rtol)))
        return
    found = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    for name in options.kernel:
        words = ["--measure", "--kernel", name, "--samples", str(options.samples), "--rtol", str(options.rtol)]
        done = subprocess.run(
            [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        if done.returncode:
            raise SystemExit(f"{name}: exit code {done.returncode}")
        row = json.loads(done.stdout.splitlines()[-1])
        print(row, flush=True)
        found = [other for other in found if (other["kernel"], other["n"]) != (row["kernel"], row["n"])] + [row]
        RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
