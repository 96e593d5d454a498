"""Numbers that YAML 1.1 reads as text: told from text in linear time."""

from __future__ import annotations

import time

import pytest

from wellposed.errors import InvalidArgument
from wellposed_lab.runs.config import resolve


@pytest.mark.parametrize("text", ["1e-3", "+1E3", "1.e2", "1.5e-2", ".5e1"])
def test_a_number_is_read(text: str) -> None:
    assert resolve({"optimizer": {"lr": text}}).optimizer.lr == float(text)


@pytest.mark.parametrize("text", ["1" * 60_000 + "x", "1" * 30_000 + "." + "1" * 30_000, "." + "1" * 60_000 + "e"])
def test_what_is_almost_a_number_takes_no_time(text: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidArgument, match=r"optimizer\.lr") as caught:
        resolve({"optimizer": {"lr": text}})
    assert time.process_time() - began < 2  # milliseconds; it took a minute
    assert len(str(caught.value)) < 1000


def test_a_number_of_thousands_of_digits_is_text() -> None:
    with pytest.raises(InvalidArgument, match=r"optimizer\.lr"):
        resolve({"optimizer": {"lr": "0" * 10_000 + "1e-3"}})
