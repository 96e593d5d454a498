"""Every experiment at a size of seconds, on built-in data: it runs, judges all its claims, and gives the same numbers again."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from wellposed.descent.recorder import Recorder
from wellposed.nn import GaussianDEQ
from wellposed.plot.curves import experiment as picture_of
from wellposed_lab.papers import EXPERIMENTS, ClaimOutcome, Record, reproduce
from wellposed_lab.papers.datasets import samples, two_classes
from wellposed_lab.papers.experiment import Result
from wellposed_lab.papers.nguyen2022.splitting import dense_equilibrium, network
from wellposed_lab.papers.records import _difference, judged_anew
from wellposed_lab.papers.storage import DIGITS, store, stored, thinned
from wellposed_lab.papers.width_results import WidthResults
from wellposed_lab.papers.width_training import largest_eigenvalue
from wellposed_lab.runs.processes import on_threads

SMALL_STUDY = {"data": ("digits",), "widths": (10, 40), "n": 12, "n_test": 10, "steps": 8, "points": 4, "seeds": (0, 1)}
SMALL_CONV = {
    "data": "digits",
    "images": 20,
    "test_images": 10,
    "size": 8,
    "channels": (2, 3),
    "epochs": 1,
    "batch": 10,
    "seeds": (0,),
}
SMALL_LANDSCAPE = {"data": "digits", "n": 20, "n_test": 10, "channels": 4, "epochs": 1, "batch": 10, "points": 3, "seeds": (0,)}
TINY: dict[str, dict[str, Any]] = {
    "ling2022/figure1": {**SMALL_STUDY, "data": ("sphere", "digits"), "seeds": (0,)},
    "ling2022/lemma1": {"widths": (10, 40), "draws": 10, "seeds": (0, 1)},
    "ling2022/theorem2": {"widths": (50, 150, 450), "n": 6},
    "ling2022/depth": {"widths": (50, 150, 450), "n": 6, "depth": 5, "seeds": (0,)},
    "gao2022/figure1": SMALL_STUDY,
    "gao2023/figure1": SMALL_STUDY,
    "gao2023/kernel": {
        "data": "digits",
        "widths": (20, 80),
        "n": 12,
        "n_test": 10,
        "steps": 20,
        "noise": (0.25,),
        "seeds": (0,),
    },
    "nguyen2022/initial": {"widths": (20, 40), "n": 3, "seeds": (0,)},
    "nguyen2022/splitting": {"width": 12, "features": 6, "n": 3, "seeds": (0,)},
    "nguyen2022/chapter3": {"widths": (12,), "features": 6, "n": 4, "steps": 10, "seeds": (0,)},
    "nguyen2022/figure4.1": {"data": "digits", "n": 2, "channels": 4, "groups": 2, "steps": 10, "seeds": (0,)},
    "nguyen2022/figure4.2": {"data": "digits", "n": 10, "channels": 4, "groups": 2, "steps": 10, "seeds": (0,)},
    "nguyen2022/figure4.3": {
        "data": "digits",
        "n": 20,
        "n_test": 10,
        "shown": 20,
        "channels": 4,
        "epochs": 2,
        "batch": 10,
        "seeds": (0,),
    },
    "nguyen2022/figure4.4": {"n_seen": 10, "repeats": (2, 3), **SMALL_LANDSCAPE},
    "nguyen2022/figure4.5": {"n_seen": 10, **SMALL_LANDSCAPE},
    "xie2021/theorems": {"width": 5, "features": 3, "n": 2, "directions": 10, "alphas": (0.1, 0.03), "seeds": (0,)},
    "xie2021/table1a": {"alphas": (0.1, 1.0), **SMALL_CONV},
    "xie2021/table1b": SMALL_CONV,
    "xie2021/table2": {"data": "squares", "images": 8, "test_images": 4, "channels": (2, 3), "epochs": 1, "seeds": (0,)},
    "xie2021/table3": {"alphas": (0.1, 1.0), **SMALL_CONV},
}


@functools.cache
def record_of(name: str) -> Record:
    """Of its tiny size; made once for all tests."""
    return reproduce(name, changes=TINY[name])


def test_every_experiment_is_tested() -> None:
    assert set(TINY) == set(EXPERIMENTS)


@pytest.mark.parametrize("name", TINY)
def test_it_runs_and_judges_every_claim(name: str) -> None:
    record = record_of(name)
    claims = EXPERIMENTS[name].claims
    assert [check.claim for check in record.checks] == list(claims)
    assert len({claim.key for claim in claims}) == len(claims)
    assert all(check.finding.measured for check in record.checks)
    assert all(claim.source.startswith("[") or claim.source == "ours" for claim in claims)
    assert record.size == "quick, changed" and set(TINY[name]) <= set(record.config)
    first = record.results[0]
    with on_threads(1):  # as the record was made: sums on several threads add up in another order
        assert EXPERIMENTS[name].run(first.task) == first.values
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert len(picture_of(record).axes) >= len(record.panels) > 0


@pytest.mark.parametrize("name", TINY)
def test_stored_results_are_enough_to_judge_and_to_draw(name: str, tmp_path: Path) -> None:
    """A later run judges them together with its own: what is stored must give the same verdicts and panels."""
    record = record_of(name)
    store(record, tmp_path)
    again = stored(name, tmp_path)
    assert again.to_json() == thinned(record).to_json()  # thin, and not whole because the rules need more
    anew = judged_anew(again)
    assert [check.outcome for check in anew.checks] == [check.outcome for check in record.checks]
    panels = [json.loads(one.to_json())["panels"] for one in (record, anew)]
    assert _difference(*panels) <= 10.0 ** (1 - DIGITS)  # half a unit of the last digit, twice: a panel may have ratios


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_sizes(name: str) -> None:
    experiment = EXPERIMENTS[name]
    for config in (experiment.quick, experiment.full):
        tasks = experiment.tasks(config)
        assert len({repr(task) for task in tasks}) == len(tasks) >= len(config.seeds) >= 3


@pytest.mark.parametrize("name", ["gao2023/figure1", "gao2023/kernel", "nguyen2022/chapter3"])
def test_an_interrupted_descent_is_not_a_result(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descent returns what it has when it is interrupted; stored, that would be taken for a whole training."""
    seen = []

    def interrupt(self: Recorder, now: object) -> None:
        seen.append(now)
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "count", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reproduce(name, changes=TINY[name], out=tmp_path, records=tmp_path, figure=False)
    assert list(tmp_path.rglob("*.json")) == []


