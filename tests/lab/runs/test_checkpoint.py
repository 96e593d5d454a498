"""Checkpoints give everything back, and damaged or foreign ones are refused."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint_problems import KINDS, forge, setup, steps
from wellposed.errors import CheckpointRefused, RunError
from wellposed_lab.runs.checkpoint import (
    Progress,
    capture,
    check_point,
    find,
    load,
    newest,
    prune,
    restore,
    save,
    tidy,
)


@pytest.mark.parametrize("kind", list(KINDS))
def test_going_on_gives_the_same_bits(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    model, optimizer = setup(kind)
    steps(model, optimizer, 3)
    progress = Progress(epoch=2, step=3, batch=1, order=torch.tensor([2, 0, 1]), totals=[0.1, 5.0], best=1 / 3, best_epoch=1)
    path = save(capture(model, optimizer, progress, fingerprint="f"), tmp_path)
    expected = steps(model, optimizer, 4)
    other, its_optimizer = setup(kind, seed=9)
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    back = restore(load(path), other, its_optimizer)
    assert steps(other, its_optimizer, 4) == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.equal(back.order, progress.order)
    assert {**back.__dict__, "order": 0} == {**progress.__dict__, "order": 0}


def test_a_capture_is_a_copy(tmp_path: Path) -> None:
    model, optimizer = setup()
    steps(model, optimizer, 1)
    kept = capture(model, optimizer, Progress(), fingerprint="f")
    before = {name: tensor.clone() for name, tensor in kept.tensors.items()}
    steps(model, optimizer, 1)
    assert all(torch.equal(kept.tensors[name], tensor) for name, tensor in before.items())


def two(folder: Path) -> tuple[Path, Path]:
    """An older and a newer checkpoint."""
    model, optimizer = setup()
    paths = []
    for step in (1, 2):
        steps(model, optimizer, 1)
        paths.append(save(capture(model, optimizer, Progress(epoch=step, step=step), fingerprint="f"), folder))
    return paths[0], paths[1]


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES = {
    "is truncated": lambda path: os.truncate(path.with_suffix(".safetensors"), 100),
    "is damaged: its checksum": lambda path: path.with_suffix(".safetensors").write_bytes(
        path.with_suffix(".safetensors").read_bytes()[:-1] + b"\x77"
    ),
    r"cannot be read \(No such file": lambda path: path.with_suffix(".safetensors").unlink(),
    "cannot be read as JSON": lambda path: os.truncate(path, 40),
    "is no checkpoint of wellposed": lambda path: path.write_text('{"format": "other"}'),
    "version 99": lambda path: change_json(path, version=99),
    "was changed or damaged": lambda path: change_json(path, habits={"x": {"y": 1.0}}),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(damage: str, tmp_path: Path) -> None:
    _, newer = two(tmp_path)
    DAMAGES[damage](newer)
    with pytest.raises(CheckpointRefused, match=damage):
        load(newer)
    said: list[str] = []
    good = newest(tmp_path, fingerprint="f", say=said.append)
    assert good is not None and good.epoch == 1 and len(said) == 1


def test_when_none_is_usable(tmp_path: Path) -> None:
    assert newest(tmp_path, fingerprint="f", say=print) is None
    two(tmp_path)
    with pytest.raises(CheckpointRefused, match="No checkpoint is usable.*another configuration.*another configuration"):
        newest(tmp_path, fingerprint="g", say=lambda text: None)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    model, optimizer = setup()
    path = save(capture(model, optimizer, Progress(), fingerprint="f"), tmp_path)
    wider, its_optimizer = setup(width=7)
    before = [parameter.clone() for parameter in wider.parameters()]
    with pytest.raises(CheckpointRefused, match="another model: U, W, a differ"):
        restore(load(path), wider, its_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, wider.parameters(), strict=True))


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("when", [0, 1])
def test_a_full_disk_leaves_the_checkpoints_before(call: str, when: int, tmp_path: Path, monkeypatch) -> None:
    two(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model, optimizer = setup()
    real, seen = getattr(os, call), []

    def full(*args: object) -> object:
        seen.append(args)
        if len(seen) > when:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(RunError, match="the disk is full; free some space"):
        save(capture(model, optimizer, Progress(step=3), fingerprint="f"), tmp_path)
    monkeypatch.undo()
    assert before.items() <= {path.name: path.read_bytes() for path in tmp_path.iterdir()}.items()
    assert not list(tmp_path.glob(".*.tmp"))
    good = newest(tmp_path, fingerprint="f", say=print)
    assert good is not None and good.epoch == 2


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    _, newer = two(tmp_path)
    prune(tmp_path, 1)
    assert find(tmp_path) == [newer]
    assert sorted(path.name for path in tmp_path.iterdir()) == [newer.name, newer.with_suffix(".safetensors").name]


def test_prune_finishes_what_was_killed_in_the_middle(tmp_path: Path) -> None:
    older, newer = two(tmp_path)
    older.unlink()  # killed while it was removed
    (tmp_path / "step-000000001-interrupted.safetensors").touch()  # killed while it was written
    (tmp_path / "step-000000003.safetensors").touch()  # the next one, which the run will write again
    prune(tmp_path, 2)
    left = [newer.name, newer.with_suffix(".safetensors").name, "step-000000003.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_tidy_never_removes_the_one_in_use(tmp_path: Path) -> None:
    older, newer = two(tmp_path)
    os.truncate(newer.with_suffix(".safetensors"), 10)
    good = newest(tmp_path, fingerprint="f", say=lambda text: None)
    assert good is not None
    tidy(tmp_path, good, 1)
    assert find(tmp_path) == [older]
    assert newer.with_name(f"{newer.name}.refused").exists()  # for whoever wants to know


FORGERIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "does not hold tensors": lambda r, t: t.update(bytes=b"\x10" + b"\x00" * 40),
    "does not state the size": lambda r, t: r.update(tensors=3),
    "'progress' is missing": lambda r, t: r.pop("progress"),
    "'progress.epoch'": lambda r, t: r["progress"].update(epoch="1"),
    "'progress.step'": lambda r, t: r["progress"].update(step=-1),
    "'progress.stop'": lambda r, t: r["progress"].update(stop="nonsense"),
    "'order'": lambda r, t: t.update(order=torch.tensor([7])),
    "'fingerprint'": lambda r, t: r.pop("fingerprint"),
    "'optimizer'": lambda r, t: r.update(optimizer=None),
    "'optimizer.groups'": lambda r, t: r["optimizer"].update(groups=[1]),
    "'optimizer.groups.lr'": lambda r, t: r["optimizer"]["groups"][0].update(lr="fast"),
    "'optimizer/0/exp_avg'": lambda r, t: t.update({"optimizer/0/exp_avg": torch.zeros(5)}),
    "'optimizer/x/y'": lambda r, t: t.update({"optimizer/x/y": torch.zeros(5)}),
    "'optimizer/99'": lambda r, t: t.update({"optimizer/99/exp_avg": torch.zeros(5)}),
    # NumPy and torch would read memory beyond their words
    "'random.numpy.position'": lambda r, t: r["random"]["numpy"].update(position=10**6),
    "'random/numpy'": lambda r, t: t.update({"random/numpy": torch.zeros(3, dtype=torch.int64)}),
    "'random/torch'": lambda r, t: t["random/torch"].__setitem__(16, 200),
    "'random.python.words'": lambda r, t: r["random"]["python"].update(words=["a"]),
    "'random' is": lambda r, t: r.pop("random"),
    "'habits'": lambda r, t: r.update(habits={"": {"step": {"value": 1.0}}}),
    "U differ in name, shape or dtype": lambda r, t: t.update({"model/U": t["model/U"].float()}),
}


@pytest.mark.parametrize("says", list(FORGERIES))
def test_a_forged_checkpoint_with_right_checksums_is_refused(says: str, tmp_path: Path) -> None:
    _, path = two(tmp_path)
    forge(path, FORGERIES[says])
    model, optimizer = setup()
    before = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointRefused, match=says) as caught:
        restore(load(path), model, optimizer)
    assert "\n" not in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())


def test_forging_nothing_is_accepted(tmp_path: Path) -> None:
    _, path = two(tmp_path)
    forge(path, lambda r, t: None)
    model, optimizer = setup()
    assert restore(load(path), model, optimizer).step == 2


@pytest.mark.parametrize("count", [0, 1, 16, 623, 624, 625, 1000])
def test_every_state_of_the_generators_is_accepted(count: int, tmp_path: Path) -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    torch.rand(count), np.random.rand(count), [random.random() for _ in range(count)]
    model, optimizer = setup()
    path = save(capture(model, optimizer, Progress(), fingerprint="f"), tmp_path)
    expected = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
    restore(load(path), model, optimizer)
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == expected


def test_a_point_that_training_does_not_come_to_is_refused(tmp_path: Path) -> None:
    model, optimizer = setup()
    order = torch.tensor([1, 0, 2])
    for progress in (
        Progress(batch=1),
        Progress(batch=5, order=order, totals=[0.0] * 5),
        Progress(batch=1, order=order),
        Progress(order=order),
    ):
        checkpoint = capture(model, optimizer, progress, fingerprint="f")
        with pytest.raises(CheckpointRefused, match="does not fit this run"):
            check_point(checkpoint, samples=3, batches=2, totals=5)
    good = capture(model, optimizer, Progress(batch=1, order=order, totals=[0.0] * 5), fingerprint="f")
    check_point(good, samples=3, batches=2, totals=5)


def test_links_and_pipes_among_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    old, new = two(folder)
    binary = new.with_suffix(".safetensors")
    binary.rename(tmp_path / "elsewhere")
    binary.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointRefused, match="is a link"):
        load(new)
    old.unlink()
    os.mkfifo(old)
    with pytest.raises(CheckpointRefused, match="a named pipe"):
        load(old)
    (folder / "step-x.json").write_text("{}")
    assert find(folder) == [new, old]
    (tmp_path / "run" / "linked").symlink_to(folder)
    with pytest.raises(CheckpointRefused, match="linked is a link"):
        find(tmp_path / "run" / "linked")
