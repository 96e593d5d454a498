"""Threads and order of the whole suite.

One thread unless OMP_NUM_THREADS asks for more: the problems are small, and two threads on two busy cores wait for each other.
`--shuffle SEED` runs files, and the tests of each file, in random order; with `--portion P`, only a random part P of each file.
"""

from __future__ import annotations

import gc
import math
import os
import random
from itertools import groupby

import pytest
import torch

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="random order of files and of the tests of each file")
    parser.addoption("--portion", type=float, default=1.0, metavar="P", help="with --shuffle: the part of each file that runs")


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
        del tests[math.ceil(config.getoption("--portion") * len(tests)) :]
    items[:] = [item for tests in files for item in tests]
