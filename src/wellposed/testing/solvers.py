"""What every solver of z = f(z) must do."""

from __future__ import annotations

import abc
import copy
import pickle
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from wellposed.solve import AbstractSolver, Solution, fixed_point
from wellposed.status import Status
from wellposed.testing._checks import CountingMap, check_close, check_honest, check_right, require, rtol_of, solve
from wellposed.testing._problem import Problem, flat, leaves
from wellposed.testing.problems import PROBLEMS, problem, spread_with

#: Problems with a matrix, which are also maps of a `DenseCell`.
_DENSE = ("affine", "rotation", "relu_by_hand", "relu_random", "smoothing", "monotone", "nilpotent")


class SolverConformance(abc.ABC):
    """Tests that a solver inherits: subclass it in a test file and define `solver`.

        >>> import wellposed as wp
        >>> from wellposed.testing import SolverConformance
        >>> class TestPicard(SolverConformance):
        ...     def solver(self):
        ...         return wp.Picard()
        >>> TestPicard().test_reports_are_true()

    pytest collects the subclass if its name begins with "Test"; with unittest, inherit from
    `unittest.TestCase` too. Every method `test_...` raises AssertionError with the name of the
    problem and the numbers that were seen.

    Attributes:
        solves: Names of the `PROBLEMS` on which the solver must converge. By default those that
            every solver must solve; on the others only its report is checked.
        dense: Whether the solver needs the map of a cell (a resolvent and a prox), as splitting
            methods do.
        max_steps: The budget of a solve; None takes that of the problem.
    """

    solves: ClassVar[Sequence[str]] = ("scalar", "affine", "relu_by_hand", "relu_random", "tanh", "vector_state")
    dense: ClassVar[bool] = False
    max_steps: ClassVar[int | None] = None

    @abc.abstractmethod
    def solver(self) -> AbstractSolver:
        """The solver under test."""

    def test_solves_its_problems(self) -> None:
        """It converges to the exact solution, in float64 and in float32."""
        for p in self._problems(self.solves, torch.float64, torch.float32):
            sol = self._solve(p)
            require(sol.converged, f"{p.name} in {p.dtype}: {self.solver()!r} must converge; got {sol}")
            check_right(p, sol)

    def test_reports_are_true(self) -> None:
        """Residuals and statuses are those of the value on every problem, solvable or not."""
        for p in self._problems(tuple(PROBLEMS), torch.float64, torch.float32):
            sol = self._solve(p)
            check_honest(p, sol)
            check_right(p, sol)

    def test_low_precision_is_solved_in_float32(self) -> None:
        """float16 and bfloat16 starts give float32 values."""
        for p in self._problems(self.solves, torch.float16, torch.bfloat16):
            if p.matrix is None:
                sol = solve(p, self.solver()) if not self.dense else self._solve(p)
                require(leaves(sol.value)[0].dtype == torch.float32, f"{p.name}: the value must be float32")
                check_honest(p, sol)

    def test_structures_keep_their_shapes(self) -> None:
        """A tuple, a dictionary or an image comes back as it went in."""
        for p in self._problems(("tuple_state", "dict_state", "image_state"), torch.float64):
            value = self._solve(p).value
            require(type(value) is type(p.z0), f"{p.name}: expected a {type(p.z0).__name__}; got {type(value).__name__}")
            shapes = [leaf.shape for leaf in leaves(value)], [leaf.shape for leaf in leaves(p.z0)]
            require(shapes[0] == shapes[1], f"{p.name}: expected the shapes {shapes[1]}; got {shapes[0]}")

    def test_steps_are_counted(self) -> None:
        """`num_steps` is the number of evaluations and products, and never exceeds `max_steps`."""
        for p in self._problems(("affine", "monotone", "expanding", "shift"), torch.float64):
            if self.dense:
                continue  # a splitting method evaluates the parts of a map, which are not counted here
            for budget in (1, 2, 3, 5, 8, 60):
                f = CountingMap(p.take([1]))
                sol = fixed_point(f, p.z0[1:2], self.solver(), rtol=rtol_of(p), max_steps=budget, on_failure="ignore")
                seen, reported = int(f.counts), int(sol.num_steps)
                require(seen == reported, f"{p.name}: num_steps is {reported}, but the map was evaluated {seen} times")
                require(reported <= budget, f"{p.name}: {reported} evaluations exceed max_steps={budget}")

    def test_a_sample_does_not_depend_on_its_neighbours(self) -> None:
        """A sample alone gives the same as in a batch, to rounding, in as many steps."""
        for name in ("relu_random", "tanh", "spread") if not self.dense else ("relu_random", "affine"):
            p = problem(name, batch=5)
            together = self._solve(p, rtol=1e-6, max_steps=500)
            for i in range(p.batch):
                alone = self._solve(p.take([i]), rtol=1e-6, max_steps=500)
                check_close(alone, _row(together, i), p.take([i]))
        p = problem("tanh" if not self.dense else "affine", batch=32)
        many = self._solve(p, rtol=1e-6, max_steps=500)
        for i in (0, 31):
            check_close(self._solve(p.take([i]), rtol=1e-6, max_steps=500), _row(many, i), p.take([i]))

    def test_a_bad_sample_does_not_disturb_the_others(self) -> None:
        """NaN in one sample is reported for that sample; the others converge as without it."""
        if self.dense:
            return
        q = torch.tensor([0.3, 0.85, torch.nan, 0.0, 0.7], dtype=torch.float64)
        p, others = spread_with(q, torch.float64), [0, 1, 3, 4]
        sol = self._solve(p, rtol=1e-7, max_steps=400)
        reference = self._solve(p.take(others), rtol=1e-7, max_steps=400)
        for k, i in enumerate(others):
            check_close(_row(sol, i), _row(reference, k), p.take([i]))
        require(sol.status[2] == Status.NOT_FINITE, f"a sample of NaN must be NOT_FINITE; got {sol.status[2]}")

    def test_arguments_are_not_changed(self) -> None:
        """Start and data keep their values and share no memory with the result."""
        for p in self._problems(("relu_random", "tuple_state", "spread"), torch.float64):
            given = [*leaves(p.z0), *p.args]
            before = [tensor.clone() for tensor in given]
            value = self._solve(p).value
            require(all(map(torch.equal, given, before)), f"{p.name}: the solve changed the tensors of the caller")
            memory = {tensor.untyped_storage().data_ptr() for tensor in given}
            shared = memory & {leaf.untyped_storage().data_ptr() for leaf in leaves(value)}
            require(not shared, f"{p.name}: the value shares memory with the tensors of the caller")

    def test_no_graph_is_recorded(self) -> None:
        """A solve is not differentiated through; gradients are attached afterwards."""
        p = problem("relu_random")
        c = p.args[0].clone().requires_grad_()
        sol = self._solve(Problem(**{**vars(p), "args": (c,)}))
        require(not sol.value.requires_grad, "the value must not require a gradient")

    def test_a_solver_is_a_value(self) -> None:
        """Equal options make equal solvers, hashable and picklable, without memory of solves."""
        solver = self.solver()
        for other in (self.solver(), copy.deepcopy(solver), pickle.loads(pickle.dumps(solver))):
            require(other == solver and hash(other) == hash(solver), f"{other!r} must equal {solver!r}: use a frozen dataclass")
        p, other_problem = problem("affine"), problem("relu_random")
        first = solve(p, solver, dense=self.dense)
        solve(other_problem, solver, dense=self.dense)
        again = solve(p, solver, dense=self.dense)
        require(torch.equal(first.value, again.value), "two solves of one problem differ: the solver keeps something")
        require(torch.equal(first.num_steps, again.num_steps), "two solves of one problem take different numbers of steps")

    def _problems(self, names: Sequence[str], *dtypes: torch.dtype) -> Iterator[Problem]:
        """The problems that the solver can be given, in each dtype."""
        for name in names:
            if not self.dense or name in _DENSE:
                yield from (problem(name, dtype) for dtype in dtypes)

    def _solve(self, p: Problem, **options: float) -> Solution:
        budget = {} if self.max_steps is None else {"max_steps": self.max_steps}
        return solve(p, self.solver(), dense=self.dense, **{**options, **budget})


def _row(sol: Solution, i: int) -> Solution:
    rows = slice(i, i + 1)
    parts = (sol.residual, sol.absolute_residual, sol.num_steps, sol.status, sol.rate)
    return Solution(flat(sol.value)[rows], *(part[rows] for part in parts))  # type: ignore[arg-type]
