"""Chains, sudoku and mazes: their answers by a second road, and what is refused."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from wellposed.data.puzzles import sudoku_classes, sudoku_grids
from wellposed.errors import InvalidArgument


def answers(givens: np.ndarray) -> list[list[int]]:
    """All answers of a sudoku by search, without the list of grids; -1 is an empty cell."""
    cells = givens.reshape(-1).tolist()
    if -1 not in cells:
        return [cells]
    i = cells.index(-1)
    r, c = divmod(i, 4)
    found = []
    for digit in range(4):
        peers = [j for j in range(16) if j // 4 == r or j % 4 == c or (j // 8 == r // 2 and j % 4 // 2 == c // 2)]
        if all(cells[j] != digit for j in peers):
            found += answers(np.array([*cells[:i], digit, *cells[i + 1 :]]))
    return found


def distances(walls: np.ndarray, start: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Steps from the start to every open place, by breadth-first search."""
    found, waiting = {start: 0}, deque([start])
    while waiting:
        r, c = waiting.popleft()
        for place in ((r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)):
            if not walls[place] and place not in found:
                found[place] = found[(r, c)] + 1
                waiting.append(place)
    return found


def test_the_grids_are_all_grids_in_two_classes() -> None:
    grids = sudoku_grids()
    assert len({tuple(grid) for grid in grids.tolist()}) == 288  # as is known
    assert sorted(map(tuple, answers(np.full((4, 4), -1)))) == sorted(map(tuple, grids.tolist()))
    assert np.bincount(sudoku_classes()).tolist() == [96, 192]
    # renaming digits leads to another grid of the same class
    place = {tuple(grid): i for i, grid in enumerate(grids.tolist())}
    for names in itertools.permutations(range(4)):
        images = [place[tuple(np.array(names)[grid].tolist())] for grid in grids]
        assert (sudoku_classes()[images] == sudoku_classes()).all()


@pytest.mark.parametrize("givens", [(4,), (5, 9)])
def test_every_sudoku_has_one_answer(givens: tuple[int, ...]) -> None:
    data = wp.data.load("sudoku", n=12, n_test=8, givens=givens, seed=3)
    assert data.X.shape == (12, 4, 4, 4) and data.X_test is not None and data.y_test is not None
    for X, y in ((data.X, data.y), (data.X_test, data.y_test)):
        for x, solution in zip(X, y, strict=True):
            assert int(x.sum()) in givens
            cells = torch.where(x.sum(0) > 0, x.argmax(0), -1).numpy()
            assert answers(cells) == [solution.flatten().tolist()]
    place = {tuple(grid): i for i, grid in enumerate(sudoku_grids().tolist())}
    parts = [{int(sudoku_classes()[place[tuple(s.flatten().tolist())]]) for s in y} for y in (data.y, data.y_test)]
    assert parts == [{1}, {0}]


@given(seed=st.integers(0, 10**6), size=st.sampled_from([7, 9, 13]))
@settings(max_examples=15, deadline=None)
def test_the_way_of_a_maze_is_the_shortest(seed: int, size: int) -> None:
    data = wp.data.load("mazes", n=1, n_test=1, size=size, seed=seed)
    walls, start, end = data.X[0].numpy()
    (s,), (e,) = (list(zip(*map(tuple, np.nonzero(part)), strict=True)) for part in (start, end))
    from_start, from_end = distances(walls, tuple(map(int, s))), distances(walls, tuple(map(int, e)))
    assert len(from_start) == int((walls == 0).sum()) == 2 * (size // 2) ** 2 - 1  # connected, and a tree
    length = from_start[tuple(map(int, e))]
    way = {place for place, d in from_start.items() if d + from_end[place] == length}
    assert way == set(zip(*map(tuple, np.nonzero(data.y[0].numpy())), strict=True))


def test_mazes_to_test_are_not_among_those_to_train() -> None:
    data = wp.data.load("mazes", n=400, n_test=400, size=7)
    assert data.X_test is not None
    train = {x.numpy().tobytes() for x in data.X}
    assert not any(x.numpy().tobytes() in train for x in data.X_test)


def test_only_the_first_node_of_a_chain_has_its_class() -> None:
    data = wp.data.load("chains", n=40, size=7, noise=0.0)
    assert data.X.shape == (40, 7, 20) and data.y.shape == (40, 7)
    assert torch.equal(data.X[:, 0].argmax(1), data.y[:, 0]) and not data.X[:, 1:].any()
    assert (data.y == data.y[:, :1]).all() and data.y[:, 0].bincount().tolist() == [2] * 20


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("mazes", {"size": 8}, "odd and at least 7"),
        ("mazes", {"size": 5}, "odd and at least 7"),
        ("mazes", {"givens": (4,)}, "given cells of sudoku"),
        ("moons", {"givens": (4,)}, "given cells of sudoku"),
        ("sudoku", {"size": 9}, "4x4 cells"),
        ("sudoku", {"givens": (3,)}, "from 4 to 15"),
        ("sudoku", {"givens": ()}, "from 4 to 15"),
        ("chains", {"size": 0}, "at least 1"),
        ("chains", {"classes": (0, 1)}, "no classes to choose from"),
    ],
)
def test_wrong_options_get_one_sentence(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(wp.InvalidArgument, match=says):
        wp.data.load(name, **{"n": 2, **options})


@pytest.mark.parametrize("noise", [float("nan"), float("inf"), -0.1, "0.1", True])
def test_noise_that_is_not_a_standard_deviation_is_refused(noise: Any) -> None:
    with pytest.raises(InvalidArgument, match="noise is a standard deviation"):
        wp.data.load("chains", n=4, noise=noise)


@pytest.mark.parametrize("name", ["chains", "mazes", "moons"])
@pytest.mark.parametrize("n", [10**12, 10**30])
def test_more_samples_than_memory_are_refused(name: str, n: int) -> None:
    with pytest.raises(InvalidArgument, match=f"The memory does not hold n={n} "):
        wp.data.load(name, n=n)
