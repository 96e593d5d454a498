"""Problems that are drawn with their answers: chains of nodes, sudoku of 4x4 cells, mazes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection

import numpy as np

from wellposed.errors import InvalidArgument

#: Data sets of this file: every node or cell has a label.
PUZZLES = ("chains", "sudoku", "mazes")
#: Given cells of a sudoku, if not said; 16 cells, of which at least 4 are needed for one answer.
GIVENS = (6, 7, 8, 9, 10)
FEWEST, CELLS = 4, 16
#: Classes of the chains [gu2020].
CHAIN_CLASSES = 20


def draw(
    name: str, n: int, n_test: int, *, size: int | None, givens: tuple[int, ...] | None, noise: float, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray], list[str]]:
    """Inputs and targets to train and to test, and what was done.

    Args:
        name: One of `PUZZLES`.
        n, n_test: How many.
        size: Nodes of a chain (100 if not given), height and width of a maze (9).
        givens: Numbers of given cells of sudoku, each as likely as the others; `GIVENS` if None.
        noise: Standard deviation in the features of chains.
        rng: Of all draws.
    """
    _check(name, size, givens)
    if name == "chains":
        length = 100 if size is None else size
        parts = [chains(count, length, noise, rng) for count in (n, n_test)]
        about = f"chains of {length} nodes and {CHAIN_CLASSES} classes; the first node has the class, with noise {noise:g}"
    elif name == "sudoku":
        givens = GIVENS if givens is None else givens
        parts = [sudoku(count, givens, orbit, rng) for count, orbit in ((n, 1), (n_test, 0))]
        about = (
            f"4x4 sudoku with {' or '.join(map(str, givens))} givens and one answer; answers to train and to test are of "
            "different classes up to symmetry"
        )
    else:
        side = 9 if size is None else size
        first = mazes(n, side, rng)
        seen = {maze.tobytes() for maze in first[0]}
        parts = [first, mazes(n_test, side, rng, avoid=seen)]
        about = f"mazes of {side} x {side} places with one way from start to end; those to test are not among those to train"
    return [X for X, _ in parts], [y for _, y in parts], [about]


def _check(name: str, size: int | None, givens: tuple[int, ...] | None) -> None:
    if givens is not None and name != "sudoku":
        raise InvalidArgument(f"givens are the given cells of sudoku; omit them for {name!r}.")
    if name == "sudoku" and size not in (None, 4):
        raise InvalidArgument(f"sudoku has 4x4 cells; got size={size!r}. Omit size.")
    whole = isinstance(givens, (tuple, list)) and all(type(k) is int and FEWEST <= k < CELLS for k in givens)
    if givens is not None and not (whole and givens):
        raise InvalidArgument(f"givens must be integers from {FEWEST} to {CELLS - 1}, such as (6, 7); got {givens!r}.")
    if size is not None and (type(size) is not int or size < 1):
        raise InvalidArgument(f"size must be an integer of at least 1; got {size!r}.")
    if name == "mazes" and size is not None and (size < 7 or size % 2 == 0):
        raise InvalidArgument(f"The size of mazes must be odd and at least 7: rooms are between walls; got {size}.")


def chains(n: int, length: int, noise: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(n, length, 20) features and (n, length) classes of directed chains, as in [gu2020].

    Only the first node has features: the one-hot class, with noise. All nodes are to be labelled.
    """
    y = np.arange(n) % CHAIN_CLASSES
    X = np.zeros((n, length, CHAIN_CLASSES))
    X[np.arange(n), 0, y] = 1
    X[:, 0] += noise * rng.standard_normal((n, CHAIN_CLASSES))
    return X, np.repeat(y[:, None], length, axis=1)


@functools.cache
def sudoku_grids() -> np.ndarray:
    """(288, 16) all filled grids, digits 0 to 3: no digit is twice in a row, column or 2x2 box."""
    rows = list(itertools.permutations(range(4)))
    grids = []
    for a, b in itertools.product(rows, rows):
        if {*a[:2], *b[:2]} != set(range(4)) or {*a[2:], *b[2:]} != set(range(4)):
            continue
        for c, d in itertools.product(rows, rows):
            boxes = {*c[:2], *d[:2]} == {*c[2:], *d[2:]} == set(range(4))
            if boxes and all(len({a[j], b[j], c[j], d[j]}) == 4 for j in range(4)):
                grids.append([*a, *b, *c, *d])
    return np.array(grids, dtype=np.int64)


