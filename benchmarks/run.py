"""Time a solve and its gradient: us, the peers, and the floor that the matrix products set.

    python benchmarks/run.py [--quick] [--only NAME] [--rounds N]

Contenders live in worker processes (the peers in an environment of their own) and take turns, one run each
per round, so that all meet the same noise. Every round times the floor too, and times are divided by it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import memory
import report
from client import HERE, Client, WorkerFailed
from problems import PROBLEMS, RTOL, Answer, Arrays, Problem, build, judge, reference
from quiet import Watch

MODULES = {"baseline": "ours", "ours": "ours", "peer_torchdeq": "peers", "peer_jaxopt": "peers"}
# A residual is computed by everybody in float32; measured again in float64 it may differ by this factor.
SLACK = 1.2
# The error of a gradient whose adjoint is solved to RTOL stays far below this; a wrong gradient does not.
GRADIENT_TOLERANCE = 1e-3
# A contender this many times slower than the floor stops after MIN_ROUNDS; more would only heat the room.
SLOW, MIN_ROUNDS = 4.0, 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [problem.name for problem in PROBLEMS]
    parser.add_argument("--quick", action="store_true", help="three rounds of gaussian-500 and smoothing, no memory")
    parser.add_argument("--only", action="append", choices=[*names, "memory"], metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds per problem (default: 7)")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has wellposed")
    default = HERE.parent / ".venv-peers" / "bin" / "python"
    parser.add_argument("--peers-python", default=str(default), help="interpreter that has torchdeq and jaxopt")
    patience = "seconds per problem to spend on repeating runs that other programs disturbed (default: 30)"
    parser.add_argument("--patience", type=float, default=30.0, help=patience)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.quick:
        options.rounds = min(options.rounds, 3)
        options.only = options.only or ["gaussian-500", "smoothing"]
    return options


def start_workers(options: argparse.Namespace, folder: Path) -> tuple[list[Client], list[str]]:
    """The workers that came up, and a sentence for each that did not."""
    interpreters = {"ours": options.python, "peers": options.peers_python}
    clients, complaints = [], []
    if not Path(options.peers_python).exists():
        complaints.append("The peers are not installed, so they are missing below. `make bench-peers` installs them.")
    for module, place in MODULES.items():
        if place == "peers" and complaints:
            continue
        try:
            clients.append(Client(module, interpreters[place], folder / f"{module}.log"))
        except WorkerFailed as failure:
            complaints.append(f"The contenders of {module} could not start: {failure}.")
    return clients, complaints


class Entry:
    """One contender on one problem: where it runs, what it measured, and why it stopped if it did."""

    def __init__(self, client: Client, name: str) -> None:
        self.client, self.name = client, name
        self.times: list[tuple[float, float, float, float]] = []  # forward, total, and the floor's two
        self.facts: dict[str, Any] = {}
        self.failure = ""

    def ask(self, **request: Any) -> dict[str, Any]:
        """The worker's answer; after a failure, {} for ever."""
        if self.failure:
            return {}
        try:
            return self.client.ask(**request)
        except WorkerFailed as failure:
            self.failure = str(failure)
            return {}

    def timed_run(self, watch: Watch) -> dict[str, Any]:
        if self.failure:
            return {}
        return watch.undisturbed(self.client.process.pid, lambda: self.ask(run=self.name))

    def is_slow(self) -> bool:
        return len(self.times) >= MIN_ROUNDS and min(total / floor for _, total, _, floor in self.times) > SLOW

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {"contender": self.name, **self.facts, "failed": bool(self.failure)}
        remarks = [f"failed: {self.failure}"] if self.failure else []
        if self.times:
            row["forward_ratio"] = report.quartiles([forward / floor for forward, _, floor, _ in self.times])
            row["total_ratio"] = report.quartiles([total / floor for _, total, _, floor in self.times])
            row["forward_seconds"] = report.quartiles([times[0] for times in self.times])
            row["total_seconds"] = report.quartiles([times[1] for times in self.times])
            row["rounds"] = len(self.times)
        if self.facts.get("residual", 0.0) > SLACK * RTOL:
            row["failed"] = True
            remarks.append("NOT SOLVED to tolerance")
        if self.facts.get("flipped_units"):
            remarks.append(f"units across their kink: {self.facts['flipped_units']}")
        if self.facts.get("gradient_error", 0.0) > GRADIENT_TOLERANCE:
            row["failed"] = True
            remarks.append("WRONG GRADIENT")
        row["remark"] = "; ".join([*remarks, *filter(None, [row.pop("note", "")])])
        return row


