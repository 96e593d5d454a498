"""Trains a transformer equilibrium on WikiText-2, compares it with a bigram, and continues a text.

    WELLPOSED_DATA=data python examples/wikitext.py [--words 1000] [--steps 1500]
    python examples/wikitext.py --text book.txt

Reads `wikitext2/valid.txt` (to train) and `wikitext2/test.txt` from the folder $WELLPOSED_DATA, or
a text of your own, whose last fifth is kept to test. Tokens are characters unless `--words` asks
for the most frequent words. Both models give the mean of -log p(next token) on the same test
tokens; exp of it is the perplexity.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn

import wellposed as wp
from wellposed_lab.tasks.ngrams import Bigram


def main() -> None:
    parser = argparse.ArgumentParser(description="A transformer equilibrium against a bigram model on WikiText-2.")
    parser.add_argument("--text", default="wikitext2", help="a .txt file of your own; WikiText-2 if not given")
    parser.add_argument("--words", type=int, help="size of the vocabulary of words; characters if not given")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--test-windows", type=int, default=500)
    options = parser.parse_args()
    data = wp.data.load(options.text, words=options.words, length=48)
    vocabulary, generator = len(data.tokens), torch.Generator().manual_seed(0)
    gradient = wp.ImplicitGradient(rtol=1e-1, max_steps=8)
    model = wp.nn.TransformerDEQ(
        vocabulary, 64, 4, length=96, init_std=0.06, generator=generator, gradient=gradient, rtol=1e-2, on_failure="ignore"
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for step in range(options.steps):
        rate = min(1.0, (step + 1) / 100) * (1 + math.cos(math.pi * step / options.steps)) / 2
        optimizer.param_groups[0]["lr"] = 3e-3 * rate
        rows = torch.randint(len(data.X), (options.batch,), generator=generator)
        loss = nn.functional.cross_entropy(model(data.X[rows]).flatten(0, 1), data.y[rows].flatten())
        # keeps the Jacobian small, so that equilibria are still found while the weights grow
        z, x = model.layer.last_solution.value, model.embedded(data.X[rows])
        penalty = wp.nn.jacobian_penalty(model.layer.cell, z, x, generator=generator)
        optimizer.zero_grad()
        (loss + 0.25 * penalty).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: {loss.item():.3f} nats a token", flush=True)

    model.layer.rtol = 1e-3
    X, y = data.X_test[: options.test_windows], data.y_test[: options.test_windows]
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(X).flatten(0, 1), y.flatten()).item()
    solution = model.layer.last_solution
    train, test = data.X.flatten(), torch.cat([X.flatten(), y[-1, -1:]])
    bigram = Bigram(train[: len(train) * 9 // 10], train[len(train) * 9 // 10 :], vocabulary).losses(test).mean().item()
    print(f"bigram: {bigram:.4f} nats a token, perplexity {math.exp(bigram):.2f}")
    print(f"equilibrium: {loss:.4f} nats a token, perplexity {math.exp(loss):.2f}")
    print(f"{int(solution.converged.sum())} of {len(X)} equilibria converged")
    made = model.generate(X[:1], 48, temperature=0.7, generator=generator)[0]
    print((" " if options.words else "").join(data.tokens[token] for token in made.tolist()))


if __name__ == "__main__":
    main()
