"""PuzzleSolver: symmetries, halting of each puzzle, carried states, learning at seconds size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.tasks.puzzles import SudokuCell

SYMMETRIES = {
    "rows of a band": lambda a: a[:, :, [1, 0, 2, 3]],
    "bands": lambda a: a[:, :, [2, 3, 0, 1]],
    "columns of a stack": lambda a: a[:, :, :, [0, 1, 3, 2]],
    "stacks": lambda a: a[:, :, :, [2, 3, 0, 1]],
    "digits": lambda a: a[:, [2, 0, 3, 1]],
    "rows with columns": lambda a: a.transpose(2, 3),
}


@pytest.mark.parametrize("name", SYMMETRIES)
def test_the_cell_commutes_with_the_symmetries_of_sudoku(name: str) -> None:
    generator, move = torch.Generator().manual_seed(0), SYMMETRIES[name]
    cell = SudokuCell(6, generator).double()
    z = torch.randn(3, 4, 4, 4, 6, generator=generator, dtype=torch.float64)
    x = torch.rand(3, 4, 4, 4, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(cell(move(z), move(x)), move(cell(z, x)), rtol=1e-12, atol=1e-12)
    rows_of_two_bands = [0, 2, 1, 3]  # which is not a symmetry
    assert not torch.allclose(cell(z[:, :, rows_of_two_bands], x[:, :, rows_of_two_bands]), cell(z, x)[:, :, rows_of_two_bands])


@pytest.mark.parametrize("name", ["sudoku", "mazes"])
def test_a_puzzle_halts_by_itself_and_as_in_a_batch(name: str) -> None:
    make = getattr(wp.tasks.PuzzleSolver, name)
    model = make(8, generator=torch.Generator().manual_seed(1), rtol=1e-3, on_failure="raise").eval()
    with torch.no_grad():
        model.layer.cell.outer.weight *= 0.5  # a random cell that converges fast for every input
    X = wp.data.load(name, n=5, n_test=1).X * torch.tensor([0.0, 1.0, 4.0, 16.0, 64.0]).reshape(-1, 1, 1, 1)
    with torch.no_grad():
        together = model(X)
        steps = model.layer.last_solution.num_steps
        for i in range(5):
            alone = model(X[i : i + 1])
            assert abs(int(model.layer.last_solution.num_steps) - int(steps[i])) <= 1  # a residual at the tolerance
            torch.testing.assert_close(alone[0], together[i], rtol=2e-3, atol=2e-3)
    assert len(set(steps.tolist())) > 1


def test_an_answer_has_a_gradient_and_the_same_value() -> None:
    model = wp.tasks.PuzzleSolver.sudoku(8, generator=torch.Generator().manual_seed(1), on_failure="raise").eval()
    with torch.no_grad():
        model.layer.cell.outer.weight *= 0.5
        X = wp.data.load("sudoku", n=3, n_test=1).X
        value = model(X)
    logits = model(X)
    assert model.layer.last_solution is not None and bool(model.layer.last_solution.converged.all())
    torch.testing.assert_close(logits.detach(), value, rtol=1e-5, atol=1e-5)
    assert torch.autograd.grad(logits.square().sum(), model.layer.cell.inner.weight)[0].any()


def test_training_continues_at_the_carried_state() -> None:
    """Two calls of k steps are 2k steps of the cell, and the gradient is that of the last k."""
    model = wp.tasks.PuzzleSolver.sudoku(5, generator=torch.Generator().manual_seed(0), gradient_steps=3)
    X = wp.data.load("sudoku", n=4, n_test=1).X
    cell = model.layer.cell
    z = model.start(X)
    model(X, z)
    assert model.layer.last_solution is not None
    logits = model(X, model.layer.last_solution.value)
    with torch.no_grad():
        for _ in range(3):
            z = cell(z, X)
    for _ in range(3):
        z = cell(z, X)
    torch.testing.assert_close(model.layer.last_solution.value, z.detach(), rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(logits.square().sum(), cell.inner.weight)[0]
    by_hand = torch.autograd.grad(model.head(z).square().sum(), cell.inner.weight)[0]
    torch.testing.assert_close(ours, by_hand, rtol=1e-4, atol=1e-4 * float(by_hand.abs().max()))


def test_in_training_a_random_number_of_steps_comes_first() -> None:
    model = wp.tasks.PuzzleSolver.sudoku(5, generator=torch.Generator().manual_seed(0), gradient_steps=1, free_steps=5)
    X, starts = wp.data.load("sudoku", n=1, n_test=1).X, []
    model.layer.register_forward_pre_hook(lambda module, args, kwargs: starts.append(kwargs["z0"].clone()), with_kwargs=True)
    torch.manual_seed(0)
    for _ in range(20):
        model(X)
    assert 2 < len({tuple(start.flatten().tolist()) for start in starts}) <= 6
    model.eval()
    model.layer.on_failure = "ignore"
    with torch.no_grad():
        model(X)
    assert not starts[-1].any()


def train(model: wp.tasks.PuzzleSolver, X: Tensor, y: Tensor, steps: int) -> None:
    """With the states carried, and all puzzles replaced every fourth step."""
    optimizer, z = torch.optim.AdamW(model.parameters(), lr=1e-2), None
    for step in range(steps):
        rows = torch.arange(32) + 32 * (step // 4)
        rows, start = rows % len(X), model.start(X[:32])
        logits = model(X[rows], start if step % 4 == 0 or z is None else z)
        assert model.layer.last_solution is not None
        z = model.layer.last_solution.value
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, y[rows]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def test_sudoku_is_learned_in_seconds() -> None:
    data = wp.data.load("sudoku", n=1000, n_test=100, givens=(10, 11))
    model = wp.tasks.PuzzleSolver.sudoku(16, generator=torch.Generator().manual_seed(0), gradient_steps=4, on_failure="ignore")
    train(model, *data, steps=80)
    with torch.no_grad():
        right = (model.eval()(data.X_test).argmax(1) == data.y_test).float().mean()
    assert float(right) >= 0.8  # of cells; a digit by chance is right in a quarter of the cells that are not given


def test_bad_input_gets_one_sentence() -> None:
    model = wp.tasks.PuzzleSolver.sudoku(4)
    with pytest.raises(wp.InvalidArgument, match=r"\(n, 4, 4, 4\): digit, row, column; got \(2, 3, 9, 9\)"):
        model(torch.zeros(2, 3, 9, 9))
    with pytest.raises(wp.InvalidArgument, match=r"\(n, 3, height, width\): walls, start, end; got \(2, 4, 4, 4\)"):
        wp.tasks.PuzzleSolver.mazes(4)(torch.zeros(2, 4, 4, 4))
    with pytest.raises(wp.InvalidArgument, match="free_steps"):
        wp.tasks.PuzzleSolver.sudoku(4, free_steps=0)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("x", "z0", "error", "says"),
    [
        (None, None, wp.InvalidType, "a tensor of puzzles, as of wp.data.load.*; got NoneType"),
        (torch.zeros(2, 4, 4, 4, dtype=torch.long), None, wp.InvalidType, r"float32 parameters and got puzzles of torch.int64"),
        (
            torch.zeros(2, 4, 4, 4).double(),
            None,
            wp.InvalidType,
            r"puzzles of torch.float64; convert one, e.g. x.to\(torch.float32\)",
        ),
        (
            torch.zeros(2, 4, 4, 4),
            torch.zeros(3),
            wp.InvalidArgument,
            r"a state of these puzzles, \(2, 4, 4, 4, 4\); got \(3,\)",
        ),
        (torch.zeros(2, 4, 4, 4), torch.zeros(3, 4, 4, 4, 4), wp.InvalidArgument, r"got \(3, 4, 4, 4, 4\). Carry"),
    ],
    ids=["none", "integers", "float64", "state", "batch"],
)
def test_puzzles_and_states_that_do_not_fit(training: bool, x: Tensor, z0: Tensor, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        wp.tasks.PuzzleSolver.sudoku(4).train(training)(x, z0)
