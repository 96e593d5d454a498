"""The global random generators of torch, NumPy and Python, as tensors and JSON."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["capture_random_state", "restore_random_state", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seeds the three."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and what JSON can hold."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, python_gauss = random.getstate()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if torch.cuda.is_available():
        tensors |= {f"cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    record = {
        "numpy": {"name": str(name), "position": int(position), "has_gauss": int(has_gauss), "gauss": float(gauss)},
        "python": {"version": version, "words": list(words), "gauss": python_gauss},
    }
    return tensors, record


def restore_random_state(tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Puts the three back; the tensors are named "random/torch" and so on."""
    torch.set_rng_state(tensors["random/torch"])
    keys = tensors["random/numpy"].numpy().astype(np.uint32)
    numpy = record["numpy"]
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    python = record["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            if f"random/cuda{i}" in tensors:
                torch.cuda.set_rng_state(tensors[f"random/cuda{i}"], i)
