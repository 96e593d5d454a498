"""Measure the task of graphs: classes along chains, ours against a graph convolutional network of five layers.

    python benchmarks/task_graphs.py [--lengths 10 30 100] [--seeds 3]

Writes benchmarks/results/graphs.json after every run, and skips what is there; `make tables` copies the table into
docs/tasks/graphs.md. Accuracy is that of all nodes of 100 test chains; both networks take the same optimizer and steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.tasks.graphs import chain_edges

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from chains import right, train  # noqa: E402

import tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "graphs.json"
mean_and_error = functools.partial(tables.mean_and_error, digits=2, scale=100)  # in percent
WIDTH, GCN_WIDTH, LAYERS, STEPS = 64, 41, 5, 150


class GCN(nn.Module):
    """Five layers H <- relu(D^-1/2 (A + I) D^-1/2 H W + b) of Kipf and Welling, on the same directed edges."""

    def __init__(self, features: int, width: int, classes: int, generator: torch.Generator) -> None:
        super().__init__()
        sizes = [features, *[width] * (LAYERS - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True))
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        (source, target), _ = chain_edges(n, length)
        degree = torch.ones(n * length).index_add(0, target, torch.ones(len(target)))
        weight = (degree[source] * degree[target]).rsqrt().unsqueeze(1)
        h = x.flatten(0, 1)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            h = (h / degree.unsqueeze(1)).index_add(0, target, h[source] * weight)
            h = torch.relu(h) if i < LAYERS - 1 else h
        return h.unflatten(0, (n, length)).movedim(2, 1)


def closing(model: wp.tasks.NodeClassifier, X: Tensor) -> float:
    """The largest |f(z) - z| / |f(z)| of a chain, by the formula in float64."""
    solution, cell = model.layer.last_solution, model.layer.cell
    n, length, _ = X.shape
    Z = solution.value.double().reshape(n, length, -1)
    received = torch.cat([torch.zeros_like(Z[:, :1]), Z[:, :-1]], dim=1)
    image = torch.relu(received @ cell.recurrent().double().T + X.double() @ cell.U.double().T)
    return float(((image - Z).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)).max())


@torch.no_grad()
def facts(model: wp.tasks.NodeClassifier, X: Tensor) -> dict[str, Any]:
    """Of the solves of the test chains: statuses, residuals, and the batch against chains one by one."""
    together = model(X)
    solution = model.layer.last_solution
    found = {
        "converged": int(solution.converged.sum()),
        "chains": len(X),
        "residual": float(solution.residual.max()),
        "closing_residual": closing(model, X),
        "evaluations": float(solution.num_steps.float().mean()),
    }
    alone = torch.cat([model(x.unsqueeze(0)) for x in X[:20]])
    return {**found, "batch_difference": float((together[:20] - alone).abs().max())}


def run(length: int, seed: int) -> dict[str, Any]:
    data = wp.data.load("chains", n=400, n_test=100, size=length, seed=seed)
    result: dict[str, Any] = {"length": length, "seed": seed}
    for name in ("ours", "gcn"):
        generator = torch.Generator().manual_seed(seed)
        if name == "ours":
            model: nn.Module = wp.tasks.NodeClassifier(20, WIDTH, 20, bound=0.99, generator=generator)
        else:
            model = GCN(20, GCN_WIDTH, 20, generator)
        begin = time.process_time()
        train(model, data, steps=STEPS, seed=seed)
        nodes = right(model, data).float()
        result[name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": round(time.process_time() - begin, 1),
            "accuracy": float(nodes.mean()),
            "by_distance": [round(v, 4) for v in nodes.mean(0).tolist()],
        }
        if isinstance(model, wp.tasks.NodeClassifier):
            result[name] |= facts(model, data.X_test)
    return result


def rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for length in sorted({r["length"] for r in runs}):
        some = [r for r in runs if r["length"] == length]
        beyond = [sum(r["gcn"]["by_distance"][LAYERS + 1 :]) / max(length - LAYERS - 1, 1) for r in some]
        found.append(
            {
                "nodes": length,
                "ours": mean_and_error([r["ours"]["accuracy"] for r in some]),
                "gcn": mean_and_error([r["gcn"]["accuracy"] for r in some]),
                "gcn_beyond": mean_and_error(beyond),
                "found": f"{sum(r['ours']['converged'] for r in some)} of {sum(r['ours']['chains'] for r in some)}",
                "closing": f"{max(r['ours']['closing_residual'] for r in some):.0e}",
                "difference": f"{max(r['ours']['batch_difference'] for r in some):.0e}",
                "seconds": f"{sum(r['ours']['seconds'] for r in some) / len(some):.0f}",
                "gcn_seconds": f"{sum(r['gcn']['seconds'] for r in some) / len(some):.1f}",
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 30, 100])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    runs = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    for length in options.lengths:
        for seed in range(options.seeds):
            if not any(r["length"] == length and r["seed"] == seed for r in runs):
                runs.append(run(length, seed))
                RESULTS.write_text(json.dumps({"steps": STEPS, "rows": rows(runs), "runs": runs}, indent=1) + "\n")
                print(length, seed, runs[-1]["ours"]["accuracy"], runs[-1]["gcn"]["accuracy"], flush=True)
    RESULTS.write_text(json.dumps({"steps": STEPS, "rows": rows(runs), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
