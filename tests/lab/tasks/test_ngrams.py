"""Counting models: probabilities that sum to one, and the formula written with dictionaries."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from wellposed_lab.tasks.ngrams import Bigram, KneserNey


def text(n: int, vocabulary: int, seed: int) -> Tensor:
    """Tokens of which some are much more frequent than others, and that follow their neighbours."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.rand(n, generator=generator).pow(3).mul(vocabulary).long()
    return (steps + steps.roll(1)) % vocabulary


def by_dictionaries(tokens: list[int], vocabulary: int, history: tuple[int, ...], following: int) -> float:
    """p(following | history) of Kneser-Ney, from its definition."""
    order = len(history) + 1
    counts = Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))
    levels = {order: counts}
    for n in range(order - 1, 0, -1):
        before = defaultdict(set)
        for gram in levels[n + 1]:
            before[gram[1:]].add(gram[0])
        levels[n] = Counter({gram: len(first) for gram, first in before.items()})

    def discount(n: int, count: int) -> float:
        kinds = Counter(levels[n].values())
        if not all(kinds[i] for i in (1, 2, 3, 4)):
            return (kinds[1] / (kinds[1] + 2 * kinds[2]) if kinds[1] and kinds[2] else 0.5) if count else 0.0
        y, i = kinds[1] / (kinds[1] + 2 * kinds[2]), min(count, 3)
        return min(max(i - (i + 1) * y * kinds[i + 1] / kinds[i], 1e-6), i) if i else 0.0

    p = 1 / vocabulary
    for n in range(1, order + 1):
        context = history[order - n :]
        grams = {gram: count for gram, count in levels[n].items() if gram[:-1] == context}
        if total := sum(grams.values()):
            count = grams.get((*context, following), 0)
            p = (count - discount(n, count) + sum(discount(n, c) for c in grams.values()) * p) / total
    return p


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [30, 400])
def test_kneser_ney_is_its_definition(order: int, size: int) -> None:
    tokens, vocabulary = text(size, 7, seed=order), 8  # the token 7 never occurs
    model = KneserNey(tokens, vocabulary, order)
    history = torch.cat([tokens[:20].unfold(0, max(order - 1, 1), 1)[:12, : order - 1], torch.full((2, order - 1), 7)])
    following = torch.arange(len(history)) % vocabulary
    expected = [
        by_dictionaries(tokens.tolist(), vocabulary, tuple(h), f)
        for h, f in zip(history.tolist(), following.tolist(), strict=True)
    ]
    torch.testing.assert_close(model.probabilities(history, following), torch.tensor(expected, dtype=torch.float64))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), size=st.integers(5, 300), order=st.integers(2, 4), vocabulary=st.integers(2, 12))
@example(seed=225908, size=31, order=3, vocabulary=7)  # an estimated discount is negative
def test_probabilities_sum_to_one(seed: int, size: int, order: int, vocabulary: int) -> None:
    tokens = text(size, vocabulary, seed)
    model = KneserNey(tokens, vocabulary, order)
    history = torch.randint(vocabulary, (5, order - 1), generator=torch.Generator().manual_seed(seed))
    p = torch.stack([model.probabilities(history, torch.full((5,), token)) for token in range(vocabulary)])
    assert bool((p > 0).all())
    torch.testing.assert_close(p.sum(dim=0), torch.ones(5, dtype=torch.float64))


def test_losses_are_those_of_the_next_tokens() -> None:
    tokens = text(200, 6, seed=0)
    model = KneserNey(tokens, 6)
    losses = model.losses(tokens[:50])
    assert losses.shape == (49,)
    p = model.probabilities(tokens[9:11].unsqueeze(0), tokens[11:12])
    torch.testing.assert_close(losses[10], -p[0].log())


def test_bigram_by_hand() -> None:
    tokens = torch.tensor([0, 1, 0, 1, 1, 0])
    model = Bigram(tokens, tokens, 3)
    k = model.k
    single = [(3 + 1) / (6 + 3), (3 + 1) / (6 + 3), 1 / (6 + 3)]
    assert model.losses(torch.tensor([0, 1]), k).item() == pytest.approx(-math.log((2 + k * single[1]) / (2 + k)))
    assert model.losses(torch.tensor([1, 2]), k).item() == pytest.approx(-math.log(k * single[2] / (3 + k)))
    assert model.losses(tokens).mean() == min(model.losses(tokens, 0.1 * 2.0**i).mean() for i in range(16))