def check(entry: Entry, arrays: Arrays, answer: Answer, folder: Path) -> None:
    """Prepare, run once untimed, and judge what came back."""
    entry.ask(prepare=entry.name)
    saved = folder / "answer.npz"
    saved.unlink(missing_ok=True)
    reply = entry.ask(run=entry.name, save=str(saved))
    entry.facts = {key: reply.get(key) for key in ("forward_steps", "adjoint_steps", "note")}
    if saved.exists() and not entry.failure:
        with np.load(saved) as given:
            entry.facts |= judge(arrays, answer, given["z"], given["dW"])


def measure(problem: Problem, clients: list[Client], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    arrays = build(problem)
    answer = reference(arrays)
    counts = {"forward_steps": answer.forward_steps, "adjoint_steps": answer.adjoint_steps}
    np.savez(folder / "problem.npz", **arrays, **counts, rtol=RTOL)
    entries = [Entry(client, name) for client in clients for name in client.contenders]
    for entry in entries:
        entry.ask(load=str(folder / "problem.npz"))
    for entry in entries:
        check(entry, arrays, answer, folder)
    floor = next(entry for entry in entries if entry.name == "floor")
    watch = Watch(options.patience)
    for _ in range(options.rounds):
        base = floor.timed_run(watch)
        if not base:
            raise WorkerFailed(f"the floor could not be measured: {floor.failure}")
        floor.times.append((base["forward"], base["total"], base["forward"], base["total"]))
        for entry in entries:
            if entry is floor or entry.is_slow():
                continue
            reply = entry.timed_run(watch)
            if reply:
                entry.times.append((reply["forward"], reply["total"], base["forward"], base["total"]))
    rows = [entry.row() for entry in entries]
    facts = {"name": problem.name, "title": problem.title, **counts}
    return facts | {"runs": watch.runs, "disturbed": watch.disturbed, "rows": rows}


def peer_versions(python: str) -> dict[str, str]:
    if not Path(python).exists():
        return {}
    names = ("torchdeq", "jaxopt", "jax")
    code = f"from importlib.metadata import version as v; print(*(n + '=' + v(n) for n in {names}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return dict(pair.split("=") for pair in done.stdout.split())


def main() -> None:
    options = arguments()
    wanted = options.only or [*(problem.name for problem in PROBLEMS), "memory"]
    result: dict[str, Any] = {
        "environment": report.environment(peer_versions(options.peers_python)),
        "rounds": options.rounds,
        "problems": [],
        "memory": {},
    }
    with tempfile.TemporaryDirectory(prefix="wellposed-bench-") as name:
        folder = Path(name)
        clients, complaints = start_workers(options, folder)
        print(*report.explanation(result), *complaints, "", sep="\n")
        for problem in PROBLEMS:
            if problem.name in wanted:
                measured = measure(problem, clients, options, folder)
                result["problems"].append(measured)
                shown = {"problems": [measured], "memory": {}}
                print(*report.lines(shown, as_markdown=False), sep="\n", flush=True)
        for client in clients:
            client.close()
    if "memory" in wanted:
        result["memory"] = memory.measure_all(options.python)
        print(*report.lines({"problems": [], "memory": result["memory"]}, as_markdown=False), sep="\n")
    complete = not options.quick and options.only is None
    report.write(result, HERE / "results", "foundation" if complete else "partial")


if __name__ == "__main__":
    main()
