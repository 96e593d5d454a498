"""Measure the task of images: an equilibrium with a certificate, a free one, unrolled networks, total variation.

    python benchmarks/task_imaging.py [--seeds 3] [--seconds 30]

Needs scikit-image, and natural64.npz and cbsd68.npz in $WELLPOSED_DATA. Writes benchmarks/results/imaging.json after
every part, and skips what is there; the training of a seed is kept in runs/imaging every 100 steps and continued.

The networks of a seed are trained in turn in one process, each for the same processor time: the next step is of the
one that has used the least. So all have the same conditions, whatever else the machine does.
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
from wellposed.data.restoration import BLUR, NOISE, SIDE, blur
from wellposed.imaging import Blur, DEQGrad, DnCNN, Reconstructor, gaussian_kernel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from deblurring import psnr, rate, some  # noqa: E402

from tables import mean_and_error  # noqa: E402

RESULTS, KEPT = ROOT / "benchmarks" / "results" / "imaging.json", ROOT / "runs" / "imaging"
DEPTH, MARKS = 10, (3, 5, 10, 20, 50)
#: Part of the time in which a network learns alone, outside an equilibrium.
BEFORE = 0.45
PART, FEW = slice(None, None, 4), slice(None, None, 8)  # of the test images, for curves and for weights of total variation
WEIGHTS = (0.025, 0.03, 0.035, 0.04, 0.05)
GREY, CHROMA = (0.012, 0.016, 0.02, 0.025, 0.03), (0.04, 0.06, 0.08, 0.1, 0.13)
#: Orthonormal colours: grey, and two differences.
OPPONENT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])
OPPONENT = OPPONENT / OPPONENT.norm(dim=1, keepdim=True)
NAMES = {
    "bounded": "equilibrium, bounded",
    "free": "equilibrium, free",
    "unrolled": f"{DEPTH} unrolled steps, bounded",
    "unrolled_free": f"{DEPTH} unrolled steps, free",
}
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
    if "free" in kind:
        cell: Any = DEQGrad(OPERATOR, DnCNN(3, 54, 4, scale=2, generator=generator), weight=1.0)
        gradient = wp.ImplicitGradient(rtol=1e-1, max_steps=6)
        model = Reconstructor(cell, gradient=gradient, rtol=1e-3, max_steps=60, on_failure="ignore")
    else:
        model = wp.tasks.deblurrer(generator=generator, on_failure="ignore")
    return Unrolled(model.layer.cell, DEPTH) if "unrolled" in kind else model


def is_alone(model: nn.Module, done: float, before: float = BEFORE) -> bool:
    """Whether, after a part of the time, a network still learns outside an equilibrium.

    Only one that computes an image of the data does. A DnCNN that has learned to denoise is worse at the start of an
    equilibrium than a new one, which is near the identity: in trials its iterations diverged.
    """
    cell: Any = model.cell if isinstance(model, Unrolled) else model.layer.cell
    return done < before and hasattr(cell.network, "condition")


def advance(
    model: nn.Module, optimizer: Any, x: Tensor, generator: torch.Generator, done: float, before: float = BEFORE
) -> float:
    """One step of training, after a part of the time, of which the part `before` is for the network alone."""
    cell: Any = model.cell if isinstance(model, Unrolled) else model.layer.cell
    y = blur(x) + NOISE * torch.randn(x.shape, generator=generator)
    if is_alone(model, done, before):
        optimizer.param_groups[0]["lr"] = rate(done / before, 5e-3)
        output = cell.network.condition(OPERATOR, y)[1]
    elif hasattr(cell.network, "condition"):
        optimizer.param_groups[0]["lr"] = rate((done - before) / (1 - before), 3e-3)
        output = model(y)
    else:
        optimizer.param_groups[0]["lr"] = rate(done, 2e-3)
        output = model(y)
    loss = (output - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if bool(torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0))):  # a free equilibrium may not exist
        optimizer.step()
    return loss.item()


def train(seed: int, seconds: float, images: Tensor) -> tuple[dict[str, nn.Module], dict[str, dict[str, float]]]:
    """The networks of a seed, and the processor time and steps of each."""
    models = {kind: make(kind, seed) for kind in NAMES}
    optimizers = {kind: torch.optim.Adam(model.parameters()) for kind, model in models.items()}
    generators = {kind: torch.Generator().manual_seed(seed) for kind in NAMES}
    used = {kind: {"seconds": 0.0, "steps": 0, "steps_before": 0} for kind in NAMES}
    path = KEPT / f"{seed}.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        used = state["used"]
        for kind in NAMES:
            models[kind].load_state_dict(state["models"][kind])
            optimizers[kind].load_state_dict(state["optimizers"][kind])
            generators[kind].set_state(state["generators"][kind])
    for kind, model in models.items():
        if isinstance(model, Reconstructor):
            model.layer.rtol, model.layer.max_steps = (1e-2, 12) if kind == "free" else (3e-3, 60)
    while used[kind := min(used, key=lambda name: used[name]["seconds"])]["seconds"] < seconds:
        done = used[kind]["seconds"] / seconds
        x = some(images, generators[kind])
        begin = time.process_time()
        loss = advance(models[kind], optimizers[kind], x, generators[kind], done)
        used[kind]["seconds"] += time.process_time() - begin
        used[kind]["steps_before" if is_alone(models[kind], done) else "steps"] += 1
        if sum(row["steps"] + row["steps_before"] for row in used.values()) % 100 == 0:
            keep(path, used, models, optimizers, generators)
            print(
                seed,
                {name: {key: round(v, 1) for key, v in row.items()} for name, row in used.items()},
                f"{loss:.5f}",
                flush=True,
            )
    keep(path, used, models, optimizers, generators)
    for model in models.values():
        if isinstance(model, Reconstructor):
            model.layer.rtol, model.layer.max_steps = 1e-3, 60
    return models, used


def keep(path: Path, used: Any, models: Any, optimizers: Any, generators: Any) -> None:
    state = {
        "used": used,
        "models": {name: model.state_dict() for name, model in models.items()},
        "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
        "generators": {name: generator.get_state() for name, generator in generators.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".begun"))
    path.with_suffix(".begun").replace(path)


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
    # strict JSON has no infinity: None is a factor that is not known
    facts = {"contraction": factor if math.isfinite(factor) else None, "converged": converged, "most_steps": max(steps)}
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


def measured(images: Tensor, truth: Tensor) -> dict[str, float]:
    from skimage.metrics import structural_similarity

    ssim = [
        structural_similarity(a.numpy(), b.numpy(), data_range=1.0, channel_axis=0) for a, b in zip(images, truth, strict=True)
    ]
    return {"psnr": float(psnr(images, truth).mean()), "ssim": float(sum(ssim)) / len(ssim)}


def run(seed: int, seconds: float, tests: dict[str, tuple[Tensor, Tensor]], images: Tensor) -> dict[str, Any]:
    models, used = train(seed, seconds, images)
    found: dict[str, Any] = {"seed": seed}
    for kind, model in models.items():
        found[kind] = {"parameters": sum(p.numel() for p in model.parameters()), **used[kind]}
        for name, (X, y) in tests.items():
            restored, facts = outputs(model, X)
            found[kind][name] = {**measured(restored, y), **facts}
            print(seed, kind, name, found[kind][name]["psnr"], flush=True)
        X, y = tests["cbsd68"]
        found[kind]["curve"] = curve(model, X[PART], y[PART])
        print(seed, kind, found[kind]["curve"], flush=True)
    return found


def total_variation(Y: Tensor, weights: tuple[float, ...], steps: int = 50) -> Tensor:
    """FISTA for every channel; the proximal map is scikit-image's `denoise_tv_chambolle`.

    Args:
        Y: (batch, channels, height, width) the data.
        weights: One for each channel.
        steps: Of FISTA.
    """
    from skimage.restoration import denoise_tv_chambolle

    x = z = Y
    t = 1.0
    for _ in range(steps):
        moved = (z - OPERATOR.A_adjoint(OPERATOR.A(z) - Y)).numpy()
        new = torch.stack(
            [
                torch.stack(
                    [
                        torch.tensor(denoise_tv_chambolle(channel, weight=w, eps=1e-4, max_num_iter=30))
                        for channel, w in zip(image, weights, strict=True)
                    ]
                )
                for image in moved
            ]
        )
        following = (1 + math.sqrt(1 + 4 * t * t)) / 2
        x, z, t = new, new + (t - 1) / following * (new - x), following
    return x


def variation_of_colours(X: Tensor, y: Tensor) -> dict[str, Any]:
    """Total variation of red, green and blue, with the weight that is best on a part of the test images."""
    some = {w: float(psnr(total_variation(X[FEW], (w,) * 3), y[FEW]).mean()) for w in WEIGHTS}
    weight = max(some, key=lambda w: some[w])
    row = {"method": "total variation", "weight": weight, "weights": some}
    return row | measured(total_variation(X, (weight,) * 3, 100), y)


def variation_of_opponents(X: Tensor, y: Tensor) -> dict[str, Any]:
    """Total variation of `OPPONENT` colours, with the two weights that are best on a part of the test images."""
    turned = torch.einsum("ij,bjhw->bihw", OPPONENT, X)

    def image(parts: Tensor) -> Tensor:
        return torch.einsum("ij,bihw->bjhw", OPPONENT, parts)

    grey = {w: total_variation(turned[FEW, :1], (w,)) for w in GREY}
    chroma = {w: total_variation(turned[FEW, 1:], (w, w)) for w in CHROMA}
    some = {(a, b): float(psnr(image(torch.cat([grey[a], chroma[b]], 1)), y[FEW]).mean()) for a in GREY for b in CHROMA}
    a, b = max(some, key=lambda pair: some[pair])
    weights = {f"{first:g} and {second:g}": value for (first, second), value in some.items()}
    row = {"method": "total variation of opponent colours", "weight": [a, b], "weights": weights}
    return row | measured(image(total_variation(turned, (a, b, b), 100)), y)


def memory(kind: str, number: int) -> int:
    """MB by which the resident memory grows at most in a training step with this number of iterations.

    Of the second step: the first also loads code. Needs Linux.
    """
    model, y = make(kind, 0), torch.rand(16, 3, 64, 64, generator=torch.Generator().manual_seed(0))
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
        for test in ("cbsd68", "natural64"):
            row[f"psnr_{test}"] = mean_and_error([r[test]["psnr"] for r in some], 2)
            row[f"ssim_{test}"] = mean_and_error([r[test]["ssim"] for r in some], 4)
        row["fall"] = mean_and_error([r["curve"][MARKS.index(10)] - r["curve"][-1] for r in some], 3)
        row["steps"] = f"{sum(r['steps'] for r in some) / len(some):.0f}"
        row["before"] = f"{sum(r['steps_before'] for r in some) / len(some):.0f}"
        row["seconds"] = f"{sum(r['seconds'] for r in some) / len(some):.0f}"
        facts = [r[test] for r in some for test in ("cbsd68", "natural64")]
        contraction = max(math.inf if (factor := r.get("contraction")) is None else factor for r in facts)
        row["contraction"] = f"{contraction:.4f}" if contraction < 1 and kind == "bounded" else "not known"
        row["bound"] = f"{max(max(r['error_bounds']) for r in facts):.0e}" if kind == "bounded" else "none"
        found.append(row)
    for k in range(2) if len(results["tv"]) == 2 else ():
        row = {"method": results["tv"]["cbsd68"][k]["method"]}
        for test, parts in results["tv"].items():
            row |= {f"psnr_{test}": f"{parts[k]['psnr']:.2f}", f"ssim_{test}": f"{parts[k]['ssim']:.4f}"}
        found.append(dict.fromkeys(found[0] if found else (), "") | row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="processor time to train each network")
    parser.add_argument("--parts", nargs="+", default=["memory", "runs", "tv"], choices=["memory", "runs", "tv"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"seconds": options.seconds, "marks": MARKS, "rows": [], "runs": [], "tv": {}, "memory": []}
    if RESULTS.exists():
        results |= json.loads(RESULTS.read_text())
    if results["seconds"] != options.seconds:
        parser.error(f"{RESULTS} is of {results['seconds']} seconds; delete it, or give the same.")

    def write(part: str, value: Any) -> None:
        current = json.loads(RESULTS.read_text()) if RESULTS.exists() else results  # another process may have added to it
        current[part] = current[part] | value if part == "tv" else [*current[part], value]
        current["rows"] = rows(current)
        RESULTS.write_text(json.dumps(current, indent=1, allow_nan=False) + "\n")
        results.update(current)

    data, more = wp.data.load("deblurring"), wp.data.load("natural64").X_test
    assert data.X_test is not None and data.y_test is not None and more is not None
    noisy = blur(more) + NOISE * torch.randn(more.shape, generator=torch.Generator().manual_seed(1))
    tests = {"cbsd68": (data.X_test, data.y_test), "natural64": (noisy, more)}
    for part in options.parts:
        if part == "memory":
            for row in [] if results["memory"] else memories():
                write("memory", row)
        elif part == "runs":
            for seed in range(options.seeds):
                if not any(r["seed"] == seed for r in results["runs"]):
                    write("runs", run(seed, options.seconds, tests, data.y))
        else:
            for name, (X, y) in tests.items():
                if name not in results["tv"]:
                    write("tv", {name: [variation_of_colours(X, y), variation_of_opponents(X, y)]})


if __name__ == "__main__":
    main()
