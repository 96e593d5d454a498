"""Two processes with DistributedDataParallel, or with FSDP2, give the gradients of one."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this build of torch has no torch.distributed with gloo",
)

WORLD = 2


class PlainCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.Linear(6, 6, dtype=torch.float64)
        self.recurrent.weight.data *= 0.5

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.recurrent(z) + x)


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    cell = wp.nn.DenseCell(6, 6, dtype=torch.float64) if kind == "dense" else PlainCell()
    first, head = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 1, dtype=torch.float64)
    return nn.Sequential(first, wp.EquilibriumLayer(cell, on_failure="raise"), head)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, k, generator=generator, dtype=torch.float64) for k in (4, 1))


def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (net(x) - y).square().mean()


def steps(net: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """Gradients of two training steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        loss(net, x, y).backward()
        seen.append({name.removeprefix("module."): p.grad.clone() for name, p in net.named_parameters()})
        optimizer.step()
    return seen


def sharded(kind: str, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """Gradients of two training steps of a model whose parameters are spread over the processes."""
    from torch.distributed.fsdp import fully_shard

    net = model(kind)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD,))
    for part in (net[1], net):  # the layer by itself, and the rest
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        loss(net, x, y).backward()
        seen.append({name: p.grad.full_tensor().clone() for name, p in net.named_parameters()})
        optimizer.step()
    return seen


def work(rank: int, folder: str) -> None:
    warnings.simplefilter("error", wp.errors.WellposedWarning)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    x, y = data()
    mine = slice(rank * 4, rank * 4 + 4)
    seen: dict[str, Any] = {}
    for kind in ("dense", "module"):
        seen[f"sharded {kind}"] = sharded(kind, x[mine], y[mine])
        net = nn.parallel.DistributedDataParallel(model(kind))
        seen[kind] = steps(net, x[mine], y[mine])
        del net  # freed after its process group it would join gloo's threads while it holds the lock that they wait for
    torch.save(seen, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_give_the_gradients_of_one(tmp_path):
    # torch is imported once for both processes
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(["wellposed"])
    torch.multiprocessing.start_processes(work, args=(str(tmp_path),), nprocs=WORLD, start_method="forkserver")
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    for kind in ("dense", "module"):
        whole = steps(model(kind), *data())
        for gradients in (part[name] for part in parts for name in (kind, f"sharded {kind}")):
            for ours, theirs in zip(gradients, whole, strict=True):
                assert ours.keys() == theirs.keys() and any(bool(g.any()) for g in theirs.values())
                for name, gradient in ours.items():
                    torch.testing.assert_close(gradient, theirs[name], rtol=1e-9, atol=1e-11)
