"""An experiment that takes no time, for the tests of the machinery around experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wellposed_lab.papers import AbstractExperiment, Claim, ClaimFinding, ExperimentConfig, Result
from wellposed_lab.papers.claims import decide


@dataclass(frozen=True, kw_only=True)
class ToyConfig(ExperimentConfig):
    """Numbers to be squared."""

    numbers: tuple[int, ...] = (1, 2, 3)
    scale: float = 1.0


class Toy(AbstractExperiment):
    """Squares numbers; counts how often it was asked, and can be told to fail."""

    name = "toy/squares"
    title = "squares"
    claims = (
        Claim("even", "Every square is even.", "[toy]", "no square is odd"),
        Claim("positive", "Every square is positive.", "[toy]", "all exceed 0"),
        Claim("proof", "There is a proof.", "[toy]", "nothing here can decide it"),
    )
    departures = ("Only integers.",)
    quick = ToyConfig()
    full = ToyConfig(numbers=tuple(range(1, 10)))

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.fails_at: int | None = None

    def tasks(self, config: ToyConfig) -> list[dict[str, Any]]:
        return [{"number": number, "seed": seed, "scale": config.scale} for number in config.numbers for seed in config.seeds]

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        if task["number"] == self.fails_at:
            raise KeyboardInterrupt
        self.asked.append(task["number"])
        return {"square": task["scale"] * task["number"] ** 2}

    def judge(self, config: ToyConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        squares = [result.values["square"] for result in results]
        odd = sum(square % 2 == 1 for square in squares)
        return {
            "even": decide(odd == 0, f"{odd} of {len(squares)} are odd", odd=odd),
            "positive": decide(min(squares) > 0, f"least {min(squares):g}"),
        }

    def panels(self, config: ToyConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        x = list(config.numbers)
        y = [[r.values["square"] for r in results if r.task["seed"] == seed] for seed in config.seeds]
        return [
            {
                "title": "squares",
                "x_label": "k",
                "y_label": "k^2",
                "y_scale": "log",
                "curves": [{"label": "k^2", "x": x, "y": y}],
            }
        ]
