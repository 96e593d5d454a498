"""Processes of this machine, and a real Dask cluster on loopback: the same numbers as in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wellposed.errors import InvalidArgument
from wellposed.experiments import reproduce

NAME, CHANGES = "ling2022/lemma1", {"widths": (8, 16), "draws": 3, "seeds": (0, 1)}


def values(**options: Any) -> list[dict[str, Any]]:
    return [result.values for result in reproduce(NAME, changes=CHANGES, **options).results]


def test_two_processes_give_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("joblib", reason="several processes need joblib")
    assert values(jobs=2, out=tmp_path, figure=False) == values()
    assert len(list((tmp_path / "ling2022" / "lemma1" / "tasks").iterdir())) == 4


def test_a_dask_cluster_gives_the_same_numbers(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    pytest.importorskip("joblib", reason="joblib is not installed")
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None, silence_logs=40
    )
    with cluster:
        cluster.wait_for_workers(2) if hasattr(cluster, "wait_for_workers") else None
        found = values(dask=cluster.scheduler_address, out=tmp_path, figure=False)
        with distributed.Client(cluster.scheduler_address) as client:
            workers = client.scheduler_info()["workers"].values()
            done = sum(worker["metrics"]["executing"] >= 0 for worker in workers)
    assert found == values()
    assert done == 2
    assert len(list((tmp_path / "ling2022" / "lemma1" / "tasks").iterdir())) == 4


def test_no_scheduler() -> None:
    pytest.importorskip("distributed", reason="dask.distributed is not installed")
    pytest.importorskip("joblib", reason="joblib is not installed")
    with pytest.raises(InvalidArgument, match="No Dask scheduler answers at 'nonsense://x'"):
        values(dask="nonsense://x")
