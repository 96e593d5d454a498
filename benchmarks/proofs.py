"""Which problems are proved from the start, with eta = 1/lambda_max, and in what time?

    python benchmarks/proofs.py [--only NAME] [--seeds N] [--minutes M] [--out FOLDER]

Each proof has one record, FOLDER/proofs/NAME-SEED.json; a problem that has a finished one is not run again, so a run that was
stopped continues where it was (delete a record to repeat it). A proof that takes longer than M minutes is stored in
FOLDER/proofs/NAME-SEED.partial and continued by the next run; its record says how far it is, and what its tail lacks. The
table is FOLDER/proofs.md, and FOLDER/proofs.json for `benchmarks/tables.py`, which copies it into docs/certificates.md. Times
are CPU seconds of one process; the records have the wall time too, which means little where the machine was shared. MNIST is
read from $WELLPOSED_DATA.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wellposed as wp
from wellposed.prove import _tail
from wellposed.prove._network import read_network
from wellposed.prove._run import ProofRun
from wellposed_lab.runs.config import resolve
from wellposed_lab.runs.proving import different_samples
from wellposed_lab.runs.setup import prepare

HERE = Path(__file__).parent
MOST_STEPS = 200_000
#: Units that may switch, for which the tail of an unfinished proof is examined: matrices of this size are stored.
MOST_SWITCHES = 6000
DATA = {"mnist": "MNIST 0/1", "digits": "digits 0/1", "make run": "digits 0/1 of `make run`"}
NETWORKS = {"gaussian": "ReLU", "softplus": "centred softplus", "skip": "`SkipDEQ`", "implicit_only": "`ImplicitOnlyDEQ`"}


@dataclass(frozen=True)
class Problem:
    """A row of the table.

    Attributes:
        name: Of the records. sizes: n, m, d.
        data: "sphere", "mnist", "digits" (the first ones) or "make run" (those that it chooses).
        network: "gaussian", "tanh", "softplus", "skip" or "implicit_only". seeds: How many.
        bar: What is asked for.
    """

    name: str
    data: str
    sizes: tuple[int, int, int]
    network: str
    seeds: int
    bar: str


PROBLEMS = [
    Problem("sphere-10", "sphere", (10, 200, 50), "gaussian", 20, "at least 18 of 20, <= 20 s each"),
    Problem("sphere-50", "sphere", (50, 500, 100), "gaussian", 1, "yes, <= 3 min"),
    Problem("sphere-100", "sphere", (100, 1000, 784), "gaussian", 1, "yes, <= 20 min"),
    Problem("mnist-20", "mnist", (20, 500, 784), "gaussian", 5, "at least 4 of 5, <= 3 min each"),
    Problem("make-run", "make run", (20, 256, 64), "gaussian", 1, "yes, <= 1 min"),
    Problem("digits-10", "digits", (10, 200, 64), "gaussian", 1, ""),
    Problem("digits-20", "digits", (20, 200, 64), "gaussian", 1, ""),
    Problem("digits-20-tanh", "digits", (20, 500, 64), "tanh", 1, ""),
    Problem("sphere-10-tanh", "sphere", (10, 200, 50), "tanh", 3, ""),
    Problem("sphere-10-softplus", "sphere", (10, 200, 50), "softplus", 3, ""),
    Problem("sphere-100-tanh", "sphere", (100, 1000, 784), "tanh", 1, "tanh or softplus: yes, <= 5 min"),
    Problem("sphere-100-softplus", "sphere", (100, 1000, 784), "softplus", 1, "tanh or softplus: yes, <= 5 min"),
    Problem("mnist-20-tanh", "mnist", (20, 500, 784), "tanh", 1, ""),
    Problem("mnist-50-tanh", "mnist", (50, 1000, 784), "tanh", 3, "tanh or softplus: yes, <= 30 min each"),
    Problem("mnist-100-tanh", "mnist", (100, 1000, 784), "tanh", 1, "yes, <= 2 h"),
    Problem("mnist-100", "mnist", (100, 1000, 784), "gaussian", 1, "the farthest step"),
    Problem("sphere-10-skip", "sphere", (10, 200, 50), "skip", 10, "10 of 10"),
    Problem("sphere-10-implicit", "sphere", (10, 200, 50), "implicit_only", 10, "at least 5 of 10"),
]


def posed(problem: Problem, seed: int) -> tuple[Any, Tensor, Tensor]:
    """The network, inputs and labels."""
    if problem.data != "make run":
        return network(problem, seed), *data(problem, seed)
    drawn = prepare(resolve({}, [f"run.seed={seed}"]))
    X, y = drawn.parts.train
    chosen = different_samples(drawn.model, X, problem.sizes[0])
    return drawn.model, X[chosen], y[chosen]


def data(problem: Problem, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs of norm sqrt(d) and labels."""
    n, _, d = problem.sizes
    if problem.data == "sphere":
        g = torch.Generator().manual_seed(seed)
        X, y = torch.randn(n, d, generator=g, dtype=torch.float64), torch.randn(n, generator=g, dtype=torch.float64)
    else:
        found = wp.data.load(problem.data, n=n, classes=(0, 1), seed=0)
        X = torch.as_tensor(found.X, dtype=torch.float64).reshape(n, -1)
        y = torch.as_tensor(found.y, dtype=torch.float64)
        y = 2 * (y - y.min()) / (y.max() - y.min()) - 1
    return X * (math.sqrt(d) / X.norm(dim=1, keepdim=True)), y


