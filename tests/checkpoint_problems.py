"""Small networks with their optimizers, and checkpoints of them that are changed with right checksums."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import wellposed as wp
from wellposed_lab.runs.checkpoint import _checksum

__all__ = ["KINDS", "forge", "setup", "steps"]

KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def setup(kind: str = "adam", seed: int = 0, width: int = 6) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = wp.GaussianDEQ(3, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return model, KINDS[kind](model.parameters())


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """Steps on data from the global generators, so that these matter too."""
    seen = []
    for _ in range(count):
        X = torch.randn(5, 3, dtype=torch.float64) * (0.5 + random.random()) + np.random.rand() * np.random.randn()
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def forge(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    """Changes a checkpoint and gives it right checksums."""
    binary = path.with_suffix(".safetensors")
    record, tensors = json.loads(path.read_text()), safetensors.torch.load(binary.read_bytes())
    change(record, tensors)
    content = tensors.pop("bytes", None) if "bytes" in tensors else safetensors.torch.save(tensors)
    binary.write_bytes(content)
    if isinstance(record.get("tensors"), dict):
        record["tensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    record.pop("sha256", None)
    path.write_text(json.dumps(record | {"sha256": _checksum(record)}))
