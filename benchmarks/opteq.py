"""One training step of the five-layer convolutional OptEq: implicit gradient against unrolling, time and peak memory.

    python benchmarks/opteq.py                 the paper's sizes: batch 64, 32 x 32, channels 16-32-64-128-128
    python benchmarks/opteq.py --batch 8       a smaller one
    python benchmarks/opteq.py --one implicit  one measurement in this process, as JSON

Each measurement has a fresh process. The unrolled network makes K = 20 steps; the residual that it reaches is the tolerance
of the implicit one, so both have the same equilibrium accuracy. Memory is the peak of the resident set (VmHWM) above its level
before the step, after a warm-up step with one image. Subnormal numbers are flushed to zero for both: cotangents that pass
twenty contractions become subnormal, and processors are up to a hundred times slower on those.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from pathlib import Path

from memory import resident_mib

ALPHAS = (1.0, 0.4)


def step(kind: str, alpha: float, batch: int, rtol: float, channels: tuple[int, ...]) -> dict[str, float]:
    """Forward and backward of the cross-entropy; what it took."""
    import torch

    import wellposed as wp

    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    gradient = wp.UnrolledGradient(20) if kind == "unrolled" else wp.ImplicitGradient()
    model = wp.convex.ConvOptEq(
        3, channels, alpha=alpha, gradient=gradient, rtol=rtol, on_failure="ignore", generator=generator
    )
    with torch.no_grad():
        for K in model.W:
            K.mul_(2)  # beyond the norm bound, as after training: |W_l| = 0.95 by the bound
    X, y = torch.randn(batch, 3, 32, 32, generator=generator), torch.arange(batch) % 10
    began = time.perf_counter()
    torch.nn.functional.cross_entropy(model(X), y).backward()
    seconds = time.perf_counter() - began
    solution = model.layer.last_solution
    return {
        "seconds": seconds,
        "residual": float(solution.residual.max()),
        "steps": int(solution.num_steps.max()),
        "adjoint_steps": int(model.layer.last_adjoint.num_steps.max()) if kind == "implicit" else 0,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def measure(kind: str, alpha: float, batch: int, rtol: float, channels: tuple[int, ...]) -> dict[str, float]:
    """One step in this process, with its peak memory."""
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    step(kind, alpha, 1, rtol, channels)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # give back what the warm-up left free, or the step would hide in it
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_mib("VmRSS")
    record = step(kind, alpha, batch, rtol, channels)
    return record | {"peak_mib": round(resident_mib("VmHWM") - before, 1)}


def in_fresh_process(kind: str, alpha: float, batch: int, rtol: float, channels: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", kind, "--alpha", str(alpha), "--batch", str(batch)]
    command += ["--rtol", repr(rtol), "--channels", channels]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    record: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return record


def line_of_objectives(width: int = 400, samples: int = 64, points: int = 51) -> tuple[float, float]:
    """Seconds for 51 values of the objective along a line: with the factorization kept, and made anew for every point."""
    import torch

    import wellposed as wp

    generator = torch.Generator().manual_seed(0)
    model = wp.OptEq(20, width, dtype=torch.float64, generator=generator)
    X = torch.randn(samples, 20, dtype=torch.float64, generator=generator)
    z = model.solve(X).value
    direction = torch.rand(samples, width, dtype=torch.float64, generator=generator) @ model.matrices()[0].detach()
    t = torch.linspace(0, 1, points, dtype=torch.float64)
    phi = wp.convex.objective(model, X)
    began = time.perf_counter()
    together = phi.along((z,), (direction,), t)
    kept = time.perf_counter() - began
    began = time.perf_counter()
    anew = torch.stack([wp.convex.objective(model, X)(z + s * direction) for s in t.tolist()], dim=1)
    made = time.perf_counter() - began
    torch.testing.assert_close(together, anew, rtol=1e-9, atol=1e-9)
    return kept, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=("implicit", "unrolled"))
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rtol", type=float, default=1e-6)
    parser.add_argument("--channels", default="16,32,64,128,128")
    options = parser.parse_args()
    channels = tuple(int(size) for size in options.channels.split(","))
    if options.one:
        print(json.dumps(measure(options.one, options.alpha or 1.0, options.batch, options.rtol, channels)))
        return
    print(f"batch {options.batch}, 32 x 32, channels {options.channels}, one thread, float32")
    print("| alpha | gradient | seconds | peak MiB | residual | evaluations | adjoint products |")
    print("|---|---|---|---|---|---|---|")
    for alpha in ALPHAS if options.alpha is None else (options.alpha,):
        unrolled = in_fresh_process("unrolled", alpha, options.batch, 1e-6, options.channels)
        rtol = max(unrolled["residual"], 2e-7)  # float32 cannot promise less
        implicit = in_fresh_process("implicit", alpha, options.batch, rtol, options.channels)
        for name, record in (("unrolled, K = 20", unrolled), ("implicit", implicit)):
            print(
                f"| {alpha:g} | {name} | {record['seconds']:.2f} | {record['peak_mib']:.0f} | {record['residual']:.1e} | "
                f"{record['steps']} | {record['adjoint_steps']} |"
            )
        ratio = unrolled["peak_mib"] / implicit["peak_mib"]
        print(f"\nalpha {alpha:g}: memory 1/{ratio:.1f}, time {implicit['seconds'] / unrolled['seconds']:.2f} of unrolled\n")
    kept, made = line_of_objectives()
    print(f"51 objectives along a line (width 400, 64 samples): {kept:.3f} s, factoring for each point {made:.3f} s")


if __name__ == "__main__":
    main()
