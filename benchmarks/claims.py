"""The table of docs/comparison.md: every cell is the outcome of a computation here.

    .venv/bin/python benchmarks/claims.py --also .venv-peers/bin/python .venv-kernel-peers/bin/python

Checks every library that the running interpreter and those of `--also` can import, with default settings but for tolerance and
number of steps, and prints one table. A library that cannot be imported anywhere has no column.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: What is asked, and how it is decided.
CLAIMS = {
    "NaN in one sample": "f(z) = z/2 + 1 for sample 1, NaN for sample 2, in one batch: sample 1 is 2 to 1e-5",
    "failure is loud": "z <- 2 z + 1 by plain iteration: the default raises or warns",
    "status per sample": "the same: the answer has the failure of each sample, not one for the batch",
    "finished samples rest": "f(z) = q z + 1, q = 0.1 and 0.99, plain: fewer rows are evaluated than 2 x the steps",
    "second derivatives": "tanh(W z + c): the Hessian of the sum agrees with finite differences to 1e-4",
    "tangent kernel of an equilibrium": "a function for it is public, or applies to an implicit layer",
    "its limit at infinite width": "a function or layer for it: 'equilib', 'fixed_point', 'implicit', 'deq' in its names",
    "certificates": "a function or class named after 'certif' in its sources",
    "landscapes": "the word 'landscape' in its sources",
}


def mentions(package: str, pattern: str) -> bool:
    """Whether the pattern occurs in any source file of an installed package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    files = Path(next(iter(spec.submodule_search_locations))).rglob("*.py")
    return any(re.search(pattern, file.read_text(errors="ignore"), re.IGNORECASE | re.MULTILINE) for file in files)


def words(package: str) -> dict[str, Any]:
    return {"certificates": mentions(package, r"^\s*(def|class) \w*certif"), "landscapes": mentions(package, "landscape")}


def said(run: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether a call raised or warned, and what it returned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer = run()
        except Exception:
            return True, None
    return bool(caught), answer


def torch_hessian_is_right(equilibrium: Callable[[Any, Any], Any]) -> bool:
    import torch

    generator = torch.Generator().manual_seed(0)
    W = (0.2 * torch.randn(3, 3, generator=generator, dtype=torch.float64)).requires_grad_()
    c = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    try:
        return bool(torch.autograd.gradgradcheck(lambda W: equilibrium(W, c).sum(), (W,), rtol=1e-4, raise_exception=False))
    except RuntimeError:
        return False


def check_wellposed() -> dict[str, Any]:
    import torch

    import wellposed as wp

    start = torch.zeros(2, 1, dtype=torch.float64)
    bad = torch.tensor([[1.0], [float("nan")]], dtype=torch.float64)
    _, half = said(lambda: wp.EquilibriumLayer(lambda z, x: x * (z / 2 + 1), state_shape=(1,)).solve(bad))
    loud, _ = said(lambda: wp.fixed_point(lambda z: 2 * z + 1, start, wp.Picard()))
    answer = wp.fixed_point(lambda z: 2 * z + 1, start, wp.Picard(), on_failure="ignore")
    rows = []

    def slow(z: Any, x: Any) -> Any:
        rows.append(len(z))
        return x * z + 1

    q = torch.tensor([[0.1], [0.99]], dtype=torch.float64)
    layer = wp.EquilibriumLayer(slow, wp.Picard(), rtol=1e-6, max_steps=3000, state_shape=(1,))
    steps = int(layer.solve(q).num_steps.max())

    def equilibrium(W: Any, c: Any) -> Any:
        return wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W.T + x))(c)

    return {
        "NaN in one sample": abs(float(half.value[0]) - 2) < 1e-5,
        "failure is loud": loud,
        "status per sample": len(answer.status) == 2 and not bool(answer.converged.any()),
        "finished samples rest": sum(rows) < 2 * steps,
        "second derivatives": torch_hessian_is_right(equilibrium),
        "tangent kernel of an equilibrium": callable(wp.tangent_kernel),
        "its limit at infinite width": callable(wp.kernel.deq_ntk),
        **words("wellposed"),
    }


