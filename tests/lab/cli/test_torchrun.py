"""Several processes give what one gives, survive like one, and end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("lightning_fabric", reason="the extra 'lightning' is not installed")
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


#: Seconds from the death of a process within which the others end, also on a crowded machine.
SOON = 30
#: Seconds for everything else, which starts processes: below the limit of a test. A machine on which other work has the
#: processors is not to be taken for a hang: 240 s were too few for one torchrun, which had ended its run.
PATIENCE = 1100


def words(folder: Path, *more: str) -> list[str]:
    """Continues if there is a run, else starts it."""
    if (folder / "config.yaml").exists():
        return ["train", "-q", "--no-report", "--resume", str(folder)]
    changes = (word for change in [*SMALL, *more] for word in ("--set", change))
    return ["train", "-q", "--no-report", "--out", str(folder), *changes]


def torchrun(*command: str, count: int = 2) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(count),
        "-m",
        "wellposed",
    ]
    return subprocess.run([*launcher, *command], capture_output=True, text=True, env=environment, timeout=PATIENCE)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(cli: Any, *command: str, count: int = 2, folder: str | None = None, **first: Any) -> list[int]:
    """Processes with the environment that torchrun makes; `first` has options of the first one."""
    others = {} if folder is None else {"folder": folder}
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    return [
        cli.start(
            *command, environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **others, **({} if rank else first)
        )
        for rank in range(count)
    ]


def together(cli: Any, *command: str, **options: Any) -> list[int]:
    """The exit codes of processes that `start` starts."""
    return [cli.wait(process) for process in start(cli, *command, **options)]


def content(folder: Path) -> dict[str, bytes]:
    """What must not depend on how often a run was killed."""
    kept = ("metrics.jsonl", "certificates/*.json", "checkpoints/*.json", "checkpoints/*.safetensors")
    return {str(file.relative_to(folder)): file.read_bytes() for name in kept for file in sorted(folder.glob(name))}


def wait_for_rows(folder: Path, count: int) -> None:
    end, path = time.monotonic() + PATIENCE, folder / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < count:
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def assert_equal_to_rounding(one: Path, other: Path) -> None:
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert b[key] == (pytest.approx(value, rel=TOLERANCE) if isinstance(value, float) else value), key


@pytest.fixture(scope="module")
def one(cli: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    assert cli.run(*words(folder)) == 0, cli.output
    return folder


@pytest.fixture(scope="module")
def two(cli: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two processes."""
    folder = tmp_path_factory.mktemp("two") / "run"
    assert together(cli, *words(folder)) == [0, 0], cli.output
    assert cli.output.count("gaussian on sphere") == 1  # only one of them prints
    return folder


def test_two_processes_give_what_one_gives(one: Path, two: Path) -> None:
    assert len(metrics(one)) == 4
    assert_equal_to_rounding(one, two)
    session = json.loads((two / "environment.json").read_text())["sessions"][0]
    assert session["processes"] == 2
    assert [file.name for file in sorted(two.glob("certificates/*"))] == ["epoch-00000.json", "epoch-00003.json"]


def test_pieces_of_batches_and_clipped_gradients(cli: Any, tmp_path: Path) -> None:
    """In two processes with three pieces each, most pieces of 5 samples have one sample or none."""
    clipped = "optimizer.clip=0.01"
    assert cli.run(*words(tmp_path / "plain", clipped)) == 0, cli.output
    assert cli.run(*words(tmp_path / "one", clipped, "run.accumulate=2")) == 0, cli.output
    assert together(cli, *words(tmp_path / "two", clipped, "run.accumulate=3")) == [0, 0], cli.output
    for name in ("one", "two"):
        assert_equal_to_rounding(tmp_path / "plain", tmp_path / name)


SPREAD = ["run.strategy=fsdp", "optimizer.name=adam", "optimizer.clip=0.01", "run.accumulate=2"]


