"""TransformerDEQ on WikiText-2 against counting and an explicit transformer.

    WELLPOSED_DATA=data python -m wellposed_lab.tasks.language benchmarks/results/language.json

Trains every model with three seeds on the first part of the text, but for its last tenth, and
measures it on the second part. The networks of a seed are trained one after the other; the last one
is the explicit transformer in the CPU time of the equilibrium. The record is written after every
run; runs in it are not repeated, so an interrupted command continues.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.data import load
from wellposed.implicit import ImplicitGradient
from wellposed.nn import TransformerCell, TransformerDEQ, jacobian_penalty
from wellposed.solve import Auto, Picard
from wellposed_lab.tasks.explicit_transformer import ExplicitTransformer
from wellposed_lab.tasks.generation import generation
from wellposed_lab.tasks.language_rows import generation_rows, rows
from wellposed_lab.tasks.ngrams import Bigram, KneserNey

__all__ = [
    "Settings",
    "equilibrium_network",
    "explicit_network",
    "run",
    "run_in_equal_time",
    "stream",
    "train",
    "window_losses",
]


#: Held-out tokens of the curves of training.
HELD_OUT = 21_745
#: CPU times are equal if they differ by at most this part; training is repeated so many times until they are.
EQUAL, REPEATS = 0.05, 5


@dataclass(frozen=True)
class Settings:
    """One kind of tokens, and how both networks are trained.

    Attributes:
        words: Size of the vocabulary of words; None for characters.
        length, batch, steps: Windows of `length` tokens from random places, `batch` of them a step.
        width, heads, layers: Of the networks; `layers` of the explicit one.
        lr, warmup, weight_decay, clip: AdamW; the rate grows over `warmup` steps, then a cosine.
        solver_steps, gradient_steps: Of an equilibrium and its adjoint in training, at most; loose
            tolerances (1e-2 and 1e-1) end them earlier.
        penalty, penalty_every: Weight of the Jacobian penalty, estimated every so many steps.
        init_std: Of the recurrent weights at the start.
        rtol, max_steps: Of equilibria in evaluations.
        test_tokens: Of the second part of the text, from its start.
    """

    words: int | None = None
    length: int = 48
    batch: int = 16
    steps: int = 1500
    width: int = 64
    heads: int = 4
    layers: int = 2
    lr: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    solver_steps: int = 12
    gradient_steps: int = 8
    penalty: float = 0.25
    penalty_every: int = 2
    init_std: float = 0.06
    rtol: float = 1e-3
    max_steps: int = 100
    test_tokens: int = 245_568


def stream(words: int | None, length: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Tokens to train on, held out (a last tenth of them) and to test; size of the vocabulary."""
    data = load("wikitext2", words=words, length=length)
    assert data.X_test is not None and data.y_test is not None
    whole, test = (torch.cat([X.flatten(), y[-1, -1:]]) for X, y in ((data.X, data.y), (data.X_test, data.y_test)))
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:], test, len(data.tokens)


def equilibrium_network(vocabulary: int, settings: Settings, seed: int) -> TransformerDEQ:
    """Solves as in evaluations; `train` takes fewer steps."""
    return TransformerDEQ(
        vocabulary,
        settings.width,
        settings.heads,
        length=settings.length,
        init_std=settings.init_std,
        generator=torch.Generator().manual_seed(seed),
        gradient=ImplicitGradient(rtol=1e-1, max_steps=settings.gradient_steps),
        rtol=settings.rtol,
        max_steps=settings.max_steps,
        on_failure="ignore",  # counted
    )


def explicit_network(vocabulary: int, settings: Settings, seed: int) -> ExplicitTransformer:
    """With nearly as many parameters as the equilibrium."""
    cell = TransformerCell(settings.width, settings.heads)
    hidden = ExplicitTransformer.hidden_for_equal_parameters(cell, settings.layers)
    generator = torch.Generator().manual_seed(seed)
    width, heads, layers = settings.width, settings.heads, settings.layers
    return ExplicitTransformer(vocabulary, width, heads, layers=layers, hidden=hidden, generator=generator)


