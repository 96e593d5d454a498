"""A user's own module: us, torchdeq 0.1.0 and a hand-written loop; `Auto` against the solvers it chooses from; compiled code.

    make bench-own ARGS="[--seconds N] [--runs N] [--only WORD] [--suite peers|auto|compiled]"
    make tables

Forward and exact backward to a relative residual of 1e-4, float32, 2 threads. Two contenders (four with `Auto`) run turn by
turn in one process, in another order in every round: who runs after an unlike program finds its own code no longer in the
caches. (With all four peers in turn, 64 and 128 units took 1.69 and 1.52 of the loop in the place of 1.33 and 1.30.) A ratio
is the median over rounds of the ratio within a round, and then the median over three processes: where code and data lie in
memory changes the ratios of small cells by a tenth from one process to the next. Rounds in which another process computed are
repeated. glibc is told to keep freed memory (`KEEPING`): else page faults, of which who ran before decides, take up to a tenth
of a backward pass with large states. A part of `Auto` that takes over three times as long as the fastest, forward and
backward, is left out. Writes results/own_cell.json and results/own_cell.md; rows that are not measured again are kept.
`make tables` copies the tables into README.md and docs/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cells
import wellposed as wp
from quiet import Watch

RESULTS = Path(__file__).parent / "results"
RTOL, MAX_STEPS = 1e-4, 200
#: Seconds of rounds between two looks at other processes; times the fastest beyond which a part of `Auto` is left out.
BLOCK, FAR = 0.5, 3.0
#: Environment of all contenders.
KEEPING = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
Row = dict[str, Any]
#: Returns the equilibrium, with a graph.
Solve = Callable[[Tensor], Tensor]


def norms(z: Tensor) -> Tensor:
    return z.flatten(1).norm(dim=1)


def loop(f: Solve, z: Tensor) -> Tensor:
    """Plain steps until every sample is done."""
    for _ in range(MAX_STEPS):
        z, before = f(z), z
        if bool((norms(z - before) / norms(z)).max() <= RTOL):
            break
    return z


def by_hand(cell: Any, shape: tuple[int, ...]) -> Solve:
    """The loop that one writes first: a residual at every step, backward by a hook."""

    def solve(x: Tensor) -> Tensor:
        with torch.no_grad():
            z = loop(lambda z: cell(z, x), torch.zeros(x.shape[0], *shape))
        tracked = cell(z, x)
        z0 = z.detach().requires_grad_()
        f0 = cell(z0, x)
        tracked.register_hook(lambda v: loop(lambda u: torch.autograd.grad(f0, z0, u, retain_graph=True)[0] + v, v))
        return tracked

    return solve


def by_torchdeq(name: str) -> Callable[[Any, tuple[int, ...]], Solve]:
    from torchdeq import get_deq

    tolerances = {"f_tol": RTOL, "b_tol": RTOL, "f_stop_mode": "rel", "b_stop_mode": "rel"}
    limits = {"f_max_iter": MAX_STEPS, "b_max_iter": MAX_STEPS}

    def prepare(cell: Any, shape: tuple[int, ...]) -> Solve:
        deq = get_deq(ift=True, f_solver=name, b_solver=name, **tolerances, **limits).train()
        return lambda x: deq(lambda z: cell(z, x), torch.zeros(x.shape[0], *shape))[0][-1]

    return prepare


def ours(solver: wp.solve.AbstractSolver | None = None) -> Callable[[Any, tuple[int, ...]], Solve]:
    def prepare(cell: Any, shape: tuple[int, ...]) -> Solve:
        gradient = wp.ImplicitGradient(solver)
        layer = wp.EquilibriumLayer(cell, solver, gradient, rtol=RTOL, max_steps=MAX_STEPS, state_shape=shape)
        layer.on_failure = "ignore"
        return layer

    return prepare


class Contender:
    """Forward and backward of one solver, with the seconds of both."""

    def __init__(self, solve: Solve, cell: Any, x: Tensor, v: Tensor) -> None:
        self.solve, self.cell, self.x, self.v = solve, cell, x, v
        self.seconds: list[tuple[float, float]] = []

    def run(self) -> None:
        self.cell.zero_grad()
        start = time.perf_counter()
        z = self.solve(self.x)
        middle = time.perf_counter()
        (z * self.v).sum().backward()
        self.seconds.append((middle - start, time.perf_counter() - middle))
        self.residual = float((norms(self.cell(z, self.x) - z) / norms(z)).max().detach())
        self.gradient = torch.cat([p.grad.flatten() for p in self.cell.parameters() if p.grad is not None])

    def ratios(self, base: Contender, part: slice = slice(None)) -> list[float]:
        """Of the rounds."""
        pairs = zip(self.seconds, base.seconds, strict=True)
        return [sum(mine[part]) / sum(other[part]) for mine, other in pairs]


def measure(
    name: str,
    prepared: dict[str, Callable[[Any, tuple[int, ...]], Solve]],
    budget: float,
    patience: float,
    far: float = math.inf,
) -> dict[str, Contender]:
    """All contenders on one map, turn by turn, for about `budget` seconds, and `patience` to wait for other processes.

    One that takes `far` times as long as the fastest, forward and backward, is left out: it has no seconds.
    """
    cell, x, shape = cells.make(name)
    v = torch.randn(x.shape[0], *shape)
    contenders = {key: Contender(prepare(cell, shape), cell, x, v) for key, prepare in prepared.items()}
    shuffler, watch = random.Random(0), Watch(patience)
    for _ in range(2):  # the first solves count costs and fill caches
        for contender in contenders.values():
            contender.run()
    fastest = [min(contender.seconds[-1][part] for contender in contenders.values()) for part in (0, 1)]
    order = [c for c in contenders.values() if any(c.seconds[-1][part] <= far * fastest[part] for part in (0, 1))]
    for contender in contenders.values():
        contender.seconds.clear()

    def block() -> list[list[tuple[float, float]]]:
        """The seconds of some rounds, for each contender."""
        before, began = len(order[0].seconds), time.perf_counter()
        while time.perf_counter() - began < BLOCK:
            for contender in shuffler.sample(order, len(order)):
                contender.run()
        found = [contender.seconds[before:] for contender in order]
        for contender in order:
            del contender.seconds[before:]
        return found

    began = time.perf_counter()
    while len(order[0].seconds) < 4 or (time.perf_counter() - began < budget and len(order[0].seconds) < 400):
        for contender, seconds in zip(order, watch.undisturbed(os.getpid(), block), strict=True):
            contender.seconds += seconds
    if watch.disturbed:
        print(f"  {name}: other processes computed in {watch.disturbed} of {watch.runs} blocks of rounds")
    return contenders


def evaluations(solve: Any) -> str:
    return f"{int(solve.last_solution.num_steps.max())} / {int(solve.last_adjoint.num_steps.max())}"


def median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def peers(name: str, budget: float, patience: float) -> Row:
    """Us against each of two solvers of torchdeq, and against the loop, by pairs."""
    others = {"torchdeq plain": by_torchdeq("fixed_point_iter"), "torchdeq Anderson": by_torchdeq("anderson"), "loop": by_hand}
    ratios: Row = {}
    errors = set()
    for key, other in others.items():
        found = measure(name, {"ours": ours(), key: other}, budget / len(others), patience)
        mine, theirs = found["ours"], found[key]
        ratios[f"/ {key}"] = median(mine.ratios(theirs))
        error = float((mine.gradient - theirs.gradient).norm() / theirs.gradient.norm())
        if (
            max(mine.residual, theirs.residual) > 3 * RTOL or error > 1e-2
        ):  # all solve the same problem, to about the same accuracy
            errors.add(f"{mine.residual:.1e} and {theirs.residual:.1e} ({key}), gradients differ by {error:.1e}")
    print(*(f"  {name}: residuals {error}\n" for error in sorted(errors)), sep="", end="")
    best = max(ratios["/ torchdeq plain"], ratios["/ torchdeq Anderson"])
    return {"cell": name, "evaluations": evaluations(mine.solve), **ratios, "/ best torchdeq": best}


def auto(name: str, budget: float, patience: float) -> Row:
    """`Auto` against the best of its parts that converges, forward and backward separately."""
    parts = {"Picard()": wp.Picard(), "Anderson()": wp.Anderson(), "NewtonKrylov()": wp.NewtonKrylov()}
    found = measure(name, {"Auto()": ours(), **{key: ours(solver) for key, solver in parts.items()}}, budget, patience, FAR)
    row: Row = {"map": name, "Auto()": evaluations(found["Auto()"].solve)}
    for direction, part in (("forward", slice(0, 1)), ("backward", slice(1, 2))):
        ratios = {}
        for key in parts:
            record = found[key].solve.last_solution if direction == "forward" else found[key].solve.last_adjoint
            if found[key].seconds and bool(record.converged.all()) and bool(found[key].solve.last_solution.converged.all()):
                ratios[key] = median(found["Auto()"].ratios(found[key], part))
        best = max(ratios, key=lambda key: ratios[key])
        row |= {f"{direction}: best": best, direction: ratios[best]}
    return row


def around(compiles: bool, inside: bool = False) -> Callable[[Any, tuple[int, ...]], Solve]:
    """A function with operations before the layer and after it; compiled as a whole, or the cell alone."""

    def prepare(cell: Any, shape: tuple[int, ...]) -> Solve:
        layer: Any = ours()(torch.compile(cell) if inside else cell, shape)

        def model(x: Tensor) -> Tensor:
            return torch.sin(layer(torch.tanh(x) + 0.1 * x))

        solve: Any = torch.compile(model) if compiles else model
        return solve

    return prepare


def compiled(name: str, budget: float, patience: float) -> Row:
    """`torch.compile` around a layer and of its cell, against neither: times, graphs, and how far gradients differ.

    Beside it the same for the loop by hand: what compiled code of a cell costs there is torch's, above all in backward.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ways = {"plain": around(False), "around": around(True), "inside": around(False, inside=True)}
    found = measure(name, ways, budget, patience)
    exact = found["plain"].gradient
    row: Row = {"cell": name, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}
    row["cell alone / plain"] = cell_alone(found["plain"])
    for way in ("around", "inside"):
        error = float((found[way].gradient - exact).norm() / exact.norm())
        row |= {f"{way} / plain": median(found[way].ratios(found["plain"])), f"difference {way}": f"{error:.0e}"}
    loops = {"plain": by_hand, "inside": lambda cell, shape: by_hand(torch.compile(cell), shape)}
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):  # the loop walks through one graph many times
        found = measure(name, loops, budget, patience)
    return row | {"loop: inside / plain": median(found["inside"].ratios(found["plain"]))}


