"""What training shows while it runs."""

from __future__ import annotations

import pytest

from wellposed import _progress
from wellposed_lab.cli.train import LINE, EpochProgress


def test_a_measured_value_is_shown_with_the_epoch_at_which_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_progress, "SECONDS_BETWEEN_LINES", -1.0)  # every line, without waiting for the next one
    with _progress.progress_display("training", 4, line=LINE) as display:
        listener = EpochProgress(display)
        listener.on_epoch({"epoch": 0, "train_loss": 0.5, "certified": False})
        listener.on_batch(0, 1, 2, 0.25)
        listener.on_epoch({"epoch": 1, "batch_loss": 0.125})  # not evaluated: the value of the start is not that of now
        listener.on_epoch({"epoch": 2, "batch_loss": 0.0625, "train_loss": 0.03125, "test_accuracy": 0.75})
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "epoch 0.0 of 4: at the start; at epoch 0: train loss 0.5, not certified",
        "epoch 0.5 of 4: batch loss 0.25; at epoch 0: train loss 0.5, not certified",
        "epoch 1.0 of 4: mean batch loss 0.125; at epoch 0: train loss 0.5, not certified",
        "epoch 2.0 of 4: mean batch loss 0.0625; at epoch 2: train loss 0.03125, test accuracy 0.75",
    ]
