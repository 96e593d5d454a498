"""Processor time and memory of the posterior of a Gaussian process: us, and neural-tangents' `predict`, in one run.

    python benchmarks/posterior.py [--sizes 2000 4000] [--rounds N] [--peers-python PATH]

The covariance is `deq_ntk`, in float64, with 100 new inputs and one thread. neural-tangents has no equilibrium networks, so it
gets the kernel matrices; so does `KernelMachine`. `solve` gets the inputs only and computes the entries itself.
Contenders take turns, each time in a new process. A time is that of the processor, for mean and variance, after a small problem
has loaded and compiled everything; memory is the peak of the resident set above its level before the problem was read.
Writes results/posterior.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
NOISE, FEATURES, NEW, WEIGHT_VARIANCE = 0.01, 10, 100, 0.1
Answer = tuple[np.ndarray, np.ndarray]


class Covariance(NamedTuple):
    """As neural-tangents names a covariance; the kernel need not be one of its own."""

    nngp: np.ndarray


def kernel_machine(problem: Any) -> Answer:
    import torch

    from wellposed.kernel import KernelMachine

    H, k, d, y = (torch.from_numpy(problem[name]) for name in ("H", "k", "d", "y"))
    mean, variance = KernelMachine(H, y).posterior(k, d, noise=NOISE)
    return mean.numpy(), variance.numpy()


def solves(problem: Any) -> Answer:
    import torch

    from wellposed.gpytorch import WideKernel, solve

    X, X_new, d, y = (torch.from_numpy(problem[name]) for name in ("X", "X_new", "d", "y"))
    kernel = WideKernel().double()
    kernel.weight_variance = WEIGHT_VARIANCE
    with torch.no_grad():
        cross = kernel.operator(X_new, X).to_dense()
        operator = kernel.operator(X).add_diagonal(torch.tensor(NOISE, dtype=torch.float64))
        a = solve(operator, torch.cat([y[:, None], cross.mT], dim=1), rtol=1e-8)
        return (cross @ a[:, 0]).numpy(), (d - (cross * a[:, 1:].mT).sum(1)).numpy()


def neural_tangents(problem: Any) -> Answer:
    import jax

    jax.config.update("jax_enable_x64", True)
    import neural_tangents as nt

    options = {"diag_reg": NOISE, "diag_reg_absolute_scale": True}
    predict = nt.predict.gp_inference(Covariance(problem["H"]), problem["y"][:, None], **options)
    found = predict("nngp", Covariance(problem["k"]), problem["K_new"])
    return np.asarray(found.mean)[:, 0], np.diagonal(np.asarray(found.covariance))


CONTENDERS: dict[str, Callable[[Any], Answer]] = {
    "KernelMachine.posterior": kernel_machine,
    "WideKernel and solve": solves,
    "neural-tangents gp_inference": neural_tangents,
}


def make(n: int, folder: Path) -> Path:
    """A problem with its matrices; those are read by who wants them."""
    import torch

    from wellposed.kernel import deq_ntk

    generator = torch.Generator().manual_seed(n)
    X = torch.randn(n + NEW, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * X[:n, 0]) + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    H = torch.cat([deq_ntk(rows, X[:n], weight_variance=WEIGHT_VARIANCE) for rows in X.split(1000)])
    K_new = deq_ntk(X[n:], weight_variance=WEIGHT_VARIANCE)
    arrays = {"X": X[:n], "X_new": X[n:], "y": y, "H": (H[:n] + H[:n].T) / 2, "k": H[n:], "K_new": K_new, "d": K_new.diagonal()}
    np.savez(folder / f"{n}.npz", **{name: np.ascontiguousarray(value.numpy()) for name, value in arrays.items()})
    return folder / f"{n}.npz"


def resident(key: str) -> float:
    """VmRSS or VmHWM in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


def measure(contender: str, small: str, path: str, answer: str) -> None:
    """In a process of its own."""
    run = CONTENDERS[contender]
    run(np.load(small))
    Path("/proc/self/clear_refs").write_text("5")
    before, began = resident("VmRSS"), time.process_time()
    mean, variance = run(np.load(path))
    seconds = time.process_time() - began
    np.savez(answer, mean=mean, variance=variance)
    print(json.dumps({"seconds": seconds, "mib": resident("VmHWM") - before}))


def compare(n: int, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Rows of every contender at one size; errors are differences from a dense solve."""
    small, path = make(50, folder), make(n, folder)
    problem = np.load(path)
    A = problem["H"] + NOISE * np.eye(n)
    exact = (
        problem["k"] @ np.linalg.solve(A, problem["y"]),
        problem["d"] - (problem["k"] * np.linalg.solve(A, problem["k"].T).T).sum(1),
    )
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    rows = []
    flags = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
    for _ in range(options.rounds):
        for name in CONTENDERS:
            python = options.peers_python if name.startswith("neural") else sys.executable
            command = [python, __file__, "--measure", name, str(small), str(path), str(folder / "answer.npz")]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | flags)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            seen[name].append(json.loads(done.stdout.splitlines()[-1]))
            answer = np.load(folder / "answer.npz")
            errors = [float(np.abs(answer[key] - value).max()) for key, value in zip(("mean", "variance"), exact, strict=True)]
            seen[name][-1] |= {"error": max(errors)}
    for name, runs in seen.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in ("seconds", "mib", "error")}
        rows.append({"n": n, "contender": name, **{key: float(f"{value:.3g}") for key, value in middle.items()}})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2000, 4000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers-python", default=str(HERE.parent / ".venv-kernel-peers" / "bin" / "python"))
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(*options.measure)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for n in options.sizes:
            rows += compare(n, options, Path(folder))
            content = {"rounds": options.rounds, "noise": NOISE, "features": FEATURES, "new": NEW, "rows": rows}
            (HERE / "results" / "posterior.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
