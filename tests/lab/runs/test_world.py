"""The variables that torchrun sets, where something else set them: one sentence."""

from __future__ import annotations

import pytest

from wellposed.errors import InvalidArgument
from wellposed_lab.runs._distributed import joined

THERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE must be .*; got 'x'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE must be .*; got ''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be .*; got '0'"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE must be .*; got '-1'"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 and RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "x", **THERE}, "RANK must be .* 0 to 1; got 'x'"),
        ({"WORLD_SIZE": "2", "RANK": "2", **THERE}, "RANK must be .* 0 to 1; got '2'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "could not be joined"),
    ],
)
def test_a_wrong_variable_is_one_sentence(variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", *THERE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match=says) as caught, joined():
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "1", "RANK": "0"}, {"RANK": "0"}])
def test_one_process_is_a_world(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with joined() as world:
        assert (world.rank, world.size) == (0, 1)
