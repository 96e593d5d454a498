"""What training shows while it runs."""

from __future__ import annotations

from typing import Any

import pytest

from wellposed_lab.cli import _progress
from wellposed_lab.cli._progress import Watch


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every line, without waiting for the next one."""
    lines: list[str] = []

    class Console:
        def print(self, text: str, **_: Any) -> None:
            lines.append(text)

    monkeypatch.setattr(_progress, "SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr(_progress, "say", Console)
    return lines


def test_a_measured_value_is_shown_with_the_epoch_at_which_it_was_measured(shown: list[str]) -> None:
    watch = Watch(4, None)
    watch.on_epoch({"epoch": 0, "train_loss": 0.5, "certified": False})
    watch.on_batch(0, 1, 2, 0.25)
    watch.on_epoch({"epoch": 1, "batch_loss": 0.125})  # not evaluated: the value of the start is not that of now
    watch.on_epoch({"epoch": 2, "batch_loss": 0.0625, "train_loss": 0.03125, "test_accuracy": 0.75})
    assert shown == [
        "epoch 0.0 of 4: at the start; at epoch 0: train loss 0.5, not certified",
        "epoch 0.5 of 4: batch loss 0.25; at epoch 0: train loss 0.5, not certified",
        "epoch 1.0 of 4: mean batch loss 0.125; at epoch 0: train loss 0.5, not certified",
        "epoch 2.0 of 4: mean batch loss 0.0625; at epoch 2: train loss 0.03125, test accuracy 0.75",
    ]
