"""Monotone equilibria: our splittings against the reference's algorithms written plainly, in one process, turn by turn.

    python benchmarks/monotone.py [--quick] [--rounds N] [--threads N] [--only dense|conv|steps]

"Plain" is what the first implementation of [winston2020] does: W is applied as (1 - m) z - A'(A z) + B z - B'z, four products;
the inverse of Peaceman-Rachford is explicit and recorded by autograd; a convolution is inverted at all frequencies of the full
complex spectrum; every step ends with the relative change of z, its test for stopping; the adjoint is that of its Theorem 2 for
any slopes, with inactive units put in by index. Plain runs take exactly as many steps as they need for the true residual
|f(z) - z|/|f(z)| of every sample to be at most the tolerance, found beforehand. A run is forward and backward; gradients are
compared before anything is timed. Times are medians over interleaved rounds, CPU seconds on one thread and wall-clock on more;
ratios are medians of the ratios within rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import wellposed as wp
from wellposed.nn import DenseCell, Monotone, MonotoneConvCell

RTOL = 1e-5
RESULTS = Path(__file__).parent / "results" / "monotone.json"


class Plain:
    """z = relu(W z + c) with W given by its four products, and the splittings as loops over them."""

    def __init__(self, apply: Callable[[Tensor], Tensor], transposed: Callable[[Tensor], Tensor], c: Tensor) -> None:
        self.apply, self.transposed, self.c = apply, transposed, c

    def forward_backward(self, a: float, steps: int) -> Tensor:
        z = torch.zeros_like(self.c)
        with torch.no_grad():
            for _ in range(steps):
                before = z
                z = torch.relu((1 - a) * z + a * (self.apply(z) + self.c))
                change(z, before)
        return z

    def forward_backward_adjoint(self, a: float, steps: int, slope: Tensor, g: Tensor) -> Tensor:
        u = torch.zeros_like(g)
        with torch.no_grad():
            inactive, d, v = slope == 0, (1 - slope) / slope, slope * g
            for _ in range(steps):
                before = u
                u = (1 - a) * u + a * self.transposed(u)
                u = (u + a * (1 + d) * v) / (1 + a * d)
                u[inactive] = v[inactive]
                change(u, before)
            return g + self.transposed(u)

    def peaceman_rachford(self, a: float, steps: int, inverse: Callable[[Tensor], Tensor]) -> Tensor:
        u = z = torch.zeros_like(self.c)
        with torch.no_grad():
            for _ in range(steps):
                before = z
                reflected = 2 * z - u
                u = 2 * inverse(reflected + a * self.c) - reflected
                z = torch.relu(u)
                change(z, before)
        return z

    def peaceman_rachford_adjoint(
        self, a: float, steps: int, inverse: Callable[[Tensor], Tensor], slope: Tensor, g: Tensor
    ) -> Tensor:
        u = p = torch.zeros_like(g)
        with torch.no_grad():
            inactive, d, v = slope == 0, (1 - slope) / slope, slope * g
            for _ in range(steps):
                before = p
                reflected = 2 * p - u
                u = 2 * inverse(reflected) - reflected
                p = (u + a * (1 + d) * v) / (1 + a * d)
                p[inactive] = v[inactive]
                change(p, before)
            return g + self.transposed(p)

    def finish(self, z: Tensor, adjoint: Callable[[Tensor, Tensor], Tensor]) -> None:
        """The one recorded application, and its cotangent for the loss |z|^2/batch."""
        value = torch.relu(self.apply(z.detach()) + self.c)
        plain = value.detach()
        value.backward(adjoint((plain > 0).to(plain.dtype), 2 * plain / plain.shape[0]))


def change(z: Tensor, before: Tensor) -> float:
    """The relative change that the reference stops by."""
    return (z - before).norm().item() / (1e-6 + z.norm().item())


def residual(model_map: object, z: Tensor) -> float:
    fz = model_map(z)  # type: ignore[operator]
    return float(((fz - z).norm(dim=1) / fz.norm(dim=1)).max())


def least_steps(run: Callable[[int], Tensor], measure: Callable[[Tensor], float], most: int = 4000) -> int:
    """The least number of steps whose result is within the tolerance, by doubling and bisection."""
    high = 4
    while measure(run(high)) > RTOL:
        high *= 2
        if high > most:
            return most
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if measure(run(middle)) <= RTOL else (middle, high)
    return high


def dense_plain(cell: DenseCell, x: Tensor) -> Plain:
    m = cell.weight.margin  # type: ignore[union-attr]
    A, B = cell.A, cell.B
    c = torch.nn.functional.linear(x, cell.U, cell.b)
    return Plain(
        lambda z: (1 - m) * z - (z @ A.t()) @ A + z @ B.t() - z @ B,
        lambda p: (1 - m) * p - (p @ A.t()) @ A + p @ B - p @ B.t(),
        c,
    )


def dense_inverse(cell: DenseCell, a: float) -> Tensor:
    W = cell.recurrent()
    identity = torch.eye(W.shape[0], dtype=W.dtype)
    return torch.linalg.inv(identity + a * (identity - W))  # recorded, as the parameters require gradients


def conv_plain(cell: MonotoneConvCell, x: Tensor) -> Plain:
    A, B, m = cell.weights.A[0], cell.weights.B[0], cell.weights.margin
    shape = (x.shape[0], cell.weights.channels[0], *x.shape[2:])
    pad = (A.shape[-1] // 2,) * 4

    def circular(z: Tensor, kernel: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(torch.nn.functional.pad(z, pad, mode="circular"), kernel)

    def flipped(kernel: Tensor) -> Tensor:
        return kernel.flip(2, 3).transpose(0, 1)

    def apply(z: Tensor) -> Tensor:
        z = z.reshape(shape)
        out = (1 - m) * z - circular(circular(z, A), flipped(A)) + circular(z, B) - circular(z, flipped(B))
        return out.flatten(1)

    def transposed(p: Tensor) -> Tensor:
        p = p.reshape(shape)
        out = (1 - m) * p - circular(circular(p, A), flipped(A)) + circular(p, flipped(B)) - circular(p, B)
        return out.flatten(1)

    return Plain(apply, transposed, cell.injection(x))


def conv_inverse(cell: MonotoneConvCell, x: Tensor, a: float) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Explicit, at every frequency of the full complex spectrum."""
    A, B, m = cell.weights.A[0], cell.weights.B[0], cell.weights.margin
    channels, (h, w), k = A.shape[0], x.shape[2:], A.shape[-1]

    def spectrum(kernel: Tensor) -> Tensor:
        padded = torch.zeros(channels, channels, h, w, dtype=kernel.dtype)
        padded[:, :, :k, :k] = kernel
        padded = padded.roll((-(k // 2), -(k // 2)), (2, 3))
        return torch.fft.fft2(padded).conj().permute(2, 3, 0, 1).reshape(h * w, channels, channels)

    a_hat, b_hat = spectrum(A), spectrum(B)
    identity = torch.eye(channels, dtype=a_hat.dtype)
    W = (1 - m) * identity - a_hat.mH @ a_hat + b_hat - b_hat.mH
    inverse = torch.linalg.inv(identity + a * (identity - W)).detach()

    def times(M: Tensor) -> Callable[[Tensor], Tensor]:
        def product(v: Tensor) -> Tensor:
            V = torch.fft.fft2(v.reshape(-1, channels, h, w)).reshape(-1, channels, h * w).permute(2, 0, 1)
            Z = torch.bmm(V, M.transpose(1, 2)).permute(1, 2, 0).reshape(-1, channels, h, w)
            return torch.fft.ifft2(Z).real.flatten(1)

        return product

    return times(inverse), times(inverse.mH)


def ours(cell: torch.nn.Module, x: Tensor, solver: wp.solve.AbstractSolver) -> wp.EquilibriumLayer:
    return wp.EquilibriumLayer(cell, solver, wp.ImplicitGradient(solver), rtol=RTOL, max_steps=20000, on_failure="raise")


def run_ours(layer: wp.EquilibriumLayer, x: Tensor) -> None:
    z = layer(x)
    (z.square().sum() / z.shape[0]).backward()


def agree(contenders: dict[str, Callable[[], None]], parameters: list[Tensor]) -> None:
    """Everybody computes the same gradient, up to what the tolerance leaves."""
    gradients = {}
    for name, run in contenders.items():
        for parameter in parameters:
            parameter.grad = None
        run()
        gradients[name] = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    reference = gradients["plain"]
    for name, gradient in gradients.items():
        error = float((gradient - reference).norm() / reference.norm())
        # one unit on the other side of its kink changes a gradient by about 1e-3
        assert error < 1e-2, f"the gradient of {name!r} differs by {error:.1e}"


def interleaved(contenders: dict[str, Callable[[], None]], parameters: list[Tensor], rounds: int) -> dict[str, list[float]]:
    agree(contenders, parameters)  # and warms
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            for parameter in parameters:
                parameter.grad = None
            # a parameter of the next training step: nothing may be left of the factorization of the last one
            with torch.no_grad():
                parameters[0].mul_(1.0 + 1e-6)
            began = clock()
            run()
            times[name].append(clock() - began)
    return times


def report(
    title: str, times: dict[str, list[float]], plain: str, mine: list[str], extra: dict[str, object]
) -> dict[str, object]:
    row: dict[str, object] = {"case": title, **extra}
    for name, seconds in times.items():
        row[name] = statistics.median(seconds)
    slower = zip(times[mine[1]], times[mine[0]], strict=True)
    row["tuned / best of grid"] = statistics.median(p / q for p, q in slower)
    for name in mine:
        row[f"{plain} / {name}"] = statistics.median(p / q for p, q in zip(times[plain], times[name], strict=True))
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    return row


def grid_best(steps_of: Callable[[float], int], grid: list[float]) -> tuple[float, int]:
    counts = {a: steps_of(a) for a in grid}
    best = min(counts, key=lambda a: counts[a])
    return best, counts[best]


def dense_case(margin: float, width: int, batch: int, rounds: int) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    cell = DenseCell(784, width, weight=Monotone(margin), generator=generator)
    x = torch.randn(batch, 784, generator=generator)
    parameters = list(cell.parameters())
    rows = []
    for method in ("forward-backward", "Peaceman-Rachford"):
        f, plain = cell.bind(x), dense_plain(cell, x)  # anew: timing changes the parameters a little
        backward = method == "forward-backward"
        kind = wp.ForwardBackward if backward else wp.PeacemanRachford
        grid = [2.0 ** (k / 2) for k in range(-4, 2)]

        def steps_of(a: float, kind: type = kind, f: object = f) -> int:
            sol = wp.fixed_point(f, torch.zeros(batch, width), kind(a), rtol=RTOL, max_steps=400, on_failure="ignore")
            return int(sol.num_steps.max()) if bool(sol.converged.all()) else 10**9

        a, _ = grid_best(steps_of, grid)
        with torch.no_grad():
            if backward:
                steps = least_steps(lambda k, a=a, plain=plain: plain.forward_backward(a, k), lambda z, f=f: residual(f, z))
            else:
                V = dense_inverse(cell, a)
                steps = least_steps(
                    lambda k, a=a, V=V, plain=plain: plain.peaceman_rachford(a, k, lambda v: v @ V.t()),
                    lambda z, f=f: residual(f, z),
                )

        def run_plain(backward: bool = backward, a: float = a, steps: int = steps) -> None:
            p = dense_plain(cell, x)
            if backward:
                z = p.forward_backward(a, steps)
                p.finish(z, lambda slope, g: p.forward_backward_adjoint(a, steps, slope, g))
            else:
                V = dense_inverse(cell, a)
                z = p.peaceman_rachford(a, steps, lambda v: v @ V.t())
                p.finish(z, lambda slope, g: p.peaceman_rachford_adjoint(a, steps, lambda u: u @ V, slope, g))

        same, tuned = ours(cell, x, kind(a)), ours(cell, x, kind(wp.TunedStep()))
        contenders = {
            "plain": run_plain,
            "ours": lambda layer=same: run_ours(layer, x),
            "ours, tuned step": lambda layer=tuned: run_ours(layer, x),
        }
        times = interleaved(contenders, parameters, rounds)
        extra = {
            "step size": a,
            "plain steps": steps,
            "our steps": int(same.last_solution.num_steps.max()),  # type: ignore[union-attr]
            "our tuned steps": int(tuned.last_solution.num_steps.max()),  # type: ignore[union-attr]
            "residual": float(same.last_solution.residual.max()),  # type: ignore[union-attr]
        }
        title = f"dense {width}, batch {batch}, margin {margin}, {method}"
        rows.append(report(title, times, "plain", ["ours", "ours, tuned step"], extra))
    return rows


def conv_case(channels: int, size: int, batch: int, rounds: int, margin: float = 1.0) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    cell = MonotoneConvCell(1, channels, margin=margin, generator=generator)
    x = torch.randn(batch, 1, size, size, generator=generator)
    f = cell.bind(x)
    plain = conv_plain(cell, x)

    def steps_of(a: float) -> int:
        few = cell.bind(x[:4])
        sol = wp.fixed_point(few, torch.zeros(4, x[0].numel() * channels), wp.PeacemanRachford(a), rtol=RTOL, max_steps=60)
        return int(sol.num_steps.max())

    a, _ = grid_best(steps_of, [2.0 ** (k / 2) for k in range(-4, 2)])
    with torch.no_grad():
        inverse, _ = conv_inverse(cell, x, a)
        steps = least_steps(lambda k: plain.peaceman_rachford(a, k, inverse), lambda z: residual(f, z), 100)

    def run_plain() -> None:
        p = conv_plain(cell, x)
        forward, backward = conv_inverse(cell, x, a)
        z = p.peaceman_rachford(a, steps, forward)
        p.finish(z, lambda slope, g: p.peaceman_rachford_adjoint(a, steps, backward, slope, g))

    same, tuned = ours(cell, x, wp.PeacemanRachford(a)), ours(cell, x, wp.PeacemanRachford(wp.TunedStep()))
    contenders = {
        "plain": run_plain,
        "ours": lambda: run_ours(same, x),
        "ours, tuned step": lambda: run_ours(tuned, x),
    }
    times = interleaved(contenders, list(cell.parameters()), rounds)
    extra = {"step size": a, "plain steps": steps, "our steps": int(same.last_solution.num_steps.max())}  # type: ignore[union-attr]
    extra["our tuned steps"] = int(tuned.last_solution.num_steps.max())  # type: ignore[union-attr]
    return report(
        f"conv {size}x{size}, {channels} channels, batch {batch}, Peaceman-Rachford",
        times,
        "plain",
        ["ours", "ours, tuned step"],
        extra,
    )


def step_sizes(width: int = 200) -> dict[str, object]:
    """Steps of the tuned solvers over those of the best step size of a grid (factors of sqrt 2), on problems of many kinds."""
    worst: dict[str, tuple[float, str]] = {}
    grid = [2.0 ** (k / 2) for k in range(-12, 5)]
    for margin in (1.0, 0.1, 0.02):
        for scale_a, scale_b in ((0.5, 0.5), (1.0, 1.0), (2.0, 0.3), (0.3, 1.0), (2.0, 5.0)):
            generator = torch.Generator().manual_seed(1)
            cell = DenseCell(20, width, weight=Monotone(margin), generator=generator, dtype=torch.float64)
            with torch.no_grad():
                cell.A.mul_(2 * scale_a)
                cell.B.mul_(2 * scale_b)
            x = torch.randn(16, 20, generator=generator, dtype=torch.float64)
            f = cell.bind(x)
            for kind in (wp.ForwardBackward, wp.PeacemanRachford, wp.DouglasRachford):

                def steps_of(step_size: object, kind: type = kind, f: object = f) -> float:
                    zero = torch.zeros(16, width, dtype=torch.float64)
                    sol = wp.fixed_point(f, zero, kind(step_size), rtol=RTOL, max_steps=2000, on_failure="ignore")  # type: ignore[arg-type]
                    return float(sol.num_steps.max()) if bool(sol.converged.all()) else math.inf

                best = min(steps_of(a) for a in grid)
                if math.isinf(best):
                    continue  # no step size of the grid converges within the budget
                ratio = steps_of(wp.TunedStep()) / best
                case = f"margin {margin}, |A| x {scale_a}, |B| x {scale_b}: {best:.0f} steps at best"
                print(kind.__name__, case, f"ratio {ratio:.2f}", flush=True)
                if ratio > worst.get(kind.__name__, (0.0, ""))[0]:
                    worst[kind.__name__] = (ratio, case)
    return {"case": "tuned step over best of a grid, steps, worst", **worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["dense", "conv", "steps"], action="append")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    parts = options.only or ["dense", "conv", "steps"]
    rows: list[dict[str, object]] = []
    if "dense" in parts:
        for margin in (1.0, 0.1):
            rows += dense_case(margin, 200 if options.quick else 1000, 32 if options.quick else 128, options.rounds)
    if "conv" in parts:
        for channels in (8,) if options.quick else (64, 81):
            rows.append(conv_case(channels, 8 if options.quick else 28, 4 if options.quick else 32, options.rounds))
    if "steps" in parts:
        rows.append(step_sizes(50 if options.quick else 200))
    if not options.quick:
        setting = {"torch": torch.__version__, "machine": platform.machine(), "threads": options.threads}
        saved = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"setting": setting, "rows": []}
        fresh = {row["case"] for row in rows}
        kept = [row for row in saved["rows"] if row["case"] not in fresh] if saved["setting"] == setting else []
        RESULTS.write_text(json.dumps({"setting": setting, "rows": kept + rows}, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(as_markdown(setting, kept + rows))


def as_markdown(setting: dict[str, object], rows: list[dict[str, object]]) -> str:
    """The rows as a page."""
    clock = "CPU" if setting["threads"] == 1 else "wall-clock"
    lines = [
        "# Monotone equilibria, forward and backward",
        "",
        f"Written by `benchmarks/monotone.py`, which says what is compared; torch {setting['torch']}, {setting['machine']}, "
        f"{setting['threads']} thread(s), {clock} seconds, to a true residual of {RTOL:g}.",
        "",
        "| case | steps: plain, ours, tuned | plain | ours | tuned | plain / ours | plain / tuned | tuned / best of grid |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if "plain" in row:
            steps = f"{row['plain steps']}, {row['our steps']}, {row['our tuned steps']}"
            seconds = [f"{row[name]:.3f}" for name in ("plain", "ours", "ours, tuned step")]
            ratios = [f"{row[name]:.2f}" for name in ("plain / ours", "plain / ours, tuned step", "tuned / best of grid")]
            lines.append(f"| {' | '.join([str(row['case']), steps, *seconds, *ratios])} |")
    for row in rows:
        if "plain" not in row:
            worst = "; ".join(f"{kind} {value[0]:.2f} ({value[1]})" for kind, value in row.items() if kind != "case")  # type: ignore[index]
            lines += ["", f"{row['case']}: {worst}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
