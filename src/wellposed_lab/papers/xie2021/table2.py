"""[xie2021, Table 2]: segmentation by a deep OptEq, next to networks of the same size."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.convex import ConvOptEq
from wellposed.data import load
from wellposed.data.files import read
from wellposed.errors import InvalidArgument
from wellposed.nn import MultiscaleDEQ
from wellposed.solve import Anderson
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, not_tested, spread
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task, values_of
from wellposed_lab.papers.image_training import fit
from wellposed_lab.papers.xie2021.networks import count, widest

__all__ = ["Table2", "Table2Config", "confusion_of", "measures"]

CLASSES, VOID = 11, 11
NETWORKS = ("OptEq", "FCN", "multiscale DEQ")
MEASURES = ("mIoU", "mAcc", "aAcc")
#: The table: Cityscapes, not CamVid.
PRINTED = {"FCN": (0.7147, 0.7923, 0.9556), "OptEq": (0.7447, 0.8191, 0.9593)}


@dataclass(frozen=True, kw_only=True)
class Table2Config(ExperimentConfig):
    """Sizes."""

    data: str = "camvid"  # with $WELLPOSED_DATA; "squares" are made here
    images: int = 24  # images, test_images: how many
    test_images: int = 16
    channels: tuple[int, ...] = (8, 16, 16)  # of the layers of the deep OptEq
    state_channels: int = 8
    epochs: int = 30  # epochs, batch, lr, weight_decay: of SGD with momentum, the step falling like (1 - t)^0.9
    batch: int = 8
    lr: float = 0.01
    weight_decay: float = 1e-3


class Table2(AbstractExperiment):
    """A deep OptEq with three layers, a multiscale DEQ and a fully convolutional network."""

    name = "xie2021/table2"
    title = "segmentation with as many parameters"
    claims = (
        Claim(
            "fcn",
            "A deep OptEq is better than an FCN with as many parameters: 74.5% against 71.5% mIoU.",
            "[xie2021, Table 2], on CamVid",
            "its mean intersection over union on test images is higher for every seed",
        ),
        Claim("all", "It is better in mAcc and aAcc too.", "[xie2021, Table 2], on CamVid", "both are higher for every seed"),
        Claim(
            "cityscapes",
            "The values of the table, on Cityscapes.",
            "[xie2021, Table 2]",
            "mIoU within 1%; it needs Cityscapes and a GPU",
        ),
        Claim(
            "multiscale",
            "A deep OptEq is better than a multiscale DEQ with as many parameters.",
            "ours",
            "its mean intersection over union on test images is higher for every seed",
        ),
    )
    departures = (
        "CamVid at 96 x 128 with 11 classes in the place of Cityscapes; channels 16, 32, 32 and a state of 16 (--full) where "
        "the paper has 256, 512, 512; features at a quarter of the resolution. 100 epochs (4,600 steps), where the paper makes "
        "40,000; SGD with momentum 0.9, step 0.01 falling like (1 - t)^0.9, weight decay 0.001 and batches of 8 as there.",
        "OptEq and FCN have the same extractor (two convolutions with batch norms) and a head of one 1 x 1 convolution, the "
        "multiscale DEQ has its own; alpha = 0.8. Equilibria are solved to a relative residual of 1e-3 with at most 100 steps; "
        "the gradient is exact, and its norm is cut at 1.",
    )
    quick = Table2Config()
    full = Table2Config(images=367, test_images=233, channels=(16, 32, 32), state_channels=16, epochs=100)

    def available(self, config: Table2Config) -> tuple[Table2Config, list[str]]:
        if config.data == "squares":
            return config, []
        try:
            parts, _ = read(config.data)
        except InvalidArgument as error:
            return dataclasses.replace(config, data="squares"), [f"coloured squares take the place of {config.data}: {error}"]
        n, n_test = (min(size, len(parts[key])) for size, key in ((config.images, "x_train"), (config.test_images, "x_test")))
        asked = f"{config.images} and {config.test_images} were asked for"
        notes = [f"{config.data} has {n} images to train and {n_test} to test; {asked}"]
        found = dataclasses.replace(config, images=n, test_images=n_test)
        return found, [] if found == config else notes

    def tasks(self, config: Table2Config) -> list[Task]:
        shared = {key: value for key, value in config.to_dict().items() if key != "seeds"}
        return [{"network": network, "seed": seed, **shared} for seed in config.seeds for network in NETWORKS]

    def run(self, task: Task) -> dict[str, Any]:
        (X, y), (X_test, y_test) = scenes(task["data"], task["images"], task["test_images"], task["seed"])
        model = network(task)
        options = {key: task[key] for key in ("epochs", "batch", "lr", "weight_decay")}
        loss = functools.partial(cross_entropy, ignore_index=VOID)
        generator = torch.Generator().manual_seed(task["seed"])
        losses = fit(model, X, y, **options, generator=generator, sgd=True, poly=True, loss=loss)
        return {"loss": losses, "parameters": count(model), **measures(confusion_of(model, X_test, y_test))}

    def judge(self, config: Table2Config, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        scores = {n: {m: values_of(results, m, network=n) for m in MEASURES} for n in NETWORKS}
        sizes = {n: values_of(results, "parameters", network=n)[0] for n in NETWORKS}

        def better(other: str, *keys: str) -> ClaimFinding:
            holds = all(a > b for m in keys for a, b in zip(scores["OptEq"][m], scores[other][m], strict=True))
            texts = [f"{n} ({sizes[n]} parameters) {m} {spread(scores[n][m])}" for m in keys for n in ("OptEq", other)]
            return decide(holds, ", ".join(texts), **{n: {m: scores[n][m] for m in keys} for n in ("OptEq", other)})

        return {
            "fcn": better("FCN", "mIoU"),
            "all": better("FCN", "mAcc", "aAcc"),
            "multiscale": better("multiscale DEQ", "mIoU"),
            "cityscapes": not_tested("it needs Cityscapes and a GPU"),
        }

    def panels(self, config: Table2Config, results: Sequence[Result]) -> list[dict[str, Any]]:
        rows = {f"{n}, {m}": values_of(results, m, network=n) for m in MEASURES for n in NETWORKS}
        bars = {"kind": "bars", "title": config.data, "x_label": "on test images", "y_label": "", "rows": rows}
        x = list(range(1, config.epochs + 1))
        curves = [{"label": n, "x": x, "y": values_of(results, "loss", network=n)} for n in NETWORKS]
        return [bars, {"title": "training", "x_label": "epoch", "y_label": "training loss", "y_scale": "log", "curves": curves}]


def scenes(name: str, n: int, n_test: int, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(images, classes of pixels) to train and to test, standardised; "squares" are made here."""
    if name == "squares":
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 3, (n + n_test, 4, 4), generator=g).repeat_interleave(4, 1).repeat_interleave(4, 2)
        X = torch.eye(3)[y].permute(0, 3, 1, 2) + 0.3 * torch.randn(n + n_test, 3, 16, 16, generator=g)
        return (X[:n], y[:n]), (X[n:], y[n:])
    data = load(name, n, n_test=n_test, flatten=False, seed=seed)
    assert data.X_test is not None and data.y_test is not None
    mean, deviation = data.X.mean(dim=(0, 2, 3), keepdim=True), data.X.std(dim=(0, 2, 3), keepdim=True)
    return ((data.X - mean) / deviation, data.y.long()), ((data.X_test - mean) / deviation, data.y_test.long())


