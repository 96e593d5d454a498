"""Turn the measurements into a table on the screen, a Markdown page and a JSON file."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

from client import THREADS
from problems import RTOL

HEADINGS = ["contender", "forward", "forward + backward", "steps", "residual", "gradient error", "remark"]


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "q1": low, "q3": high}


def environment(peers: dict[str, str]) -> dict[str, Any]:
    """What the numbers depend on. `peers` are the versions found in the other environment."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    ours = {name: metadata.version(name) for name in ("torch", "numpy")}
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "threads": THREADS,
        "python": platform.python_version(),
        "versions": ours | {name: version for name, version in peers.items() if name not in ours},
    }


def ratio(summary: dict[str, float] | None) -> str:
    return "" if summary is None else f"{summary['median']:.2f} ({summary['q1']:.2f}-{summary['q3']:.2f})"


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table; a failed contender has only a remark."""
    steps = "/".join("?" if row.get(key) is None else str(row[key]) for key in ("forward_steps", "adjoint_steps"))
    numbers = ["" if row.get(key) is None else f"{row[key]:.1e}" for key in ("residual", "gradient_error")]
    measured = "forward_ratio" in row
    return [
        row["contender"],
        ratio(row.get("forward_ratio")),
        ratio(row.get("total_ratio")),
        steps if measured else "",
        *numbers,
        row["remark"],
    ]


def aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


def markdown(table: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(line) + " |" for line in table]
    return [lines[0], "|" + " --- |" * len(table[0]), *lines[1:]]


def memory_table(memory: dict[str, Any]) -> list[list[str]]:
    table = [["peak memory above the start, MiB", "10 steps", "100 steps", "1000 steps"]]
    for title, records in memory.items():
        values = [records, "", ""] if isinstance(records, str) else [f"{r['peak_mib']:.1f}" for r in records]
        table.append([title, *values])
    return table


def summary(problem: dict[str, Any]) -> str:
    """Us against the fastest peer that kept the tolerance, in one sentence."""
    rows = {row["contender"]: row for row in problem["rows"] if "total_ratio" in row and not row["failed"]}
    ours = rows.get("wellposed")
    peers = [row for name, row in rows.items() if name.startswith(("torchdeq", "jaxopt", "plain"))]
    if ours is None or not peers:
        return ""
    best = min(peers, key=lambda row: row["total_ratio"]["median"])
    forward, total = ours["forward_ratio"]["median"], ours["total_ratio"]["median"]
    return (
        f"wellposed: {forward:.2f} of the floor forward, {total:.2f} forward + backward; the fastest other "
        f"({best['contender']}) takes {best['total_ratio']['median'] / total:.2f} times as long."
    )


def lines(result: dict[str, Any], *, as_markdown: bool) -> list[str]:
    layout, heading = (markdown, "## ") if as_markdown else (aligned, "")
    out = []
    for problem in result["problems"]:
        counts = f"Picard needs {problem['forward_steps']} steps, the Neumann series {problem['adjoint_steps']}."
        out += [f"{heading}{problem['title']}", "", f"{counts} {summary(problem)}".rstrip(), ""]
        if problem["disturbed"] > 0.1 * problem["runs"]:
            disturbed = f"{problem['disturbed']} of {problem['runs']} runs"
            out += [f"UNRELIABLE: other programs were computing during {disturbed}.", ""]
        out += [*layout([HEADINGS, *map(cells, problem["rows"])]), ""]
    if result["memory"]:
        out += [f"{heading}Memory of forward + backward", "", *layout(memory_table(result["memory"])), ""]
    return out


def explanation(result: dict[str, Any]) -> list[str]:
    e = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items())
    text = f"""
        Times are ratios to the floor measured in the same round, median (quartiles) over {result["rounds"]}
        interleaved rounds. The floor is the matrix products alone: one per step of Picard iteration and of
        the Neumann series, and those of the parameter gradients. Steps are forward/adjoint, as the contender
        reports them. The residual is the largest over the samples, of the returned value, in float64 (asked:
        {RTOL:g}); the gradient error is that of dW, relative to float64."""
    facts = f"{e['date']}, {e['cpu']}, {e['threads']} threads, Python {e['python']}, {versions}."
    return [*textwrap.wrap(facts, 110), "", *textwrap.wrap(" ".join(text.split()), 110), ""]


def write(result: dict[str, Any], folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    page = ["# Benchmarks", "", *explanation(result), *lines(result, as_markdown=True)]
    (folder / f"{name}.md").write_text("\n".join(page).rstrip() + "\n")
