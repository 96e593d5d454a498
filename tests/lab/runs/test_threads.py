"""Threads by the size of the products: small networks take one, and the caller's number is given back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.errors import InvalidArgument
from wellposed_lab.report import _network
from wellposed_lab.runs import processes
from wellposed_lab.runs.config import resolve
from wellposed_lab.runs.processes import largest_product, on_threads, threads_for
from wellposed_lab.runs.run import read_config
from wellposed_lab.runs.training import train

QUICK = ["data.n=6", "model.width=5", "run.epochs=1", "run.tensorboard=false", "run.certify_every=0"]
SOURCE = Path(wp.__file__).parent


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    """What a caller might have set; 3 is not the default of a usual machine."""
    with on_threads(3):
        yield


class Watch:
    """Which numbers of threads torch had while it trained."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def on_batch(self, *_: Any) -> None:
        self.seen.add(torch.get_num_threads())

    def on_epoch(self, *_: Any) -> None:
        self.seen.add(torch.get_num_threads())


def threads_of_a_run(folder: Path, *changes: str) -> tuple[set[int], Any, Any]:
    """While it trains, in config.yaml and in environment.json."""
    watch = Watch()
    train(resolve({}, [*QUICK, *changes]), folder, listener=watch)
    session = json.loads((folder / "environment.json").read_text())["sessions"][-1]
    return watch.seen, read_config(folder).run.threads, session["threads"]


def test_a_small_network_trains_on_one_thread(tmp_path: Path) -> None:
    assert threads_of_a_run(tmp_path / "run") == ({1}, 1, 1)
    assert torch.get_num_threads() == 3  # a call of the library leaves what the caller chose


def test_large_products_get_what_torch_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SMALL", 2.0 * 6 * 5 * 5)  # as many operations as W @ z takes for 6 samples and 5 units
    assert threads_of_a_run(tmp_path / "run", "data.name=sphere", "data.features=2") == ({3}, 3, 3)


def test_a_number_that_was_said_is_taken(tmp_path: Path) -> None:
    assert threads_of_a_run(tmp_path / "run", "run.threads=2") == ({2}, 2, 2)
    assert torch.get_num_threads() == 3


def test_a_run_goes_on_with_the_threads_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    schedule = "optimizer.schedule=constant"
    threads_of_a_run(folder, schedule)
    monkeypatch.setattr(processes, "SMALL", 0.0)  # another machine would choose otherwise
    config = resolve(read_config(folder).model_dump(), ["run.epochs=2"])
    watch = Watch()
    train(config, folder, resume=True, listener=watch)
    assert watch.seen == {1} and read_config(folder).run.threads == 1


def test_the_page_of_a_small_network_is_made_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads_of_a_run(tmp_path / "run")
    used: list[int] = []
    monkeypatch.setattr(_network, "_predict", lambda *_: used.append(torch.get_num_threads()))
    assert not _network.network_state(tmp_path / "run").remarks
    assert used == [1] and torch.get_num_threads() == 3


def test_the_default_network_is_small_and_wide_ones_are_not() -> None:
    X = torch.zeros(100, 64)
    assert threads_for(nn.Linear(256, 256), X, batch=25) == 1
    assert threads_for(nn.Linear(2048, 2048), X, batch=25) == 3
    assert threads_for(nn.Linear(2048, 2048), X, batch=25, available=7) == 7
    assert threads_for(nn.Linear(512, 512), X, batch=100) == 1 and threads_for(nn.Linear(512, 512), torch.zeros(2000, 64)) == 3
    assert threads_for(nn.ReLU(), X) == 1


def test_largest_product() -> None:
    assert largest_product(nn.Linear(3, 7), (3,), 10) == 2 * 10 * 3 * 7
    assert largest_product(nn.Conv2d(3, 7, 5), (3, 8, 9), 10) == 2 * 10 * (3 * 7 * 25) * (8 * 9)
    assert largest_product(nn.BatchNorm1d(3), (3,), 10) == 0


def test_the_old_spelling_and_mistakes() -> None:
    assert resolve({}).run.threads == resolve({"run": {"threads": None}}).run.threads == "auto"
    for wrong in ("0", "many", "1.5"):
        with pytest.raises(InvalidArgument, match=r"run\.threads of the configuration is "):
            resolve({}, [f"run.threads={wrong}"])


def test_only_the_tool_sets_threads() -> None:
    """`import wellposed`, solves, layers, certificates and training by hand leave torch's threads alone."""
    setting = {path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py") if "set_num_threads" in path.read_text()}
    assert setting <= {"experiments", "cli"}
