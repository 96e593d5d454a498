"""A tangent kernel on one and on two Dask workers of one thread each: how much faster two are.

    OMP_NUM_THREADS=1 python benchmarks/kernel_cluster.py [--samples 6144] [--width 1000] [--rounds 5]

Worker processes of this machine, float64, into a .zarr store. One and two workers take turns. Seconds are those of the whole
call; the least of all rounds counts, because other work on the machine only adds to them, and a round is marked as disturbed if
anything else computed much meanwhile. Processor seconds of the client with its scheduler and of each worker show the balance:
the busiest process bounds the time from below, whatever else the machine does. Writes results/kernel_cluster.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import wellposed as wp
from quiet import busy_seconds, process_seconds

RESULTS = Path(__file__).parent / "results" / "kernel_cluster.json"
FEATURES = 50


def measure(model: torch.nn.Module, X: torch.Tensor, workers: int, block_size: int) -> dict[str, Any]:
    """One kernel on a new cluster, whose workers have imported everything."""
    from dask.distributed import Client, LocalCluster

    options: dict[str, Any] = {"n_workers": workers, "threads_per_worker": 1, "processes": True, "dashboard_address": ":0"}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(local_directory=folder, **options) as cluster,
        Client(cluster) as client,
    ):
        client.run(warm)
        pids = [os.getpid(), *client.run(os.getpid).values()]
        before, busy, began = [process_seconds(pid) for pid in pids], busy_seconds(), time.perf_counter()
        wp.tangent_kernel(model, X, out=f"{folder}/kernel.zarr", block_size=block_size, client=client)
        seconds, others = time.perf_counter() - began, busy_seconds() - busy
        used = [process_seconds(pid) - start for pid, start in zip(pids, before, strict=True)]
    disturbed = others - sum(used) > 0.15 * seconds  # 15 % of a core
    return {"workers": workers, "seconds": seconds, "client_cpu": used[0], "worker_cpu": used[1:], "disturbed": disturbed}


def warm() -> None:
    """What the first task would pay for."""
    import numpy  # noqa: F401
    import zarr  # noqa: F401

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    wp.tangent_kernel(wp.GaussianDEQ(5, 20, generator=generator), torch.randn(5, 5, generator=generator))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=6144)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm()
    generator = torch.Generator().manual_seed(0)
    model = wp.GaussianDEQ(FEATURES, options.width, generator=generator, dtype=torch.float64)
    X = torch.randn(options.samples, FEATURES, generator=generator, dtype=torch.float64)
    rows: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        for workers in (1, 2):
            rows.append(measure(model, X, workers, options.block_size))
            print(
                {key: [round(x, 2) for x in v] if isinstance(v, list) else round(v, 2) for key, v in rows[-1].items()},
                flush=True,
            )
    found: dict[str, Any] = {"samples": options.samples, "width": options.width, "block_size": options.block_size}
    least = {k: min((row for row in rows if row["workers"] == k), key=lambda row: row["seconds"]) for k in (1, 2)}
    busiest = {k: min(max(row["client_cpu"], *row["worker_cpu"]) for row in rows if row["workers"] == k) for k in (1, 2)}
    found |= {
        "rounds": options.rounds,
        "seconds": {str(k): round(row["seconds"], 2) for k, row in least.items()},
        "disturbed": {str(k): row["disturbed"] for k, row in least.items()},
        "speedup": round(least[1]["seconds"] / least[2]["seconds"], 2),
        "busiest_process_cpu": {str(k): round(value, 2) for k, value in busiest.items()},
        "speedup_of_the_busiest_process": round(busiest[1] / busiest[2], 2),
        "client_cpu": {str(k): round(row["client_cpu"], 2) for k, row in least.items()},
    }
    print(json.dumps(found))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
