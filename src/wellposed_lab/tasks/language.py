"""TransformerDEQ on WikiText-2 against counting and an explicit transformer.

    WELLPOSED_DATA=data python -m wellposed_lab.tasks.language benchmarks/results/language.json

Trains every model with three seeds on the first part of the text, but for its last tenth, and
measures it on the second part. The record is written after every run; runs in it are not repeated,
so an interrupted command continues.
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
from wellposed_lab.tasks.ngrams import Bigram, KneserNey

__all__ = ["Settings", "equilibrium_network", "explicit_network", "run", "stream", "train", "window_losses"]


#: Held-out tokens of the curves of training.
HELD_OUT = 21_745


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
    """AdamW in place; the loss of training and of held-out tokens every so many steps."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(seed)
    deq = _equilibrium(model)
    history, recent, began = [], 0.0, time.process_time()
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
        recent += loss.item()
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
        if (step + 1) % every == 0:
            seconds = time.process_time() - began
            found = window_losses(model, held_out[:HELD_OUT], settings)
            row = {"step": step + 1, "train": recent / every, "held_out": float(found["losses"].mean()), "cpu_seconds": seconds}
            history.append({key: round(value, 4) for key, value in row.items()})
            print(row, f"converged {found['converged']:.3f}, {found['evaluations']:.1f} evaluations", flush=True)
            recent, began = 0.0, time.process_time() - seconds
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
        if kind == "equilibrium":
            found |= measured
    # windows are nearly independent, tokens within one are not
    return found | {
        "loss": float(losses.mean()),
        "loss_se": float(losses.std() / math.sqrt(len(losses))),
        "windows": len(losses),
    }


ALL = {"words": Settings(words=1000), "characters": Settings()}
KINDS = ("bigram", "trigram", "explicit", "equilibrium", "explicit_equal_time")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--weights", type=Path, help="folder to which the networks are written")
    parser.add_argument("--table", action="store_true", help="only write the tables of the record anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(options.record.read_text()) if options.record.exists() else {"runs": []}
    wanted = [(name, kind, seed) for seed in range(options.seeds) for kind in KINDS for name in ALL]
    wanted.sort(key=lambda run: run[1] == "explicit_equal_time")  # last: their steps follow from the times of the others
    for name, kind, seed in [] if options.table else wanted:
        known = {(run["tokens"], run["model"], run["seed"]): run for run in record["runs"]}
        if (name, kind, seed) in known or (seed and kind in ("bigram", "trigram")):
            continue
        print(name, kind, seed, flush=True)
        settings = ALL[name]
        if kind == "explicit_equal_time":
            seconds = [known[name, other, seed]["cpu_seconds"] for other in ("equilibrium", "explicit")]
            settings = replace(settings, steps=round(settings.steps * seconds[0] / seconds[1]))
        record["runs"].append(run(name, kind, seed, settings, options.weights))
        save(record, options.record)
    save(record, options.record)


def save(record: dict[str, Any], path: Path) -> None:
    """Writes the record with its tables."""
    record["settings"] = {name: asdict(settings) for name, settings in ALL.items()}
    for name in ALL:
        record[name] = rows([run for run in record["runs"] if run["tokens"] == name])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


TITLES = {
    "bigram": "bigram",
    "trigram": "trigram, Kneser-Ney",
    "equilibrium": "`TransformerDEQ`",
    "explicit": "explicit transformer, equal steps",
    "explicit_equal_time": "explicit transformer, more steps",
}


def rows(runs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row a model: means and standard errors over seeds, or over windows for counting.

    The steps are a mean too: those of "explicit_equal_time" follow from times, which differ.
    """
    made = []
    for kind, title in TITLES.items():
        mine = [run for run in runs if run["model"] == kind]
        if not mine:
            continue
        losses = torch.tensor([run["loss"] for run in mine], dtype=torch.float64)
        loss, sampling = float(losses.mean()), sum(run["loss_se"] for run in mine) / len(mine)
        seeds = float(losses.std() / math.sqrt(len(mine))) if len(mine) > 1 else 0.0
        both = math.hypot(seeds, sampling)
        made.append(
            {
                "model": title,
                "seeds": str(len(mine)) if "steps" in mine[0] else "-",
                "parameters": f"{mine[0]['parameters']:,}" if "parameters" in mine[0] else "-",
                "steps": f"{sum(run['steps'] for run in mine) / len(mine):.0f}" if "steps" in mine[0] else "-",
                "nats": f"{loss:.4f}" + (f" ± {seeds:.4f}" if len(mine) > 1 else ""),
                "over windows": f"{sampling:.4f}",
                "perplexity": f"{math.exp(loss):.2f} ± {math.exp(loss) * both:.2f}",
                "CPU s": f"{sum(run['cpu_seconds'] for run in mine) / len(mine):.3g}",
                "converged": f"{min(run['converged'] for run in mine):.2%}" if kind == "equilibrium" else "-",
            }
        )
    return made


if __name__ == "__main__":
    main()