@functools.cache
def sudoku_classes() -> np.ndarray:
    """(288,) 0 or 1: the class of each grid up to symmetry.

    The symmetries rename digits, exchange rows of a band, bands, columns of a stack, stacks, or
    rows with columns. They have two orbits, of 96 and of 192 grids.
    """
    grids = sudoku_grids()
    place = {grid.tobytes(): i for i, grid in enumerate(grids)}
    cells = np.arange(CELLS).reshape(4, 4)
    moves = [cells[[1, 0, 2, 3]], cells[[2, 3, 0, 1]], cells.T]
    orbit = np.ones(len(grids), dtype=np.int64)
    found, waiting = {0}, [0]
    while waiting:
        grid = grids[waiting.pop()]
        images = [grid[move.reshape(-1)] for move in moves]
        images += [np.array(names)[grid] for names in ([1, 0, 2, 3], [1, 2, 3, 0])]
        for image in images:
            i = place[np.ascontiguousarray(image).tobytes()]
            if i not in found:
                found.add(i)
                waiting.append(i)
    orbit[list(found)] = 0
    return orbit


@functools.cache
def _masks(givens: int) -> np.ndarray:
    """(masks, 16) all choices of cells."""
    chosen = np.array(list(itertools.combinations(range(CELLS), givens)))
    masks = np.zeros((len(chosen), CELLS), dtype=np.float32)
    masks[np.arange(len(chosen))[:, None], chosen] = 1
    return masks


@functools.cache
def _unique(grid: bytes, givens: int) -> np.ndarray:
    """Indices of the masks of which a grid is the only answer; `grid` has 0, 1, 2, 3 in its first
    row, which renaming digits achieves and which does not change the masks."""
    own, others = np.frombuffer(grid, dtype=np.int64), sudoku_grids()
    differs = (others[(others != own).any(axis=1)] != own).astype(np.float32)
    return np.flatnonzero((_masks(givens) @ differs.T > 0).all(axis=1))


def sudoku(n: int, givens: tuple[int, ...], orbit: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(n, 4, 4, 4) one-hot givens by digit, row and column, and (n, 4, 4) digits.

    Every puzzle has one answer. Its number of givens is drawn from `givens`, its filled grid from
    one of the two classes up to symmetry, its given cells from all with one answer.
    """
    grids = sudoku_grids()
    solutions = rng.choice(np.flatnonzero(sudoku_classes() == orbit), n)
    numbers = rng.choice(np.array(givens), n)
    X = np.zeros((n, 4, CELLS))
    for i, (grid, number) in enumerate(zip(grids[solutions], numbers.tolist(), strict=True)):
        mask = _masks(number)[rng.choice(_unique(np.argsort(grid[:4])[grid].tobytes(), number))] > 0
        X[i, grid[mask], mask] = 1
    return X.reshape(n, 4, 4, 4), grids[solutions].reshape(n, 4, 4)


def mazes(n: int, size: int, rng: np.random.Generator, *, avoid: Collection[bytes] = ()) -> tuple[np.ndarray, np.ndarray]:
    """(n, 3, size, size) walls, start and end, and (n, size, size) 1 on the way between them.

    Rooms are at odd places. Their passages are a tree (drawn by depth-first search), so there is
    one way between two rooms.

    Args:
        n, size, rng: How many, height and width, of all draws.
        avoid: Bytes of inputs that must not be drawn again.
    """
    X, y = np.zeros((n, 3, size, size)), np.zeros((n, size, size), dtype=np.int64)
    for i in range(n):
        for _ in range(100):
            X[i], y[i] = _maze(size, rng)
            if X[i].tobytes() not in avoid:
                break
        else:
            raise InvalidArgument(f"There are too few mazes of size {size} for {len(avoid)} to train and {n} others to test.")
    return X, y


def _maze(size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    side = size // 2
    start, end = rng.choice(side * side, 2, replace=False).tolist()
    before = _tree(side, start, rng)
    open_places = np.zeros((size, size))
    for room in before:
        _mark(open_places, room, before[room], side)
    way, room = np.zeros((size, size)), end
    while room != start:
        _mark(way, room, before[room], side)
        room = before[room]
    _mark(way, start, start, side)
    ends = np.zeros((2, size, size))
    for channel, room in enumerate((start, end)):
        _mark(ends[channel], room, room, side)
    return np.stack([1 - open_places, *ends]), way


def _mark(places: np.ndarray, room: int, other: int, side: int) -> None:
    """Sets the place of a room, and that between it and a neighbour, to 1."""
    (r, c), (p, q) = divmod(room, side), divmod(other, side)
    places[2 * r + 1, 2 * c + 1] = places[r + p + 1, c + q + 1] = 1


def _tree(side: int, start: int, rng: np.random.Generator) -> dict[int, int]:
    """The room from which a random depth-first search came to each room; the start is its own."""
    draws = iter(rng.random(4 * side * side).tolist())
    parent, stack = {start: start}, [start]
    while stack:
        room = stack[-1]
        r, c = divmod(room, side)
        around = [(r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)]
        free = [p * side + q for p, q in around if 0 <= p < side and 0 <= q < side and p * side + q not in parent]
        if not free:
            stack.pop()
            continue
        chosen = free[int(next(draws) * len(free))]
        parent[chosen] = room
        stack.append(chosen)
    return parent
