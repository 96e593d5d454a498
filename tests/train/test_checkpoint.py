"""Checkpoints give everything back, and damaged or foreign ones are refused."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import wellposed as wp
from wellposed.errors import CheckpointRefused, RunError
from wellposed.train.checkpoint import Progress, capture, find, load, newest, prune, restore, save, tidy

KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def setup(kind: str = "adam", seed: int = 0, width: int = 6) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = wp.GaussianDEQ(3, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return model, KINDS[kind](model.parameters())


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """Steps on data from the global generators, so that these matter too."""
    seen = []
    for _ in range(count):
        X = torch.randn(5, 3, dtype=torch.float64) * (0.5 + random.random()) + np.random.rand() * np.random.randn()
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


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