def test_spread_over_processes_by_fsdp(cli: Any, tmp_path: Path) -> None:
    """FSDP2 gives what one process gives; a killed run continues with the same bits, and in one process too."""
    plain = tmp_path / "plain"
    assert cli.run(*words(plain, *SPREAD[1:])) == 0, cli.output
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert together(cli, *words(whole, *SPREAD)) == [0, 0], cli.output
    assert_equal_to_rounding(plain, whole)
    assert together(cli, *words(folder, *SPREAD), kill_at=[31, False]) == [-signal.SIGKILL, 3], cli.output
    assert "Another process of this run ended" in cli.output and "Traceback" not in cli.output
    assert 0 < len(metrics(folder)) < 4
    assert together(cli, *words(folder)) == [0, 0], cli.output
    assert content(folder) == content(whole)
    assert cli.run(*words(folder), "--set", "run.strategy=ddp", "--set", "run.epochs=4") == 0, cli.output
    assert len(metrics(folder)) == 5  # the checkpoint is whole


@pytest.mark.parametrize("write", [pytest.param(12, marks=pytest.mark.slow), 31])
def test_the_first_process_is_killed(cli: Any, two: Path, write: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    processes = start(cli, *words(folder), kill_at=[write, False])
    assert cli.wait(processes[0]) == -signal.SIGKILL
    began = time.monotonic()
    assert cli.wait(processes[1]) == 3
    assert time.monotonic() - began < SOON
    assert "Another process of this run ended" in cli.output and "Traceback" not in cli.output
    assert together(cli, *words(folder)) == [0, 0], cli.output
    assert content(folder) == content(two)


LONG = ["run.epochs=20", "run.certify_every=0"]


@pytest.fixture(scope="module")
def long(cli: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two processes over more epochs."""
    folder = tmp_path_factory.mktemp("long") / "run"
    assert together(cli, *words(folder, *LONG)) == [0, 0], cli.output
    return folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "interrupted"])
def test_the_second_process_is_ended(cli: Any, long: Path, number: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    processes = start(cli, *words(folder, *LONG))
    wait_for_rows(folder, 3)
    os.kill(processes[1], number)
    began = time.monotonic()
    ends = [cli.wait(process) for process in processes]
    assert time.monotonic() - began < SOON
    assert ends == ([3, -signal.SIGKILL] if number == signal.SIGKILL else [130, 0]), cli.output
    assert "Traceback" not in cli.output and len(metrics(folder)) < 21
    assert together(cli, *words(folder)) == [0, 0], cli.output
    assert content(folder) == content(long)


def test_an_error_within_a_step_ends_all(cli: Any, tmp_path: Path) -> None:
    ends = together(cli, *words(tmp_path / "run", "model.on_failure=raise", "model.max_steps=2", "run.certify_every=0"))
    assert 1 in ends and set(ends) <= {1, 3} and "Traceback" not in cli.output  # 1 is NotConverged


@pytest.mark.slow
def test_spread_over_another_number_of_processes(cli: Any, tmp_path: Path) -> None:
    """Rows of parameters in parts of other sizes, and the state of the optimizer with them. Processes that are not forked from
    one read the names in files in orders of their own."""
    folder, one = tmp_path / "run", tmp_path / "one"
    constant = [*SPREAD, "optimizer.schedule=constant", "model.width=8", "run.certify_every=0"]
    assert together(cli, *words(folder, *constant)) == [0, 0], cli.output
    for count, epochs in ((3, 5), (2, 7)):
        more = torchrun("train", "-q", "--no-report", "--resume", str(folder), "--set", f"run.epochs={epochs}", count=count)
        assert more.returncode == 0, more.stderr
    assert cli.run(*words(one, *constant[1:], "run.epochs=7")) == 0, cli.output
    assert_equal_to_rounding(one, folder)
    last = [sorted(run.glob("checkpoints/*.safetensors"))[-1] for run in (one, folder)]
    ours, theirs = (safetensors.torch.load_file(path) for path in last)
    for name, tensor in ours.items():
        if name.startswith("optimizer/"):
            torch.testing.assert_close(tensor, theirs[name], rtol=TOLERANCE, atol=TOLERANCE * float(tensor.abs().max()))


@pytest.mark.slow
def test_three_processes_give_the_same_bits_after_a_kill(cli: Any, tmp_path: Path) -> None:
    """With three, the order of a sum matters, and torch may choose another one after the first step."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    assert together(cli, *words(whole, "run.epochs=6"), count=3) == [0, 0, 0], cli.output
    assert together(cli, *words(folder, "run.epochs=6"), count=3, kill_at=[40, False]) == [-signal.SIGKILL, 3, 3]
    assert together(cli, *words(folder), count=3) == [0, 0, 0], cli.output
    assert content(folder) == content(whole)


def test_bfloat16_around_the_equilibrium(cli: Any, tmp_path: Path) -> None:
    """The read-out multiplies in bfloat16, with 8 bits; the equilibrium and evaluations do not."""
    changes = ["data.name=digits", "data.classes=[0, 1, 2]", "model.name=dense", "run.dtype=float32", "run.certify_every=0"]
    assert cli.run(*words(tmp_path / "full", *changes)) == 0, cli.output
    assert cli.run(*words(tmp_path / "mixed", *changes, "run.precision=bf16-mixed")) == 0, cli.output
    full, mixed = ([row["train_loss"] for row in metrics(tmp_path / name)] for name in ("full", "mixed"))
    assert full[0] == mixed[0] and full[-1] != mixed[-1]
    assert mixed[-1] == pytest.approx(full[-1], rel=2**-6) and mixed[-1] < mixed[0]


def test_an_error_of_the_first_process_ends_both(cli: Any, tmp_path: Path) -> None:
    command = words(tmp_path / "run")
    assert cli.run(*command, "--set", "run.epochs=1") == 0
    assert together(cli, *command) == [2, 3]
    assert "holds a run already" in cli.output and "Traceback" not in cli.output


@pytest.mark.slow
def test_torchrun_continues_where_one_process_stopped(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert cli.run(*words(folder, "optimizer.schedule=constant")) == 0
    more = torchrun("train", "-q", "--no-report", "--resume", str(folder), "--set", "run.epochs=5")
    assert more.returncode == 0, more.stderr
    whole = tmp_path / "whole"
    assert cli.run(*words(whole, "optimizer.schedule=constant", "run.epochs=5")) == 0
    for a, b in zip(metrics(whole), metrics(folder), strict=True):
        assert b["train_loss"] == pytest.approx(a["train_loss"], rel=TOLERANCE)


@pytest.mark.slow
def test_devices_starts_processes(cli: Any, one: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert cli.run(*words(folder, "run.devices=2")) == 0, cli.output
    assert cli.output.splitlines()[-1] == str(folder) and cli.output.count("gaussian on sphere") == 1
    assert_equal_to_rounding(one, folder)
    assert cli.run(*words(one.parent / "copy", "run.devices=2"), "--set", "data.n=-1") == 2
    assert cli.output.count("data.n of") == 1  # found before any process is started


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="children are found in /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_dies_ends_the_others(cli: Any, rank: int, tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    long = ["run.devices=2", "run.epochs=60", "run.certify_every=0"]
    launcher = cli.start(*words(folder, *long))
    wait_for_rows(folder, 3)
    first = json.loads((folder / "lock").read_text())["pid"]
    other = next(p for p in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()) if p != first)
    os.kill(other if rank else first, signal.SIGKILL)
    began = time.monotonic()
    assert cli.wait(launcher) == 3
    assert time.monotonic() - began < SOON
    assert f"Process {rank} of 2 was ended by SIGKILL" in cli.output and f"--resume {folder}" in cli.output
    assert "Traceback" not in cli.output and not Path(f"/proc/{first if rank else other}").exists()
    assert cli.run(*words(folder)) == 0, cli.output  # run.devices is kept
    assert cli.run(*words(whole, *long)) == 0, cli.output
    assert content(folder) == content(whole)


NORMALIZED = """
import torch

class Normalized(torch.nn.Sequential):
    def __init__(self, in_features):
        super().__init__(torch.nn.Linear(in_features, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
"""


@pytest.mark.slow
def test_buffers_are_those_of_the_first_process(cli: Any, tmp_path: Path) -> None:
    """Each process changes its own in a step; evaluations of all processes use those that the checkpoint has."""
    (tmp_path / "normalized.py").write_text(NORMALIZED)
    own = ["model.class=normalized.Normalized", "run.batch_size=11", "run.certify_every=0"]
    for strategy in ("ddp", "fsdp"):
        command = words(tmp_path / strategy, *own, f"run.strategy={strategy}")
        assert together(cli, *command, "--allow-code", folder=str(tmp_path)) == [0, 0], cli.output
        last = load_run_in(tmp_path, tmp_path / strategy)
        assert metrics(tmp_path / strategy)[-1]["train_loss"] == pytest.approx(last, rel=TOLERANCE)
    assert_equal_to_rounding(tmp_path / "ddp", tmp_path / "fsdp")


def load_run_in(place: Path, folder: Path) -> float:
    """The training loss of the model in the last checkpoint, by one process."""
    code = (
        "import sys, pathlib, torch\n"
        "from wellposed_lab.runs.training import load_run\n"
        "with torch.no_grad():\n"
        "    _, problem, _ = load_run(pathlib.Path(sys.argv[1]), allow_code=True)\n"
        "    X, y = problem.parts.train\n"
        "    print(float(problem.loss.total(problem.model.eval()(X), y)) / len(y))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=place, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


SLOW_CLASS = """
import os, time
import torch

class Slow(torch.nn.Module):
    def __init__(self, in_features):
        super().__init__()
        self.last = torch.nn.Linear(in_features, 1, dtype=torch.float64)

    def forward(self, x):
        if not self.training and os.environ["RANK"] == "0" and os.path.exists("busy"):
            time.sleep(600)  # as a long certificate does
        return self.last(x)[:, 0]
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="children are found in /proc")
def test_a_process_that_is_busy_ends_too(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process computes for minutes, and needs the other one only then."""
    (tmp_path / "slow.py").write_text(SLOW_CLASS)
    folder, own = tmp_path / "run", ["model.class=slow.Slow", "run.devices=2", "run.epochs=100000", "run.certify_every=0"]
    launcher = cli.start(*words(folder, *own), "--allow-code", environment={"PYTHONPATH": str(tmp_path)}, folder=str(tmp_path))
    wait_for_rows(folder, 3)
    first = json.loads((folder / "lock").read_text())["pid"]
    other = next(p for p in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()) if p != first)
    (tmp_path / "busy").touch()
    time.sleep(1)
    os.kill(other, signal.SIGKILL)
    began = time.monotonic()
    assert cli.wait(launcher) == 3
    assert time.monotonic() - began < SOON
    assert "Process 1 of 2 was ended by SIGKILL" in cli.output and f"--resume {folder}" in cli.output
    assert not Path(f"/proc/{first}").exists() and list(folder.glob("checkpoints/*.json"))


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launcher = cli.start(*words(folder, "run.devices=2", "run.epochs=100000", "run.certify_every=0"))
    wait_for_rows(folder, 2)
    os.kill(launcher, signal.SIGKILL)
    assert cli.wait(launcher) == -signal.SIGKILL
    end = time.monotonic() + SOON
    while (folder / "lock").read_text():
        assert time.monotonic() < end, "the first process holds the lock"
        time.sleep(0.1)
    assert list(folder.glob("checkpoints/*.json"))