def cell_alone(plain: Contender, rounds: int = 40) -> float:
    """Compiled code of the cell against the cell, both at the equilibrium and without a graph: what torch gains by itself."""
    seconds = []
    with torch.no_grad():
        z, ways = plain.solve(plain.x), (torch.compile(plain.cell), plain.cell)
        for _ in range(rounds):
            times = []
            for f in ways:
                f(z, plain.x)  # what ran before it does not count
                start = time.perf_counter()
                f(z, plain.x)
                times.append(time.perf_counter() - start)
            seconds.append(times)
    return median([mine / other for mine, other in seconds])


SUITES: dict[str, tuple[Callable[[str, float, float], Row], list[str]]] = {
    "peers": (peers, list(cells.TABLE)),
    "auto": (auto, [*cells.TABLE, *cells.FURTHER]),
    "compiled": (
        compiled,
        [name for name in cells.TABLE if "128 units" in name or "32 channels" in name or "attention" in name],
    ),
}


def table(rows: list[Row]) -> list[str]:
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + [
        "| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row.values()) + " |"
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each map, in each process")
    parser.add_argument("--runs", type=int, default=3, help="processes, one after the other")
    parser.add_argument("--row", nargs=2, metavar=("SUITE", "MAP"), help="measure one row here and print it as JSON")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for other processes, for each map")
    parser.add_argument("--only", default="", help="maps whose name contains this")
    parser.add_argument("--suite", choices=sorted(SUITES), action="append")
    options = parser.parse_args()
    torch.set_num_threads(2)
    warnings.simplefilter("ignore", wp.errors.WellposedWarning)
    if options.row:
        suite, name = options.row
        print(json.dumps(SUITES[suite][0](name, options.seconds, options.patience)))
        return
    suites = list(options.suite or SUITES)
    if importlib.util.find_spec("torchdeq") is None and "peers" in suites:
        print("torchdeq is not installed here, so its suite is not measured; `make bench-peers` installs it.")
        suites.remove("peers")
    setting = {"torch": torch.__version__, "threads": 2, "rtol": RTOL}
    for suite in suites:
        names = SUITES[suite][1]
        shown = 0
        for name in (name for name in names if options.only in name):
            row = between([in_a_process(suite, name, options) for _ in range(options.runs)])
            print("\n".join(table([row])[2 if shown else 0 :]), flush=True)
            write(suite, names, row, setting)
            shown += 1


def in_a_process(suite: str, name: str, options: argparse.Namespace) -> Row:
    """A row, measured in a process of its own; what that prints before is shown."""
    limits = ["--seconds", str(options.seconds), "--patience", str(options.patience)]
    command = [sys.executable, __file__, *limits, "--row", suite, name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | KEEPING)
    *remarks, row = done.stdout.splitlines()
    print(*remarks, sep="\n", end="\n" if remarks else "", flush=True)
    found: Row = json.loads(row)
    return found


def between(rows: list[Row]) -> Row:
    """The median of each number; of everything else the most frequent value."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {key: median(values) if isinstance(values[0], float) else statistics.mode(values) for key, values in columns.items()}


def write(suite: str, names: list[str], row: Row, setting: dict[str, Any]) -> None:
    """Puts a row into the results, in the place of an older one."""
    path = RESULTS / "own_cell.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    found = found if found.get("setting") == setting else {"setting": setting}
    rows = {next(iter(old.values())): old for old in [*found.get(suite, []), row]}
    found[suite] = [rows[name] for name in names if name in rows]
    path.write_text(json.dumps(found, indent=1) + "\n")
    text = ["# A user's own module", "", " ".join(__doc__.split("\n\n")[2].split()), ""]
    for name in SUITES:
        text += [f"## {name.capitalize()}", "", *(table(found[name]) if found.get(name) else ["Not measured yet."]), ""]
    (RESULTS / "own_cell.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
