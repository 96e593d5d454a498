"""The variables that torchrun sets, where something else set them: one sentence."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from wellposed.errors import InvalidArgument, MissingPackage
from wellposed_lab.runs.config import resolve
from wellposed_lab.runs.launch import _explained, launch
from wellposed_lab.runs.processes import Interruption, joined

THERE = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE must be .*; got 'x'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE must be .*; got ''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be .*; got '0'"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE must be .*; got '-1'"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 and RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "x", **THERE}, "RANK must be .* 0 to 1; got 'x'"),
        ({"WORLD_SIZE": "2", "RANK": "2", **THERE}, "RANK must be .* 0 to 1; got '2'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "LOCAL_RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "MASTER_ADDR is not set"),
    ],
)
def test_a_wrong_variable_is_one_sentence(variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", *THERE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match=says) as caught, joined():
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "1", "RANK": "0"}, {"RANK": "0"}])
def test_one_process_is_a_world(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with joined() as world:
        assert (world.rank, world.size) == (0, 1)


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", **THERE}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_without_fabric_one_sentence_says_what_to_install(second_of_two: pytest.MonkeyPatch) -> None:
    second_of_two.setitem(sys.modules, "lightning_fabric", None)
    with pytest.raises(MissingPackage, match=r"need Lightning Fabric; install it with: pip install .*\[lightning\]"), joined():
        pass


@pytest.mark.parametrize(
    ("changes", "variables", "says"),
    [
        ([], {"MASTER_PORT": "x"}, "could not be joined"),
        ([], {"LOCAL_WORLD_SIZE": "3"}, "could not be joined"),
        (["run.device=cuda:1"], {}, "'cuda:1' is one device, and there are 2 processes: use run.device=cuda"),
        (["run.precision=bf16-mixed"], {}, "bf16-mixed needs run.dtype=float32; got float64"),
    ],
)
def test_what_fabric_cannot_do_is_one_sentence(
    changes: list[str], variables: dict[str, str], says: str, second_of_two: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning_fabric", reason="the extra 'lightning' is not installed")
    for name, value in variables.items():
        second_of_two.setenv(name, value)
    with pytest.raises(InvalidArgument, match=says) as caught, joined(resolve({}, changes).run):
        pass
    assert "\n" not in str(caught.value)


def test_the_launcher_names_the_missing_package_before_it_starts_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    with pytest.raises(MissingPackage, match=r"need Lightning Fabric; install it with: pip install .*\[lightning\]"):
        launch(2, ["train"])


@pytest.mark.parametrize(
    ("codes", "code", "says"),
    [
        ({0: 2, 1: -signal.SIGTERM}, 2, ""),  # the launcher ended the second because the first failed
        ({1: -signal.SIGTERM, 0: 2}, 2, ""),
        ({1: 1}, 1, ""),
        ({0: 3, 1: -signal.SIGKILL}, 3, "Process 1 of 2 was ended by SIGKILL"),
        ({0: -signal.SIGTERM, 1: -signal.SIGKILL}, 3, "Process 1 of 2 was ended by SIGKILL"),
        ({0: -signal.SIGALRM, 1: -signal.SIGKILL}, 3, "Process 1 of 2 was ended by SIGKILL"),
        ({1: -signal.SIGTERM}, 3, "Process 1 of 2 was ended by SIGTERM"),
    ],
)
def test_who_ended_a_run(codes: dict[int, int], code: int, says: str) -> None:
    found, text = _explained(codes, 2)
    assert found == code and text.startswith(says) and bool(text) == bool(says)


def test_one_process_has_nothing_to_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(InvalidArgument, match="run.strategy=fsdp spreads a model over several"):
        with joined(resolve({}, ["run.strategy=fsdp"]).run):
            pass


def test_processes_are_not_started_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(InvalidArgument, match="run.devices=2 needs 2 processes"), joined(resolve({}, ["run.devices=2"]).run):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize(("grace", "end"), [(0.05, -signal.SIGALRM), (None, 7)])
def test_a_process_that_cannot_stop_is_ended(grace: float | None, end: int) -> None:
    process = os.fork()
    if process == 0:
        with Interruption(grace) as interruption:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5 if grace is None else 30)
        os._exit(7 if interruption.asked else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == end