def network(problem: Problem, seed: int) -> Any:
    _, m, d = problem.sizes
    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    if problem.network == "skip":
        return wp.SkipDEQ(d, m, **options)
    if problem.network == "implicit_only":
        return wp.ImplicitOnlyDEQ(d, m, gamma0=0.3, **options)
    activation = {"gaussian": None, "tanh": wp.nn.Tanh(), "softplus": wp.nn.Softplus(centred=True)}[problem.network]
    return wp.GaussianDEQ(d, m, activation=activation, **options)


class Budget:
    """Stops a proof after some minutes of CPU time."""

    def __init__(self, minutes: float) -> None:
        self._end = time.process_time() + 60 * minutes

    def on_step(self, state: Any) -> bool:
        return time.process_time() > self._end


def missing(problem: Problem, seed: int, proof: wp.Proof) -> dict[str, Any]:
    """What the theorem of the tail lacks at the last point of an unfinished proof, in words and numbers."""
    state = ProofRun(*read_network(*posed(problem, seed)), "auto")  # type: ignore[misc]  # every problem has a proof
    state.continue_from(proof, "auto")
    now, contraction = state._now, state._evaluator.contraction
    residual, least = math.sqrt(2 * now.point.loss), math.sqrt(max(0.0, now.jacobian.least_eigenvalue()))
    tried = _tail.tail
    if problem.network in ("tanh", "softplus"):
        from wellposed.prove._smooth_tail import smooth_tail as tried
    _tail.MOST_SWITCHES = MOST_SWITCHES
    found = tried(state.problem, now.point, now.jacobian, contraction, state.eta, now.delta)
    return {"residual": residual, "sigma_min": least, "reason": found.reason, **found.numbers}


def run(problem: Problem, seed: int, minutes: float, out: Path) -> None:
    record, partial = out / f"{problem.name}-{seed}.json", out / f"{problem.name}-{seed}.partial"
    if record.exists() and json.loads(record.read_text()).get("finished", True):
        return
    spent = out / f"{problem.name}-{seed}.seconds"
    before = float(spent.read_text()) if partial.exists() and spent.exists() else 0.0
    start = time.process_time()
    budget = Budget(minutes)
    options: dict[str, Any] = {"callbacks": [budget], "max_steps": MOST_STEPS, "progress": True}
    proof = wp.prove(*posed(problem, seed), resume=partial if partial.exists() else None, **options)
    seconds = before + time.process_time() - start
    print(f"{problem.name}, seed {seed}\n{proof}", flush=True)
    finished = not ("callback" in proof.reason or "interrupted" in proof.reason)
    if not finished:
        proof.save(partial)
        spent.write_text(str(seconds))
    store(record, problem, seed, proof, seconds, finished=finished)
    if finished:
        spent.unlink(missing_ok=True)
        shutil.rmtree(partial, ignore_errors=True)


