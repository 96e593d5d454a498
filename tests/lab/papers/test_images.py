"""What the experiments with images are made of, against answers by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from wellposed.nn import MonotoneClassifier
from wellposed_lab.papers import EXPERIMENTS, ClaimOutcome
from wellposed_lab.papers.datasets import accuracy, fit, images, ten_classes
from wellposed_lab.papers.experiment import Result
from wellposed_lab.papers.nguyen2022.figure4_2 import residual, wander
from wellposed_lab.papers.nguyen2022.figure4_3 import _last, _nearest
from wellposed_lab.papers.nguyen2022.figure4_5 import minima
from wellposed_lab.papers.xie2021.table1a import conv_opteq
from wellposed_lab.papers.xie2021.table1b import _monotone


def test_wander_by_hand() -> None:
    leap = np.array([[[0.0, 0.0]], [[3.0, 4.0]], [[3.0, 4.0]]])
    square = np.array([[[0.0, 0.0]], [[1.0, 0.0]], [[1.0, 1.0]], [[0.0, 1.0]]])
    short = np.concatenate([leap, np.full((1, 1, 2), np.nan)])
    assert wander(leap) == 0 and wander(square) == 2 and wander(short) == 0
    assert wander(np.concatenate([short, square], axis=1)) == 1


def test_the_last_states_and_their_nearest_class() -> None:
    points = np.array([[[0.0], [5.0]], [[1.0], [np.nan]]])
    assert _last(points, np.array([2, 1])).tolist() == [[1.0], [5.0]]
    ends = np.array([[0.0], [1.0], [10.0], [11.0], [9.0]])
    assert _nearest(ends, np.array([0, 0, 1, 1, 1])) == 1.0
    assert _nearest(ends, np.array([0, 0, 1, 1, 0])) == 0.8  # means 10/3 and 10.5


def test_minima_by_hand() -> None:
    bowl = [[float(i * i + j * j) for j in range(-2, 3)] for i in range(-2, 3)]
    assert minima(bowl) == 1
    assert minima([[0.0, 1.0, 0.0], [1.0, 2.0, 1.0]]) == 2
    assert minima([[0.0, 0.0], [1.0, 1.0]]) == 0  # a flat valley has no point lower than its neighbours
    assert minima([[None, 1.0], [2.0, None]]) == 1


def test_sizes_are_those_that_there_are() -> None:
    assert ten_classes("digits", 50, 20) == ("digits", 50, 20, [])
    name, n, n_test, (note,) = ten_classes("digits", 10000, 20)
    (X, y), (X_test, _) = images(name, n, n_test, size=8, seed=0)
    assert len(X) == n < 10000 and len(X_test) == n_test == 20 and f"{n} images to train" in note
    assert set(y.bincount().tolist()) == {n // 10}
    with pytest.raises(ValueError, match="lower n"):
        images(name, n + 10, n_test, size=8, seed=0)


def test_training_learns_and_repeats() -> None:
    (X, y), (X_test, y_test) = images("digits", 60, 20, size=8, seed=0)
    assert X.shape == (60, 1, 8, 8) and abs(float(X.mean())) < 1e-5 and abs(float(X.std()) - 1) < 1e-5
    assert y.dtype == torch.int64 and len(X_test) == len(y_test) == 20

    def run(**options: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        seen: list[int] = []
        generator = torch.Generator().manual_seed(1)
        losses = fit(model, X, y, epochs=5, batch=10, lr=0.05, generator=generator, each=seen.append, **options)
        assert seen == [1, 2, 3, 4, 5] and accuracy(model, X, y) > 0.8
        return losses

    for options in ({}, {"sgd": True}):
        first = run(**options)
        assert first == run(**options) and first[-1] < 0.5 * first[0]


def test_steady_training_moves_the_cell_less() -> None:
    (X, y), _ = images("digits", 20, 10, size=7, seed=0)
    moved = {}
    for steady in (False, True):
        model = residual(1, 4, seed=0)
        before = [p.detach().clone() for p in model.cell.parameters()]
        fit(model, X, y, epochs=1, batch=10, lr=1e-2, generator=torch.Generator().manual_seed(0), steady=steady)
        after = model.cell.parameters()
        moved[steady] = max(float((p - q.detach()).abs().max()) for p, q in zip(before, after, strict=True))
    assert 0 < moved[True] < 0.2 * moved[False]


@pytest.mark.parametrize("channels", [(2, 3), (6, 8, 10)])
def test_the_other_network_is_as_wide_as_it_may_be(channels: tuple[int, ...]) -> None:
    task = {"channels": channels, "state_channels": 4, "seed": 0, "size": 8}
    most = sum(p.numel() for p in conv_opteq(1, task).parameters())
    counts = [
        sum(p.numel() for p in MonotoneClassifier.conv((1, 8, 8), width, 10, grid=4).parameters()) for width in range(1, 40)
    ]
    assert counts[-1] > most  # so that the best of them is the best of all
    assert sum(p.numel() for p in _monotone(1, task, most).parameters()) == max(c for c in counts if c <= most)


def test_the_same_seed_draws_the_same_network_and_leaves_others_alone() -> None:
    task = {"channels": (2, 3), "state_channels": 4, "seed": 3}
    state = torch.get_rng_state()
    a, b = conv_opteq(1, task), conv_opteq(1, task)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def area(repeats: int, seed: int, size: float | None, undecided: float = 0.0) -> Result:
    values = {"area": size, "undecided": undecided, "counts": {"VALID": 1}, "loss": [1.0]}
    return Result({"repeats": repeats, "seed": seed}, values, 0.0)


def test_the_verdicts_about_areas() -> None:
    experiment = EXPERIMENTS["nguyen2022/figure4.4"]
    config = experiment.quick.changed({"repeats": (2, 3)})

    def verdicts(two: float, three: float, deep: float | None, undecided: float = 0.0) -> list[ClaimOutcome]:
        found = experiment.judge(config, [area(2, 0, two), area(3, 0, three), area(0, 0, deep, undecided)])
        return [found[key].outcome for key in ("wider", "equilibrium")]

    good, bad, none = ClaimOutcome.REPRODUCED, ClaimOutcome.NOT_REPRODUCED, ClaimOutcome.NOT_TESTED
    assert verdicts(1, 2, 3) == [good, good] and verdicts(2, 1, 3) == [bad, good]
    assert verdicts(1, 2, 1.5) == [good, bad] and verdicts(1, 2, 1.5, 1.0) == [good, none]
    assert verdicts(1, 2, None) == [good, none]
