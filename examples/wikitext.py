"""Trains a transformer equilibrium on the small WikiText-2 text and compares it with a bigram
model.

    WELLPOSED_DATA=data python examples/wikitext.py --steps 600

Reads `wikitext2/valid.txt` (trained on, but for its last tenth, which chooses the bigram's
smoothing) and `wikitext2/test.txt` from the folder $WELLPOSED_DATA. Tokens are characters unless
`--words` asks for the most frequent words. Both models give the mean of -log p(next token) on the
same test tokens; exp of it is the perplexity. Sequences whose equilibrium did not converge are
counted and printed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import wellposed as wp


def read(folder: Path, words: int | None) -> tuple[Tensor, Tensor, int]:
    """Token numbers of the two files and the size of the vocabulary; rare tokens share the number
    0."""
    texts = [(folder / "wikitext2" / name).read_text(encoding="utf-8") for name in ("valid.txt", "test.txt")]
    parts = [text.replace("\n", " <eos> ").split() if words else list(text) for text in texts]
    kept = [token for token, _ in Counter(parts[0]).most_common((words or 97) - 1)]
    number = {token: i + 1 for i, token in enumerate(kept)}
    train, test = (torch.tensor([number.get(token, 0) for token in part]) for part in parts)
    return train, test, len(number) + 1


class Bigram:
    """p(b | a) = (count(a, b) + k p(b)) / (count(a) + k), p(b) the smoothed frequency; k is chosen
    on held-out tokens."""

    def __init__(self, tokens: Tensor, held_out: Tensor, vocabulary: int) -> None:
        pairs = tokens[:-1] * vocabulary + tokens[1:]
        self.counts = torch.bincount(pairs, minlength=vocabulary**2).reshape(vocabulary, vocabulary).double()
        self.single = (torch.bincount(tokens, minlength=vocabulary).double() + 1) / (len(tokens) + vocabulary)
        self.k = min((0.1 * 2.0**i for i in range(16)), key=lambda k: self.loss(held_out, k))

    def loss(self, tokens: Tensor, k: float | None = None) -> float:
        """Mean of -log p(next)."""
        k = self.k if k is None else k
        a, b = tokens[:-1], tokens[1:]
        p = (self.counts[a, b] + k * self.single[b]) / (self.counts.sum(dim=1)[a] + k)
        return float(-p.log().mean())


def batches(tokens: Tensor, length: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """All tokens in order: (size, length) inputs and what comes next."""
    count = (len(tokens) - 1) // length
    x = tokens[: count * length].reshape(count, length)
    y = tokens[1 : count * length + 1].reshape(count, length)
    return list(zip(x.split(size), y.split(size), strict=True))


@torch.no_grad()
def evaluate(model: wp.nn.TransformerDEQ, tokens: Tensor, length: int, size: int) -> tuple[float, int, int]:
    """Mean loss, and how many of how many sequences converged."""
    total = count = converged = sequences = 0.0
    for x, y in batches(tokens, length, size):
        logits = model(x)
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"))
        count += y.numel()
        solution = model.layer.last_solution
        assert solution is not None
        converged += int(solution.converged.sum())
        sequences += len(x)
    return total / count, int(converged), int(sequences)


def train(model: wp.nn.TransformerDEQ, tokens: Tensor, options: argparse.Namespace) -> float:
    """Adam with a warm-up and a cosine; returns the part of sequences whose equilibrium
    converged."""
    generator = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    steps = options.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1.0, (k + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * min(k, steps) / steps))
    )
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[news]}"))
    good = 0.0
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=steps, news="")
        for _ in range(steps):
            starts = torch.randint(len(tokens) - options.length - 1, (options.batch,), generator=generator)
            rows = torch.stack([tokens[s : s + options.length + 1] for s in starts.tolist()])
            x = model.embedded(rows[:, :-1])
            z = model.layer(x)
            solution = model.layer.last_solution
            assert solution is not None
            loss = nn.functional.cross_entropy((z @ model.E.mT + model.b).flatten(0, 1), rows[:, 1:].flatten())
            # keeps the Jacobian small, so that equilibria are still found while the weights grow
            penalty = wp.nn.jacobian_penalty(model.layer.cell, solution.value, x, generator=generator)
            optimizer.zero_grad()
            (loss + options.penalty * penalty).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            good += float(solution.converged.double().mean()) / steps
            news = f"loss {loss.item():.3f}, {float(solution.num_steps.double().mean()):.1f} evaluations"
            progress.update(task, advance=1, news=news)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description="A transformer equilibrium against a bigram model on WikiText-2.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--penalty", type=float, default=0.5, help="weight of the Jacobian penalty")
    parser.add_argument("--words", type=int, default=None, metavar="N", help="the N most frequent words instead of characters")
    parser.add_argument("--test-tokens", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = os.environ.get("WELLPOSED_DATA")
    if folder is None or not (Path(folder) / "wikitext2" / "valid.txt").exists():
        sys.exit("Set WELLPOSED_DATA to a folder that holds wikitext2/valid.txt and wikitext2/test.txt.")

    tokens, test, vocabulary = read(Path(folder), options.words)
    test = test[: options.test_tokens]
    cut = len(tokens) * 9 // 10
    bigram = Bigram(tokens[:cut], tokens[cut:], vocabulary)
    model = wp.nn.TransformerDEQ(
        vocabulary,
        options.width,
        options.heads,
        length=options.length,
        generator=torch.Generator().manual_seed(options.seed),
        gradient=wp.ImplicitGradient(rtol=1e-2, max_steps=30),
        rtol=1e-3,
        max_steps=40,
        on_failure="ignore",  # counted below
    )
    start = time.perf_counter()
    good = train(model, tokens[:cut], options)
    seconds = time.perf_counter() - start
    loss, converged, sequences = evaluate(model, test, options.length, options.batch)
    console = Console()
    kind = f"{vocabulary} words" if options.words else f"{vocabulary} characters"
    console.print(
        f"{kind}, {cut} training tokens, {options.steps} steps of {options.batch} x {options.length}, {seconds:.0f} s"
    )
    console.print(f"equilibria that converged: {good:.1%} in training, {converged} of {sequences} test sequences")
    # the bigram is scored on the same tokens that the model predicts
    baseline = bigram.loss(test[: sequences * options.length + 1])
    console.print(f"bigram (k = {bigram.k:g}): {baseline:.4f} nats a token, perplexity {math.exp(baseline):.2f}")
    console.print(f"equilibrium:       {loss:.4f} nats a token, perplexity {math.exp(loss):.2f}")


if __name__ == "__main__":
    main()
