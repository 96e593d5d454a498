"""Processes of this machine, and a real Dask cluster on loopback: the same numbers as in this process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from wellposed.errors import InvalidArgument
from wellposed_lab.papers import reproduce
from wellposed_lab.papers.ling2022.lemma1 import Lemma1

NAME, CHANGES = "ling2022/lemma1", {"widths": (8, 16), "draws": 3, "seeds": (0, 1)}
#: A free port for the page of the cluster: None takes 8787, which another cluster may have.
LOOPBACK: dict[str, Any] = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "silence_logs": 40}


def values(**options: Any) -> list[dict[str, Any]]:
    return [result.values for result in reproduce(NAME, changes=CHANGES, **options).results]


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What this process finds; afterwards it refuses to work, so that others must."""
    found = values()

    def refuse(self: Lemma1, task: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("a task ran in the process that gave it away")

    monkeypatch.setattr(Lemma1, "run", refuse)
    return found


def test_two_processes_give_the_same_numbers(tmp_path: Path, expected: list[dict[str, Any]]) -> None:
    pytest.importorskip("joblib", reason="several processes need joblib")
    assert values(jobs=2, out=tmp_path, figure=False) == expected
    assert len(list((tmp_path / "ling2022" / "lemma1" / "tasks").iterdir())) == 4


def test_a_dask_scheduler_gives_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a worker in this process, because processes of its own start slowly: they are for the next test."""
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    pytest.importorskip("joblib", reason="joblib is not installed")
    alone, threads, run = values(), [], Lemma1.run

    def noted(self: Lemma1, task: dict[str, Any]) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return run(self, task)

    monkeypatch.setattr(Lemma1, "run", noted)
    with distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, protocol="tcp://", **LOOPBACK) as cluster:
        found = values(dask=cluster.scheduler_address, out=tmp_path, figure=False)
    assert found == alone
    assert len(threads) == 4 and all("Dask" in name for name in threads)


@pytest.mark.slow
def test_a_dask_cluster_gives_the_same_numbers(tmp_path: Path, expected: list[dict[str, Any]]) -> None:
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    pytest.importorskip("joblib", reason="joblib is not installed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, **LOOPBACK) as cluster:
        with distributed.Client(cluster) as client:
            client.wait_for_workers(2, timeout=120)
        found = values(dask=cluster.scheduler_address, out=tmp_path, figure=False)
    assert found == expected
    assert len(list((tmp_path / "ling2022" / "lemma1" / "tasks").iterdir())) == 4


def test_no_scheduler() -> None:
    pytest.importorskip("distributed", reason="dask.distributed is not installed")
    pytest.importorskip("joblib", reason="joblib is not installed")
    with pytest.raises(InvalidArgument, match="No Dask scheduler answers at 'nonsense://x'"):
        values(dask="nonsense://x")
