"""Time the tangent kernel of a GaussianDEQ: us, neural-tangents, torch.func, and the floor of the products.

    python benchmarks/kernels.py [--quick] [--rounds N] [--peers-python PATH]

As in run.py, contenders live in worker processes and take turns, and times are divided by the floor of their round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

import kernel_memory
import report
from client import HERE, Client, WorkerFailed
from problems import IN_FEATURES, RTOL, Arrays, Problem, build, reference
from quiet import Watch

SAMPLES, WIDTH = 300, 1000
SCALING = {"n": (500, 1000, 2000, 4000), "m": (250, 500, 1000, 2000)}
SCALING_CENTRE = {"n": 1000, "m": 1000}
QUICK_SAMPLES, QUICK_WIDTH = 40, 100
QUICK_SCALING = {"n": (100, 200, 400), "m": (50, 100, 200)}
QUICK_CENTRE = {"n": 200, "m": 100}
MEMORY = ("wellposed", "wellposed, explicit Jacobian", "torch.func")
# An error of the kernel above this is no rounding of float32.
TOLERANCE = 1e-4
SLOW, MIN_ROUNDS = 20.0, 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: checks the script, measures nothing")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: 7)")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has wellposed")
    default = HERE.parent / ".venv-kernel-peers" / "bin" / "python"
    parser.add_argument("--peers-python", default=str(default), help="interpreter that has neural-tangents and jaxopt")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for repeating disturbed runs (default: 60)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def exact_kernel(arrays: Arrays) -> np.ndarray:
    """G + (P P^T) o (G + X X^T) in float64, by plain iteration far below the tolerance."""
    W, U, a, X = (arrays[name].astype(np.float64) for name in ("W", "U", "a", "X"))
    c = X @ U.T
    z = np.maximum(c, 0)
    for _ in range(200):
        z = np.maximum(z @ W.T + c, 0)
    mask = (z > 0).astype(np.float64)
    p = mask * a
    for _ in range(200):
        p = mask * (a + p @ W)
    G = z @ z.T
    return G + (p @ p.T) * (G + X @ X.T)


def prepare(n: int, m: int, folder: Path) -> Arrays:
    arrays = build(Problem("kernel", "gaussian", n, m))
    answer = reference(arrays)
    arrays |= {"forward_steps": np.asarray(answer.forward_steps), "adjoint_steps": np.asarray(answer.adjoint_steps)}
    np.savez(folder / "problem.npz", **arrays, rtol=RTOL)
    return arrays


def compare(clients: list[Client], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every contender on one problem, in turns; ratios to the floor of the same round."""
    n, m = (QUICK_SAMPLES, QUICK_WIDTH) if options.quick else (SAMPLES, WIDTH)
    arrays = prepare(n, m, folder)
    exact, watch = exact_kernel(arrays), Watch(0.0 if options.quick else options.patience)
    entries = [(client, name) for client in clients for name in client.contenders]
    rows: dict[str, dict[str, Any]] = {}
    for client, name in entries:
        rows[name] = {"contender": name, "seconds": [], "ratios": [], "remark": ""}
        saved = folder / "answer.npz"
        saved.unlink(missing_ok=True)
        try:
            client.ask(load=str(folder / "problem.npz"))
            client.ask(prepare=name)
            client.ask(run=name, save=str(saved))
        except WorkerFailed as failure:
            rows[name]["remark"] = f"failed: {failure}"
        if saved.exists():
            with np.load(saved) as given:
                error = float(np.linalg.norm(given["z"] - exact) / np.linalg.norm(exact))
            rows[name]["error"] = error
            if error > TOLERANCE:
                rows[name]["remark"] = "WRONG KERNEL"
    floor_client = next(client for client, name in entries if name == "floor")
    for client, _ in entries:
        client.ask(load=str(folder / "problem.npz"))
    for client, name in entries:
        if not rows[name]["remark"]:
            client.ask(prepare=name)
            client.ask(run=name)
    for _ in range(options.rounds):
        base = watch.undisturbed(floor_client.process.pid, lambda: floor_client.ask(run="floor"))["total"]
        for client, name in entries:
            row = rows[name]
            if row["remark"] or (len(row["ratios"]) >= MIN_ROUNDS and min(row["ratios"]) > SLOW):
                continue
            if name == "floor":
                seconds = base
            else:
                seconds = watch.undisturbed(client.process.pid, lambda c=client, k=name: c.ask(run=k))["total"]  # type: ignore[misc]
            row["seconds"].append(seconds)
            row["ratios"].append(seconds / base)
    for row in rows.values():
        ratios, seconds = row.pop("ratios"), row.pop("seconds")
        row["rounds"] = len(ratios)
        if ratios:
            row |= {"ratio": report.quartiles(ratios), "seconds": report.quartiles(seconds)}
    steps = {key: int(arrays[key]) for key in ("forward_steps", "adjoint_steps")}
    return {"n": n, "m": m, **steps, "runs": watch.runs, "disturbed": watch.disturbed, "rows": list(rows.values())}


