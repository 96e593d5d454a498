"""Losses and measures against torch and scikit-learn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, jaccard_score
from torch import nn

from wellposed.errors import InvalidArgument
from wellposed_lab.runs.losses import CrossEntropy, NextToken, Reconstruction, Segmentation, Squared


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), classes=st.integers(2, 5), ignored=st.integers(-1, 4))
def test_segmentation_is_that_of_scikit_learn_and_adds_up(seed: int, classes: int, ignored: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (4, 3, 5), generator=generator)
    y[0, 0, :2] = ignored
    if bool((y == ignored).all()):
        return
    logits = torch.randn(4, classes, 3, 5, generator=generator, dtype=torch.float64)
    loss = Segmentation(classes, ignore_index=ignored)
    counted = y != ignored
    truth, guess = y[counted].numpy(), logits.argmax(1)[counted].numpy()
    present = sorted(set(truth) | set(guess))
    halves = [slice(0, 1), slice(1, 4)]
    count = sum(loss.count(y[half]) for half in halves)
    tally = sum((loss.tally(logits[half], y[half]) for half in halves), start=torch.zeros(classes**2, dtype=torch.float64))
    measures = loss.measures(tally, count)
    assert measures["accuracy"] == pytest.approx(accuracy_score(truth, guess))
    assert measures["miou"] == pytest.approx(jaccard_score(truth, guess, labels=present, average="macro", zero_division=0.0))
    total = sum(float(loss.total(logits[half], y[half])) for half in halves)
    mean = nn.functional.cross_entropy(logits.movedim(1, -1)[counted], y[counted])
    assert total / count == pytest.approx(float(mean), rel=1e-12)


def test_accuracy_of_signs_only_for_signs() -> None:
    output, y = torch.tensor([0.3, -2.0, 0.1, 0.0]), torch.tensor([1.0, -1.0, -1.0, 1.0])
    assert Squared(signs=True).measures(Squared(signs=True).tally(output, y), 4) == {"accuracy": 0.5}
    assert Squared(signs=False).measures(Squared(signs=False).tally(output, y), 4) == {}
    assert float(Squared(signs=True).total(output, y)) == pytest.approx(0.5 * float(((output - y) ** 2).sum()))


def test_cross_entropy_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], dtype=torch.float64))
    y = torch.tensor([0, 1])
    loss = CrossEntropy()
    assert float(loss.total(logits, y)) == pytest.approx(-(torch.tensor([0.5, 0.2], dtype=torch.float64).log().sum().item()))
    assert loss.measures(loss.tally(logits, y), loss.count(y)) == {"accuracy": 0.5}


def test_next_token_is_a_mean_over_all_positions_and_adds_up() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, y = torch.randn(5, 4, 7, generator=generator, dtype=torch.float64), torch.randint(7, (5, 4), generator=generator)
    loss = NextToken()
    halves = [slice(0, 2), slice(2, 5)]
    tally = sum((loss.tally(logits[half], y[half]) for half in halves), start=torch.zeros(2, dtype=torch.float64))
    mean = nn.functional.cross_entropy(logits.reshape(20, 7), y.reshape(20))
    assert sum(loss.count(y[half]) for half in halves) == 20
    assert float(loss.total(logits, y)) / 20 == pytest.approx(float(mean), rel=1e-12)
    measures = loss.measures(tally, 20)
    assert measures["perplexity"] == pytest.approx(float(mean.exp()), rel=1e-12)
    assert measures["accuracy"] == pytest.approx(accuracy_score(y.flatten(), logits.argmax(2).flatten()))
    with pytest.raises(InvalidArgument, match=r"\(n, length, vocabulary\) for targets of shape \(5, 4\); got \(5, 7\)"):
        loss.total(logits[:, 0], y)


def test_reconstruction_by_hand() -> None:
    """Errors of 0.1 and 0.01 in every pixel have 20 and 40 dB; equal images are finite."""
    y = torch.rand(3, 1, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    output, loss = y + torch.tensor([0.1, -0.01, 0.0], dtype=torch.float64).reshape(3, 1, 1, 1), Reconstruction()
    assert float(loss.total(output, y)) == pytest.approx(0.01 + 0.0001)
    assert loss.measures(loss.tally(output[:2], y[:2]), 2)["psnr"] == pytest.approx(30)
    parts = loss.tally(output[:1], y[:1]) + loss.tally(output[1:], y[1:])
    assert loss.measures(parts, loss.count(y))["psnr"] == pytest.approx((20 + 40 + 200) / 3)
    with pytest.raises(InvalidArgument, match="of the shape of the targets"):
        loss.total(output[:, :, 1:], y)