def check_torchdeq() -> dict[str, Any]:
    import torch
    from torchdeq import get_deq

    names = {"f_solver": "fixed_point_iter", "b_solver": "fixed_point_iter", "f_stop_mode": "rel", "b_stop_mode": "rel"}
    deq = get_deq(ift=True, f_tol=1e-6, f_max_iter=3000, **names)
    start = torch.zeros(2, 1, dtype=torch.float64)
    bad = torch.tensor([[1.0], [float("nan")]], dtype=torch.float64)
    _, half = said(lambda: deq(lambda z: bad * (z / 2 + 1), start))
    loud, answer = said(lambda: get_deq(f_tol=1e-6, f_max_iter=200, **names)(lambda z: 2 * z + 1, start))
    rows = []

    def slow(z: Any) -> Any:
        rows.append(len(z))
        return torch.tensor([[0.1], [0.99]], dtype=torch.float64) * z + 1

    _, info = deq(slow, start)
    exact = get_deq(ift=True, f_tol=1e-13, b_tol=1e-13, f_max_iter=300, b_max_iter=300, **names).train()
    return {
        "NaN in one sample": abs(float(half[0][-1][0]) - 2) < 1e-5,
        "failure is loud": loud,
        # residual and steps of every sample, and nothing that says that they are not good enough
        "status per sample": "residual only" if len(answer[1]["rel_lowest"]) == 2 else False,
        "finished samples rest": sum(rows) < 2 * int(info["nstep"].max()),
        "second derivatives": torch_hessian_is_right(
            lambda W, c: exact(lambda z: torch.tanh(z @ W.T + c), torch.zeros_like(c))[0][-1]
        ),
        "tangent kernel of an equilibrium": mentions("torchdeq", r"tangent.?kernel|\bntk\b"),
        "its limit at infinite width": mentions("torchdeq", r"tangent.?kernel|\bntk\b"),
        **words("torchdeq"),
    }


def jax_hessian_is_right(equilibrium: Callable[[Any, Any], Any]) -> bool:
    import jax
    import numpy as np

    c = np.random.RandomState(1).randn(2, 3)
    W = 0.2 * np.random.RandomState(0).randn(3, 3)

    def gradient(W: Any) -> Any:
        return jax.grad(lambda W: equilibrium(W, c).sum())(W)

    try:
        hessian = np.asarray(jax.jacrev(gradient)(W))
    except Exception:
        return False
    step = 1e-5
    for i, j in ((0, 0), (1, 2), (2, 1)):
        shift = np.zeros((3, 3))
        shift[i, j] = step
        difference = (np.asarray(gradient(W + shift)) - np.asarray(gradient(W - shift))) / (2 * step)
        if not np.allclose(hessian[:, :, i, j], difference, rtol=1e-4, atol=1e-6):
            return False
    return True


def jax_counted() -> tuple[Callable[..., Any], list[int]]:
    """f(z) = q z + 1 that notes how many rows it is evaluated at, while it runs."""
    import jax
    import jax.numpy as jnp

    rows: list[int] = []

    def slow(z: Any, _: Any) -> Any:
        jax.debug.callback(lambda: rows.append(z.shape[0]))
        return jnp.array([[0.1], [0.99]]) * z + 1

    return slow, rows


def check_jaxopt() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import jaxopt

    jax.config.update("jax_enable_x64", True)
    start, bad = jnp.zeros((2, 1)), jnp.array([[1.0], [jnp.nan]])

    def solve(f: Callable[..., Any], z: Any, maxiter: int, tol: float) -> Any:
        return jaxopt.FixedPointIteration(f, maxiter=maxiter, tol=tol, implicit_diff=True).run(z, None)

    _, half = said(lambda: solve(lambda z, _: bad * (z / 2 + 1), start, 3000, 1e-6))
    loud, answer = said(lambda: jax.block_until_ready(solve(lambda z, _: 2 * z + 1, start, 200, 1e-6)))

    slow, rows = jax_counted()
    steps = int(jax.block_until_ready(solve(slow, start, 3000, 1e-6)).state.iter_num)

    def equilibrium(W: Any, c: Any) -> Any:
        step = jaxopt.FixedPointIteration(lambda z, W: jnp.tanh(z @ W.T + c), maxiter=500, tol=1e-13, implicit_diff=True)
        return step.run(jnp.zeros(c.shape), W).params

    found = {"half": half.params, "loud": loud, "status": answer.state.error, "rows": rows, "steps": steps}
    return jax_claims("jaxopt", equilibrium=equilibrium, **found)


def check_optimistix() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import optimistix

    jax.config.update("jax_enable_x64", True)
    start, bad = jnp.zeros((2, 1)), jnp.array([[1.0], [jnp.nan]])
    solver = optimistix.FixedPointIteration(rtol=1e-6, atol=1e-6)

    def solve(f: Callable[..., Any], **options: Any) -> Any:
        return jax.block_until_ready(optimistix.fixed_point(f, solver, start, max_steps=200, **options))

    half = solve(lambda z, _: bad * (z / 2 + 1), throw=False)
    loud, _ = said(lambda: solve(lambda z, _: 2 * z + 1))
    answer = solve(lambda z, _: 2 * z + 1, throw=False)
    slow, rows = jax_counted()
    steps = int(optimistix.fixed_point(slow, solver, start, max_steps=3000).stats["num_steps"])
    exact = optimistix.FixedPointIteration(rtol=1e-13, atol=1e-13)

    def equilibrium(W: Any, c: Any) -> Any:
        f = optimistix.fixed_point(lambda z, W: jnp.tanh(z @ W.T + c), exact, jnp.zeros(c.shape), W, max_steps=500)
        return f.value

    found = {"half": half.value, "loud": loud, "status": answer.result._value, "rows": rows, "steps": steps}
    return jax_claims("optimistix", equilibrium=equilibrium, **found)


