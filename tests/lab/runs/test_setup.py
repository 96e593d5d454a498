"""From configurations to problems: parts, losses, segmentation from a file, and runs read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from wellposed.errors import CheckpointRefused, InvalidArgument, RunError, WellposedError
from wellposed.nn import MonotoneClassifier
from wellposed_lab.runs.config import resolve
from wellposed_lab.runs.losses import CrossEntropy, Segmentation, Squared
from wellposed_lab.runs.records import read_metrics
from wellposed_lab.runs.run import read_config
from wellposed_lab.runs.setup import prepare, resolve_auto
from wellposed_lab.runs.training import load_run, train

QUICK = ["run.tensorboard=false", "run.certify_every=0", "run.threads=1"]


def test_validation_is_a_part_of_the_training_samples() -> None:
    whole = prepare(resolve({}, ["data.n=30"])).parts
    split = prepare(resolve({}, ["data.n=30", "data.validation=0.2"])).parts
    assert split.validation is not None and whole.validation is None
    assert len(split.validation[0]) == 6 and len(split.train[0]) == 24
    together = torch.cat([split.train[0], split.validation[0]])
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, whole.train[0].tolist()))
    again = prepare(resolve({}, ["data.n=30", "data.validation=0.2"])).parts
    assert again.validation is not None and torch.equal(again.validation[0], split.validation[0])


def test_the_loss_follows_the_targets() -> None:
    two = prepare(resolve({}, ["data.n=10"])).loss
    numbers = prepare(resolve({}, ["data.name=sphere", "data.n=10"])).loss
    many = prepare(resolve({}, ["data.classes=[4, 5, 6]", "data.n=9", "model.name=dense"])).loss
    assert isinstance(two, Squared) and two.signs
    assert isinstance(numbers, Squared) and not numbers.signs
    assert isinstance(many, CrossEntropy)
    with pytest.raises(InvalidArgument, match="loss.name is 'cross_entropy'"):
        prepare(resolve({}, ["data.n=10", "loss.name=cross_entropy", "model.name=gaussian"]))


def said(*changes: str) -> tuple[str, list[int] | str | None, str]:
    config = resolve_auto(resolve({}, changes))
    assert resolve_auto(config) == config
    return config.model.name, config.data.classes, config.loss.name


@pytest.mark.parametrize(
    ("changes", "model", "classes", "loss"),
    [
        ([], "gaussian", [0, 1], "squared"),
        (["data.name=sphere"], "gaussian", None, "squared"),
        (["data.name=moons", "model.name=skip"], "skip", None, "squared"),
        (["data.name=moons", "model.name=dense"], "dense", None, "cross_entropy"),
        (["data.name=camvid"], "segmenter", None, "segmentation"),
        (["data.name=wikitext2"], "transformer", None, "next_token"),
        (["model.name=monotone_classifier"], "monotone_classifier", None, "cross_entropy"),
        (["model.name=dense", "data.classes=[3, 8]"], "dense", [3, 8], "cross_entropy"),
        (["data.classes=[3, 8]"], "gaussian", [3, 8], "squared"),
        (["data.classes=[3, 8, 9]"], "dense", [3, 8, 9], "cross_entropy"),
        (["data.classes=null"], "dense", None, "cross_entropy"),
        (["loss.name=cross_entropy"], "dense", None, "cross_entropy"),
        # what was said stays, also where it does not fit: `prepare` says so
        (["data.name=sphere", "data.classes=[0, 1]", "model.name=dense", "loss.name=squared"], "dense", [0, 1], "squared"),
    ],
)
def test_what_is_left_open_is_filled_in(changes: list[str], model: str, classes: list[int] | None, loss: str) -> None:
    assert said(*changes) == (model, classes, loss)


def test_networks_of_images_get_images() -> None:
    shapes = {}
    for name in ("dense", "monotone_conv"):
        config = resolve_auto(resolve({}, [f"model.name={name}", "data.n=10", "data.n_test=10", "model.width=4"]))
        shapes[name] = (config.data.flatten, tuple(prepare(config).parts.train[0].shape))
    assert shapes == {"dense": (True, (10, 64)), "monotone_conv": (False, (10, 1, 8, 8))}


@pytest.mark.parametrize("changes", [["data.classes=[0, 1]"], ["data.name=moons"]])
def test_a_classifier_learns_two_classes(changes: list[str]) -> None:
    problem = prepare(resolve({}, [*changes, "data.n=10", "data.n_test=6", "model.name=dense", "model.width=5"]))
    assert isinstance(problem.loss, CrossEntropy) and problem.parts.test is not None
    for _, y in (problem.parts.train, problem.parts.test):
        assert y.dtype == torch.int64 and set(y.tolist()) == {0, 1}
    assert torch.equal(problem.parts.train[1], (problem.data.y > 0).long())
    assert problem.model(problem.parts.train[0]).shape == (10, 2)


def test_config_yaml_has_what_was_used(tmp_path: Path) -> None:
    changes = ["data.name=sphere", "data.n=8", "data.features=5", "model.width=6", "run.epochs=1", *QUICK]
    train(resolve({}, changes), tmp_path / "run")
    plain = read_config(tmp_path / "run")
    assert (plain.model.name, plain.data.classes, plain.loss.name) == ("gaussian", None, "squared")
    _, _, checkpoint = load_run(tmp_path / "run")  # the fingerprint is that of the configuration on the disk
    assert checkpoint is not None and checkpoint.epoch == 1


def test_the_same_seed_gives_the_same_network() -> None:
    a, b, c = (prepare(resolve({}, ["data.n=4", f"run.seed={seed}"])).model for seed in (1, 1, 2))
    assert torch.equal(a.W, b.W) and not torch.equal(a.W, c.W)


def test_segmentation_learns_and_ignores_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (4, 12, 16)).repeat(8, axis=1).repeat(8, axis=2).astype(np.uint8)  # blocks
    images = np.repeat((labels * 200)[..., None], 3, axis=3).astype(np.uint8)  # bright is class 1
    labels[:, :4] = 11  # void
    np.savez(tmp_path / "camvid.npz", x_train=images, y_train=labels, x_test=images[:1], y_test=labels[:1])
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    changes = ["data.name=camvid", "data.n=2", "data.norm=null", "model.width=4"]
    more = [
        "run.epochs=6",
        "run.batch_size=1",
        "run.dtype=float32",
        "optimizer.lr=0.1",
        "model.rtol=1e-2",
        "run.evaluate_every=6",
    ]
    config = resolve({}, [*changes, *more, *QUICK])
    problem = prepare(config)
    assert isinstance(problem.loss, Segmentation) and problem.loss.classes == 2 and problem.loss.ignore_index == 11
    trained = train(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    assert trained.outcome.stop == "epochs"
    assert rows[-1]["train_loss"] < 0.5 * rows[0]["train_loss"] and rows[-1]["test_miou"] > 0.9


def test_a_run_read_back_is_the_model_that_was_trained(tmp_path: Path) -> None:
    changes = ["data.n=20", "data.validation=0.3", "run.patience=30", "model.width=10", "run.epochs=2", *QUICK]
    trained = train(resolve({}, changes), tmp_path / "run")
    _, problem, checkpoint = load_run(tmp_path / "run")
    assert checkpoint is not None and checkpoint.epoch == 2
    for ours, theirs in zip(problem.model.parameters(), trained.problem.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    losses = [row["validation_loss"] for row in read_metrics(tmp_path / "run")]
    _, _, best = load_run(tmp_path / "run", at="best")
    assert best is not None and best.epoch == min(range(3), key=losses.__getitem__)
    (tmp_path / "run" / "checkpoints" / "best.json").unlink()
    with pytest.raises(CheckpointRefused, match="best.json cannot be read"):
        load_run(tmp_path / "run", at="best")


@pytest.mark.slow
def test_events_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(resolve({}, ["data.n=10", "model.width=8", "run.epochs=2", "run.threads=1", "run.certify_every=0"]), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    rows = read_metrics(tmp_path / "run")
    seen = [(event.step, event.value) for event in events.Scalars("loss/train")]
    assert seen == [(row["epoch"], pytest.approx(row["train_loss"], rel=1e-6)) for row in rows]


def test_a_monotone_convolution_takes_images() -> None:
    changes = ["data.name=digits", "data.classes=null", "data.n=4", "data.norm=null", "model.name=monotone_conv"]
    changes += ["model.width=3", "model.grid=2", "model.margin=0.5"]
    model = prepare(resolve({}, changes)).model
    assert isinstance(model, MonotoneClassifier) and model.grid == 2 and model.cell.weights.margin == 0.5
    with pytest.raises(InvalidArgument, match="flatten=false"):
        prepare(resolve({}, [*changes, "data.flatten=true"]))


def test_networks_of_images_have_few_channels_unless_a_width_is_said() -> None:
    from wellposed_lab.runs.config import resolve
    from wellposed_lab.runs.setup import resolve_auto

    assert resolve_auto(resolve({}, ["model.name=monotone_conv"])).model.width == 32
    assert resolve_auto(resolve({"model": {"name": "monotone_conv", "width": 256}}, [])).model.width == 256
    assert resolve_auto(resolve({}, ["model.name=monotone_classifier"])).model.width == 256


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("run.device=meta", "run.device='meta' cannot be used: tensors there have no values"),
        ('run.device="\\ud800"', "run.device of .* unicode"),
        ("run.theorem=nonsense", "Unknown theorem 'nonsense'"),
        ("run.theorem=gao2022", "gao2022"),
        ("model.width=2147483647", "of memory"),
        ("data.features=2147483647", "of memory"),
        ("data.n=2147483647", "of memory"),
    ],
)
def test_values_that_cannot_work_are_refused_before_there_is_a_run(change: str, says: str, tmp_path: Path) -> None:
    small = ["data.name=sphere", "data.n=4", "data.features=3", "model.width=4", "run.epochs=1", "run.tensorboard=false"]
    with pytest.raises(WellposedError, match=says) as caught:
        train(resolve({}, [*small, change]), tmp_path / "run")
    assert not isinstance(caught.value, RunError) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def finished(folder: Path, *changes: str) -> Path:
    small = ["data.name=sphere", "data.n=4", "data.features=3", "model.width=4", "run.epochs=2", "run.tensorboard=false"]
    train(resolve({}, [*small, "optimizer.schedule=constant", "run.certify_every=1", *changes]), folder)
    return folder


def test_a_damaged_certificate_is_found_before_training(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    path = run / "certificates" / "epoch-00002.json"
    path.write_text("{}")
    (run / "certificates" / "epoch-x.json").write_text("{}")  # not a certificate, and none of our business
    longer = resolve(read_config(run).model_dump(), ["run.epochs=4"])
    with pytest.raises(RunError, match=r"epoch-00002\.json is damaged"):
        train(longer, run, resume=True)
    assert len(read_metrics(run)) == 3
    path.unlink()
    assert train(longer, run, resume=True).summary["epochs"] == 4


def test_a_certificate_damaged_in_the_meantime_does_not_take_the_summary(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")

    class Vandal:
        def on_batch(self, *_: object) -> None:
            pass

        def on_epoch(self, row: dict) -> None:
            (run / "certificates" / f"epoch-{row['epoch']:05d}.json").write_text("[]")

    longer = resolve(read_config(run).model_dump(), ["run.epochs=3"])
    trained = train(longer, run, resume=True, listener=Vandal())
    assert trained.summary["certificate"] is None and (run / "summary.json").exists()
    assert "The summary has no certificate" in (run / "log.txt").read_text()


def test_strange_sessions_do_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    for text in ('{"sessions": null}', '{"sessions": [{"versions": 3}]}', '{"sessions": [3]}', "["):
        (run / "environment.json").write_text(text)
        assert train(read_config(run), run, resume=True).summary["epochs"] == 2
