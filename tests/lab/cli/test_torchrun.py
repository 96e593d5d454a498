"""Two processes under torchrun give what one gives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this build of torch has no torch.distributed with gloo",
)

#: Sums are added in another order, in float64; training multiplies what that changes.
TOLERANCE = 1e-9
# batches of 5, 5 and 1: in the last one a process has nothing to do
SMALL = [
    "data.name=sphere", "data.classes=null", "data.features=6", "data.n=14", "data.n_test=1", "data.validation=0.2",
    "model.width=12", "run.epochs=3", "run.batch_size=5", "run.threads=1", "run.tensorboard=false", "run.certify_every=3",
    "run.theorem=contraction", "optimizer.lr=1e-3",
]  # fmt: skip


def words(folder: Path) -> list[str]:
    return ["train", "-q", "--no-report", "--out", str(folder), *(w for change in SMALL for w in ("--set", change))]


def torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "wellposed"]
    return subprocess.run([*launcher, *command], capture_output=True, text=True, env=environment, timeout=240)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def together(cli: Any, *command: str) -> list[int]:
    """Two processes with the environment that torchrun makes; their exit codes."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [cli.start(*command, environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    return [cli.wait(process) for process in processes]


def test_two_processes_give_what_one_gives(cli: Any, tmp_path: Path) -> None:
    assert cli.run(*words(tmp_path / "one")) == 0, cli.output
    assert together(cli, *words(tmp_path / "two")) == [0, 0], cli.output
    assert cli.output.count("gaussian on sphere") == 1  # only one of them prints
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(one) == len(two) == 4
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert b[key] == (pytest.approx(value, rel=TOLERANCE) if isinstance(value, float) else value), key
    session = json.loads((tmp_path / "two" / "environment.json").read_text())["sessions"][0]
    assert session["processes"] == 2


def test_an_error_of_the_first_process_ends_both(cli: Any, tmp_path: Path) -> None:
    assert cli.run(*words(tmp_path / "run")) == 0
    assert together(cli, *words(tmp_path / "run")) == [2, 3]
    assert "holds a run already" in cli.output and "Traceback" not in cli.output


@pytest.mark.slow
def test_torchrun_goes_on_where_one_process_stopped(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert cli.run(*words(folder), "--set", "optimizer.schedule=constant") == 0
    more = torchrun("train", "-q", "--no-report", "--resume", str(folder), "--set", "run.epochs=5")
    assert more.returncode == 0, more.stderr
    whole = tmp_path / "whole"
    assert cli.run(*words(whole), "--set", "optimizer.schedule=constant", "--set", "run.epochs=5") == 0
    for a, b in zip(metrics(whole), metrics(folder), strict=True):
        assert b["train_loss"] == pytest.approx(a["train_loss"], rel=TOLERANCE)
