"""Models of text by counting: a smoothed bigram, and Kneser-Ney of any order."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Bigram", "KneserNey"]

#: In the place of an estimated discount below it: with 0 a new token could have the probability 0, and a loss that is infinite.
LEAST = 1e-6


class Bigram:
    """p(b | a) = (count(a, b) + k p(b)) / (count(a) + k), p(b) the smoothed frequency.

    Args:
        tokens: (n,) to count.
        held_out: Tokens on which k is chosen.
        vocabulary: Number of tokens.
    """

    def __init__(self, tokens: Tensor, held_out: Tensor, vocabulary: int) -> None:
        pairs = tokens[:-1] * vocabulary + tokens[1:]
        self.counts = torch.bincount(pairs, minlength=vocabulary**2).reshape(vocabulary, vocabulary).double()
        self.single = (torch.bincount(tokens, minlength=vocabulary).double() + 1) / (len(tokens) + vocabulary)
        self.k = min((0.1 * 2.0**i for i in range(16)), key=lambda k: float(self.losses(held_out, k).mean()))

    def losses(self, tokens: Tensor, k: float | None = None) -> Tensor:
        """(n - 1,) -log p(next) of all tokens but the first."""
        k = self.k if k is None else k
        a, b = tokens[:-1], tokens[1:]
        p = (self.counts[a, b] + k * self.single[b]) / (self.counts.sum(dim=1)[a] + k)
        return -p.log()


class KneserNey:
    r"""Interpolated Kneser-Ney smoothing with three discounts [chen1999], without held-out tokens.

    With c the count of an n-gram at the highest order, and the number of different tokens before it
    at lower orders,

        p(w | h) = (c(h w) - D(c(h w)))^+ / c(h) + g(h) p(w | h without its first token),

    where g(h) makes the sum over w one, and D takes the values D_1, D_2, D_3 at the counts 1, 2 and
    from 3, estimated by the numbers of n-grams that occur once to four times. The lowest order is
    interpolated with the uniform distribution.

    Args:
        tokens: (n,) to count.
        vocabulary: Number of tokens; vocabulary^order must be below 2^63.
        order: 3 for a trigram.
    """

    def __init__(self, tokens: Tensor, vocabulary: int, order: int = 3) -> None:
        self.vocabulary, self.order = vocabulary, order
        grams = sum(tokens[i : len(tokens) - order + 1 + i] * vocabulary ** (order - 1 - i) for i in range(order))
        levels = []
        for n in range(order, 0, -1):
            level = _Level(grams, vocabulary)
            levels.append(level)
            grams = level.grams % vocabulary ** (n - 1)  # one for each different token before
        self.levels = levels[::-1]

    def probabilities(self, history: Tensor, following: Tensor) -> Tensor:
        """(m, order - 1) histories and (m,) tokens -> (m,) p(following | history)."""
        p = torch.full(following.shape, 1 / self.vocabulary, dtype=torch.float64)
        context = torch.zeros_like(following)
        for n, level in enumerate(self.levels, start=1):
            if n > 1:
                context = context + history[:, self.order - n] * self.vocabulary ** (n - 2)
            p = level.interpolated(context, following, p)
        return p

    def losses(self, tokens: Tensor) -> Tensor:
        """(n - 1,) -log p(next) of all tokens but the first; missing history counts as token 0."""
        padded = torch.cat([tokens.new_zeros(self.order - 2), tokens])
        return -self.probabilities(padded.unfold(0, self.order - 1, 1)[:-1], tokens[1:]).log()


class _Level:
    """One order: sorted n-grams with their counts, and for each history its total and its g."""

    def __init__(self, grams: Tensor, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.grams, self.counts = torch.unique(grams, return_counts=True)
        self.discounts = _discounts(self.counts)
        self.contexts, place = torch.unique(self.grams // vocabulary, return_inverse=True)
        zeros = torch.zeros(len(self.contexts), dtype=torch.float64)
        self.totals = zeros.index_add(0, place, self.counts.double())
        self.weights = zeros.index_add(0, place, self.discounts[self.counts.clamp(max=3)]) / self.totals

    def interpolated(self, context: Tensor, following: Tensor, lower: Tensor) -> Tensor:
        """p with this order, from p without it; a history that never occurred changes nothing."""
        gram, found = _find(self.grams, context * self.vocabulary + following)
        count = torch.where(found, self.counts[gram], 0)
        place, seen = _find(self.contexts, context)
        p = (count - self.discounts[count.clamp(max=3)]) / self.totals[place] + self.weights[place] * lower
        return torch.where(seen, p, lower)


def _discounts(counts: Tensor) -> Tensor:
    """(4,) D at the counts 0, 1, 2 and 3 or more: 0 and the estimates of [chen1999]."""
    n = [float((counts == i).sum()) for i in range(1, 5)]
    if not all(n):  # too few kinds to estimate three: one for all, or a half
        y = n[0] / (n[0] + 2 * n[1]) if n[0] and n[1] else 0.5
        return torch.tensor([0.0, y, y, y], dtype=torch.float64)
    y = n[0] / (n[0] + 2 * n[1])
    found = [0.0] + [min(max(i - (i + 1) * y * n[i] / n[i - 1], LEAST), float(i)) for i in (1, 2, 3)]
    return torch.tensor(found, dtype=torch.float64)


def _find(ordered: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The place of each wanted number, and whether it is there."""
    place = torch.searchsorted(ordered, wanted).clamp(max=len(ordered) - 1)
    return place, ordered[place] == wanted
