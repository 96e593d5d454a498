"""Threads and order of the whole suite.

One thread unless OMP_NUM_THREADS asks for more: the problems are small, and two threads on two busy cores wait for each other.
`--shuffle SEED` runs files, and the tests of each file, in random order.
"""

from __future__ import annotations

import gc
import os
import random
from itertools import groupby

import pytest
import torch

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="random order of files and of the tests of each file")


def pytest_collection_finish() -> None:
    """What is imported stays, so that the garbage collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is None:
        return
    generator = random.Random(seed)
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    generator.shuffle(files)
    for tests in files:  # files stay together, or fixtures of a module would be made again and again
        generator.shuffle(tests)
    items[:] = [item for tests in files for item in tests]
