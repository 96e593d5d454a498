"""Reasoning by iteration: the same step is repeated until the answer no longer changes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.implicit import PhantomGradient, UnrolledGradient
from wellposed.nn import EquilibriumLayer
from wellposed.solve import Picard


class SudokuCell(nn.Module):
    r"""f(z, x) = norm(z + B relu(A [z, x] + exchange(z))), a state for every digit, row and column.

    The exchange is a sum of linear maps of means of z: over the digits of a cell, over its row and
    its column, over its 2x2 box. Weights are shared by all places, and by rows and columns, so f
    commutes with every symmetry of the puzzle: renaming digits, exchanging rows of a band, bands,
    columns of a stack, stacks, rows with columns.

    Args:
        width: m, states of a place. generator: Of the weights.
    """

    classes = 1

    def __init__(self, width: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.width = width
        self.inner, self.outer = nn.Linear(width + 1, 2 * width), nn.Linear(2 * width, width)
        self.digits, self.lines, self.boxes = (nn.Linear(width, 2 * width, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        _draw(self, generator)

    def start(self, x: Tensor) -> Tensor:
        """Zeros of the shape of the state."""
        if x.dim() != 4 or x.shape[1:] != (4, 4, 4):
            raise InvalidArgument(f"Puzzles must have the shape (n, 4, 4, 4): digit, row, column; got {tuple(x.shape)}.")
        return x.new_zeros(*x.shape, self.width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """(n, 4, 4, 4, m), (n, 4, 4, 4) -> (n, 4, 4, 4, m)."""
        hidden = self.inner(torch.cat([z, x.unsqueeze(-1)], dim=-1)) + self.digits(z.mean(1, keepdim=True))
        hidden = hidden + self.lines(z.mean(2, keepdim=True)) + self.lines(z.mean(3, keepdim=True))
        boxes = self.boxes(z.unflatten(3, (2, 2)).unflatten(2, (2, 2)).mean((3, 5)))
        hidden = hidden + boxes.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
        new: Tensor = self.norm(z + self.outer(torch.relu(hidden)))
        return new


class MazeCell(nn.Module):
    r"""f(z, x) = norm(z + B relu(A * [z, x])), A a 3x3 convolution: a place sees its neighbours.

    Args:
        width: States of a place. generator: Of the weights.
    """

    classes = 2

    def __init__(self, width: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.width = width
        self.inner, self.outer = nn.Conv2d(width + 3, 2 * width, 3, padding=1), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        _draw(self, generator)

    def start(self, x: Tensor) -> Tensor:
        """Zeros of the shape of the state."""
        if x.dim() != 4 or x.shape[1] != 3:
            raise InvalidArgument(f"Mazes must have the shape (n, 3, height, width): walls, start, end; got {tuple(x.shape)}.")
        return x.new_zeros(x.shape[0], *x.shape[2:], self.width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """(n, h, w, m), (n, 3, h, w) -> (n, h, w, m)."""
        seen = torch.cat([z.movedim(3, 1), x], dim=1)
        new: Tensor = self.norm(z + self.outer(torch.relu(self.inner(seen)).movedim(1, 3)))
        return new


class PuzzleSolver(nn.Module):
    r"""Answers of puzzles, read off the equilibrium z = cell(z, x): iterated until it converges.

        >>> import torch, wellposed as wp
        >>> model = wp.tasks.PuzzleSolver.sudoku(8)
        >>> puzzles, answers = wp.data.load("sudoku", n=5, flatten=False)
        >>> model.train()(puzzles).shape  # logits of digits in every cell
        torch.Size([5, 4, 4, 4])

    In evaluation every puzzle halts when its own residual is at most `rtol`; it then leaves the
    computation. A derivative is that of `gradient_steps` steps at the answer (`PhantomGradient`).

    In training a call records `gradient_steps` steps (`UnrolledGradient`) and does not iterate to
    convergence. They begin at z0, the state that the caller carries from call to call
    (`model.layer.last_solution.value`), so that a puzzle is continued until it converges, and the
    cell is trained to stay at an answer. Without z0 they begin after a random number of steps from
    zero.

    Nothing proves that an equilibrium exists: `layer.last_solution` reports for each puzzle whether
    one was found.

    Args:
        cell: `SudokuCell` or `MazeCell`, or a module with `start`, `width`, `classes` like theirs.
        rtol: Tolerance at which a puzzle halts. max_steps: The most steps in evaluation.
        gradient_steps: Recorded steps of a call in training.
        free_steps: The most steps before them, if the caller does not carry a state.
        on_failure: When a puzzle does not converge in evaluation.
        generator: Of the read-out.
    """

    def __init__(
        self,
        cell: Any,
        *,
        rtol: float = 1e-2,
        max_steps: int = 500,
        gradient_steps: int = 8,
        free_steps: int = 16,
        on_failure: Any = "warn",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_positive_integer("PuzzleSolver", "free_steps", free_steps)
        self.gradient_steps, self.free_steps, self.on_failure = gradient_steps, free_steps, on_failure
        self.layer = EquilibriumLayer(cell, Picard(), rtol=rtol, max_steps=max_steps, on_failure=on_failure)
        self.head = nn.Linear(cell.width, cell.classes)
        _draw(self.head, generator)
        self.train()

    @classmethod
    def sudoku(cls, width: int = 32, *, generator: torch.Generator | None = None, **options: Any) -> PuzzleSolver:
        """A solver of 4x4 sudoku; options as for the class."""
        return cls(SudokuCell(width, generator), generator=generator, **options)

    @classmethod
    def mazes(cls, width: int = 24, *, generator: torch.Generator | None = None, **options: Any) -> PuzzleSolver:
        """A solver of mazes of any size; options as for the class."""
        return cls(MazeCell(width, generator), generator=generator, **{"gradient_steps": 16, **options})

    def train(self, mode: bool = True) -> PuzzleSolver:
        """In training few recorded steps, in evaluation as many as each puzzle needs."""
        super().train(mode)
        steps = self.gradient_steps
        self.layer.gradient = UnrolledGradient(steps) if mode else PhantomGradient(steps, damping=1.0)
        self.layer.on_failure = "ignore" if mode else self.on_failure
        return self

    def start(self, x: Tensor) -> Tensor:
        """The state from which puzzles begin: zeros."""
        cell: Any = self.layer.cell
        if not isinstance(x, Tensor):
            raise InvalidType(
                f"PuzzleSolver expects a tensor of puzzles, as of wp.data.load('sudoku'); got {type(x).__name__}."
            )
        if x.dtype != self.head.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            dtype = self.head.weight.dtype
            raise InvalidType(
                f"PuzzleSolver has {dtype} parameters and got puzzles of {x.dtype}; convert one, e.g. x.to({dtype})."
            )
        zeros: Tensor = cell.start(x)
        return zeros

    def forward(self, x: Tensor, z0: Tensor | None = None) -> Tensor:
        """Logits, (n, classes, height, width).

        Args:
            x: (n, 4, 4, 4) one-hot givens of sudoku, or (n, 3, height, width) mazes.
            z0: The state to continue from; zeros if not given.
        """
        zeros = self.start(x)
        start = zeros if z0 is None else z0
        if not isinstance(start, Tensor) or start.shape != zeros.shape:
            seen = tuple(start.shape) if isinstance(start, Tensor) else type(start).__name__
            raise InvalidArgument(
                f"z0 of PuzzleSolver must be a state of these puzzles, {tuple(zeros.shape)}; got {seen}. Carry "
                "model.layer.last_solution.value, or begin with model.start(x)."
            )
        if z0 is None and self.training:
            with torch.no_grad():
                for _ in range(int(torch.randint(self.free_steps + 1, ()))):
                    start = self.layer.cell(start, x)
        logits: Tensor = self.head(self.layer(x, z0=start))
        return logits.squeeze(-1) if logits.dim() == 5 else logits.movedim(3, 1)


def _draw(module: nn.Module, generator: torch.Generator | None) -> None:
    """Draws all weights and biases as `nn.Linear` does, from a generator."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Conv2d)) and generator is not None:
            limit = 1 / math.sqrt(part.weight[0].numel())
            for parameter in part.parameters():
                nn.init.uniform_(parameter, -limit, limit, generator=generator)
