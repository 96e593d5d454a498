"""A network in a folder: `config.json` and `model.safetensors`, as on the Hugging Face hub.

A file from a stranger can state numbers only: names, shapes, dtypes, sizes and the checksum are
compared before a number is used, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellposed._checks import check_path
from wellposed._io import check_outputs, write_whole
from wellposed._reading import read_bytes, read_object
from wellposed.errors import CheckpointRefused, InvalidArgument, InvalidType, required

CONFIG, TENSORS = "config.json", "model.safetensors"
MODEL_TYPE, VERSION = "wellposed", 1
OWN_KEYS = ("model_type", "version", "architectures", "arguments", "bytes", "sha256")  #: Of a configuration, not of its card.
#: Largest sizes in bytes: of a configuration, and of the header of the tensors; of the tensors it is known.
LARGEST, HEADER = 1 << 16, 1 << 18


def folder_of(folder: Any) -> Path:
    """A path, or `InvalidType`."""
    return check_path("The folder of a network", folder)


def write(
    folder: Path, architecture: str, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor], card: Any, **own: Any
) -> Path:
    """Writes both files, the configuration last; returns its path.

    Args:
        folder: Made if it does not exist.
        architecture: The name of what is stored.
        arguments: With which it is made; finite numbers, texts, lists and tables.
        tensors: All parameters and buffers.
        card: What else the configuration says, by texts. own: What the library says beside it.
    """
    if not isinstance(card, Mapping | None):
        raise InvalidType(f"A card is a table of texts and simple values; got {type(card).__name__}.")
    for key in card or {}:
        if not isinstance(key, str) or key in OWN_KEYS:
            raise InvalidArgument(f"A card cannot have the key {key!r:.60}: give it a text other than {', '.join(OWN_KEYS)}.")
    check_finite(tensors, "The network", InvalidArgument, "They would not be read back; go back to finite parameters.")
    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    content: bytes = _safetensors().save(plain, {"format": "pt"})
    config = {
        **(card or {}),
        **own,
        "model_type": MODEL_TYPE,
        "version": VERSION,
        "architectures": [architecture],
        "arguments": dict(arguments),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    try:
        text = json.dumps(config, indent=1, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{CONFIG} can hold finite numbers, texts, lists and tables only ({error}).") from error
    if len(text) > LARGEST:
        raise InvalidArgument(f"{CONFIG} would have {len(text):,} bytes; at most {LARGEST:,} are read back.")
    check_outputs(folder, [CONFIG, TENSORS])
    write_whole(folder / TENSORS, content, begun=False)
    write_whole(folder / CONFIG, text + b"\n", begun=False)
    return folder / CONFIG


def read_config(folder: Path, architecture: str) -> dict[str, Any] | None:
    """The configuration of this architecture; None if there is none in the folder."""
    config = read_object(folder / CONFIG, limit=LARGEST, error=CheckpointRefused)
    if config is None:
        return None
    version = config.get("version")
    if config.get("model_type") != MODEL_TYPE or type(version) is not int or version != VERSION:
        seen = f"model_type {config.get('model_type')!r:.40}, version {version!r:.40}"
        raise CheckpointRefused(f"{folder / CONFIG} is not of a {MODEL_TYPE} network, version {VERSION}: it has {seen}.")
    if config.get("architectures") != [architecture]:
        raise CheckpointRefused(f"{folder / CONFIG} is of {config.get('architectures')!r:.80}; expected [{architecture!r}].")
    if not isinstance(config.get("arguments"), dict):
        raise CheckpointRefused(f"{folder / CONFIG} has no table of arguments.")
    return config


def read_tensors(folder: Path, config: Mapping[str, Any], wanted: Mapping[str, Tensor], remedy: str) -> dict[str, Tensor]:
    """The tensors, with the size and checksum of the configuration and the shapes expected.

    Args:
        folder, config: Of the network.
        wanted: Its parameters and buffers, as they are after it was made.
        remedy: What to do if they do not fit: the end of an error.
    """
    path, size = folder / TENSORS, config.get("bytes")
    least = sum(value.numel() * value.element_size() for value in wanted.values())
    if type(size) is not int or type(config.get("sha256")) is not str or not least < size <= least + HEADER:
        stated = f"{folder / CONFIG} states {size!r:.40} bytes of tensors"
        raise CheckpointRefused(f"{stated}; those of this network take {least:,} and a header. {remedy}")
    content = read_bytes(path, limit=size, error=CheckpointRefused)
    if content is None:
        raise CheckpointRefused(f"{path} is missing; only {CONFIG} is there. {remedy}")
    if len(content) != size or hashlib.sha256(content).hexdigest() != config["sha256"]:
        raise CheckpointRefused(f"{path} is damaged: its size or checksum is not that of {CONFIG}. {remedy}")
    library = _safetensors()
    try:
        tensors: dict[str, Tensor] = library.load(content)
    except Exception as error:  # SafetensorError and more: whatever it is, these are not tensors
        raise CheckpointRefused(f"{path} does not hold tensors ({' '.join(str(error).split())[:200]}). {remedy}") from error
    check_shapes(tensors, wanted, f"{path} is of another architecture", CheckpointRefused, remedy)
    check_finite(tensors, f"{path}", CheckpointRefused, remedy)
    return tensors


def check_finite(tensors: Mapping[str, Tensor], what: str, error: Any, remedy: str) -> None:
    """Raises if a number is NaN or infinite."""
    for key, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise error(f"{what} has numbers in {key} that are not finite. {remedy}")


def check_shapes(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str, error: Any, remedy: str) -> None:
    """Raises unless names, shapes and dtypes agree."""
    for key in (*wanted, *tensors):
        seen, expected = (
            f"{values[key].dtype} {tuple(values[key].shape)}" if key in values else "nothing" for values in (tensors, wanted)
        )
        if seen != expected:
            raise error(f"{what}: {key[:60]} is {seen}, expected {expected}. {remedy}")


def _safetensors() -> Any:
    return required("safetensors.torch", "Stored weights need safetensors", extra="runs")