def network(task: Task) -> nn.Module:
    """The network of a task; the FCN and the multiscale DEQ are as wide as the parameters of the
    OptEq allow."""
    options: dict[str, Any] = {"rtol": 1e-3, "max_steps": 100, "on_failure": "ignore"}
    width = task["state_channels"]

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(task["seed"])

    with torch.random.fork_rng():
        torch.manual_seed(task["seed"])
        sizes: dict[str, Any] = {"state_channels": width, "feature_channels": width, "alpha": 0.8, "generator": generator()}
        outer: dict[str, Any] = {"extractor": _extractor(width), "head": _head(width)}
        opteq = ConvOptEq(3, tuple(task["channels"]), **sizes, **outer, **options)
        if task["network"] == "OptEq":
            return opteq

        def fcn(channels: int) -> nn.Module:
            torch.manual_seed(task["seed"])
            layers: list[nn.Module] = []
            for a, b in ((width, channels), (channels, channels), (channels, width)):
                layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
            return nn.Sequential(_extractor(width), *layers, _head(width))

        def multiscale(channels: int) -> nn.Module:
            return MultiscaleDEQ.segmenter(
                3, (channels, channels), CLASSES, stride=4, groups=1, generator=generator(), solver=Anderson(), **options
            )

        return widest(fcn if task["network"] == "FCN" else multiscale, count(opteq))


def _extractor(channels: int) -> nn.Module:
    """Images to features at a quarter of the resolution."""
    layers: list[nn.Module] = []
    for a in (3, channels):
        layers += [nn.Conv2d(a, channels, 3, stride=2, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers)


def _head(channels: int) -> nn.Module:
    """A class for every pixel, at full resolution again."""
    up = nn.Upsample(scale_factor=4, mode="bilinear", align_corners=False)
    return nn.Sequential(nn.BatchNorm2d(channels), nn.Conv2d(channels, CLASSES, 1), up)


@torch.no_grad()
def confusion_of(model: nn.Module, X: Tensor, y: Tensor) -> Tensor:
    """(classes, classes) pixels by their class and the one that is predicted; void does not
    count."""
    confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.float64)
    for images, truth in zip(X.split(8), y.split(8), strict=True):
        guess, valid = model(images).argmax(dim=1), truth != VOID
        pairs = torch.bincount(truth[valid] * CLASSES + guess[valid], minlength=CLASSES**2)
        confusion += pairs.reshape(CLASSES, CLASSES)
    return confusion


def measures(confusion: Tensor) -> dict[str, float]:
    """Mean intersection over union and mean accuracy of the classes that occur, accuracy of all
    pixels."""
    right, truth, guess = confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)
    seen = truth > 0
    union = (right / (truth + guess - right))[seen].mean()
    return {"mIoU": float(union), "mAcc": float((right / truth)[seen].mean()), "aAcc": float(right.sum() / truth.sum())}
