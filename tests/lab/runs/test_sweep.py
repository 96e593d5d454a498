"""Sweeps: every run is that of `train`, a sweep continues as a whole, and mean and spread are those of NumPy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wellposed.errors import InvalidArgument, RunError, RunLocked
from wellposed_lab.runs import sweep as module
from wellposed_lab.runs.config import RunConfig, resolve
from wellposed_lab.runs.parallel import unordered
from wellposed_lab.runs.sweep import Sweep, parse_grid, read_sweep, run_sweep, spreads
from wellposed_lab.runs.sweep_ended import ended
from wellposed_lab.runs.training import train

SMALL = [
    "data.name=sphere", "data.features=5", "data.n=8", "data.n_test=4", "model.width=10", "model.rtol=1e-6", "run.epochs=2",
    "run.batch_size=4", "run.tensorboard=false", "run.certify_every=2", "run.theorem=contraction",
]  # fmt: skip
GRID = ["optimizer.lr=1e-3,1e-2"]


def small(grid: list[str] = GRID, seeds: int = 2, more: tuple[str, ...] = ()) -> Sweep:
    return Sweep(resolve({}, [*SMALL, *more]).model_dump(exclude_unset=True), parse_grid(grid), seeds)


def files(folder: Path) -> dict[str, bytes]:
    kept = ("*/metrics.jsonl", "*/config.yaml", "*/checkpoints/*", "*/certificates/*")
    return {str(p.relative_to(folder)): p.read_bytes() for name in kept for p in sorted((folder / "runs").glob(name))}


def numbers(folder: Path) -> dict[str, bytes]:
    """The same without the descriptions of checkpoints, which have the state of Python's generator: Dask draws from it too."""
    return {name: content for name, content in files(folder).items() if not ("checkpoints" in name and name.endswith(".json"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "whole"
    run_sweep(small(), folder)
    return folder


def test_every_run_is_that_of_train(whole: Path, tmp_path: Path) -> None:
    names = [path.name for path in sorted((whole / "runs").iterdir())]
    assert names == [f"{i:03d}-optimizer.lr={lr}-seed={i % 2}" for i, lr in enumerate(["1e-3", "1e-3", "1e-2", "1e-2"])]
    train(resolve({}, [*SMALL, "optimizer.lr=1e-2", "run.seed=1", "run.threads=1"]), tmp_path / "alone")
    assert (tmp_path / "alone" / "metrics.jsonl").read_bytes() == (whole / "runs" / names[3] / "metrics.jsonl").read_bytes()


def test_mean_and_spread(whole: Path) -> None:
    points = json.loads((whole / "results.json").read_text())["points"]
    runs = sorted((whole / "runs").iterdir())
    for index, point in enumerate(points):
        assert point["point"] == {"optimizer.lr": ["1e-3", "1e-2"][index]} and point["runs"] == point["averaged"] == 2
        last = [
            json.loads(run.joinpath("metrics.jsonl").read_text().splitlines()[-1]) for run in runs[2 * index : 2 * index + 2]
        ]
        for name in ("train_loss", "test_loss", "equilibrium_steps"):
            values = [row[name] for row in last]
            assert point["measures"][name]["mean"] == pytest.approx(np.mean(values), rel=1e-14)
            assert point["measures"][name]["spread"] == pytest.approx(np.std(values, ddof=1), rel=1e-12)
        assert point["certified"] == sum(bool(row["certified"]) for row in last)


def test_a_sweep_continues_as_a_whole(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, trained = tmp_path / "sweep", []

    def counted(config: Any, place: Path, **options: Any) -> Any:
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(place.name)
        return train(config, place, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "train", counted)
        with pytest.raises(KeyboardInterrupt):
            run_sweep(small(), folder)
    assert not (folder / "results.json").exists()
    # the third run was killed at its end, the fourth did not begin
    third = small().runs()[2]
    train(third.config, folder / "runs" / third.name)
    (folder / "runs" / third.name / "summary.json").unlink()
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "train", lambda config, place, **o: (trained.append(place.name), train(config, place, **o))[1])
    run_sweep(read_sweep(folder), folder, listener=lambda done, total: seen.append((done, total)))
    assert trained == [run.name for run in small().runs()] and seen == [(2, 4), (3, 4), (4, 4)]
    assert files(folder) == files(whole)
    before = (folder / "results.json").read_bytes()
    run_sweep(small(), folder)  # the same command again
    assert len(trained) == 4 and (folder / "results.json").read_bytes() == before


def test_a_run_that_fails_is_counted_and_not_averaged(tmp_path: Path) -> None:
    sweep = small(["model.max_steps=1,200"], 1, ("model.on_failure=raise", "run.certify_every=0"))
    results = run_sweep(sweep, tmp_path / "sweep")
    assert "error" in results[0] and results[1]["stop"] == "epochs"
    for first in (results[0], {"stop": "not_finite", "last": {"train_loss": 1.0}}):
        points = spreads(sweep.runs(), [first, results[1]])
        assert [point["averaged"] for point in points] == [0, 1] and points[0]["measures"] == {}
        assert points[1]["measures"]["train_loss"] == {"mean": results[1]["last"]["train_loss"], "spread": None}  # of one run


def test_summaries_of_unknown_origin(tmp_path: Path) -> None:
    run = small().runs()[0]
    (tmp_path / "config.yaml").write_text(run.config.to_yaml())
    for value in ("Infinity", "NaN", "1" + 400 * "0", "1e308", "true"):  # not averaged
        last = f'{{"epoch": 2, "train_loss": {value}, "test_loss": 1.5}}'
        (tmp_path / "summary.json").write_text(f'{{"stop": "epochs", "last": {last}}}')
        if value in ("1e308", "true"):  # no row has the others
            (tmp_path / "metrics.jsonl").write_text(last + "\n")
            assert ended(run.config, tmp_path) == {"stop": "epochs", "last": json.loads(last)}
        (point,) = spreads([run, run], [{"stop": "epochs", "last": json.loads(last)}] * 2)
        assert point["measures"] == {"test_loss": {"mean": 1.5, "spread": 0.0}}
    for certificate in ("[1]", '"x"'):
        (tmp_path / "summary.json").write_text(f'{{"stop": "epochs", "last": {last}, "certificate": {certificate}}}')
        with pytest.raises(RunError, match="its certificate is not an object. Remove it: the sweep writes it anew"):
            ended(run.config, tmp_path)
    for certified in (True, False):  # a summary does not claim more than the rows
        row = {"epoch": 2, "certified": certified}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        found = {"stop": "epochs", "last": row, "certificate": {"verdict": "certified"}}
        (tmp_path / "summary.json").write_text(json.dumps(found))
        assert ended(run.config, tmp_path) == (found if certified else None)
    for text in ("{", "[]", "", "[" * 5000):
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(RunError, match=r"summary.json .*\. Remove it: the sweep writes it anew"):
            ended(run.config, tmp_path)


_FALSE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "interrupted": lambda found: {**found, "stop": "interrupted"},
    "unknown stop": lambda found: {**found, "stop": "done"},
    "stop of another kind": lambda found: {**found, "stop": ["epochs"]},
    "stop that is not configured": lambda found: {**found, "stop": "patience"},
    "other number": lambda found: {**found, "last": {**found["last"], "test_loss": 0.0}},
    "more numbers": lambda found: {**found, "last": {**found["last"], "test_accuracy": 1.0}},
    "infinite": lambda found: {**found, "last": {**found["last"], "test_loss": float("inf")}},
    "no numbers": lambda found: {**found, "last": None},
}


@pytest.mark.parametrize("false", _FALSE)
def test_a_summary_that_contradicts_its_records_is_written_anew(false: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    shutil.copytree(whole, folder)
    path = folder / "runs" / small().runs()[0].name / "summary.json"
    truth = json.loads(path.read_text())
    path.write_text(json.dumps(_FALSE[false](truth)))
    results = run_sweep(small(), folder)
    assert results[0]["last"] == truth["last"] and results[0]["stop"] == "epochs"
    assert json.loads(path.read_text())["last"] == truth["last"]
    before, after = (json.loads((place / "results.json").read_text())["points"] for place in (whole, folder))
    assert before == after


@pytest.mark.parametrize(
    ("grid", "seeds", "says"),
    [
        (["optimizer.lr"], 1, "needs section.key=value,value.*got 'optimizer.lr'"),
        (["lr=1,2"], 1, "needs section.key=value"),
        (["optimizer.lr="], 1, "needs section.key=value"),
        (["optimizer.lr=1,1"], 1, "has a value twice"),
        (["optimizer.lr=1e-3,0.001"], 2, "has a configuration twice: .*1e-3.* and .*0.001"),
        (["optimizer.lr=1", "optimizer.lr=2"], 1, "optimizer.lr twice"),
        (["optimizer.lr=1,[2"], 1, "is not a YAML file"),
        (["optimizer.lr=-1,1"], 1, "optimizer.lr of the configuration is -1"),
        (["optimizer.nonsense=1,2"], 1, "Unknown key"),
        (["run.seed=1,2"], 2, "omit one of them"),
        (["run.devices=1,2"], 1, "each run in one process"),
        ([], 0, "at least 1; got 0"),
        ([], 10**6, "1,000,000 runs"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(grid: list[str], seeds: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=says):
        run_sweep(small(grid, seeds), tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("grid", ["run.epochs=2,4", "run.stop_loss=0.1,0.2", "run.patience=2,3"])
def test_the_length_of_a_run_is_a_value_of_a_grid(grid: str) -> None:
    key, values = grid.split("=")
    runs = small([grid], 1, ("optimizer.schedule=constant",)).runs()
    assert [f"{getattr(run.config.run, key.split('.')[1]):g}" for run in runs] == values.split(",")


def test_values_with_commas() -> None:
    assert parse_grid(["data.classes=[0, 1],[2, 3]"]) == {"data.classes": [[0, 1], [2, 3]]}


def test_other_folders_are_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="holds another sweep"):
        run_sweep(small(seeds=3), whole)
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match="holds other files"):
        run_sweep(small(), tmp_path)
    with pytest.raises(InvalidArgument, match="no sweep.json"):
        read_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text('{"base": 1}')
    with pytest.raises(RunError, match="is damaged"):
        read_sweep(tmp_path)


def test_a_run_of_another_configuration_is_refused(tmp_path: Path) -> None:
    sweep = small(seeds=1)
    first = sweep.runs()[0]
    run_sweep(sweep, tmp_path / "sweep")
    path = tmp_path / "sweep" / "runs" / first.name / "config.yaml"
    path.write_text(path.read_text().replace("width: 10", "width: 11"))
    with pytest.raises(RunError, match="another configuration"):
        run_sweep(sweep, tmp_path / "sweep")


def with_run(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update=changes)})


@pytest.mark.parametrize("killed", [False, True])
def test_a_shorter_run_is_trained_on(killed: bool, tmp_path: Path) -> None:
    sweep = small(["optimizer.lr=1e-3"], 1, ("optimizer.schedule=constant", "run.certify_every=0"))
    (run,) = sweep.runs()
    (expected,) = run_sweep(sweep, tmp_path / "whole")
    module._begin(sweep, tmp_path / "sweep")
    place = tmp_path / "sweep" / "runs" / run.name
    train(with_run(run.config, epochs=1), place)
    if killed:  # after a longer one had begun in its place
        (place / "config.yaml").write_text(run.config.to_yaml())
    (found,) = run_sweep(sweep, tmp_path / "sweep")
    assert found["epochs"] == 2 and found["last"] == expected["last"]
    assert files(tmp_path / "sweep").keys() == files(tmp_path / "whole").keys()
    assert (place / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "runs" / run.name / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"epochs": 3}, "was trained for 3 epochs, and the sweep has run.epochs=2; remove it, or choose another --out"),
        ({"stop_loss": 1e9}, "was trained with run.stop_loss=1000000000.0, and the sweep has None; remove it"),
        ({"patience": 1}, "was trained with run.patience=1, and the sweep has None; remove it"),
    ],
    ids=["epochs", "stop_loss", "patience"],
)
def test_a_run_that_ends_elsewhere_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    more = ("optimizer.schedule=constant", "run.certify_every=0", "data.validation=0.25")
    sweep = small(["optimizer.lr=1e-3"], 1, more)
    (run,) = sweep.runs()
    module._begin(sweep, tmp_path / "sweep")
    place = tmp_path / "sweep" / "runs" / run.name
    train(with_run(run.config, **changes), place)
    with pytest.raises(RunError, match=says):
        run_sweep(sweep, tmp_path / "sweep")
    if "epochs" in changes:  # also if only the rows say so
        (place / "config.yaml").write_text(run.config.to_yaml())
        with pytest.raises(RunError, match=says):
            run_sweep(sweep, tmp_path / "sweep")


