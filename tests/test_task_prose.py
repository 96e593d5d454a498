"""Numbers in the prose of the pages of tasks: each phrase is made from the record and must be on the page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
KINDS = ("bigram", "trigram", "explicit", "equilibrium", "explicit_equal_time")


def of_graphs(record: dict[str, Any]) -> list[str]:
    ours, gcn = ({run[kind]["parameters"] for run in record["runs"]} for kind in ("ours", "gcn"))
    return [f"{gcn.pop()} parameters against our {ours.pop()}", f"and {record['steps']} steps", "at chance, 5 %"]


def of_imaging(record: dict[str, Any]) -> list[str]:
    """Milliseconds of a step, 45 % of the time being for the first part; differences of PSNR."""
    runs = record["runs"]

    def mean(number: Callable[[dict[str, Any]], float], kind: str) -> float:
        return statistics.mean(number(run[kind]) for run in runs)

    first = mean(lambda run: 450 * run["seconds"] / run["steps_before"], "bounded")
    second = [mean(lambda run: 550 * run["seconds"] / run["steps"], kind) for kind in ("bounded", "unrolled")]
    above: dict[str, list[float]] = {}
    for test in ("cbsd68", "natural64"):
        ours, unrolled = (mean(lambda run, test=test: run[test]["psnr"], kind) for kind in ("bounded", "unrolled"))
        above[test] = [ours - row["psnr"] for row in record["tv"][test]] + [ours - unrolled]
    colours, opponents, _ = above["cbsd68"]
    alike = sorted(above[test][2] for test in above)
    assert all(run["free"][test]["converged"] == 0 for run in runs for test in above)
    fall = mean(lambda run: run["curve"][record["marks"].index(10)] - run["curve"][-1], "unrolled_free")
    growth = [row["unrolled"] for row in record["memory"]]
    return [
        f"{first:.0f} ms a step, with four images of 64 x 64",
        f"backward): {second[0]:.0f} ms a step",
        f"same cell take {second[1]:.0f} ms",
        f"{record['seconds']:.0f} s of processor time each",
        f"{colours:.1f} dB above total variation of every colour on `cbsd68` and {opponents:.2f} dB above",
        f"and {alike[0]:.2f} to {alike[1]:.2f} dB above 10 unrolled steps of the same cell",
        f"falls by {fall:.1f} dB",
        "no test image converged to 1e-3 within 60 steps, with any of the three seeds",
        f"grows by about {(growth[-1] - growth[0]) / 35:.0f} MB with each",
    ]


def of_limits(record: dict[str, Any]) -> list[str]:
    """On the page of imaging, beside its own record."""
    found, runs = record["imaging"], json.loads((RESULTS / "imaging.json").read_text())["runs"]
    (both, alone), data = found["trials"], found["data"]
    below = data["natural64"] - min(run["free"]["natural64"]["psnr"] for run in runs)
    return [
        f"{both['before']} and {both['steps']} steps",
        f"reached {both['psnr']:.2f} dB on {found['photographs']} photographs of `cbsd68`",
        f"{alone['steps']} steps of the second part alone, which take as long, reached {alone['psnr']:.2f} dB",
        f"The data have {data['cbsd68']:.1f} dB on `cbsd68` and {data['natural64']:.1f} dB on `natural64`",
        f"With one seed it is {below:.0f} dB below the data on `natural64`",
    ]


def of_reasoning(record: dict[str, Any]) -> list[str]:
    def levels(puzzle: str, level: int, *, carry: bool = True) -> list[dict[str, Any]]:
        return [run["levels"][str(level)] for run in record["runs"] if (run["puzzle"], run["carry"]) == (puzzle, carry)]

    def after(steps: int, puzzle: str, level: int, *, carry: bool = True) -> float:
        place = record["marks"][puzzle].index(steps)
        return 100 * statistics.mean(found["curve"][place] for found in levels(puzzle, level, carry=carry))

    def mean(key: str, puzzle: str, level: int, *, carry: bool = True) -> float:
        return 100 * statistics.mean(found[key] for found in levels(puzzle, level, carry=carry))

    seconds = {
        puzzle: sorted(run["seconds"] for run in record["runs"] if run["puzzle"] == puzzle and run["carry"])
        for puzzle in ("sudoku", "mazes")
    }
    assert 30 < after(3, "sudoku", 5) < 37 and after(6, "sudoku", 5) == 100  # a third, and all
    later = [f"{after(24, 'mazes', n, carry=False):.1f} % of {n} x {n}" for n in (13, 17, 21)]
    ours = [f"{after(24, 'mazes', n):.1f} %" for n in (13, 17, 21)]
    wrong = [f"{mean('exact', 'mazes', n, carry=False):.1f}" for n in (13, 17, 21)]
    end = [f"{after(192, 'mazes', n, carry=False):.1f}" for n in (13, 17, 21)]
    assert end[2] == "0.0"  # "none"
    return [
        f"200 steps, {seconds['sudoku'][0]:.0f} to {seconds['sudoku'][-1]:.0f} seconds",
        f"2000 steps, {seconds['mazes'][0]:.0f} to {seconds['mazes'][-1]:.0f} seconds",
        f"of 13 x 13, {after(16, 'mazes', 13):.0f} % after 16 iterations and {mean('exact', 'mazes', 13):.0f} %",
        f"of 21 x 21, {after(16, 'mazes', 21):.0f} % and {mean('exact', 'mazes', 21):.0f} %",
        f"after 24 it solves {later[0]} (ours after 24: {ours[0]}), {later[1]} (ours {ours[1]}) and {later[2]}",
        f"21 x 21 (ours {ours[2]})",
        f"states converge {wrong[0]} %, {wrong[1]} % and {wrong[2]} % are right",
        f"after 192 iterations {end[0]} %, {end[1]} % and none",
        f"of 9 x 9, {after(16, 'mazes', 9, carry=False):.1f} % are right after 16 iterations",
        f"and {mean('exact', 'mazes', 9, carry=False):.1f} % where it converges",
        f"{mean('converged_right', 'mazes', 13):.0f} % of 13 x 13 and {mean('converged_right', 'mazes', 21):.0f} % of 21 x 21",
    ]


def of_language(record: dict[str, Any]) -> list[str]:
    def mean(key: str, tokens: str, kind: str) -> float:
        return statistics.mean(run[key] for run in record["runs"] if (run["tokens"], run["model"]) == (tokens, kind))

    said, both = [], ("words", "characters")
    losses = {tokens: {kind: mean("loss", tokens, kind) for kind in KINDS} for tokens in both}
    gaps = {kind: [losses[tokens]["equilibrium"] - losses[tokens][kind] for tokens in both] for kind in KINDS}
    said.append(f"by {gaps['explicit'][0]:.3f} nats on words and by {gaps['explicit'][1]:.3f} on characters")
    said.append(f"than the bigram by {-gaps['bigram'][0]:.3f} and {-gaps['bigram'][1]:.3f} nats")
    said.append(f"than the trigram by {-gaps['trigram'][0]:.3f} and {-gaps['trigram'][1]:.3f}")
    for place, tokens in enumerate(both):
        mine, other = (
            {run["seed"]: run["loss"] for run in record["runs"] if (run["tokens"], run["model"]) == (tokens, kind)}
            for kind in ("explicit_equal_time", "equilibrium")
        )
        gap = statistics.mean(other[seed] - mine[seed] for seed in mine)
        times = mean("steps", tokens, "explicit_equal_time") / 1500
        said.append(f"by {gap:.3f} {'nats ' if place == 0 else ''}on {tokens}, with {times:.1f} times as many")
    found = [run for run in record["runs"] if run["model"] == "equilibrium"]
    lost = sum(round((1 - run["converged"]) * run["windows"]) for run in found)
    said.append(
        f"All but {lost} of {sum(run['windows'] for run in found):,}" if lost else "All equilibria on the 30,696 test windows"
    )
    said.append(f"in {mean('evaluations', 'words', 'equilibrium'):.1f} evaluations on average on words")
    said.append(f"and in {mean('evaluations', 'characters', 'equilibrium'):.1f} on characters")
    ratios = [
        mine["cpu_seconds"] / other["cpu_seconds"]
        for mine in record["runs"]
        for other in found
        if mine["model"] == "explicit_equal_time" and (mine["tokens"], mine["seed"]) == (other["tokens"], other["seed"])
    ]
    assert ratios and all(abs(ratio - 1) <= 0.05 for ratio in ratios)
    said.append(f"the ratios of the {len(ratios)} pairs are {min(ratios):.2f} to {max(ratios):.2f}")
    return said


SAID: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]]]] = {
    "graphs": ("graphs", of_graphs),
    "imaging": ("imaging", of_imaging),
    "language": ("language", of_language),
    "reasoning": ("reasoning", of_reasoning),
    "task_limits": ("imaging", of_limits),
}


@pytest.mark.parametrize("name", SAID)
def test_the_prose_of_a_page_agrees_with_a_record(name: str) -> None:
    page, phrases = SAID[name]
    text = " ".join((ROOT / "docs" / "tasks" / f"{page}.md").read_text(encoding="utf-8").split())
    missing = [said for said in phrases(json.loads((RESULTS / f"{name}.json").read_text())) if said not in text]
    assert not missing, f"docs/tasks/{page}.md should say: {missing}"
