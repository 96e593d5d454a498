"""Generators outside of torch from which a function may draw."""

from __future__ import annotations

import pickle
import random
import sys


def outer_states() -> tuple[object, bytes]:
    """Of the generators that the functions of Python's `random`, and of `numpy.random`, share."""
    return random.getstate(), _numpy_state()


def _numpy_state() -> bytes:
    """Of the generator that functions of numpy.random share; empty if that was not imported."""
    module = sys.modules.get("numpy.random")
    return b"" if module is None else pickle.dumps(module.get_state(legacy=False))
