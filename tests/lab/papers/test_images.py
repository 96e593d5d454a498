"""What the experiments with images are made of, against answers by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.landscape import basin, filter_normalized, random_direction, surface
from wellposed_lab.papers import EXPERIMENTS, ClaimOutcome
from wellposed_lab.papers.datasets import images, ten_classes
from wellposed_lab.papers.experiment import Result
from wellposed_lab.papers.image_training import accuracy, fit
from wellposed_lab.papers.nguyen2022.figure4_2 import residual, wander
from wellposed_lab.papers.nguyen2022.figure4_3 import _last, _nearest
from wellposed_lab.papers.nguyen2022.figure4_4 import reached
from wellposed_lab.papers.nguyen2022.figure4_5 import certain_minima, minima
from wellposed_lab.papers.record import Record
from wellposed_lab.papers.xie2021.networks import NeuralODE, count, deep_opteq, network, widest
from wellposed_lab.papers.xie2021.segmentation_table import segmentation_table
from wellposed_lab.papers.xie2021.table2 import measures
from wellposed_lab.papers.xie2021.table2 import network as segmenter


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
    assert certain_minima([[None, 1.0], [2.0, None]]) == 0  # what is unknown may be lower
    assert certain_minima(bowl) == 1
    assert certain_minima([[0.0, 1.0, 2.0, 0.0, None], [1.0, 2.0, 2.0, 1.0, 3.0]]) == 1


def test_losses_where_the_solver_stops() -> None:
    """They are those of the surface where every point has one equilibrium, and finite where none has."""
    generator = torch.Generator().manual_seed(0)
    X, y = torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)
    cell = wp.nn.DenseCell(4, 8, generator=generator)
    layer = wp.EquilibriumLayer(cell, on_failure="ignore", rtol=1e-6)
    model = nn.Sequential(layer, nn.Linear(8, 3))
    directions = [filter_normalized(model, random_direction(model, generator=generator)) for _ in range(2)]
    loss = nn.functional.cross_entropy

    def both(scale: float) -> tuple[Any, dict[str, Any]]:
        with torch.no_grad():
            cell.W.copy_(scale * torch.eye(8).roll(1, 0))  # relu(scale * permutation): no equilibrium above 1
        before = [p.detach().clone() for p in model.parameters()]
        found = surface(model, loss, X, y, directions=directions, num=3, radius=0.1)
        drawn = reached(model, directions, found, X, y)
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        return found, drawn

    found, drawn = both(0.3)
    assert found.valid.all() and np.allclose(drawn["values"], found.values, rtol=1e-4)
    assert drawn["area"] == pytest.approx(basin(found, level=drawn["centre"] + 0.5).area, rel=1e-2)
    layer.max_steps = 10
    found, drawn = both(1.5)
    assert not found.valid.any() and np.isfinite(np.array(drawn["values"], dtype=float)).all()
    assert drawn["area"] == pytest.approx(0.04) and drawn["undecided"] == 0


def test_sizes_are_those_that_there_are() -> None:
    assert ten_classes("digits", 50, 20) == ("digits", 50, 20, [])
    name, n, n_test, (note,) = ten_classes("digits", 10000, 20)
    (X, y), (X_test, _) = images(name, n, n_test, size=8, seed=0)
    assert len(X) == n < 10000 and len(X_test) == n_test == 20 and f"{n} samples of digits to train" in note
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


def test_a_slow_cell_moves_less() -> None:
    (X, y), _ = images("digits", 20, 10, size=7, seed=0)
    moved = {}
    for slow in (1.0, 30.0):
        model = residual(1, 4, seed=0)
        before = [p.detach().clone() for p in model.cell.parameters()]
        fit(model, X, y, epochs=1, batch=10, lr=1e-2, generator=torch.Generator().manual_seed(0), slow=slow)
        after = model.cell.parameters()
        moved[slow] = max(float((p - q.detach()).abs().max()) for p, q in zip(before, after, strict=True))
    assert 0 < moved[30.0] < 0.2 * moved[1.0]


CONV = {"channels": (4, 6), "state_channels": 4, "feature_channels": 4, "stride": 1, "size": 8, "seed": 3}
OPTEQ = {"alpha": 0.8, "regularizer": "none", "weight": 1.0, "gradient": "implicit", **CONV}


def test_the_widest_network() -> None:
    def make(width: int) -> nn.Module:
        return nn.Linear(width, 3)

    for most in (6, 7, 8, 9, 10, 50, 51, 53):
        assert count(widest(make, most)) == 3 * ((most - 3) // 3) + 3


@pytest.mark.parametrize("kind", ["dnn", "monotone", "ode", "augmented ode"])
def test_other_networks_have_no_more_parameters_and_not_many_fewer(kind: str) -> None:
    task = {"network": kind, **CONV, "channels": (16, 32), "state_channels": 8, "feature_channels": 8}
    most = count(deep_opteq(1, task))
    assert 0.85 * most < count(network(1, task)) <= most


def test_small_alphas_are_trained_as_in_the_paper_and_two_equal_rows_are_one_task() -> None:
    """20 steps do not reach the equilibrium of a small alpha, which the exact gradient hides: the claims need the same one."""
    table = EXPERIMENTS["xie2021/table1a"]
    rows = table.rows(table.full)  # type: ignore[attr-defined]
    assert [rows[f"alpha {a:g}"]["gradient"] for a in (0.01, 0.1, 0.4, 1.0)] == ["unrolled"] * 2 + ["implicit"] * 2
    assert rows["alpha 0.1, prior"]["gradient"] == "unrolled" and rows["alpha 0.1, exact"]["gradient"] == "implicit"
    tasks = table.tasks(table.quick.changed({"alphas": (0.1,), "seeds": (0,)}))
    assert len(tasks) == len({str(sorted(task.items())) for task in tasks}) == 11


def test_the_signal_reaches_the_head_of_the_explicit_network() -> None:
    """With the start of torch a convolution and ReLU keep a sixth of the mean square: the DNN of Table 1a learned nothing."""
    task = {**EXPERIMENTS["xie2021/table1a"].full.to_dict(), "network": "dnn", "seed": 0}
    model = network(3, task)
    assert isinstance(model, nn.Sequential)
    X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model[0](X)
        after = model[1:-1](before)
    assert 0.2 < float(after.square().mean() / before.square().mean()) < 5


@pytest.mark.parametrize(("name", "printed"), [("table1a", 199_000), ("table1b", 162_000), ("table3", 199_000)])
def test_the_networks_have_the_parameters_of_the_paper(name: str, printed: int) -> None:
    full = EXPERIMENTS[f"xie2021/{name}"].full
    task = {**full.to_dict(), "seed": 0}
    assert abs(count(deep_opteq(3, task)) / printed - 1) <= 0.01


@pytest.mark.parametrize("kind", ["FCN", "multiscale DEQ"])
def test_segmenters_have_no_more_parameters_than_the_opteq(kind: str) -> None:
    task = {"channels": (8, 16), "state_channels": 8, "seed": 0}
    most = count(segmenter({**task, "network": "OptEq"}))
    assert 0.7 * most < count(segmenter({**task, "network": kind})) <= most


def test_the_table_of_the_page_about_segmentation() -> None:
    assert "No run is stored yet" in segmentation_table({})
    values = {"parameters": 5000, "mIoU": 0.3, "mAcc": 0.4, "aAcc": 0.8}
    results = [
        Result({"network": "FCN", "seed": seed}, values | {"mIoU": 0.3 + 0.1 * seed}, seconds=2.0 + seed) for seed in range(2)
    ]
    config = {"images": 24, "test_images": 16, "data": "camvid", "epochs": 4}
    record = Record("xie2021/table2", "", "quick", config, [], results, [], [], [], {}, 0.0)
    table = segmentation_table({"xie2021/table2": record})
    assert table.splitlines()[-1] == "| FCN | 5,000 | 2 | 35.0 ± 5.0 | 40.0 ± 0.0 | 80.0 ± 0.0 | 2 |"  # others are not run
    assert "24 images of camvid to train and 16 to test, 4 epochs" in table


def test_measures_of_a_segmentation_by_hand() -> None:
    confusion = torch.zeros(11, 11, dtype=torch.float64)
    confusion[0, 0], confusion[0, 1], confusion[1, 1] = 3, 1, 4  # union 4 and 5; class 2 never occurs
    assert measures(confusion) == pytest.approx({"mIoU": (3 / 4 + 4 / 5) / 2, "mAcc": (3 / 4 + 1) / 2, "aAcc": 7 / 8})


def test_the_same_seed_draws_the_same_network_and_leaves_others_alone() -> None:
    state = torch.get_rng_state()
    a, b = (network(1, {"network": "opteq", **OPTEQ}) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_neural_ode_solves_its_equation() -> None:
    """With dz/dt = z (its field is linear on positive states) z(1) = e z(0), to the order of the method."""
    model = NeuralODE(nn.Identity(), 1, 1, 0).double()
    with torch.no_grad():
        for layer, weight in zip(model.layers, (torch.tensor([[1.0], [0.0]]), torch.ones(1), torch.ones(1)), strict=True):
            layer.weight.zero_()
            layer.bias.zero_()
            middle = layer.weight.shape[-1] // 2
            layer.weight[0, :, middle, middle] = weight.flatten().double()
    model.head = nn.Identity()
    X = torch.rand(2, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(model(X), X * np.e, rtol=1e-4)


def test_averaging_and_unrolling_end_near_the_equilibrium() -> None:
    """For |W| < 1 there is one equilibrium: 20 unrolled steps of alpha = 1 reach it, averaging comes near."""
    X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    made = {**OPTEQ, "alpha": 1.0}
    with torch.no_grad():
        exact = network(1, {"network": "opteq", **made})(X)
        unrolled = network(1, {"network": "opteq", **made, "gradient": "unrolled"})(X)
        averaged = network(1, {"network": "averaged", **made, "regularizer": "l2", "weight": 0.5})(X)
    assert torch.allclose(exact, unrolled, atol=1e-3)
    assert 0 < float((averaged - exact).norm()) < float(exact.norm())


def area(repeats: int, seed: int, size: float | None, drawn: float | None = None) -> Result:
    values = {"area": size, "undecided": 0.0, "counts": {"VALID": 1}, "loss": [1.0], "test_accuracy": 0.5}
    values["reached"] = None if drawn is None else {"area": drawn}
    return Result({"repeats": repeats, "seed": seed}, values, 0.0)


def test_the_verdicts_about_areas() -> None:
    experiment = EXPERIMENTS["nguyen2022/figure4.4"]
    config = experiment.quick.changed({"repeats": (2, 3)})

    def verdicts(two: float, three: float, deep: float | None, drawn: float | None = None) -> list[ClaimOutcome]:
        found = experiment.judge(config, [area(2, 0, two), area(3, 0, three), area(0, 0, deep, drawn)])
        return [found[key].outcome for key in ("wider", "equilibrium")]

    good, bad, none = ClaimOutcome.REPRODUCED, ClaimOutcome.NOT_REPRODUCED, ClaimOutcome.NOT_TESTED
    assert verdicts(1, 2, 3) == [good, good] and verdicts(2, 1, 3) == [bad, good]
    assert verdicts(1, 2, 1.5) == [good, bad]
    assert verdicts(1, 2, 1.5, 2.5) == [good, good] and verdicts(1, 2, 3, 1.5) == [good, bad]  # as the thesis draws it
    assert verdicts(1, 2, None, 2.5) == [good, good]
    assert verdicts(1, 2, None) == [good, none]