def scaling(client: Client, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Seconds of the features and of the Gram products over n and over m, with the slopes of their logarithms."""
    sizes, centre = (QUICK_SCALING, QUICK_CENTRE) if options.quick else (SCALING, SCALING_CENTRE)
    watch, tables = Watch(0.0 if options.quick else options.patience), []
    for variable, values in sizes.items():
        points = []
        for value in values:
            size = centre | {variable: value}
            prepare(size["n"], size["m"], folder)
            client.ask(load=str(folder / "problem.npz"))
            client.ask(prepare="parts")
            client.ask(run="parts")
            replies = [watch.undisturbed(client.process.pid, lambda: client.ask(run="parts")) for _ in range(5)]
            features, grams = (min(reply[part] for reply in replies) for part in ("forward", "total"))
            points.append({**size, "features_seconds": features, "gram_seconds": grams, "seconds": features + grams})
        slopes = {
            part: float(np.polyfit(np.log(values), np.log([point[part] for point in points]), 1)[0])
            for part in ("features_seconds", "gram_seconds", "seconds")
        }
        tables.append({"variable": variable, "points": points, "exponents": slopes})
    return tables


def memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Those that hold gradients only at the smaller size: at the larger one they would fill 14 GiB."""
    large, small = ((60, 60), (40, 60)) if options.quick else ((1000, 1000), (SAMPLES, WIDTH))
    cases = [("wellposed", *large, "float64"), *((contender, *small, "float32") for contender in MEMORY)]
    return [
        {"contender": contender, "n": n, "m": m, "dtype": dtype}
        | {"peak_mib": kernel_memory.measure(options.python, contender, n, m, dtype)}
        for contender, n, m, dtype in cases
    ]


def lines(result: dict[str, Any], *, as_markdown: bool) -> list[str]:
    table, heading = (report.markdown, "## ") if as_markdown else (report.aligned, "")
    timed = result["comparison"]
    out = [f"{heading}GaussianDEQ, n = {timed['n']}, m = {timed['m']}, d = {IN_FEATURES}, float32", ""]
    if timed["disturbed"] > 0.1 * timed["runs"]:
        out += [f"UNRELIABLE: other programs were computing during {timed['disturbed']} of {timed['runs']} runs.", ""]
    rows = [["contender", "time / floor", "seconds", "relative error of the kernel", "remark"]]
    for row in timed["rows"]:
        seconds = f"{row['seconds']['median']:.4f}" if row["rounds"] else ""
        rows.append([row["contender"], report.ratio(row.get("ratio")), seconds, _number(row.get("error")), row["remark"]])
    out += [*table(rows), "", f"{heading}Peak memory above data and parameters", ""]
    rows = [["contender", "n", "m", "dtype", "MiB"]]
    rows += [[str(record[key]) for key in ("contender", "n", "m", "dtype", "peak_mib")] for record in result["memory"]]
    out += [*table(rows), ""]
    for one in result["scaling"]:
        other = "m" if one["variable"] == "n" else "n"
        out += [f"{heading}Seconds over {one['variable']}, at {other} = {one['points'][0][other]}", ""]
        rows = [[one["variable"], "features", "Gram products", "kernel"]]
        parts = ("features_seconds", "gram_seconds", "seconds")
        rows += [[str(point[one["variable"]]), *(f"{point[part]:.4f}" for part in parts)] for point in one["points"]]
        rows.append(["exponent", *(f"{one['exponents'][part]:.2f}" for part in parts)])
        out += [*table(rows), ""]
    return out


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def explanation(result: dict[str, Any]) -> list[str]:
    e, timed = result["environment"], result["comparison"]
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items())
    text = f"""
        Times are ratios to the floor measured in the same round, median (quartiles) over {result["rounds"]} interleaved
        rounds. The floor is the matrix products alone: {timed["forward_steps"]} steps to the equilibria,
        {timed["adjoint_steps"]} to the adjoints (to {RTOL:g}), and three Gram products. Errors are relative to the kernel
        in float64. Expected exponents: features 1 over n and 2 over m; Gram products 2 and, for m well above d, 1."""
    facts = f"{e['date']}, {e['cpu']}, {e['threads']} threads, Python {e['python']}, {versions}."
    return [*textwrap.wrap(facts, 110), "", *textwrap.wrap(" ".join(text.split()), 110), ""]


def peer_versions(python: str) -> dict[str, str]:
    if not Path(python).exists():
        return {}
    code = "from importlib.metadata import version as v; print(*(n + '=' + v(n) for n in ('neural-tangents', 'jaxopt', 'jax')))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return dict(pair.split("=") for pair in done.stdout.split())


def main() -> None:
    options = arguments()
    result: dict[str, Any] = {"environment": report.environment(peer_versions(options.peers_python)), "rounds": options.rounds}
    with tempfile.TemporaryDirectory(prefix="wellposed-bench-") as name:
        folder = Path(name)
        clients = [Client("kernel_ours", options.python, folder / "ours.log", timeout=600.0)]
        if Path(options.peers_python).exists():
            try:
                clients.append(Client("kernel_peer_nt", options.peers_python, folder / "peers.log", timeout=600.0))
            except WorkerFailed as failure:
                print(f"neural-tangents could not start: {failure}.")
        else:
            print("neural-tangents is not installed, so it is missing below. `make bench-kernel-peers` installs it.")
        result["comparison"] = compare(clients, options, folder)
        for client in clients:
            client.close()
        parts = Client("kernel_scaling", options.python, folder / "scaling.log", timeout=600.0)
        result["scaling"] = scaling(parts, options, folder)
        parts.close()
    result["memory"] = memory(options)
    print(*explanation(result), *lines(result, as_markdown=False), sep="\n")
    folder, stem = HERE / "results", "partial.kernels" if options.quick else "kernels"
    folder.mkdir(exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    page = ["# Benchmarks: tangent kernels", "", *explanation(result), *lines(result, as_markdown=True)]
    (folder / f"{stem}.md").write_text("\n".join(page).rstrip() + "\n")


if __name__ == "__main__":
    main()
