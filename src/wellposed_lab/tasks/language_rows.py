"""Tables of the record of `wellposed_lab.tasks.language`: of models, and of ways to generate."""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["generation_rows", "rows"]

TITLES = {
    "bigram": "bigram",
    "trigram": "trigram, Kneser-Ney",
    "equilibrium": "`TransformerDEQ`",
    "explicit": "explicit transformer, equal steps",
    "explicit_equal_time": "explicit transformer, equal CPU time",
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


def generation_rows(name: str, runs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Means over the runs with these tokens: the equilibrium of the prefix kept, or not."""
    mine = [run["generate"] for run in runs if run["tokens"] == name and "generate" in run]
    made = []
    for key, title in (("kept", "kept"), ("anew", "solved anew (`reuse=False`)")) if mine else ():
        means = {what: sum(found[key][what] for found in mine) / len(mine) for what in mine[0][key]}
        made.append(
            {
                "tokens": name,
                "equilibrium of the prefix": title,
                "seeds": str(len(mine)),
                "evaluations": f"{means['evaluations']:.1f}",
                "positions": f"{means['positions']:.0f}",
                "CPU ms": f"{means['cpu_ms']:.1f}",
                "equal": f"{sum(found['equal'] for found in mine)} of {sum(found['tokens'] for found in mine)}",
            }
        )
    return made