def _equilibrium(model: nn.Module) -> TransformerDEQ | None:
    return model if isinstance(model, TransformerDEQ) else None  # by type: the explicit one has no layer to set


def train(
    model: nn.Module, tokens: Tensor, held_out: Tensor, settings: Settings, seed: int, *, every: int = 300
) -> list[dict[str, float]]:
    """AdamW in place; losses in training and on held-out tokens, every so many steps and last."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(seed)
    deq = _equilibrium(model)
    history: list[dict[str, float]] = []
    recent, began = [], time.process_time()
    for step in range(settings.steps):
        rate = min(1.0, (step + 1) / settings.warmup) * (1 + math.cos(math.pi * step / settings.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * rate
        starts = torch.randint(len(tokens) - settings.length, (settings.batch, 1), generator=generator)
        rows = tokens[starts + torch.arange(settings.length + 1)]
        x, y = rows[:, :-1], rows[:, 1:]
        if deq is not None:
            deq.layer.solver, deq.layer.rtol, deq.layer.max_steps = Picard(), 1e-2, settings.solver_steps
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        recent.append(loss.item())
        if deq is not None and step % settings.penalty_every == 0 and settings.penalty:
            # keeps the Jacobian small, so that equilibria are still found while the weights grow
            assert deq.layer.last_solution is not None
            z = deq.layer.last_solution.value
            penalty = jacobian_penalty(deq.layer.cell, z, deq.embedded(x), generator=generator)
            loss = loss + settings.penalty * settings.penalty_every * penalty
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        if (step + 1) % every == 0 or step + 1 == settings.steps:
            seconds = time.process_time() - began
            found = window_losses(model, held_out[:HELD_OUT], settings)
            row = {"step": step + 1, "train": sum(recent) / len(recent), "held_out": float(found["losses"].mean())}
            history.append({key: round(value, 4) for key, value in (row | {"cpu_seconds": seconds}).items()})
            print(row, f"converged {found['converged']:.3f}, {found['evaluations']:.1f} evaluations", flush=True)
            recent, began = [], time.process_time() - seconds
    return history


@torch.no_grad()
def window_losses(model: nn.Module, tokens: Tensor, settings: Settings) -> dict[str, Any]:
    """(windows,) mean losses; the share of equilibria that converged, and their evaluations."""
    deq = _equilibrium(model)
    if deq is not None:
        deq.layer.solver, deq.layer.rtol, deq.layer.max_steps = Auto(), settings.rtol, settings.max_steps
    count = (len(tokens) - 1) // settings.length
    x, y = (part[: count * settings.length].reshape(count, -1) for part in (tokens[:-1], tokens[1:]))
    losses, converged, evaluations = [], [], []
    for a, b in zip(x.split(64), y.split(64), strict=True):
        losses.append(nn.functional.cross_entropy(model(a).transpose(1, 2), b, reduction="none").mean(dim=1))
        if deq is not None:
            assert deq.layer.last_solution is not None
            converged.append(deq.layer.last_solution.converged.double())
            evaluations.append(deq.layer.last_solution.num_steps.double())
    means = [float(torch.cat(part).mean()) if part else math.nan for part in (converged, evaluations)]
    return {"losses": torch.cat(losses).double(), "converged": means[0], "evaluations": means[1]}


def run(name: str, kind: str, seed: int, settings: Settings, weights: Path | None = None) -> dict[str, Any]:
    """Trains one model and measures it on the test tokens.

    Args:
        name: "words" or "characters", for the record.
        kind: "bigram", "trigram", "explicit", "explicit_equal_time" or "equilibrium".
        seed: Of the parameters and of the windows.
        settings: How.
        weights: Folder to which a network is written.
    """
    tokens, held_out, test, vocabulary = stream(settings.words, settings.length)
    test = test[: settings.test_tokens + 1]
    began = time.process_time()
    found: dict[str, Any] = {"tokens": name, "model": kind, "seed": seed}
    if kind in ("bigram", "trigram"):
        counted = Bigram(tokens, held_out, vocabulary) if kind == "bigram" else KneserNey(tokens, vocabulary, 3)
        found["cpu_seconds"] = time.process_time() - began
        found["held_out"] = float(counted.losses(held_out[:HELD_OUT]).mean())
        whole = (len(test) - 1) // settings.length * settings.length
        losses = counted.losses(test)[:whole].reshape(-1, settings.length).mean(dim=1)
    else:
        make = equilibrium_network if kind == "equilibrium" else explicit_network
        model = make(vocabulary, settings, seed)
        found |= {"parameters": sum(p.numel() for p in model.parameters()), "steps": settings.steps}
        found["history"] = train(model, tokens, held_out, settings, seed)
        found["cpu_seconds"] = found["history"][-1]["cpu_seconds"]
        if weights is not None:
            weights.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), weights / f"{name}-{kind}-{seed}.pt")
        measured = window_losses(model, test, settings)
        losses = measured.pop("losses")
        if (network := _equilibrium(model)) is not None:
            found |= measured | {"generate": generation(network, test, settings.length // 2)}
    # windows are nearly independent, tokens within one are not
    return found | {
        "loss": float(losses.mean()),
        "loss_se": float(losses.std() / math.sqrt(len(losses))),
        "windows": len(losses),
    }


def run_in_equal_time(
    name: str, seed: int, settings: Settings, seconds: float, steps: int, weights: Path | None = None
) -> dict[str, Any]:
    """The explicit transformer in the CPU time of another network, which took `seconds`.

    Its steps must be known before training, because the cosine ends with them, and the time of a
    step changes with the load of the machine. So it is trained again with a corrected number of
    steps until the times differ by at most `EQUAL`. The losses decide nothing.

    Args:
        name, seed, settings, weights: As in `run`.
        seconds: To take.
        steps: To begin with.
    """
    tried: list[dict[str, float]] = []
    for _ in range(REPEATS):
        found = run(name, "explicit_equal_time", seed, replace(settings, steps=steps), weights)
        ratio = found["cpu_seconds"] / seconds
        tried.append({"steps": steps, "ratio_of_cpu_seconds": round(ratio, 4)})
        print(f"{steps} steps took {ratio:.3f} of the time", flush=True)
        if abs(ratio - 1) <= EQUAL:
            return found | {"tried": tried}
        steps = max(1, round(steps / ratio))
    raise RuntimeError(f"No training of {REPEATS} took {seconds:.0f} s to {EQUAL:.0%}: {tried}. Try again with less load.")


ALL = {"words": Settings(words=1000), "characters": Settings()}
KINDS = ("bigram", "trigram", "equilibrium", "explicit", "explicit_equal_time")  # the last needs the times before it


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--weights", type=Path, help="folder to which the networks are written")
    parser.add_argument("--table", action="store_true", help="only write the tables of the record anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(options.record.read_text()) if options.record.exists() else {"runs": []}
    wanted = [(name, kind, seed) for seed in range(options.seeds) for name in ALL for kind in KINDS]
    for name, kind, seed in [] if options.table else wanted:
        known = {(run["tokens"], run["model"], run["seed"]): run for run in record["runs"]}
        if (name, kind, seed) in known or (seed and kind in ("bigram", "trigram")):
            continue
        print(name, kind, seed, flush=True)
        settings = ALL[name]
        if kind == "explicit_equal_time":
            seconds, fewer = (known[name, other, seed]["cpu_seconds"] for other in ("equilibrium", "explicit"))
            steps = round(settings.steps * seconds / fewer)
            record["runs"].append(run_in_equal_time(name, seed, settings, seconds, steps, options.weights))
        else:
            record["runs"].append(run(name, kind, seed, settings, options.weights))
        save(record, options.record)
    save(record, options.record)


def save(record: dict[str, Any], path: Path) -> None:
    """Writes the record with its tables."""
    record["settings"] = {name: asdict(settings) for name, settings in ALL.items()}
    for name in ALL:
        record[name] = rows([run for run in record["runs"] if run["tokens"] == name])
    record["generate"] = [row for name in ALL for row in generation_rows(name, record["runs"])]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