def test_known_verdicts() -> None:
    """Statements that mathematics decides: the Gram matrix converges, and (9) fails at every width."""
    record = record_of("ling2022/theorem2")
    assert record.outcome("rate") is ClaimOutcome.REPRODUCED
    assert record.outcome("condition") is ClaimOutcome.NOT_REPRODUCED
    record = record_of("nguyen2022/splitting")
    assert record.outcome("forward_backward") is record.outcome("peaceman_rachford") is ClaimOutcome.REPRODUCED
    assert record.outcome("plain") is ClaimOutcome.NOT_REPRODUCED
    record = record_of("xie2021/theorems")
    assert {check.outcome for check in record.checks} == {ClaimOutcome.REPRODUCED}


def test_the_norm_is_bounded_at_every_step() -> None:
    """The bound over all steps from few looks against norms at every step, and the losses against plain descent."""
    experiment = EXPERIMENTS["ling2022/figure1"]
    task = {
        "data": "digits",
        "seed": 0,
        "width": 15,
        "reference": 15,
        "n": 10,
        "n_test": 6,
        "steps": 12,
        "points": 3,
        "step": 1.0,
    }
    seen, every = experiment.run(task), experiment.run({**task, "points": 12})
    assert len(seen["norm"]) == 4 and len(every["norm"]) == 13
    assert max(every["norm"]) <= seen["norm_throughout"]
    assert (seen["norm_throughout"] < 1) == (max(every["norm"]) < 1)

    data = samples("digits", 10, 6, paper="ling2022", seed=0)
    model = GaussianDEQ(data.X.shape[1], 15, weight_variance=0.08, generator=torch.Generator().manual_seed(0), rtol=1e-6)
    size = 1.0 / largest_eigenvalue(model, data.X)
    assert seen["step_size"] == pytest.approx(size, rel=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=size)
    for k in range(12):
        loss = ((model(data.X) - data.y) ** 2).sum() / 2
        assert float(loss.detach()) / 10 == pytest.approx(every["loss"][k], rel=1e-3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert data.X_test is not None and data.y_test is not None
    prediction = model(data.X_test).detach()
    assert float(((prediction - data.y_test) ** 2).mean()) / 2 == pytest.approx(seen["test_loss"][-1], rel=1e-3)
    assert float((prediction.sign() != data.y_test).float().mean()) == pytest.approx(seen["test_error"][-1])


def result(width: int, seed: int, value: float, data: str = "a") -> Result:
    return Result({"width": width, "seed": seed, "data": data}, {"x": value}, 0.0)


@pytest.mark.parametrize(
    ("values", "falls"),
    [
        ({(1, 0): 3, (1, 1): 3, (2, 0): 2, (2, 1): 2, (3, 0): 1, (3, 1): 1}, True),
        ({(1, 0): 3, (1, 1): 3, (2, 0): 1, (2, 1): 1, (3, 0): 2, (3, 1): 2}, False),  # the mean rises in between
        ({(1, 0): 3, (1, 1): 1, (2, 0): 1, (2, 1): 2}, False),  # one seed rises
        ({(1, 0): 1, (2, 0): 1}, False),  # nothing changes
    ],
)
def test_falls_with_width(values: dict[tuple[int, int], float], falls: bool) -> None:
    results = [result(width, seed, value) for (width, seed), value in values.items()]
    outcome = ClaimOutcome.REPRODUCED if falls else ClaimOutcome.NOT_REPRODUCED
    assert WidthResults(results).falls(lambda v: v["x"]).outcome is outcome
    mirrored = [result(width, seed, -value) for (width, seed), value in values.items()]
    assert WidthResults(mirrored).falls(lambda v: v["x"], rises=True).outcome is outcome
    flat = [*results, *(result(width, seed, 0.0, "b") for width, seed in values)]
    assert WidthResults(flat).falls(lambda v: v["x"]).outcome is ClaimOutcome.NOT_REPRODUCED  # every data set must agree


def test_widths_are_compared_over_the_seeds_that_both_have() -> None:
    """The widest network has one seed, on one data set: a mean over other seeds would decide by their level."""
    found = {(1, 0): 9.0, (1, 1): 2.0, (2, 0): 8.0, (2, 1): 1.0, (3, 0): 7.0}
    results = [result(width, seed, value) for (width, seed), value in found.items()]
    other = [result(width, 0, 5.0 - width, "b") for width in (1, 2)]
    assert WidthResults([*results, *other]).falls(lambda v: v["x"]).outcome is ClaimOutcome.REPRODUCED
    rising = [result(3, 0, 8.5) if r.task["width"] == 3 else r for r in results]  # below the start, above the width before
    assert WidthResults(rising).falls(lambda v: v["x"]).outcome is ClaimOutcome.NOT_REPRODUCED


def test_tasks_of_a_study_of_widths() -> None:
    experiment = EXPERIMENTS["gao2022/figure1"]
    tasks = experiment.tasks(experiment.full)
    assert [task["seed"] for task in tasks] == sorted(task["seed"] for task in tasks)  # one seed of everything first
    widest = [task for task in tasks if task["width"] == 2000]
    assert {(task["data"], task["seed"]) for task in widest} == {("mnist", 0)}
    part = experiment.tasks(experiment.full.changed({"widths": (500, 1000), "seeds": 0}))
    assert all(task in tasks for task in part)  # a part of the full size is not measured twice
    assert {task["data"] for task in tasks if task.get("centred")} == set(experiment.full.data)
    own = [task for task in tasks if task["reference"] == task["width"] < 2000]
    assert {task["data"] for task in own} == {"mnist"}


def test_a_centred_network_starts_at_zero() -> None:
    """Its loss at the start is that of the prediction 0, and its test loss that of f - f(start) by plain descent."""
    experiment = EXPERIMENTS["gao2022/figure1"]
    shared = {"data": "digits", "seed": 0, "width": 15, "reference": 15, "n": 10, "n_test": 6, "steps": 3, "points": 3}
    values = experiment.run({**shared, "step": 1.0, "centred": True})
    assert values["loss"][0] == pytest.approx(0.5) and values["test_loss"][0] == pytest.approx(0.5)
    data = samples("digits", 10, 6, paper="gao2022", seed=0)
    model = experiment.network(data.X.shape[1], 15, torch.Generator().manual_seed(0))  # type: ignore[attr-defined]
    assert data.X_test is not None and data.y_test is not None
    with torch.no_grad():
        start, start_test = model(data.X), model(data.X_test)
    optimizer = torch.optim.SGD(model.parameters(), lr=values["step_size"])
    for _ in range(3):
        optimizer.zero_grad()
        (((model(data.X) - start - data.y) ** 2).sum() / 2).backward()
        optimizer.step()
    loss = float(((model(data.X_test) - start_test - data.y_test) ** 2).mean().detach()) / 2
    assert loss == pytest.approx(values["test_loss"][-1], rel=1e-3)


def test_one_width_decides_nothing() -> None:
    assert WidthResults([result(1, 0, 1.0)]).falls(lambda v: v["x"]).outcome is ClaimOutcome.NOT_TESTED


def test_everywhere() -> None:
    of = WidthResults([result(1, 0, 0.5), result(2, 0, 0.9)])
    assert of.everywhere(lambda v: v["x"], 1.0).outcome is ClaimOutcome.REPRODUCED
    assert of.everywhere(lambda v: v["x"], 0.9).outcome is ClaimOutcome.NOT_REPRODUCED
    lost = of.everywhere(lambda v: None if v["x"] == 0.9 else v["x"], 1.0)
    assert lost.outcome is ClaimOutcome.NOT_REPRODUCED and "1 runs did not go to their end" in lost.measured


@pytest.mark.parametrize(("step", "stops"), [(1e8, True), (30.0, False)])
def test_a_descent_that_goes_wrong_does_not_pass(step: float, stops: bool) -> None:
    record = reproduce("gao2022/figure1", changes={**SMALL_STUDY, "widths": (20,), "step": step, "steps": 40, "seeds": (0,)})
    assert (record.results[0].values["stop"] in ("not_finite", "diverged")) is stops
    assert record.outcome("well_posed") is ClaimOutcome.NOT_REPRODUCED
    ended = all(r.values["stop"] not in ("not_finite", "diverged") for r in record.results)
    assert ("did not go to their end" in str(record)) is not ended
    unsolved = any(r.values["unsolved"] > 0 for r in record.results)
    assert any("did not converge" in note for note in record.notes) is unsolved
    assert record.outcome("faster") is record.outcome("no_bell") is ClaimOutcome.NOT_TESTED


def test_digits_take_the_place_of_what_is_not_two_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")

    def offline(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(datasets, "fetch_openml", offline)
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    samples.cache_clear()
    data, n, n_test, notes = two_classes(("mnist", "cifar10"), 1000, 10, paper="gao2022")
    assert data == ("digits",) and n < 1000 and n_test == 10
    assert "digits take the place of mnist" in notes[0] and "cifar10" in notes[1]
    assert notes[2].startswith(f"{n} samples of digits to train and 10 to test are used, of 1000 and 10 that were asked for")
    small = two_classes(("digits",), 20, 10**6, paper="gao2022")
    assert small[1] == 20 and small[3][0].startswith("20 samples of digits to train"), "what is used, not all that it has"
    assert len(samples("digits", n, n_test, paper="gao2022", seed=0).X) == n
    record = reproduce("xie2021/table1a", changes={**TINY["xie2021/table1a"], "data": "mnist"})
    assert record.config["data"] == "digits" and "take the place of mnist" in record.departures[0]
    (tmp_path / "mnist.npz").write_bytes(b"damaged")
    samples.cache_clear()
    with pytest.raises(ValueError, match="cannot be read"):  # a damaged file is no reason to go on with other data
        two_classes(("mnist",), 10, 10, paper="gao2022")
    samples.cache_clear()


def test_the_synthetic_data_are_those_of_the_paper() -> None:
    data = samples("sphere", 30, 5, paper="ling2022", seed=3, dtype=torch.float64)
    assert data.X.shape == (30, 30) and torch.allclose(data.X.norm(dim=1), torch.tensor(math.sqrt(30), dtype=torch.float64))


def test_the_reference_equilibrium() -> None:
    model, X = network({"seed": 1, "features": 6, "width": 10, "margin": 0.3, "n": 4, "skew": 3.0})
    with torch.no_grad():
        W, C = model.recurrent(), model.injection(X)
    Z = dense_equilibrium(W, C)
    assert torch.allclose(Z, torch.relu(Z @ W.t() + C), atol=1e-12)


def test_a_configuration_is_read_again_as_it_was() -> None:
    """Two layers with as many channels are not a value given twice: records of the tables could not be judged anew."""
    for experiment in EXPERIMENTS.values():
        for config in (experiment.quick, experiment.full):
            assert config.changed(config.to_dict()) == config