def test_an_error_of_any_kind_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(config: Any, place: Path, **options: Any) -> Any:
        if "1e-3" in place.name:
            raise ZeroDivisionError("in a class\nof the user")
        return train(config, place, **options)

    monkeypatch.setattr(module, "train", fails)
    results = run_sweep(small(seeds=1, more=("run.certify_every=0",)), tmp_path / "sweep")
    assert results[0] == {"error": "ZeroDivisionError: in a class of the user"} and results[1]["stop"] == "epochs"


def test_a_second_process_is_kept_out(whole: Path) -> None:
    before = (whole / "results.json").read_bytes()
    with module._alone(whole), pytest.raises(RunLocked, match="is in use by another process"):
        run_sweep(small(), whole)
    run_sweep(small(), whole)
    assert (whole / "results.json").read_bytes() == before


def _dies(task: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return task


@pytest.mark.slow
def test_a_killed_process_is_a_sentence() -> None:
    pytest.importorskip("joblib", reason="joblib is not installed")
    with pytest.raises(RunError, match="was ended from outside.* continue, if need be with fewer processes"):
        list(unordered(_dies, [1, 2], jobs=2))


def test_a_sweep_without_workers_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="jobs must be an integer of at least 1"):
        run_sweep(small(), tmp_path / "sweep", jobs=0)
    pytest.importorskip("distributed", reason="dask.distributed is not installed")
    with pytest.raises(InvalidArgument, match="No Dask scheduler answers at 'nonsense://1'"):
        run_sweep(small(), tmp_path / "sweep", dask="nonsense://1")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_scheduler_without_workers_is_a_sentence(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    options: dict[str, Any] = {"host": "127.0.0.1", "dashboard_address": None, "silence_logs": 50}
    with distributed.LocalCluster(n_workers=0, **options) as cluster:
        with pytest.raises(InvalidArgument, match="has no workers. Start some with: dask worker tcp://"):
            list(unordered(abs, [1, 2], dask=cluster.scheduler_address))
        with pytest.raises(InvalidArgument, match="has no workers"):
            run_sweep(small(), tmp_path / "sweep", dask=cluster.scheduler_address)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_lost_worker_of_a_cluster(tmp_path: Path) -> None:
    """Its run continues on the other one, with the same bits."""
    pytest.importorskip("joblib", reason="joblib is not installed")
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    sweep = small(["optimizer.lr=1e-4,1e-3"], 1, ("run.epochs=40", "run.certify_every=0"))
    run_sweep(sweep, tmp_path / "whole")
    options: dict[str, Any] = {"host": "127.0.0.1", "dashboard_address": None, "silence_logs": 50}
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, **options) as cluster:
        killed: list[int] = []

        def kill_the_first() -> None:
            lock = tmp_path / "sweep" / "runs" / sweep.runs()[0].name / "lock"
            while not list(lock.parent.glob("checkpoints/*.json")):
                time.sleep(0.01)
            killed.append(json.loads(lock.read_text())["pid"])
            os.kill(killed[0], signal.SIGKILL)

        killer = threading.Thread(target=kill_the_first, daemon=True)
        killer.start()
        results = run_sweep(sweep, tmp_path / "sweep", dask=cluster.scheduler_address)
        killer.join(timeout=5)
    assert killed and [result["stop"] for result in results] == ["epochs", "epochs"]
    assert numbers(tmp_path / "sweep") == numbers(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["joblib", "dask"])
def test_other_processes_give_the_same_bits(where: str, whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("joblib", reason="joblib is not installed")
    if where == "joblib":
        run_sweep(small(), tmp_path / "sweep", jobs=2)
        assert files(tmp_path / "sweep") == files(whole)
    else:
        distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
        options: dict[str, Any] = {"host": "127.0.0.1", "dashboard_address": None, "silence_logs": 40}
        with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, **options) as cluster:
            run_sweep(small(), tmp_path / "sweep", dask=cluster.scheduler_address)
    assert numbers(tmp_path / "sweep") == numbers(whole)
