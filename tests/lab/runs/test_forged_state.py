"""A checkpoint with right checksums and a state that no optimizer of this kind has is refused, and nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_problems import KINDS, forge, setup, steps
from wellposed.errors import CheckpointRefused
from wellposed_lab.runs.checkpoint import Progress, capture, find, load, prune, restore, save, tidy

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]


def group(**options: Any) -> Change:
    return lambda record, tensors: record["optimizer"]["groups"][0].update(options)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda record, tensors: tensors.update({name: change(tensors[name])})


def without(*names: str) -> Change:
    return lambda record, tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(names)]


FORGERIES: dict[str, tuple[str, Change]] = {
    "a scalar in the place of a matrix": ("optimizer/0/exp_avg", tensor("optimizer/0/exp_avg", lambda t: t.sum())),
    "a missing moment": ("optimizer/0/exp_avg_sq", without("optimizer/0/exp_avg_sq")),
    "a missing step": ("optimizer/1/step", without("optimizer/1/step")),
    "no state at all": ("optimizer", without("optimizer/")),
    "one more slot": ("optimizer/0/evil", lambda r, t: t.update({"optimizer/0/evil": t["optimizer/0/exp_avg"].clone()})),
    "a number in the place of a tensor": (
        "optimizer/0/step",
        lambda r, t: (t.pop("optimizer/0/step"), r["optimizer"]["scalars"].update({"0": {"step": 2}})),
    ),
    "a step of -1": ("optimizer/0/step", tensor("optimizer/0/step", lambda t: t - 3)),
    "an infinite step": ("optimizer/0/step", tensor("optimizer/0/step", lambda t: t + float("inf"))),
    "half a step": ("optimizer/0/step", tensor("optimizer/0/step", lambda t: t + 0.5)),
    "whole numbers for a moment": ("optimizer/0/exp_avg", tensor("optimizer/0/exp_avg", lambda t: t.long())),
    "a negative square": ("optimizer/0/exp_avg_sq", tensor("optimizer/0/exp_avg_sq", lambda t: -t - 1)),
    "betas beyond 1": ("optimizer.groups.betas", group(betas=[0.9, 2.0])),
    "other betas": ("optimizer.groups.betas", group(betas=[0.8, 0.999])),
    "a negative eps": ("optimizer.groups.eps", group(eps=-1.0)),
    "a truth value as weight decay": ("optimizer.groups.weight_decay", group(weight_decay=False)),
    "a truth value as step size": ("optimizer.groups.lr", group(lr=True)),
    "a negative step size": ("optimizer.groups.lr", group(lr=-1.0)),
    "a truth value as a best loss": ("progress.best", lambda r, t: r["progress"].update(best=True)),
}


@pytest.mark.parametrize("case", list(FORGERIES))
def test_a_state_that_the_optimizer_cannot_have_is_refused(case: str, tmp_path: Path) -> None:
    says, change = FORGERIES[case]
    model, optimizer = setup()
    steps(model, optimizer, 2)
    path = save(capture(model, optimizer, Progress(step=2), fingerprint="f"), tmp_path)
    forge(path, change)
    other, its_optimizer = setup(seed=1)
    before = [parameter.detach().clone() for parameter in other.parameters()]
    with pytest.raises(CheckpointRefused, match=f"'{says}'"):
        restore(load(path), other, its_optimizer)
    assert all(map(torch.equal, before, other.parameters())) and not its_optimizer.state_dict()["state"]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("count", [0, 2])
def test_every_state_that_training_comes_to_is_accepted(kind: str, count: int, tmp_path: Path) -> None:
    model, optimizer = setup(kind)
    steps(model, optimizer, count)
    for options in optimizer.param_groups:
        options["lr"] = 0.0  # at the end of a schedule
    path = save(capture(model, optimizer, Progress(step=count), fingerprint="f"), tmp_path)
    other, its_optimizer = setup(kind, seed=1)
    assert restore(load(path), other, its_optimizer).step == count
    assert its_optimizer.param_groups[0]["lr"] == 0.0
    assert its_optimizer.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_plain_descent_has_no_state(tmp_path: Path) -> None:
    model, _ = setup()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps(model, optimizer, 2)
    path = save(capture(model, optimizer, Progress(step=2), fingerprint="f"), tmp_path)
    assert restore(load(path), model, optimizer).step == 2
    forge(path, lambda r, t: t.update({"optimizer/0/momentum_buffer": t["model/W"].clone()}))
    with pytest.raises(CheckpointRefused, match="'optimizer/0/momentum_buffer'"):
        restore(load(path), model, optimizer)


@pytest.mark.parametrize("ending", [".json", ".safetensors"])
@pytest.mark.parametrize("full", [False, True])
def test_a_folder_in_the_place_of_a_checkpoint_is_set_aside(ending: str, full: bool, tmp_path: Path) -> None:
    model, optimizer = setup()
    paths = []
    for step in range(1, 5):
        steps(model, optimizer, 1)
        paths.append(save(capture(model, optimizer, Progress(step=step), fingerprint="f"), tmp_path))
    for path in (paths[0], paths[-1]):  # an old one, and the newest
        part = path.with_suffix(ending)
        part.unlink()
        part.mkdir()
        if full:
            (part / "x").write_text("mine")
    good = load(paths[2])
    tidy(tmp_path, good, 2)
    prune(tmp_path, 1)
    assert find(tmp_path) == [paths[2]]
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        f"{path.with_suffix(ending).name}.refused" for path in (paths[0], paths[-1])
    }
    assert len(list(tmp_path.rglob("x"))) == 2 * full  # what is in them is not ours to remove
    assert json.loads(paths[2].read_text())["progress"]["step"] == 3
