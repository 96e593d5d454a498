"""Time full-batch gradient descent of GaussianDEQ: `wp.descend`, torchdeq, and a careful warm-started loop.

    python benchmarks/descent.py [--quick] [--rounds N] [--peers-python PATH]

Every forward and every adjoint is solved to a relative residual of 1e-6, in float32. Contenders live in worker processes and
take turns, one descent each per round; ratios are those of the same round. All must end at the same parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import report
from client import HERE, Client, WorkerFailed
from problems import RTOL, Arrays, Problem, build, solve_plainly
from quiet import Watch

MODULES = {"descent_ours": "ours", "descent_plain": "ours", "descent_torchdeq": "peers"}
REFERENCE = "torchdeq fixed_point_iter"
# Two descents differ by solves to RTOL and by units across their kinks; a wrong gradient shows in the first digit.
PARAMETER_TOLERANCE = 1e-3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="n = m = 300 and 10 steps, one round")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    parser.add_argument("--steps", type=int, default=200, help="steps of descent (default: 200)")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has wellposed")
    default = HERE.parent / ".venv-peers" / "bin" / "python"
    parser.add_argument("--peers-python", default=str(default), help="interpreter that has torchdeq")
    patience = "seconds to spend on repeating descents that other programs disturbed (default: 300)"
    parser.add_argument("--patience", type=float, default=300.0, help=patience)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.patience = 1, min(options.steps, 10), 0.0
    return options


def largest_eigenvalue(arrays: Arrays) -> float:
    """Of the tangent kernel at the start, H = G + (P P^T) o (G + X X^T): its inverse is a step that is stable and not timid."""
    W, U, a, X = (torch.from_numpy(arrays[name]).double() for name in ("W", "U", "a", "X"))
    z = solve_plainly(arrays, torch.float64, 1e-10).z
    mask = (z > 0).double()
    p = mask * a
    for _ in range(100):
        p = mask * (a + p @ W)
    G = z @ z.T
    return float(torch.linalg.eigvalsh(G + (p @ p.T) * (G + X @ X.T))[-1])


def start_workers(options: argparse.Namespace, folder: Path) -> tuple[list[Client], list[str]]:
    clients, complaints = [], []
    for module, place in MODULES.items():
        python = options.python if place == "ours" else options.peers_python
        if not Path(python).exists():
            complaints.append("The peers are not installed, so they are missing below. `make bench-peers` installs them.")
            continue
        try:
            clients.append(Client(module, python, folder / f"{module}.log", timeout=1800.0))
        except WorkerFailed as failure:
            complaints.append(f"The contenders of {module} could not start: {failure}.")
    return clients, complaints


def distance(answers: dict[str, Any], name: str) -> float | None:
    """Relative difference of W to that of the plain loop."""
    if name not in answers or "plain loop, warm" not in answers:
        return None
    reference = answers["plain loop, warm"]
    return float(np.linalg.norm(answers[name] - reference) / np.linalg.norm(reference))


def measure(options: argparse.Namespace, folder: Path) -> None:
    size = 300 if options.quick else 1000
    problem = Problem(f"descent-{size}", "gaussian", size, size)
    arrays = build(problem)
    eta = 1.0 / largest_eigenvalue(arrays)
    np.savez(folder / "problem.npz", **arrays, rtol=RTOL, step_size=eta, steps=options.steps)
    clients, complaints = start_workers(options, folder)
    print(f"{problem.title}; {options.steps} steps of size {eta:.3g}, every solve to {RTOL:g}", *complaints, sep="\n")
    names = [(client, name) for client in clients for name in client.contenders]
    seconds: dict[str, list[float]] = {name: [] for _, name in names}
    answers: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for client in clients:
        client.ask(load=str(folder / "problem.npz"))
    for client, name in names:
        client.ask(prepare=name)
    watch = Watch(options.patience)
    for _ in range(options.rounds):
        for client, name in names:
            saved = folder / "answer.npz"
            request = {"run": name, "save": str(saved)}
            reply = watch.undisturbed(client.process.pid, lambda c=client, r=request: c.ask(**r))
            seconds[name].append(reply["total"])
            notes[name] = reply["note"]
            with np.load(saved) as given:
                answers[name] = given["dW"]  # the final W
    for client in clients:
        client.close()
    result: dict[str, Any] = {"title": problem.title, "steps": options.steps, "step_size": eta, "rows": []}
    for name, times in seconds.items():
        ratios = [own / ref for own, ref in zip(seconds.get(REFERENCE, []), times, strict=False)]
        row = {"contender": name, "seconds": statistics.median(times), "ratios": ratios, "note": notes[name]}
        row["difference"] = distance(answers, name)
        result["rows"].append(row)
        wrong = row["difference"] is not None and row["difference"] > PARAMETER_TOLERANCE
        faster = f"{statistics.median(ratios):5.2f}x torchdeq" if ratios else "        "
        remark = "  OTHER PARAMETERS" if wrong else ""
        print(f"{name:42s} {row['seconds']:8.2f} s  {faster}  {row['note']}  |dW|/|W| {row['difference']:.1e}{remark}")
    print(f"{watch.disturbed} of {watch.runs} runs were disturbed by other programs.")
    if not options.quick:
        measured = {"environment": report.environment({})} | result
        (HERE / "results" / "descent.json").write_text(json.dumps(measured, indent=1) + "\n")


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="wellposed-bench-") as name:
        measure(options, Path(name))


if __name__ == "__main__":
    main()
