"""Measure the task of images: an equilibrium with a certificate, a free one, an unrolled network, total variation.

    python benchmarks/task_imaging.py [--seeds 3] [--steps 1500]

Needs scikit-image, and natural64.npz and cbsd68.npz in $WELLPOSED_DATA. Writes benchmarks/results/imaging.json after
every part, and skips what is there; the training of a seed is kept in runs/imaging every 20 steps and continued.

The three networks of a seed are trained in turn in one process: the next step is of the one that has used the least
processor time, until the bounded one has made all its steps. So all have the same time, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.data.restoration import BLUR, SIDE
from wellposed.imaging import Blur, DEQGrad, DnCNN, Reconstructor, gaussian_kernel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from deblurring import psnr, rate, step  # noqa: E402

from tables import mean_and_error  # noqa: E402

RESULTS, KEPT = ROOT / "benchmarks" / "results" / "imaging.json", ROOT / "runs" / "imaging"
DEPTH, MARKS = 10, (5, 10, 20, 50)
PART = slice(None, None, 4)  # of the test images, for curves
WEIGHTS = (0.007, 0.0085, 0.01, 0.012, 0.015)
NAMES = {"bounded": "equilibrium, bounded", "free": "equilibrium, free", "unrolled": f"unrolled, {DEPTH} steps"}
OPERATOR = Blur(gaussian_kernel(BLUR, SIDE))


class Unrolled(nn.Module):
    """A number of steps z <- f(z, y) from A^T y, with a graph through all of them."""

    def __init__(self, cell: Any, steps: int) -> None:
        super().__init__()
        self.cell, self.steps = cell, steps

    def forward(self, y: Tensor) -> Tensor:
        f, arguments = self.cell._function(y)
        z = self.cell.initial(y)
        for _ in range(self.steps):
            z = f(z, *arguments)
        return self.cell.image(z, y)


def make(kind: str, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    if kind == "free":
        cell = DEQGrad(OPERATOR, DnCNN(1, 55, 4, scale=2, generator=generator))
        gradient = wp.ImplicitGradient(rtol=1e-2)
        return Reconstructor(cell, gradient=gradient, rtol=1e-3, max_steps=20, on_failure="ignore")
    model = wp.tasks.deblurrer(generator=generator, on_failure="ignore")
    return Unrolled(model.layer.cell, DEPTH) if kind == "unrolled" else model


def train(seed: int, steps: int, images: Tensor) -> tuple[dict[str, nn.Module], dict[str, dict[str, float]]]:
    """The three networks of a seed, and the processor time and steps of each."""
    models = {kind: make(kind, seed) for kind in NAMES}
    optimizers = {kind: torch.optim.Adam(model.parameters()) for kind, model in models.items()}
    generators = {kind: torch.Generator().manual_seed(seed) for kind in NAMES}
    used = {kind: {"seconds": 0.0, "steps": 0} for kind in NAMES}
    path = KEPT / f"{seed}.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        used = state["used"]
        for kind in NAMES:
            models[kind].load_state_dict(state["models"][kind])
            optimizers[kind].load_state_dict(state["optimizers"][kind])
            generators[kind].set_state(state["generators"][kind])
    while used["bounded"]["steps"] < steps:
        kind = min(used, key=lambda name: used[name]["seconds"])
        optimizers[kind].param_groups[0]["lr"] = rate(used["bounded"]["steps"] / steps)
        begin = time.process_time()
        loss = step(models[kind], optimizers[kind], images, generators[kind])
        used[kind]["seconds"] += time.process_time() - begin
        used[kind]["steps"] += 1
        done = used["bounded"]["steps"]
        if kind == "bounded" and (done % 20 == 0 or done == steps):
            state = {
                "used": used,
                "models": {name: model.state_dict() for name, model in models.items()},
                "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
                "generators": {name: generator.get_state() for name, generator in generators.items()},
            }
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path.with_suffix(".begun"))
            path.with_suffix(".begun").replace(path)
            print(seed, used, f"{loss:.5f}", flush=True)
    return models, used


@torch.no_grad()
def outputs(model: nn.Module, X: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The images of a network, and of an equilibrium: how many were found, and the largest proved
    distance from one, root mean square of the pixels."""
    images, bounds, converged, steps = [], [], 0, []
    factor = model.layer.cell.contraction if isinstance(model, Reconstructor) else math.inf
    for part in X.split(4):
        images.append(model(part))
        if isinstance(model, Reconstructor):
            solution = model.layer.last_solution
            assert solution is not None
            if factor < 1:
                bounds += (solution.error_bound(factor) / math.sqrt(part[0].numel())).tolist()
            converged += int(solution.converged.sum())
            steps += solution.num_steps.tolist()
    if not isinstance(model, Reconstructor):
        return torch.cat(images), {}
    facts = {"contraction": factor, "converged": converged, "most_steps": max(steps)}
    return torch.cat(images), {**facts, "mean_steps": sum(steps) / len(steps), "error_bounds": bounds}


@torch.no_grad()
def curve(model: nn.Module, X: Tensor, y: Tensor) -> list[float]:
    """Mean PSNR after the iterations `MARKS`: of the solver for an equilibrium, plain for an unrolled network."""
    found = []
    for number in MARKS:
        if isinstance(model, Unrolled):
            changed: nn.Module = Unrolled(model.cell, number)
        else:
            changed = Reconstructor(model.layer.cell, rtol=1e-9, max_steps=number, on_failure="ignore")
        found.append(float(psnr(outputs(changed, X)[0], y).mean()))
    return found


def similarity(images: Tensor, truth: Tensor) -> list[float]:
    from skimage.metrics import structural_similarity

    return [structural_similarity(a[0].numpy(), b[0].numpy(), data_range=1.0) for a, b in zip(images, truth, strict=True)]


