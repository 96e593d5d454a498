"""Reads a stored proof of unknown origin: strictly, within limits, and executes nothing of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from wellposed._reading import opened, read_object
from wellposed.errors import RunError
from wellposed.prove.verify_digits import Floats

#: Largest sizes in bytes; a checkpoint of width 1000 takes 22 MB.
JSON_LIMIT, HEADER_LIMIT, TENSORS_LIMIT = 1 << 28, 1 << 24, 1 << 36
#: Largest numbers of samples, units, inputs and steps.
MOST = {"n": 8192, "m": 8192, "d": 1_000_000}
MOST_STEPS = 10_000_000

_STEPS = ("delta", "loss", "expansion", "jacobian", "omega", "error", "mask_ratio", "residual")
#: What proof.json has, and what it has in some of its parts. A number that is not named here cannot be checked.
_NAMES = {
    *("format", "version", "program", "verdict", "reason", "family", "activation", "sizes", "scales", "step_size"),
    *("num_steps", "delta", "loss", "radius", "rate", "distance", "assumptions", "hashes", "steps", "tail", "checkpoints"),
    "seal",
}
#: What proof.json has besides the proof: nothing in it is checked, and nothing that is proved depends on it.
NOT_PROVED = ("seconds", "attempts")
_TAILS = {
    False: ("residual", "s", "L", "f", "e0", "g", "g0", "kappa", "switches", "omega"),
    True: ("residual", "s0", "L", "Lambda", "c", "slope", "s1", "omega"),
}
#: For each family: the scaled part, the name of its parameter, and whether it is transposed.
FAMILIES: dict[str, dict[str, tuple[str, bool]]] = {
    "gaussian": {"R": ("W", False), "U": ("U", False), "w": ("a", False)},
    "skip": {"R": ("A", False), "U": ("W", False), "w": ("u", False), "v": ("v", False)},
    "implicit_only": {"R": ("A", True), "U": ("W", True), "w": ("b", False)},
}
_DTYPES: dict[str, np.dtype[Any]] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4")}


class StoredProof:
    """The numbers of `proof.json`, checked for their kinds, and the tensors, read when asked for.

    Attributes:
        folder: Where it is.
        document: The whole of proof.json.
        n, m, d, K: Sizes, and the number of steps.
        family, activation, shift: Of the network.
        scales: Of R, U, w, v. step_size: eta.
        steps: The columns. tail: Its numbers, but for g and g0 that are null; None if undecided.
        checkpoints: The steps that have one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        document = read_object(folder / "proof.json", limit=JSON_LIMIT, error=RunError, within=folder)
        if document is None:
            raise RunError(
                f"{folder} holds no proof.json. Give the folder of a proof, which `wellposed prove` or `proof.save` writes."
            )
        self.document = document
        if self.text("format") != "wellposed-proof" or document.get("version") != 3:
            raise self.damaged("it is not a wellposed-proof of version 3; prove it again with this version of the library")
        self._only("proof.json", document, {*_NAMES, *NOT_PROVED})
        self.family = self.one_of("family", document.get("family"), FAMILIES)
        activation = self._only("activation", document.get("activation"), ("name", "shift"))
        self.activation = self.one_of("activation.name", activation.get("name"), ("relu", "tanh", "softplus"))
        self.shift = self.number("activation.shift", activation.get("shift"))
        self.smooth, self.rectified = self.activation != "relu", self.family != "gaussian"
        if self.shift not in ((0.0, math.log(2.0)) if self.activation == "softplus" else (0.0,)):
            raise self.damaged(f"activation.shift is {self.shift!r}, which no {self.activation} has")
        if self.smooth and self.rectified:
            raise self.damaged(f"there is no proof for {self.family} with {self.activation}")
        sizes = self._only("sizes", document.get("sizes"), MOST)
        self.n, self.m, self.d = (self.count(f"sizes.{name}", sizes.get(name), MOST[name], least=1) for name in "nmd")
        self.K = self.count("num_steps", document.get("num_steps"), MOST_STEPS)
        self.parts = FAMILIES[self.family]
        scales = self._only("scales", document.get("scales"), self.parts)
        self.scales = {part: self.number(f"scales.{part}", scales.get(part), least=0.0) for part in self.parts}
        self.step_size = self.number("step_size", document.get("step_size"), least=0.0)
        columns = self._only("steps", document.get("steps"), _STEPS)
        self.steps = {name: self._column(name, columns.get(name)) for name in _STEPS}
        self.tail = None if document.get("tail") is None else self._tail(document["tail"])
        self.checkpoints = [
            self.count("checkpoints", k, self.K) for k in self.of_kind("checkpoints", document.get("checkpoints"), list)
        ]
        if sorted(set(self.checkpoints)) != self.checkpoints or not {0, self.K} <= set(self.checkpoints):
            raise self.damaged("the list of checkpoints is not sorted, or lacks the first or the last step")
        self.hashes = self.of_kind("hashes", document.get("hashes"), dict)
        self._index, self._begin = self._read_header()
        for name in self._index:
            self._check_name(name)

    def damaged(self, why: str) -> RunError:
        """The refusal of a file that is not a proof at all."""
        return RunError(f"{self.folder} cannot be checked: {why}.")

    def of_kind(self, name: str, value: Any, kind: type) -> Any:
        """A value of proof.json of this type."""
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.damaged(f"{name} in proof.json is a {type(value).__name__} and not a {kind.__name__}")
        return value

    def _only(self, name: str, value: Any, known: Any) -> Any:
        """An object of proof.json that has nothing but these names."""
        other = [key for key in self.of_kind(name, value, dict) if key not in known]
        if other:
            raise self.damaged(f"{name} has {str(other[0])[:40]!r}, which a proof does not have")
        return value

    def text(self, name: str) -> str:
        """A text of proof.json."""
        return str(self.of_kind(name, self.document.get(name), str))

    def one_of(self, name: str, value: Any, known: Any) -> str:
        """A text of proof.json that must be one of a few."""
        if not isinstance(value, str) or value not in known:
            raise self.damaged(f"{name} in proof.json is {str(value)[:40]!r}; known are {', '.join(known)}")
        return value

    def number(self, name: str, value: Any, *, least: float = -math.inf) -> float:
        """A finite number of proof.json."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300 or value < least:
            raise self.damaged(f"{name} in proof.json is {str(value)[:40]}, which is not a number that it can be")
        return float(value)

    def count(self, name: str, value: Any, most: int, *, least: int = 0) -> int:
        """A whole number of proof.json."""
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.damaged(f"{name} in proof.json is {str(value)[:40]} and not a whole number from {least} to {most}")
        return value

    def _column(self, name: str, values: Any) -> list[Any]:
        length = self.K + 1 if name == "delta" else self.K
        values = self.of_kind(f"steps.{name}", values, list)
        if len(values) != length:
            raise self.damaged(f"steps.{name} has {len(values)} entries and not {length}")
        optional = name in ("mask_ratio", "expansion")
        label = f"steps.{name}"
        return [
            None if optional and v is None else self.number(label, v, least=-1.0 if name == "omega" else 0.0) for v in values
        ]

    def _tail(self, tail: Any) -> dict[str, float]:
        names = _TAILS[self.smooth]
        tail = self._only("tail", tail, names)
        if tail.get("g", 0) is None and tail.get("g0", 0) is None:  # |F^T r| <= f |r| is as good
            names = tuple(name for name in names if name not in ("g", "g0"))
        least = {"omega": -1.0, "g0": -math.inf}
        return {name: self.number(f"tail.{name}", tail.get(name), least=least.get(name, 0.0)) for name in names}

    def _read_header(self) -> tuple[dict[str, tuple[np.dtype, tuple[int, ...], int, int]], int]:
        """Where each tensor is; all stated sizes are checked against the file."""
        with self._open() as (file, size):
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise self.damaged("the header of proof.safetensors has an impossible length")
            try:
                header = json.loads(file.read(length).decode("utf-8"))
            except (ValueError, RecursionError):
                raise self.damaged("the header of proof.safetensors is not JSON") from None
        begin, index = 8 + length, {}
        for name, entry in self.of_kind("the header", header, dict).items():
            if name == "__metadata__":
                continue
            entry = self.of_kind(name, entry, dict)
            dtype = _DTYPES[self.one_of(f"dtype of {name[:60]}", entry.get("dtype"), _DTYPES)]
            shape = tuple(self.count(name, extent, 1 << 31) for extent in self.of_kind(name, entry.get("shape"), list))
            ends = self.of_kind(name, entry.get("data_offsets"), list)
            first, last = (self.count(name, end, size - begin) for end in (ends if len(ends) == 2 else (None, None)))
            if len(shape) > 2 or last - first != math.prod(shape) * dtype.itemsize:
                raise self.damaged(f"{name[:60]} in proof.safetensors states another size than it has")
            index[name] = (dtype, shape, first, last)
        return index, begin

    def _check_name(self, name: str) -> None:
        """No tensor may be one that the check does not read."""
        what, _, rest = name.partition(".")
        step, _, part = rest.partition(".")
        values = ("Z", "P", "r", "Q", "C") if self.rectified else ("Z", "P", "r")
        known = name in ("X", "y")
        known = known or (what == "start" and rest in [parameter for parameter, _ in self.parts.values()])
        trained = [key for key in self.parts if step == "0" or self.scales[key] > 0]
        allowed = part.removesuffix(".low") in (trained if step == str(self.K) else (*trained, *values))
        if not (known or (what == "checkpoint" and step in map(str, self.checkpoints) and allowed)):
            raise self.damaged(f"proof.safetensors has {name[:60]}, which this proof does not have")

    def _open(self) -> Any:
        return _Opened(self.folder / "proof.safetensors", self)

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._index)

    def raw(self, name: str) -> np.ndarray:
        """A tensor as it is stored."""
        if name not in self._index:
            raise self.damaged(f"proof.safetensors has no {name}")
        dtype, shape, first, last = self._index[name]
        with self._open() as (file, _):
            file.seek(self._begin + first)
            content = file.read(last - first)
        if len(content) != last - first:
            raise self.damaged("proof.safetensors is truncated")
        return np.frombuffer(content, dtype=dtype).reshape(shape)

    def tensor(self, name: str, *shape: int) -> Floats:
        """A tensor of this shape, of finite numbers, as float64."""
        values = self.raw(name).astype(np.float64)
        if values.shape != shape:
            raise self.damaged(f"{name} has the shape {values.shape} and not {shape}")
        if not np.isfinite(values).all():
            raise self.damaged(f"{name} has entries that are not finite")
        return values

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._index


class _Opened:
    """An open file and its size, or the refusal of a missing one."""

    def __init__(self, path: Path, proof: StoredProof) -> None:
        self._path, self._proof = path, proof
        self._context = opened(path, limit=TENSORS_LIMIT, error=RunError, within=path.parent)

    def __enter__(self) -> tuple[BinaryIO, int]:
        found = self._context.__enter__()
        if found is None:
            raise self._proof.damaged("proof.safetensors is missing")
        return found

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
