"""Trained weights by name: `<name>.safetensors` with a model card, `<name>.json`.

The architecture of a name is in this file and not in the card, so a file from a stranger can state
numbers only: names, shapes, sizes and checksum are compared before a number is used, and nothing is
unpickled.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_path
from wellposed._io import check_outputs, write_whole
from wellposed._reading import read_bytes, read_object
from wellposed.errors import CheckpointRefused, InvalidArgument, InvalidType, did_you_mean, required

FORMAT, VERSION = "wellposed-task", 1
#: The weights that come with the package.
INCLUDED = Path(__file__).parent / "weights"
#: Largest sizes in bytes: of a card, and of the header of the tensors; of the tensors it is known.
CARD, HEADER = 1 << 16, 1 << 16


@dataclass(frozen=True)
class Architecture:
    """What a name stands for.

    Attributes:
        make: "module:function" that makes the network.
        arguments: Of that function, all of them simple values; a card must state the same.
        command: Makes the weights; {folder} is where.
    """

    make: str
    arguments: Mapping[str, Any]
    command: str

    def build(self) -> nn.Module:
        """The network, with weights that are not trained."""
        module, _, path = self.make.partition(":")
        made: Any = importlib.import_module(module)
        for part in path.split("."):
            made = getattr(made, part)
        network: nn.Module = made(**self.arguments)
        return network


#: All names. A line here, and weights in the folder `weights` if their data are free.
ARCHITECTURES: dict[str, Architecture] = {
    "chains": Architecture(
        "wellposed.tasks.graphs:NodeClassifier",
        {"in_features": 20, "width": 64, "classes": 20, "bound": 0.99},
        "python examples/chains.py --save {folder}",
    ),
    "sudoku": Architecture(
        "wellposed.tasks.puzzles:PuzzleSolver.sudoku", {"width": 32}, "python examples/puzzles.py sudoku --save {folder}"
    ),
    "mazes": Architecture(
        "wellposed.tasks.puzzles:PuzzleSolver.mazes", {"width": 24}, "python examples/puzzles.py mazes --save {folder}"
    ),
    "deblurring": Architecture(
        "wellposed.tasks.imaging:deblurrer", {"width": 40, "channels": 3}, "python examples/deblurring.py --save {folder}"
    ),
}


def load(name: str, folder: str | Path | None = None) -> nn.Module:
    """The trained network of a task, in evaluation mode; its card is the attribute `card`.

        >>> import wellposed as wp
        >>> model = wp.tasks.load("sudoku")  # doctest: +SKIP

    Args:
        name: "chains", "deblurring", "mazes" or "sudoku".
        folder: Where `save` wrote the weights; those that come with the package if not given.

    Raises:
        CheckpointRefused: The weights are missing or damaged, or belong to another architecture.
    """
    design = _design(name)
    place = INCLUDED if folder is None else _place(folder)
    command = design.command.format(folder=f"{folder or 'FOLDER'}")
    card = read_object(place / f"{name}.json", limit=CARD, error=CheckpointRefused)
    if card is None:
        where = "are not part of this package" if folder is None else f"are not in {place}"
        then = "" if folder is not None else f", then open them by wp.tasks.load({name!r}, FOLDER)"
        raise CheckpointRefused(
            f"The weights of {name!r} {where}. Make them in a clone of the repository by `{command}`{then}."
        )
    network: Any = design.build()
    wanted = network.state_dict()
    remedy = f"Make them anew by `{command}`."
    _check_card(name, card, design, wanted, remedy)
    tensors = _tensors(place / f"{name}.safetensors", card, wanted, remedy)
    network.load_state_dict(tensors)
    network.card = card
    opened: nn.Module = network.eval()
    return opened


def save(network: nn.Module, name: str, folder: str | Path, *, card: Mapping[str, Any] | None = None) -> Path:
    """Writes the weights of a task and their model card, as `load` reads them.

    Args:
        network: Of the architecture of this name.
        name, folder: As for `load`.
        card: What else the card says: data, training, measured numbers. Simple values.
    """
    design, place = _design(name), _place(folder)
    if not isinstance(network, nn.Module):
        raise InvalidType(f"tasks.save takes the network of {name!r}; got {type(network).__name__}.")
    tensors = {key: value.detach().cpu().contiguous() for key, value in network.state_dict().items()}
    _check_shapes(tensors, design.build().state_dict(), f"This network is not the one of {name!r}", InvalidArgument)
    content: bytes = _safetensors().save(tensors)
    record = {
        **(card or {}),
        "format": FORMAT,
        "version": VERSION,
        "task": name,
        "arguments": dict(design.arguments),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    try:
        text = json.dumps(record, indent=1, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"The model card must hold finite numbers, texts, lists and tables only ({error}).") from error
    if len(text) > CARD:
        raise InvalidArgument(f"The model card has {len(text):,} bytes; at most {CARD:,} are read back.")
    check_outputs(place, [f"{name}.json", f"{name}.safetensors"])
    write_whole(place / f"{name}.safetensors", content, begun=False)
    write_whole(place / f"{name}.json", text + b"\n", begun=False)
    return place / f"{name}.json"


def _place(folder: Any) -> Path:
    return check_path("The folder of the weights", folder)


def _design(name: str) -> Architecture:
    if not isinstance(name, str):
        raise InvalidType(f"The name of a task is a text, such as 'sudoku'; got {type(name).__name__}.")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InvalidArgument(f"Unknown task {name!r:.60}; known are {known}.{did_you_mean(str(name)[:60], ARCHITECTURES)}")
    return ARCHITECTURES[name]


def _check_card(name: str, card: dict[str, Any], design: Architecture, wanted: dict[str, Tensor], remedy: str) -> None:
    """Raises unless the card is that of this architecture and of tensors of a possible size."""
    version = card.get("version")
    if card.get("format") != FORMAT or type(version) is not int or version != VERSION or card.get("task") != name:
        seen = f"{card.get('format')!r:.40}, version {version!r:.40}, of {card.get('task')!r:.40}"
        raise CheckpointRefused(f"{name}.json is not a model card of {name!r}, version {VERSION}: it is {seen}.")
    if card.get("arguments") != dict(design.arguments):
        raise CheckpointRefused(
            f"{name}.json is of another architecture: {card.get('arguments')!r:.200}; {name!r} has {dict(design.arguments)}. "
            + remedy
        )
    size, least = card.get("bytes"), sum(value.numel() * value.element_size() for value in wanted.values())
    if type(size) is not int or type(card.get("sha256")) is not str or not least < size <= least + HEADER:
        raise CheckpointRefused(
            f"{name}.json states {size!r:.40} bytes of tensors; those of {name!r} take {least:,} and a header. {remedy}"
        )


def _tensors(path: Path, card: dict[str, Any], wanted: dict[str, Tensor], remedy: str) -> dict[str, Tensor]:
    """The tensors of a file, with the size and checksum of its card and the shapes expected."""
    content = read_bytes(path, limit=card["bytes"], error=CheckpointRefused)
    if content is None:
        raise CheckpointRefused(f"{path} is missing; only its card is there. {remedy}")
    if len(content) != card["bytes"] or hashlib.sha256(content).hexdigest() != card["sha256"]:
        raise CheckpointRefused(f"{path} is damaged: its size or checksum is not that of its card. {remedy}")
    try:
        tensors: dict[str, Tensor] = _safetensors().load(content)
    except Exception as error:  # SafetensorError and more: whatever it is, these are not tensors
        raise CheckpointRefused(f"{path} does not hold tensors ({' '.join(str(error).split())[:200]}). {remedy}") from error
    _check_shapes(tensors, wanted, f"{path} is of another architecture", CheckpointRefused, remedy)
    for key, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise CheckpointRefused(f"{path} has numbers in {key} that are not finite. {remedy}")
    return tensors


def _check_shapes(
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    what: str,
    error: Any,
    remedy: str = "Use the class of the task.",
) -> None:
    """Raises unless names, shapes and dtypes agree."""
    for key in (*wanted, *tensors):
        seen, expected = (
            f"{values[key].dtype} {tuple(values[key].shape)}" if key in values else "nothing" for values in (tensors, wanted)
        )
        if seen != expected:
            raise error(f"{what}: {key[:60]} is {seen}, expected {expected}. {remedy}")


def _safetensors() -> Any:
    return required("safetensors.torch", "Stored weights need safetensors", extra="runs")
