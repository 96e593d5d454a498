"""What the choices cost: solvers, gradient modes, tolerances, networks. Writes results/choices.json and results/choices.md.

    OMP_NUM_THREADS=1 python benchmarks/choices.py [--rounds N]

One thread, CPU seconds. Contenders run turn by turn; a ratio is the median over the rounds of the ratio within a round, so that
what slows all of them cancels. Evaluations are means over the samples, as the solves report them. The page
docs/choosing.md quotes these tables.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wellposed as wp

RESULTS = Path(__file__).parent / "results"
WIDTH, IN_FEATURES, SAMPLES, RTOL = 300, 20, 128, 1e-5

Row = dict[str, Any]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def contracting() -> wp.nn.DenseCell:
    """Gaussian W with a norm of about 0.8: plain steps gain a factor of about two and a half each."""
    return wp.nn.DenseCell(IN_FEATURES, WIDTH, generator=generator())


def slow() -> wp.nn.DenseCell:
    """W averages over neighbouring units, with norm 0.97: plain steps gain little, and the slow directions are few."""
    cell = contracting()
    distance = torch.arange(WIDTH).minimum(WIDTH - torch.arange(WIDTH)).float()
    kernel = torch.exp(-((distance / 12) ** 2) / 2)
    rows = torch.stack([kernel.roll(shift) for shift in range(WIDTH)])
    cell.W.data = 0.97 * rows / kernel.sum()
    return cell


def not_contracting() -> wp.nn.DenseCell:
    """W with sym(I - W) >= 0.5 and a large skew-symmetric part: one equilibrium, from which plain steps run away."""
    cell = wp.nn.DenseCell(IN_FEATURES, WIDTH, weight=wp.nn.Monotone(margin=0.5), generator=generator())
    cell.B.data *= 4
    return cell


MAPS: dict[str, Callable[[], wp.nn.DenseCell]] = {
    "contracting": contracting,
    "slow": slow,
    "monotone, not contracting": not_contracting,
}


def timed(contenders: dict[str, Callable[[], None]], baseline: str, rounds: int) -> dict[str, float]:
    """Median over rounds of CPU time over that of the baseline in the same round; one round beforehand is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    return {
        name: statistics.median(mine / base for mine, base in zip(times[1:], seconds[baseline][1:], strict=True))
        for name, times in seconds.items()
    }


def mean(values: Tensor) -> float:
    return float(values.double().mean())


def solvers(rounds: int) -> list[Row]:
    """Every solver on every kind of map."""
    x = torch.randn(SAMPLES, IN_FEATURES, generator=generator(1))
    rows = []
    for kind, make in MAPS.items():
        choices = {
            "Auto()": wp.Auto(),
            "Picard()": wp.Picard(),
            "Anderson()": wp.Anderson(),
            "Broyden()": wp.Broyden(),
            "NewtonKrylov()": wp.NewtonKrylov(),
            "ForwardBackward()": wp.ForwardBackward(),
            "PeacemanRachford(TunedStep())": wp.PeacemanRachford(wp.TunedStep()),
        }
        cell = make()
        layers = {
            name: wp.EquilibriumLayer(cell, solver, rtol=RTOL, max_steps=1000, on_failure="ignore")
            for name, solver in choices.items()
        }

        def solve(layer: wp.EquilibriumLayer, cell: wp.nn.DenseCell = cell) -> None:
            with torch.no_grad():  # as in training: factorizations and tuned steps of the last parameters are of no use
                (cell.B if isinstance(cell.weight, wp.nn.Monotone) else cell.W).mul_(1 - 1e-6)
            layer.solve(x)

        ratios = timed({name: lambda layer=layer: solve(layer) for name, layer in layers.items()}, "Auto()", rounds)
        for name, layer in layers.items():
            sol = layer.solve(x)
            rows.append(
                {
                    "map": kind,
                    "solver": name,
                    "converged": mean(sol.converged),
                    "evaluations": mean(sol.num_steps),
                    "time": ratios[name],
                }
            )
    return rows


