"""jaxopt 0.8.5, jitted, with implicit differentiation; compilation is never timed.

jaxopt stops on the norm of the whole batch, absolutely: `prepare` finds the loosest tolerance (to a factor
of two) at which every sample reaches the relative one. Its default adjoint solve, conjugate gradients on the
normal equations, is much slower than either of the two tried here, of which the faster is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import jaxopt
from jaxopt import linear_solve

from . import Run

MAX_STEPS = 1000


def equilibrium_map(z: jax.Array, W: jax.Array, c: jax.Array) -> jax.Array:
    return jax.nn.relu(z @ W.T + c)


def relative_residual(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.max(jnp.linalg.norm(new - old, axis=1) / jnp.linalg.norm(new, axis=1))


def neumann(matvec: Callable, b: jax.Array, rtol: float, **_: Any) -> jax.Array:
    """Solve (J - I)^T u = b by u <- J^T u - b, sample by sample to `rtol`."""

    def step(state: tuple) -> tuple:
        u, _, k = state
        new = u + matvec(u) - b
        return new, relative_residual(new, u), k + 1

    start = (-b, jnp.asarray(jnp.inf, b.dtype), 0)
    return jax.lax.while_loop(lambda s: (s[1] > rtol) & (s[2] < MAX_STEPS), step, start)[0]


def calibrated_tolerance(make: Callable, arrays: dict, rtol: float) -> float:
    W, c = arrays["W"], arrays["X"] @ arrays["U"].T

    @jax.jit  # the arrays are arguments: as constants they would be folded for seconds at compile time
    def solve(tol: float, W: jax.Array, c: jax.Array) -> jax.Array:
        return make(tol=tol, implicit_diff=False).run(jnp.zeros_like(c), W, c).params

    rough = solve(1e-3 * float(jnp.linalg.norm(c)), W, c)
    tol = rtol * float(jnp.linalg.norm(rough))
    for _ in range(10):
        z = solve(tol, W, c)
        if relative_residual(equilibrium_map(z, W, c), z) <= rtol:
            break
        tol /= 2
    return tol


def contender(make: Callable) -> Callable[[dict], Callable[[], Run]]:
    def prepare(arrays: dict) -> Callable[[], Run]:
        rtol = float(arrays["rtol"])
        arrays = {name: jnp.asarray(value) for name, value in arrays.items()}
        W, U, a, y, X = (arrays[name] for name in ("W", "U", "a", "y", "X"))
        tol = calibrated_tolerance(make, arrays, rtol)

        def compiled(adjoint: Callable) -> tuple[Callable, Callable]:
            solver = make(tol=tol, implicit_diff=True, implicit_diff_solve=adjoint)

            def equilibrium(W: jax.Array, U: jax.Array) -> tuple[jax.Array, jax.Array]:
                c = X @ U.T
                z, state = solver.run(jnp.zeros_like(c), W, c)
                return z, state.iter_num

            def loss(parameters: tuple) -> tuple[jax.Array, tuple]:
                W, U, a = parameters
                z, steps = equilibrium(W, U)
                return 0.5 * jnp.sum((z @ a - y) ** 2), (z, steps)

            return jax.jit(equilibrium), jax.jit(jax.value_and_grad(loss, has_aux=True))

        def run(forward: Callable, gradient: Callable, note: str) -> Run:
            start = perf_counter()
            jax.block_until_ready(forward(W, U))
            middle = perf_counter()
            (_, (z, steps)), (dW, dU, da) = jax.block_until_ready(gradient((W, U, a)))
            end = perf_counter()
            return Run(middle - start, end - middle, z, dW, dU, da, int(steps), note=note)

        adjoints = {
            "Neumann": functools.partial(neumann, rtol=rtol),
            "BiCGStab": functools.partial(linear_solve.solve_bicgstab, tol=rtol, maxiter=MAX_STEPS),
        }
        candidates = [functools.partial(run, *compiled(solve), f"adjoint by {name}") for name, solve in adjoints.items()]
        for candidate in candidates:
            candidate()  # compiles
        return min(candidates, key=lambda candidate: min(candidate().total_seconds for _ in range(2)))

    return prepare


CONTENDERS = {
    "jaxopt FixedPointIteration": contender(functools.partial(jaxopt.FixedPointIteration, equilibrium_map, maxiter=MAX_STEPS)),
    "jaxopt AndersonAcceleration": contender(
        functools.partial(jaxopt.AndersonAcceleration, equilibrium_map, maxiter=MAX_STEPS, ridge=1e-10)
    ),
}
