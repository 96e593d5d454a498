"""Where equilibria may lie: exact where the state is affine or quadratic in the parameters, honest where nothing is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wellposed.landscape import _predictor
from wellposed.landscape._predictor import Predictor

KEY = (0, 0)


def walk(rows: int, columns: int) -> list[tuple[int, int]]:
    return [(i, j if i % 2 == 0 else columns - 1 - j) for i in range(rows) for j in range(columns)]


def errors(state: Callable[[int, int], Tensor], rows: int, columns: int) -> dict[tuple[int, int], float]:
    """Relative errors of the predictions along the snake, where there was one."""
    predictor, found = Predictor(columns), {}
    for i, j in walk(rows, columns):
        truth = state(i, j)
        start = predictor.predict((i, j), 1 if i % 2 == 0 else -1)
        if start:
            found[i, j] = float((start[KEY] - truth).norm() / truth.norm())
        predictor.keep((i, j), {KEY: truth})
    return found


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 4), columns=st.integers(2, 5))
def test_states_that_are_affine_are_predicted_exactly(seed: int, rows: int, columns: int) -> None:
    base, a, b = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = errors(lambda i, j: base + i * a + j * b, rows, columns)
    assert set(found) == set(walk(rows, columns)[1:])
    # a first step has seen no slope: in the first row, and into the second
    blind = {(0, 1), (1, columns - 1)}
    assert all(error < 1e-5 for place, error in found.items() if place not in blind)


def test_states_that_are_quadratic_are_predicted_once_the_neighbours_are_known() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(6, 4, 20, generator=generator, dtype=torch.float64)

    def state(i: int, j: int) -> Tensor:
        powers = torch.tensor([1.0, i, j, i * i, i * j, j * j], dtype=torch.float64)
        return torch.einsum("k,kab->ab", powers * torch.tensor([100.0, 1, 1, 0.1, 0.1, 0.1], dtype=torch.float64), parts)

    found = errors(state, 5, 9)
    line = {
        (4, j): float((2 * state(4, j - 1) - state(4, j - 2) - state(4, j)).norm() / state(4, j).norm()) for j in range(4, 8)
    }
    assert all(found[place] < 1e-2 * error for place, error in line.items())


def test_nothing_is_predicted_from_nothing() -> None:
    predictor = Predictor(5)
    assert predictor.predict((0, 0), 1) == {}
    predictor.keep((0, 0), {KEY: torch.ones(2, 3)})
    assert predictor.predict((0, 3), 1) == {}  # too far away


def test_a_point_that_was_lost_is_gone_round() -> None:
    predictor = Predictor(3)
    for i, j in walk(2, 3):
        if (i, j) != (1, 1):
            predictor.keep((i, j), {KEY: torch.full((2, 3), 10.0 * i + j)})
    start = predictor.predict((1, 1), -1)[KEY]
    assert torch.equal(start, torch.full((2, 3), 11.0))  # the parallelogram of (1, 2), (0, 1), (0, 2)


def test_large_states_are_not_hoarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_predictor, "MEMORY", 100)
    predictor = Predictor(4)
    for i, j in walk(2, 4):
        predictor.keep((i, j), {KEY: torch.full((2, 3), float(j))})
    assert list(predictor._known) == [(1, 1), (1, 0)]
    predictor.keep((2, 0), {KEY: torch.zeros(2, 3)})
    predictor.keep((2, 1), {KEY: torch.ones(2, 3)})
    assert torch.equal(predictor.predict((2, 2), 1)[KEY], torch.full((2, 3), 2.0))


def test_states_of_other_shapes_do_not_mix() -> None:
    predictor = Predictor(3)
    predictor.keep((0, 0), {KEY: torch.zeros(5, 3)})
    predictor.keep((0, 1), {KEY: torch.ones(2, 3)})
    assert torch.equal(predictor.predict((0, 2), 1)[KEY], torch.ones(2, 3))


def test_what_is_kept_is_not_written_to() -> None:
    predictor = Predictor(3)
    states = [torch.full((2, 3), float(j)) for j in range(2)]
    for j, state in enumerate(states):
        predictor.keep((0, j), {KEY: state})
    predictor.predict((0, 2), 1)[KEY].fill_(7.0)
    assert [float(state[0, 0]) for state in states] == [0.0, 1.0]
