"""The task at the size of seconds: every model is trained and measured, and the record continues."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wellposed_lab.tasks import language
from wellposed_lab.tasks.generation import PROMPTS, generation
from wellposed_lab.tasks.language import (
    Settings,
    equilibrium_network,
    explicit_network,
    run,
    run_in_equal_time,
    train,
    window_losses,
)
from wellposed_lab.tasks.language_rows import generation_rows, rows

TINY = Settings(length=8, batch=4, steps=4, width=8, heads=2, test_tokens=160, warmup=2)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text with a rule: letters follow each other in the alphabet."""
    folder = tmp_path / "wikitext2"
    folder.mkdir()
    for name, times in (("valid.txt", 80), ("test.txt", 20)):
        (folder / name).write_text("abcdefghij" * times)
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))


def test_networks_have_equal_parameters() -> None:
    for settings in (Settings(words=1000), Settings()):
        sizes = [
            sum(p.numel() for p in make(settings.words or 97, settings, 0).parameters())
            for make in (equilibrium_network, explicit_network)
        ]
        assert abs(sizes[0] - sizes[1]) < 0.005 * sizes[0], sizes


def test_all_models_are_in_the_record(text: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "ALL", {"characters": TINY})
    monkeypatch.setattr(language, "train", lambda *given: train(*given, every=2))
    monkeypatch.setattr(language, "EQUAL", 1e9)  # times of four steps say nothing
    path = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["language", str(path), "--seeds", "1", "--weights", str(tmp_path / "weights")])
    language.main()
    record = json.loads(path.read_text())
    assert [run["model"] for run in record["runs"]] == list(language.KINDS)
    assert len(record["characters"]) == 5 and record["characters"][2]["converged"] == "100.00%"
    assert [row["equal"] for row in record["generate"]] == [f"{4 * PROMPTS} of {4 * PROMPTS}"] * 2
    # a deterministic text: counting it is better than any untrained network
    assert record["runs"][0]["loss"] < 0.5 < record["runs"][2]["loss"]
    assert record["runs"][0]["windows"] == record["runs"][2]["windows"] == 20
    before = path.read_text()
    language.main()  # nothing is left to do
    assert path.read_text() == before
    assert (tmp_path / "weights" / "characters-equilibrium-0.pt").exists()


def test_training_lowers_the_loss_and_repeats(text: None) -> None:
    settings = replace(TINY, steps=30, lr=1e-2)
    tokens = (torch.arange(400) % 10) + 1
    found = []
    for _ in range(2):
        model = equilibrium_network(11, settings, 0)
        history = train(model, tokens, tokens[:81], settings, 0, every=15)
        found.append([row["held_out"] for row in history])
        assert window_losses(model, tokens[:81], settings)["converged"] == 1.0
    assert found[0] == found[1]
    assert found[0][1] < found[0][0]


def test_the_last_step_is_in_the_history(text: None) -> None:
    settings, tokens = replace(TINY, steps=5), (torch.arange(400) % 10) + 1
    history = train(explicit_network(11, settings, 0), tokens, tokens[:81], settings, 0, every=2)
    assert [row["step"] for row in history] == [2, 4, 5]  # its seconds are those of the whole training


@pytest.mark.parametrize(
    ("times", "steps"),
    [([0.02], [400]), ([0.0192], [400]), ([0.01, 0.01], [400, 800]), ([0.025, 0.018, 0.018], [400, 320, 444])],
)
def test_steps_are_corrected_until_the_times_are_equal(
    times: list[float], steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 s are to be taken; a step of each training takes as long as `times` says."""
    calls: list[int] = []

    def run(name: str, kind: str, seed: int, settings: Settings, weights: Any) -> dict[str, Any]:
        calls.append(settings.steps)
        return {"cpu_seconds": times[len(calls) - 1] * settings.steps}

    monkeypatch.setattr(language, "run", run)
    found = run_in_equal_time("words", 0, TINY, 8.0, 400)
    assert calls == steps == [attempt["steps"] for attempt in found["tried"]]
    assert abs(found["cpu_seconds"] / 8.0 - 1) <= 0.05


def test_times_that_never_agree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "run", lambda *given: {"cpu_seconds": 1.0})
    with pytest.raises(RuntimeError, match=f"No training of {language.REPEATS} took 8 s to 5%"):
        run_in_equal_time("words", 0, TINY, 8.0, 4)


def test_generation_counts_positions() -> None:
    """Of a network that needs two evaluations of every solve: all positions twice, or the new one."""
    settings = replace(TINY, length=16)
    model = equilibrium_network(11, settings, 0)
    model.layer.rtol, model.layer.max_steps = 1e-12, 2
    found = generation(model, torch.arange(400) % 11, 8)
    assert found["tokens"] == 8 * PROMPTS
    assert found["kept"]["evaluations"] == found["anew"]["evaluations"] == 2
    assert found["kept"]["positions"] == 2 * (8 + 7) / 8
    assert found["anew"]["positions"] == 2 * sum(range(8, 16)) / 8
    assert "solve" not in vars(model.layer)


def test_rows_of_generation_are_means() -> None:
    one = {"kept": {"evaluations": 8.0, "positions": 14.0, "cpu_ms": 1.0}, "tokens": 10, "equal": 10}
    one["anew"] = {"evaluations": 14.0, "positions": 500.0, "cpu_ms": 4.0}
    other = {**one, "kept": {"evaluations": 9.0, "positions": 16.0, "cpu_ms": 2.0}, "equal": 9}
    runs: list[dict[str, Any]] = [{"generate": one}, {"model": "explicit"}, {"generate": other}]
    kept, anew = generation_rows("words", [{"tokens": "words", **run} for run in runs])
    assert (kept["evaluations"], kept["positions"], kept["CPU ms"], kept["equal"]) == ("8.5", "15", "1.5", "19 of 20")
    assert (anew["evaluations"], anew["positions"], anew["seeds"]) == ("14.0", "500", "2")
    assert generation_rows("characters", [{"tokens": "words", "generate": one}]) == []


def test_standard_errors() -> None:
    runs = [
        {"model": "explicit", "loss": loss, "loss_se": 0.03, "parameters": 10, "steps": 2, "cpu_seconds": 1.0}
        for loss in (1.0, 1.1, 1.3)
    ]
    (row,) = rows(runs)
    seeds = torch.tensor([1.0, 1.1, 1.3]).std().item() / 3**0.5
    assert row["nats"] == f"{3.4 / 3:.4f} ± {seeds:.4f}" and row["over windows"] == "0.0300"


def test_steps_and_seconds_of_a_row_are_means() -> None:
    fixed = {"model": "explicit_equal_time", "loss": 1.0, "loss_se": 0.03, "parameters": 10}
    (row,) = rows([{**fixed, "steps": steps, "cpu_seconds": steps / 100} for steps in (8727, 7231, 7627)])
    assert row["steps"] == "7862" and row["CPU s"] == "78.6"


def test_bigram_of_the_task(text: None) -> None:
    found = run("characters", "bigram", 0, TINY)
    assert found["windows"] == 20 and found["loss"] < 0.5
