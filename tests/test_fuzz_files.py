"""Mutated files of every kind: results or sentences, no other error, no hang, no damage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuzz_files import fuzz

pytestmark = pytest.mark.skipif(os.name == "nt", reason="it makes pipes and uses alarms")


def test_a_few_hundred_mutated_files(tmp_path: Path) -> None:
    found = fuzz(tmp_path, 150, seed=1, every=30)
    assert found.failures == []
    # the mutations matter, and not all of them: otherwise this shows nothing
    refused = sum(count for name, count in found.outcomes.items() if not name.endswith("read"))
    assert 25 < refused < 0.9 * found.outcomes.total()


@pytest.mark.slow
def test_ten_thousand_mutated_files(tmp_path: Path) -> None:
    assert fuzz(tmp_path, 10_000, seed=2).failures == []
