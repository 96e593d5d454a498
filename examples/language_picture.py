"""The picture of docs/tasks/language.md: held-out losses by step, from its record.

python examples/language_picture.py [--record RECORD.json] [--out docs/images/language.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLORS = {"equilibrium": "#0072B2", "explicit": "#D55E00"}  # distinct also for most colour-blind readers
NAMES = {"equilibrium": "TransformerDEQ", "explicit": "explicit transformer"}


def panel(ax: Any, runs: list[dict[str, Any]], title: str) -> None:
    """One thin line a seed; dotted lines for the models that count."""
    for kind, color in COLORS.items():
        for number, run in enumerate(run for run in runs if run["model"] == kind):
            steps, losses = ([row[key] for row in run["history"]] for key in ("step", "held_out"))
            ax.plot(steps, losses, color=color, linewidth=1.4, alpha=0.8, label=NAMES[kind] if number == 0 else None)
    for run in runs:
        if run["model"] in ("bigram", "trigram"):
            ax.axhline(run["held_out"], color="0.4", linestyle=":", linewidth=1.2)
            ax.annotate(
                run["model"],
                (1, run["held_out"]),
                (-3, -11),
                ("axes fraction", "data"),
                "offset points",
                ha="right",
                color="0.3",
            )
    ax.set(title=title, xlabel="step", ylabel="held-out nats a token")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.72))  # between the dotted lines


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path, default=Path("benchmarks/results/language.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/language.png"))
    options = parser.parse_args()
    runs = json.loads(options.record.read_text(encoding="utf-8"))["runs"]
    figure = Figure(figsize=(8, 3.2), layout="constrained", facecolor="white")
    for ax, name in zip(figure.subplots(1, 2), ("words", "characters"), strict=True):
        panel(ax, [run for run in runs if run["tokens"] == name], name)
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