def gradients(rounds: int) -> list[Row]:
    """Every gradient mode on the two maps that plain steps solve; errors against float64 with a residual of 1e-12."""
    rows = []
    for kind in ("contracting", "slow"):
        cell = MAPS[kind]()
        x = torch.randn(SAMPLES, IN_FEATURES, generator=generator(1))
        v = torch.randn(SAMPLES, WIDTH, generator=generator(2))

        def weight_gradient(layer: wp.EquilibriumLayer, x: Tensor = x, v: Tensor = v) -> Tensor:
            layer.zero_grad()
            (layer(x) * v.to(x.dtype)).sum().backward()
            gradient: Tensor = layer.cell.W.grad
            return gradient

        exact = weight_gradient(wp.EquilibriumLayer(MAPS[kind]().double(), rtol=1e-12, max_steps=2000), x.double())
        choices = {
            "ImplicitGradient()": wp.ImplicitGradient(),
            "PhantomGradient(steps=5, damping=0.5)": wp.PhantomGradient(5, 0.5),
            "JacobianFree()": wp.JacobianFree(),
            "UnrolledGradient(steps=20)": wp.UnrolledGradient(20),
            "UnrolledGradient(steps=200)": wp.UnrolledGradient(200),
        }
        layers = {
            name: wp.EquilibriumLayer(cell, gradient=mode, rtol=RTOL, max_steps=1000, on_failure="ignore")
            for name, mode in choices.items()
        }
        ratios = timed(
            {name: lambda layer=layer: weight_gradient(layer) for name, layer in layers.items()}, "ImplicitGradient()", rounds
        )
        for name, layer in layers.items():
            found = weight_gradient(layer).double()
            cosine = float((found * exact).sum() / (found.norm() * exact.norm()))
            error = float((found - exact).norm() / exact.norm())
            rows.append({"map": kind, "gradient": name, "error": error, "cosine": cosine, "time": ratios[name]})
    return rows


def tolerances(rounds: int) -> list[Row]:
    """Forward and backward of the contracting map in float64, by the residual asked for."""
    x = torch.randn(SAMPLES, IN_FEATURES, generator=generator(1), dtype=torch.float64)
    cell = contracting().double()

    def run(rtol: float) -> Tensor:
        layer = wp.EquilibriumLayer(cell, rtol=rtol, max_steps=1000)
        cell.zero_grad()
        layer(x).square().sum().backward()
        gradient: Tensor = cell.W.grad
        return gradient

    exact = run(1e-13)
    choices = [1e-2, 1e-3, 1e-4, 1e-6, 1e-8, 1e-10]
    ratios = timed({str(rtol): lambda rtol=rtol: run(rtol) for rtol in choices}, "1e-06", rounds)
    return [
        {"rtol": rtol, "error": float((run(rtol) - exact).norm() / exact.norm()), "time": ratios[str(rtol)]} for rtol in choices
    ]


