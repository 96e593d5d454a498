"""A stored proof of a tiny problem, and changes of one number in it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

import wellposed as wp
from wellposed.prove.seal import seal, tensor_hash

NETWORKS: dict[str, Any] = {
    "relu": lambda **options: wp.GaussianDEQ(4, 24, **options),
    "tanh": lambda **options: wp.GaussianDEQ(4, 24, activation=wp.nn.Tanh(), **options),
    "softplus": lambda **options: wp.GaussianDEQ(4, 24, activation=wp.nn.Softplus(centred=True), **options),
    "skip": lambda **options: wp.SkipDEQ(4, 40, **options),
    "implicit_only": lambda **options: wp.ImplicitOnlyDEQ(4, 40, **options),
}


#: Seeds with short proofs.
SEEDS = {"relu": 2, "tanh": 2, "softplus": 2, "skip": 1, "implicit_only": 1}


def proved(kind: str) -> wp.Proof:
    """A proof about three samples."""
    generator = torch.Generator().manual_seed(SEEDS[kind])
    model = NETWORKS[kind](generator=generator, dtype=torch.float64)
    X = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    X = 2 * X / X.norm(dim=1, keepdim=True)
    y = 0.5 * torch.randn(3, generator=generator, dtype=torch.float64)
    proof = wp.prove(model, X, y, max_steps=300)
    assert proof.verdict is wp.Verdict.CERTIFIED, proof
    return proof


class Stored:
    """The two files of a proof, as objects that can be changed."""

    def __init__(self, folder: Path) -> None:
        self.document: dict[str, Any] = json.loads((folder / "proof.json").read_text())
        self.tensors: dict[str, np.ndarray] = load_file(folder / "proof.safetensors")

    def copy(self) -> Stored:
        """To be changed."""
        return copy.deepcopy(self)

    def write(self, folder: Path, *, sealed: bool) -> Path:
        """Writes both files; `sealed` with checksums that fit, as a forger would."""
        if sealed:
            self.document["hashes"] = {name: tensor_hash(values) for name, values in self.tensors.items()}
            self.document["seal"] = seal(self.document)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "proof.json").write_text(json.dumps(self.document))
        save_file(self.tensors, folder / "proof.safetensors")
        return folder

    def numbers(self) -> list[tuple[Any, ...]]:
        """Paths to all numbers of proof.json."""
        return list(_paths(self.document))

    def at(self, path: tuple[Any, ...]) -> Any:
        """The value at a path."""
        value: Any = self.document
        for key in path:
            value = value[key]
        return value

    def put(self, path: tuple[Any, ...], value: Any) -> None:
        """Changes the value at a path."""
        self.at(path[:-1])[path[-1]] = value


def _paths(value: Any, before: tuple[Any, ...] = ()) -> Any:
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(part, (*before, key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield before