def store(record: Path, problem: Problem, seed: int, proof: wp.Proof, seconds: float, *, finished: bool) -> None:
    """Writes the record of a proof, also of one that was stopped."""
    steps = proof.steps
    ratios = [ratio for ratio in steps["mask_ratio"] if ratio is not None]
    found = {
        "problem": problem.name,
        "seed": seed,
        "finished": finished,
        "verdict": str(proof.verdict),
        "reason": proof.reason if finished else "stopped, to be continued",
        "num_steps": proof.num_steps,
        "step_size": proof.step_size,
        "delta": proof.delta,
        "loss": proof.loss,
        "radius": proof.radius,
        "rate": proof.rate,
        "growth": sum(math.log1p(proof.step_size * M) for M in steps["expansion"] if M is not None),
        "mask_ratio": min(ratios) if ratios else None,
        "tail": proof.tail,
        "attempts": proof.attempts[-3:],
        "missing": None if finished else missing(problem, seed, proof),
        "cpu_seconds": round(seconds, 1),
        "wall_seconds": round(proof.seconds, 1),
        "torch": torch.__version__,
    }
    record.write_text(json.dumps(found, indent=1) + "\n")


def span(records: list[dict[str, Any]], name: str, form: str) -> str:
    """The least and the largest value of a column, or the one that there is."""
    values = [record[name] for record in records if record[name] is not None]
    if not values:
        return "-"
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def rows(out: Path) -> list[dict[str, str]]:
    """The table of all records."""
    found = []
    for problem in PROBLEMS:
        records = [json.loads(path.read_text()) for path in sorted(out.glob(f"{problem.name}-[0-9]*.json"))]
        if not records:
            continue
        proved = sum(record["verdict"] == "CERTIFIED" for record in records)
        going = sum(not record.get("finished", True) for record in records)
        found.append(
            {
                "name": problem.name,
                "data": DATA.get(problem.data, problem.data),
                "sizes": str(problem.sizes),
                "network": NETWORKS.get(problem.network, problem.network),
                "proved": f"{proved} of {len(records)}" + (", unfinished" if going else ""),
                "steps": ("" if proved else "stopped at ") + span(records, "num_steps", "{}"),
                "loss": span(records, "loss", "{:.1e}"),
                "delta": span(records, "delta", "{:.0e}"),
                "growth": span(records, "growth", "{:.1f}"),
                "ratio": span(records, "mask_ratio", "{:.0e}"),
                "seconds": span(records, "cpu_seconds", "{:.0f}"),
                "bar": problem.bar or "-",
            }
        )
    return found


def table(found: list[dict[str, str]]) -> str:
    """As Markdown, with all columns."""
    columns = {"name": "problem", "sizes": "(n, m, d)", "network": "network", "proved": "proved", "steps": "K"}
    columns |= {"loss": "loss at K", "delta": "delta_K", "growth": "log growth", "ratio": "least mask ratio"}
    columns |= {"seconds": "CPU s each", "bar": "bar"}
    lines = [list(columns.values()), ["---"] * len(columns), *([row[name] for name in columns] for row in found)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of problems, separated by commas")
    parser.add_argument("--seeds", type=int, help="how many seeds; those of the table if not given")
    parser.add_argument("--minutes", type=float, default=30.0, help="of CPU time for one proof in this run")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    out = options.out / "proofs"
    out.mkdir(parents=True, exist_ok=True)
    for problem in PROBLEMS:
        if options.only and problem.name not in options.only.split(","):
            continue
        for seed in range(options.seeds or problem.seeds):
            run(problem, seed, options.minutes, out)
            found = rows(out)
            (options.out / "proofs.md").write_text(table(found))
            (options.out / "proofs.json").write_text(json.dumps({"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
