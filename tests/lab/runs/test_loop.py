"""Minibatch training against plain loops, descend and torch's schedulers; interruption, stopping, evaluation."""

from __future__ import annotations

import copy
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.errors import InvalidArgument
from wellposed_lab.runs import training
from wellposed_lab.runs.checkpoint import newest
from wellposed_lab.runs.config import RunConfig, resolve
from wellposed_lab.runs.epoch_logger import RunOutcome
from wellposed_lab.runs.loop import _order, fit, learning_rate, make_optimizer
from wellposed_lab.runs.losses import CrossEntropy, Squared
from wellposed_lab.runs.models import MODELS
from wellposed_lab.runs.records import read_metrics
from wellposed_lab.runs.run import Run, read_config
from wellposed_lab.runs.setup import DataParts, prepare
from wellposed_lab.runs.training import train
from wellposed_lab.runs.training_state import Checkpoint

BASE = ["run.certify_every=0", "run.tensorboard=false", "run.threads=1", "optimizer.schedule=constant"]


def config_of(*changes: str) -> RunConfig:
    return resolve({}, [*BASE, *changes])


def regression(n: int = 12) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    model = wp.GaussianDEQ(4, 16, generator=generator, dtype=torch.float64)
    return model, *(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((n, 4), (n,)))


def test_full_batch_sgd_is_descend() -> None:
    model, X, y = regression()
    twin = copy.deepcopy(model)
    config = config_of("optimizer.name=sgd", "optimizer.lr=0.05", "run.batch_size=null", "run.epochs=7")
    outcome = fit(model, DataParts((X, y)), config, loss=Squared(signs=False))
    history = wp.descend(twin, X, y, step_size=0.05 / len(X), steps=7)  # its loss is a sum
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, dict(twin.named_parameters())[name], rtol=1e-9, atol=1e-11)
    ours = torch.tensor([row["train_loss"] * len(X) for row in outcome.rows], dtype=torch.float64)
    torch.testing.assert_close(ours, history.loss, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_minibatches_are_those_of_a_plain_loop(name: str) -> None:
    model, X, y = regression()
    twin = copy.deepcopy(model)
    config = config_of(
        f"optimizer.name={name}", "optimizer.lr=0.01", "optimizer.momentum=0.5", "optimizer.weight_decay=0.1",
        "optimizer.clip=0.3", "run.batch_size=5", "run.epochs=3", "run.seed=4",
    )  # fmt: skip
    fit(model, DataParts((X, y)), config, loss=Squared(signs=False))
    plain = {
        "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.5, weight_decay=0.1),
        "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    }[name](twin.parameters())
    for epoch in range(3):
        order = _order(4, epoch, len(X))
        assert sorted(order.tolist()) == list(range(len(X)))
        for start in (0, 5, 10):
            rows = order[start : start + 5]
            plain.zero_grad()
            (0.5 * (twin(X[rows]) - y[rows]).square().mean()).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
            plain.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_orders_differ_between_epochs_and_seeds() -> None:
    orders = {tuple(_order(seed, epoch, 30).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("schedule", ["constant", "step", "cosine"])
def test_schedules_are_those_of_torch(schedule: str, warmup: int) -> None:
    epochs, batches = 9, 4
    options = config_of(
        f"optimizer.schedule={schedule}", "optimizer.step_every=3", "optimizer.step_factor=0.3", "optimizer.lr=0.7",
        f"optimizer.warmup={warmup}",
    ).optimizer  # fmt: skip
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.7)
    kinds = torch.optim.lr_scheduler
    theirs: list[torch.optim.lr_scheduler.LRScheduler] = []
    if schedule == "step":
        theirs.append(kinds.StepLR(optimizer, 3 * batches, gamma=0.3))
    elif schedule == "cosine":
        theirs.append(kinds.CosineAnnealingLR(optimizer, epochs * batches))
    if warmup:  # the factor is 1/8, 2/8, ..., 8/8
        theirs.append(kinds.LinearLR(optimizer, 1 / (warmup * batches), total_iters=warmup * batches - 1))
    torch_schedule = kinds.ChainedScheduler(theirs or [kinds.ConstantLR(optimizer, factor=1.0)])
    for step in range(epochs * batches):
        ours, rate = learning_rate(options, step, batches, epochs), optimizer.param_groups[0]["lr"]
        # a step of theirs rounds ten times at most; the cosine near its zero is as exact as its argument, pi k/K
        assert abs(ours - rate) <= 10 * (step + 1) * 2**-52 * (rate + (0.7 if schedule == "cosine" else 0.0))
        optimizer.step()
        torch_schedule.step()


def test_evaluation_in_parts_is_the_whole(monkeypatch) -> None:
    monkeypatch.setattr("wellposed_lab.runs.loop.EVALUATED_AT_ONCE", 1)
    problem = prepare(config_of("data.n=20", "data.classes=[0, 1, 2]", "model.name=dense", "model.width=8", "run.batch_size=3"))
    config = config_of("run.epochs=1", "run.batch_size=3")
    row = fit(problem.model, problem.parts, config, loss=problem.loss).rows[-1]
    for part in ("train", "test"):
        X, y = getattr(problem.parts, part)
        with torch.no_grad():
            logits = problem.model(X)
        assert row[f"{part}_loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-10)
        assert row[f"{part}_accuracy"] == pytest.approx(float((logits.argmax(1) == y).double().mean()), rel=1e-12)


class Stopper:
    """Sends Ctrl-C when it hears of a batch."""

    def __init__(self, epoch: int, batch: int) -> None:
        self.at = (epoch, batch)

    def on_batch(self, epoch: int, batch: int, batches: int, loss: float) -> None:
        if (epoch, batch) == self.at:
            signal.raise_signal(signal.SIGINT)

    def on_epoch(self, row: dict[str, Any]) -> None:
        return None


def in_folder(config: RunConfig, folder: Path, listener: Any = None) -> tuple[RunOutcome, nn.Module]:
    """Creates or resumes a run, as a new process would."""
    problem = prepare(config)
    resumed = folder.exists()
    checkpoint: Checkpoint | None = None
    with Run.open(folder, config) if resumed else Run.create(folder, config) as run:
        if resumed:
            checkpoint = newest(folder / "checkpoints", [config.fingerprint()], log=print)
            run.rewind(-1 if checkpoint is None else checkpoint.epoch)
        outcome = fit(
            problem.model, problem.parts, config, loss=problem.loss, run=run, checkpoint=checkpoint, listener=listener
        )
    return outcome, problem.model


@pytest.mark.parametrize(
    ("name", "at"),
    # the solver of the last one learns step sizes as it goes
    [("gaussian", (0, 1)), ("gaussian", (1, 3)), ("monotone_classifier", (1, 2))],
)
def test_interrupted_at_a_batch_and_resumed_it_gives_the_same_bits(name: str, at: tuple[int, int], tmp_path: Path) -> None:
    classes = "[0, 1]" if name == "gaussian" else "[0, 1, 2]"
    changes = [f"model.name={name}", f"data.classes={classes}", "data.n=16", "data.n_test=6", "model.width=10"]
    config = config_of(*changes, "run.batch_size=4", "run.epochs=3", "data.norm=unit", "optimizer.lr=0.02", "model.rtol=1e-6")
    whole, model = in_folder(config, tmp_path / "whole")
    first, _ = in_folder(config, tmp_path / "parts", Stopper(*at))
    assert (whole.stop, first.stop) == ("epochs", "interrupted")
    # the step that was under way is finished, and one more finds out that it is the last
    assert first.progress.step == at[0] * 4 + at[1] + 1
    second, resumed = in_folder(config, tmp_path / "parts")
    assert second.stop == "epochs"
    files = [(tmp_path / folder / "metrics.jsonl").read_bytes() for folder in ("whole", "parts")]
    assert files[0] == files[1]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


SPHERE = ["data.name=sphere", "data.classes=null", "data.features=5", "data.n=12", "data.n_test=6", "model.width=12"]


def checkpoints(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "checkpoints").iterdir()}


@pytest.mark.parametrize("every", [1, 2])
def test_what_is_kept_does_not_depend_on_interruptions(every: int, tmp_path: Path) -> None:
    config = config_of(*SPHERE, "run.batch_size=4", "run.epochs=4", f"run.checkpoint_every={every}", "model.rtol=1e-6")
    train(config, tmp_path / "whole")
    whole = checkpoints(tmp_path / "whole")
    assert len(whole) == 4  # two of them, two files each
    for at in ((1, 2), (3, 1)):  # at the end of an epoch, and within the last one
        folder = tmp_path / f"parts{at}"
        assert train(config, folder, listener=Stopper(*at)).outcome.stop == "interrupted"
        kept = {path.stem for path in (folder / "checkpoints").iterdir()}
        assert len(kept) == 2 + (at == (3, 1))  # an interruption takes no other's place
        assert train(read_config(folder), folder, resume=True).outcome.stop == "epochs"
        assert checkpoints(folder) == whole


def test_what_was_drawn_before_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scikit-learn does when it is imported, which it is in the first run of a process only."""
    config = config_of(*SPHERE, "run.epochs=1", "model.rtol=1e-6")
    train(config, tmp_path / "first")

    def draws(config: RunConfig, **options: Any) -> Any:
        random.random(), torch.rand(1), np.random.rand()
        return prepare(config, **options)

    monkeypatch.setattr(training, "prepare", draws)
    train(config, tmp_path / "second")
    assert checkpoints(tmp_path / "first") == checkpoints(tmp_path / "second")


def test_early_stopping_keeps_the_best(tmp_path: Path) -> None:
    changes = ["data.n=20", "data.validation=0.4", "model.width=12", "run.patience=2", "run.epochs=50", "optimizer.lr=3e-3"]
    config = config_of(
        *changes, "data.name=sphere", "data.classes=null", "data.features=5", "run.batch_size=4", "model.rtol=1e-6"
    )
    outcome, _ = in_folder(config, tmp_path / "run")
    losses = [row["validation_loss"] for row in read_metrics(tmp_path / "run")]
    best = min(range(len(losses)), key=losses.__getitem__)
    assert outcome.stop == "patience" and outcome.progress.best_epoch == best and len(losses) - 1 == best + 2 < 50
    from wellposed_lab.runs.checkpoint import load
    from wellposed_lab.runs.training_state import restore

    problem = prepare(config)
    restore(load(tmp_path / "run" / "checkpoints" / "best.json"), problem.model)
    assert problem.parts.validation is not None
    X, y = problem.parts.validation
    with torch.no_grad():
        assert float(0.5 * (problem.model(X) - y).square().mean()) == pytest.approx(losses[best], rel=1e-12)
    # a stopped run stays stopped
    again, _ = in_folder(config, tmp_path / "run")
    assert again.stop == "patience" and again.rows == []


def test_patience_without_validation_is_refused() -> None:
    model, X, y = regression()
    with pytest.raises(InvalidArgument, match="data.validation=0.2"):
        fit(model, DataParts((X, y)), config_of("run.patience=1"), loss=Squared(signs=False))


def test_stop_loss() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False, dtype=torch.float64), nn.Flatten(0))
    model[0].weight.data.fill_(1.0)
    X, y = torch.ones(4, 2, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    config = config_of("optimizer.name=sgd", "optimizer.lr=0.01", "run.stop_loss=1.5", "run.epochs=50")
    outcome = fit(model, DataParts((X, y)), config, loss=Squared(signs=False))
    losses = [row["train_loss"] for row in outcome.rows]
    assert outcome.stop == "stop_loss" and losses[-1] <= 1.5 < losses[-2]


def test_a_loss_that_is_not_finite_stops_before_the_step() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False, dtype=torch.float64), nn.Flatten(0))
    X, y = torch.ones(4, 2, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    outcome = fit(model, DataParts((X, y)), config_of("optimizer.name=sgd", "optimizer.lr=1e100"), loss=Squared(signs=False))
    assert outcome.stop == "not_finite"
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_losses_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"\(3,\); got \(3, 2\)"):
        Squared(signs=False).total(torch.zeros(3, 2), torch.zeros(3))
    with pytest.raises(InvalidArgument, match=r"targets of shape \(3,\); got \(3,\)"):
        CrossEntropy().total(torch.zeros(3), torch.zeros(3, dtype=torch.int64))


FEW_STEPS = ("residual", "multiscale")  # tested in test_few_steps.py: their training does not look for equilibria
SOLVED = [name for name, kind in MODELS.items() if kind.task in ("regression", "classification") and name not in FEW_STEPS]


@pytest.mark.parametrize("name", SOLVED)
def test_every_network_learns(name: str) -> None:
    classes = "[0, 1]" if MODELS[name].task == "regression" else "[0, 1, 2]"
    changes = [f"model.name={name}", f"data.classes={classes}", "data.n=24", "data.n_test=6", "model.width=24"]
    # convolutions see one pixel at a time, and read-outs their averages: these are tiny in images of norm 1
    changes.append(f"data.norm={'sqrt_d' if MODELS[name].images else 'unit'}")
    config = config_of(*changes, "run.epochs=3", "run.batch_size=6", "optimizer.lr=5e-3", "model.rtol=1e-6")
    problem = prepare(config)
    rows = fit(problem.model, problem.parts, config, loss=problem.loss).rows
    assert rows[-1]["train_loss"] < 0.97 * rows[0]["train_loss"]
    assert rows[-1]["unconverged"] == 0 and rows[-1]["equilibrium_steps"] > 1


def test_only_trained_parameters_move() -> None:
    model, _, _ = regression()
    model.U.requires_grad_(False)
    optimizer = make_optimizer(model, RunConfig().optimizer)
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == 16 * 16 + 16