def measured(images: Tensor, truth: Tensor) -> dict[str, float]:
    ssim = similarity(images, truth)
    return {"psnr": float(psnr(images, truth).mean()), "ssim": sum(ssim) / len(ssim)}


def run(seed: int, steps: int, data: wp.data.Dataset) -> dict[str, Any]:
    models, used = train(seed, steps, data.y)
    found: dict[str, Any] = {"seed": seed}
    for kind, model in models.items():
        parameters = sum(p.numel() for p in model.parameters())
        images, facts = outputs(model, data.X_test)
        found[kind] = {"parameters": parameters, **used[kind], **measured(images, data.y_test), **facts}
        found[kind]["curve"] = curve(model, data.X_test[PART], data.y_test[PART])
        print(seed, kind, found[kind]["psnr"], found[kind]["curve"], flush=True)
    return found


def total_variation(weight: float, Y: Tensor) -> Tensor:
    """50 steps of FISTA; the proximal map is scikit-image's `denoise_tv_chambolle`."""
    from skimage.restoration import denoise_tv_chambolle

    x = z = Y
    t = 1.0
    for _ in range(50):
        moved = z - OPERATOR.A_adjoint(OPERATOR.A(z) - Y)
        new = torch.stack(
            [
                torch.tensor(denoise_tv_chambolle(image[0].numpy(), weight=weight, eps=1e-4, max_num_iter=30))[None]
                for image in moved
            ]
        )
        following = (1 + math.sqrt(1 + 4 * t * t)) / 2
        x, z, t = new, new + (t - 1) / following * (new - x), following
    return x


def memory(kind: str, number: int) -> int:
    """MB by which the resident memory grows at most in a training step with this number of iterations.

    Of the second step: the first also loads code. Needs Linux.
    """
    model, y = make(kind, 0), torch.rand(16, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    if isinstance(model, Unrolled):
        model.steps = number
    else:
        model.layer.rtol, model.layer.max_steps = 1e-9, number  # never reached: exactly this number
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at the present size
        before = resident("VmRSS")
        (model(y) - y).square().mean().backward()
        grown = resident("VmHWM") - before
    return round(grown)


def resident(key: str) -> float:
    """MB of this process, of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def memories() -> list[dict[str, int]]:
    """In a new process that gives every freed tensor back to the system at once.

    The allocator of the C library keeps freed blocks otherwise, the more the longer the process runs: a growth that is
    not of the solve.
    """
    code = "import task_imaging as t; t.torch.set_num_threads(1)\n"
    code += 'print([{"iterations": n, **{k: t.memory(k, n) for k in ("bounded", "unrolled")}} for n in (5, 10, 20, 40)])'
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    found: list[dict[str, int]] = ast.literal_eval(done.stdout.splitlines()[-1])
    return found


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    runs, found = results["runs"], []
    for kind, name in NAMES.items() if runs else ():
        some = [r[kind] for r in runs]
        row = {"method": name, "parameters": str(some[0]["parameters"]), "seeds": str(len(some))}
        row |= {"psnr": mean_and_error([r["psnr"] for r in some], 2), "ssim": mean_and_error([r["ssim"] for r in some], 4)}
        row["fall"] = mean_and_error([r["curve"][MARKS.index(10)] - r["curve"][-1] for r in some], 3)
        row["steps"] = f"{sum(r['steps'] for r in some) / len(some):.0f}"
        row["seconds"] = f"{sum(r['seconds'] for r in some) / len(some):.0f}"
        contraction = max(r.get("contraction", math.inf) for r in some)
        row["contraction"] = f"{contraction:.4f}" if contraction < 1 and kind == "bounded" else "not known"
        row["bound"] = f"{max(max(r['error_bounds']) for r in some):.0e}" if kind == "bounded" else "none"
        found.append(row)
    if results["tv"]:
        best = max(results["tv"], key=lambda r: r["psnr"])
        row = {
            "method": f"total variation, weight {best['weight']:g}",
            "psnr": f"{best['psnr']:.2f}",
            "ssim": f"{best['ssim']:.4f}",
        }
        found.append(dict.fromkeys(("parameters", "seeds", "fall", "steps", "seconds", "contraction", "bound"), "") | row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--parts", nargs="+", default=["memory", "runs", "tv"], choices=["memory", "runs", "tv"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"steps": options.steps, "marks": MARKS, "rows": [], "runs": [], "tv": [], "memory": []}
    if RESULTS.exists():
        results |= json.loads(RESULTS.read_text())
    if results["steps"] != options.steps:
        parser.error(f"{RESULTS} is of {results['steps']} steps; delete it, or give the same.")

    def write(part: str, value: dict[str, Any]) -> None:
        current = json.loads(RESULTS.read_text()) if RESULTS.exists() else results  # another process may have added to it
        current[part].append(value)
        current["rows"] = rows(current)
        RESULTS.write_text(json.dumps(current, indent=1) + "\n")
        results.update(current)

    data = wp.data.load("deblurring")
    assert data.X_test is not None and data.y_test is not None
    for part in options.parts:
        if part == "memory":
            for row in [] if results["memory"] else memories():
                write("memory", row)
        elif part == "runs":
            for seed in range(options.seeds):
                if not any(r["seed"] == seed for r in results["runs"]):
                    write("runs", run(seed, options.steps, data))
        else:
            for weight in WEIGHTS:
                if not any(r["weight"] == weight for r in results["tv"]):
                    restored = total_variation(weight, data.X_test)
                    write("tv", {"weight": weight, **measured(restored, data.y_test)})


if __name__ == "__main__":
    main()
