"""neural-tangents 0.6.5: its empirical kernel, through jaxopt's implicit gradient; jitted, compilation is never timed.

The adjoint of jaxopt's fixed point has a reverse rule only, so of neural-tangents' implementations the Jacobian
contraction is the one that applies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter

import jax
import jax.numpy as jnp
import jaxopt
import neural_tangents as nt

from . import Run
from .peer_jaxopt import MAX_STEPS, calibrated_tolerance, equilibrium_map, neumann


def contender(arrays: dict) -> Callable[[], Run]:
    rtol = float(arrays["rtol"])
    arrays = {name: jnp.asarray(value) for name, value in arrays.items()}
    make = functools.partial(jaxopt.FixedPointIteration, equilibrium_map, maxiter=MAX_STEPS)
    # Calibrated for the batch, then used for each sample alone, whose norm is smaller by the square root of its size.
    tol = calibrated_tolerance(make, arrays, rtol) / arrays["X"].shape[0] ** 0.5
    solver = make(tol=tol, implicit_diff=True, implicit_diff_solve=functools.partial(neumann, rtol=rtol))

    def predict(parameters: dict, x: jax.Array) -> jax.Array:
        c = x @ parameters["U"].T
        return solver.run(jnp.zeros_like(c), parameters["W"], c).params @ parameters["a"]

    implementation = nt.NtkImplementation.JACOBIAN_CONTRACTION
    kernel = jax.jit(nt.empirical_ntk_fn(predict, trace_axes=(), vmap_axes=0, implementation=implementation))
    parameters = {name: arrays[name] for name in ("W", "U", "a")}
    jax.block_until_ready(kernel(arrays["X"], None, parameters))

    def run() -> Run:
        start = perf_counter()
        K = jax.block_until_ready(kernel(arrays["X"], None, parameters))
        seconds = perf_counter() - start
        return Run(seconds, seconds, z=K, dW=(), dU=(), da=())

    return run


CONTENDERS = {"neural-tangents": contender}