def jax_claims(
    package: str, *, half: Any, loud: bool, status: Any, rows: list[int], steps: int, equilibrium: Callable[..., Any]
) -> dict[str, Any]:
    """What a package of JAX does, from what it was seen to do.

    Args:
        package: Its name.
        half: The answer to f with NaN in the second of two samples.
        loud, status: Whether a map that diverges raised, and what the answer says about it.
        rows, steps: Rows that `jax_counted` saw when the solve is over, and the steps of the slower sample.
        equilibrium: (W, c) -> z with z = tanh(W z + c).
    """
    import jax
    import jax.numpy as jnp

    jax.effects_barrier()
    return {
        "NaN in one sample": abs(float(half[0, 0]) - 2) < 1e-5,
        "failure is loud": loud,
        "status per sample": jnp.ndim(status) > 0,
        "finished samples rest": sum(rows) < 2 * steps,
        "second derivatives": jax_hessian_is_right(equilibrium),
        "tangent kernel of an equilibrium": mentions(package, r"tangent.?kernel|\bntk\b"),
        "its limit at infinite width": mentions(package, r"tangent.?kernel|\bntk\b"),
        **words(package),
    }


def check_neural_tangents() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import jaxopt
    import neural_tangents as nt
    import numpy as np

    jax.config.update("jax_enable_x64", True)
    rng = np.random.RandomState(0)
    W, X = 0.2 * rng.randn(4, 4), rng.randn(3, 4)

    def predict(W: Any, X: Any) -> Any:
        solver = jaxopt.FixedPointIteration(lambda z, W: jnp.tanh(z @ W.T + X), maxiter=300, tol=1e-12, implicit_diff=True)
        return solver.run(jnp.zeros(X.shape), W).params.sum(axis=1, keepdims=True)

    implementation = nt.NtkImplementation.JACOBIAN_CONTRACTION
    K = nt.empirical_ntk_fn(predict, trace_axes=(-1,), vmap_axes=None, implementation=implementation)(X, None, W)
    J = np.asarray(jax.jacrev(predict)(W, X)).reshape(3, -1)
    names = " ".join(dir(nt.stax)).lower()
    return {
        "tangent kernel of an equilibrium": "with jaxopt" if np.allclose(np.asarray(K), J @ J.T) else False,
        "its limit at infinite width": bool(re.search(r"equilib|fixedpoint|fixed_point|implicit|deq", names)),
        **words("neural_tangents"),
    }


CHECKS = {
    "wellposed": check_wellposed,
    "torchdeq": check_torchdeq,
    "jaxopt": check_jaxopt,
    "optimistix": check_optimistix,
    "neural-tangents": check_neural_tangents,
}


def measure() -> dict[str, dict[str, Any]]:
    """Outcomes of every library that can be imported here, with its version."""
    found = {}
    for name, check in CHECKS.items():
        if importlib.util.find_spec(name.replace("-", "_")) is not None:
            found[f"{name} {importlib.metadata.version(name)}"] = check()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Check what equilibrium libraries do, and print the table.")
    parser.add_argument("--also", nargs="*", default=[], help="other Python interpreters, with other libraries")
    parser.add_argument("--json", action="store_true", help="print the outcomes of this interpreter alone")
    options = parser.parse_args()
    found = measure()
    if options.json:
        print(json.dumps(found))
        return
    for python in options.also:
        done = subprocess.run([python, __file__, "--json"], capture_output=True, text=True, check=True)
        for name, outcomes in json.loads(done.stdout.splitlines()[-1]).items():
            found.setdefault(name, outcomes)
    print("|  | " + " | ".join(found) + " | how it was checked |")
    print("| --- | " + " | ".join("---" for _ in found) + " | --- |")
    for claim, how in CLAIMS.items():
        cells = [outcomes.get(claim) for outcomes in found.values()]
        texts = ["" if cell is None else cell if isinstance(cell, str) else "yes" if cell else "no" for cell in cells]
        print(f"| {claim} | " + " | ".join(texts) + f" | {how} |")


if __name__ == "__main__":
    sys.exit(main())
