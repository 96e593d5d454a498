"""fixed_point: the entry point of solving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import Policy, check_policy, check_tolerances, shown
from wellposed._torch import apart, eager, require_values
from wellposed._tree import Layout
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.linear_solver import AbstractLinearSolver
from wellposed.solve._groups import GroupedMap, Groups
from wellposed.solve.auto import Auto
from wellposed.solve.map import AbstractMap, FunctionMap
from wellposed.solve.solution import Solution, SolveOptions
from wellposed.solve.solver import AbstractSolver, Tolerance


@eager  # a loop that depends on values gains nothing from a trace
def fixed_point(
    f: Callable[..., Any] | AbstractMap,
    z0: Any,
    solver: AbstractSolver | None = None,
    *,
    args: tuple[Any, ...] = (),
    rtol: float = 1e-6,
    atol: float = 0.0,
    max_steps: int = 200,
    on_failure: Policy = "warn",
    record: bool = False,
    coupled: bool = False,
    groups: Tensor | None = None,
) -> Solution:
    r"""Solves z = f(z), every sample of the batch by itself.

    A sample has converged when |f(z) - z| <= max(rtol |f(z)|, atol), norms over all features of
    that sample. It then leaves the computation: it takes part in no further evaluation, and its
    value does not depend on its neighbours beyond rounding. The last evaluation is one of the whole
    batch at the value returned, and confirms it: it finds rows that depend on each other, a random
    f, and a solver that reports a wrong f(z). No graph is recorded; `EquilibriumLayer`
    differentiates.

        >>> import torch, wellposed as wp
        >>> sol = wp.fixed_point(lambda z: 0.8 * z + 1, torch.zeros(3, 1, dtype=torch.float64))
        >>> sol.value.squeeze(1)
        tensor([5.0000, 5.0000, 5.0000], dtype=torch.float64)

    Args:
        f: `f(z, *args)` of the same structure and shapes as z, row-wise: sample i of the result
            depends on sample i alone, unless `coupled`.
        z0: The start: a tensor, or a structure of tensors (tuple, list, dict, registered
            dataclass), batch first, real or complex floating point. float16 and bfloat16 are solved
            in float32.
        solver: `Auto()` if not given.
        args: Further arguments of f. Tensors (or structures of tensors) whose first dimension is
            the batch follow their samples. Per-sample data that f captures instead works too, but
            then finished samples can only stand still: f is evaluated for the whole batch.
        rtol: Relative tolerance. It does not count as met where |f(z)| has grown more than tenfold
            while |f(z) - z| has not even halved: there z diverges, and no fixed point is near.
        atol: Absolute tolerance on |f(z) - z|.
        max_steps: How many evaluations of f a sample may take part in.
        on_failure: "raise" (`NotConverged`), "warn" (`NotConvergedWarning`) or "ignore" controls
            reporting; `Solution.status` is always set.
        record: Keep the residuals of all steps in `Solution.history`.
        coupled: Rows depend on each other (nodes of a graph, batch statistics): the batch is solved
            as one sample. All rows then have the same status, and the residual of the whole batch.
        groups: (rows,) the index 0, 1, 2, ... of the group of each row, sorted: rows of a group
            depend on each other, as the nodes of one graph in a batch of graphs. Each group is one
            sample: numbers and statuses of the solution are per group, values per row. Integer
            tensors of shape (2, edges) in `args` are edges. Those and data of edges follow their
            nodes. With as many edges as nodes put data of edges into a dict, under a name that
            begins with `edge`; a name that begins with `shared` is for what belongs to all graphs.
    """
    solver = Auto() if solver is None else solver
    check_options(f, solver, coupled=coupled)
    check_args(f, args)
    check_tolerances(rtol=rtol, atol=atol, max_steps=max_steps)
    check_policy(on_failure)
    require_values("fixed_point", "Inside them use EquilibriumLayer instead.")
    options = SolveOptions(solver, Tolerance(rtol, atol), max_steps, on_failure, "fixed_point")
    layout = Layout.of(z0, "z0")
    mixed = torch.is_autocast_enabled(layout.device.type)
    with torch.no_grad(), apart(), torch.autocast(layout.device.type, enabled=False):
        start = layout.flatten(z0).detach().to(layout.compute_dtype)
        rows = f if isinstance(f, AbstractMap) else FunctionMap(f, layout, args, low_precision=mixed)
        if groups is not None:
            rows, start = in_groups(rows, start, groups, coupled=coupled)
        return options.judge(options.run(rows, start, record=record, coupled=coupled), layout, rows)


def in_groups(f: AbstractMap, start: Tensor, groups: Tensor, *, coupled: bool = False) -> tuple[AbstractMap, Tensor]:
    """The map and the start with groups of rows as samples."""
    if coupled:
        raise InvalidArgument("coupled=True makes the whole batch one sample, and groups makes each group one; give only one.")
    together = Groups.of(groups, start.shape[0], start.device)
    if isinstance(f, FunctionMap):
        f.graphs = True
    return (GroupedMap(f, together), together.pad(start)) if together.count else (f, start)


def check_args(f: Any, args: Any) -> None:
    """Checks the further arguments of a map."""
    if not isinstance(args, tuple):
        raise InvalidType(f"args must be a tuple; got {type(args).__name__}. For one argument write args=(x,).")
    if args and isinstance(f, AbstractMap):
        raise InvalidArgument(f"{type(f).__name__} holds what it needs, so args must be empty; got {len(args)}.")


def check_options(f: Any, solver: Any, *, name: str = "f", coupled: object = False) -> None:
    """Checks the map (called `name`), the solver and the switch of a solve."""
    if not isinstance(coupled, bool):
        raise InvalidArgument(f"coupled must be True or False; got {shown(coupled)}.")
    if not callable(f):
        raise InvalidType(f"{name} must be callable; got {type(f).__name__}.")
    if isinstance(f, type) and issubclass(f, nn.Module):
        raise InvalidType(f"{name} must be an object; got the class {f.__name__}. Give {f.__name__}(...).")
    if not isinstance(solver, AbstractSolver):
        hint = " Choices are objects: give Anderson(), not its name or class." if isinstance(solver, (str, type)) else ""
        if isinstance(solver, AbstractLinearSolver):
            hint = (
                f" It solves linear systems: give NewtonKrylov({solver!r}), or ImplicitGradient({solver!r}) for the gradient."
            )
        raise InvalidType(f"solver must be a solver such as Auto() or Anderson(); got {shown(solver)}.{hint}")