def networks(rounds: int) -> list[Row]:
    """The families of one width in float64 to 1e-6, forward and backward, beside two explicit layers of that width."""
    X = nn.functional.normalize(torch.randn(64, IN_FEATURES, generator=generator(1), dtype=torch.float64))
    options: Row = {"dtype": torch.float64, "rtol": 1e-6}
    width = 200
    torch.manual_seed(0)
    explicit = nn.Sequential(nn.Linear(IN_FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    models: dict[str, nn.Module] = {
        "two explicit layers": explicit.double(),
        "GaussianDEQ": wp.GaussianDEQ(IN_FEATURES, width, generator=generator(), **options),
        "SkipDEQ": wp.SkipDEQ(IN_FEATURES, width, generator=generator(), **options),
        "ImplicitOnlyDEQ": wp.ImplicitOnlyDEQ(IN_FEATURES, width, gamma0=0.3, generator=generator(), **options),
        "MonotoneDEQ": wp.MonotoneDEQ(IN_FEATURES, width, margin=0.5, generator=generator(), **options),
        "OptEq": wp.OptEq(IN_FEATURES, width, generator=generator(), **options),
    }

    def run(model: nn.Module) -> None:
        with torch.no_grad():  # as in training: nothing is kept from the last parameters
            for parameter in model.parameters():
                parameter.mul_(1 - 1e-6)
        model.zero_grad()
        model(X).square().sum().backward()

    ratios = timed({name: lambda m=model: run(m) for name, model in models.items()}, "two explicit layers", rounds)
    rows = []
    for name, model in models.items():
        run(model)
        row: Row = {"network": name, "parameters": sum(p.numel() for p in model.parameters()), "time": ratios[name]}
        if layer := getattr(model, "layer", None):
            row |= {
                "evaluations": mean(layer.last_solution.num_steps),
                "adjoint evaluations": mean(layer.last_adjoint.num_steps),
            }
        rows.append(row)
    return rows


def certificates(rounds: int) -> list[Row]:
    """A certificate beside one step of descent on the same network and data."""
    X, y = wp.data.load("sphere", n=20, features=50, norm="sqrt_d", dtype=torch.float64)
    model = wp.GaussianDEQ(50, 200, generator=generator(), dtype=torch.float64)
    contenders: dict[str, Callable[[], Any]] = {
        "one step of descent, of 20": lambda: wp.descend(model, X, y, step_size=1e-5, steps=20),
        "contraction": lambda: wp.certify.contraction(model),
        "radius, flow": lambda: wp.certify(model, X, y, theorem="radius"),
        "radius, descent": lambda: wp.certify(model, X, y, theorem="radius", dynamics="descent"),
        "ling2022": lambda: wp.certify(model, X, y, theorem="ling2022"),
        "tangent kernel": lambda: wp.tangent_kernel(model, X),
    }
    base = "one step of descent, of 20"
    ratios = timed(contenders, base, rounds)
    return [{"what": name, "time": ratio * (1 if name == base else 20)} for name, ratio in ratios.items()]


TABLES: dict[str, tuple[Callable[[int], list[Row]], str]] = {
    "solvers": (
        solvers,
        f"z = relu(W z + U x + b), width {WIDTH}, {SAMPLES} samples, float32, residual {RTOL:g}, at most 1000 evaluations. "
        "Time is relative to `Auto()` on the same map; parameters are new in every solve, so that factorizations "
        "are paid for.",
    ),
    "gradients": (
        gradients,
        "Forward and backward on the same maps, with the solver `Auto()` (unrolling takes its own plain steps). Error and "
        "cosine are those of the gradient of W against the exact one. Time is relative to `ImplicitGradient()`.",
    ),
    "tolerances": (
        tolerances,
        "Forward and backward on the contracting map, float64. Error of the gradient of W; time relative to 1e-6.",
    ),
    "networks": (
        networks,
        f"Forward and backward, width 200, {IN_FEATURES} inputs, 64 samples, float64, residual 1e-6, at the start of training. "
        "Time is relative to two explicit layers of the same width; parameters are new in every run.",
    ),
    "certificates": (
        certificates,
        "GaussianDEQ, width 200, 20 samples, float64. Time is relative to one step of gradient descent.",
    ),
}


def shown(value: Any) -> str:
    if isinstance(value, str):
        return value if value == value.strip("()") else f"`{value}`"
    if isinstance(value, int) or value is None:
        return "" if value is None else f"{value:,}"
    if math.isnan(value) or value == 0:
        return f"{value:g}"
    return f"{value:.1e}" if value < 0.01 else (f"{value:.2f}" if value < 10 else f"{value:.0f}")


def markdown(tables: dict[str, list[Row]], rounds: int) -> str:
    lines = [
        "# What the choices cost",
        "",
        "Measured by `benchmarks/choices.py`: one thread, CPU time, medians over "
        f"{rounds} interleaved rounds of ratios within a round.",
        "Evaluations are means over the samples; a product with a Jacobian counts as one.",
    ]
    for name, rows in tables.items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines += ["", f"## {name.capitalize()}", "", TABLES[name][1], "", "| " + " | ".join(columns) + " |"]
        lines += ["|" + " --- |" * len(columns)]
        lines += ["| " + " | ".join(shown(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", wp.errors.WellposedWarning)  # failures are in the tables
    tables = {name: measure(rounds) for name, (measure, _) in TABLES.items()}
    setting = {"torch": torch.__version__, "threads": 1, "rounds": rounds}
    (RESULTS / "choices.json").write_text(json.dumps({"setting": setting, **tables}, indent=1) + "\n")
    (RESULTS / "choices.md").write_text(markdown(tables, rounds))
    print(markdown(tables, rounds))


if __name__ == "__main__":
    main()
