"""Trained weights by name, each in a folder with `config.json` and `model.safetensors`.

The architecture of a name is in this file and not in the configuration, so a file from a stranger
can state numbers only; see `wellposed._stored`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from wellposed._stored import CONFIG, TENSORS, check_finite, check_shapes, folder_of, read_config, read_tensors, write
from wellposed.errors import CheckpointRefused, InvalidArgument, InvalidType, did_you_mean
from wellposed.tasks._compared import check_fixed, check_output, check_same

#: The weights that come with the package.
INCLUDED = Path(__file__).parent / "weights"


@dataclass(frozen=True)
class Architecture:
    """What a name stands for.

    Attributes:
        make: "module:function" that makes the network.
        arguments: Of that function, all of them simple values; a card must state the same.
        shape: Of an input, with which `save` compares outputs.
        command: Makes the weights; {folder} is where.
    """

    make: str
    arguments: Mapping[str, Any]
    shape: tuple[int, ...]
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
        (2, 5, 20),
        "python examples/chains.py --save {folder}",
    ),
    "sudoku": Architecture(
        "wellposed.tasks.puzzles:PuzzleSolver.sudoku",
        {"width": 32},
        (2, 4, 4, 4),
        "python examples/puzzles.py sudoku --save {folder}",
    ),
    "mazes": Architecture(
        "wellposed.tasks.puzzles:PuzzleSolver.mazes",
        {"width": 24},
        (2, 3, 7, 7),
        "python examples/puzzles.py mazes --save {folder}",
    ),
    "deblurring": Architecture(
        "wellposed.tasks.imaging:deblurrer",
        {"width": 40, "channels": 3},
        (2, 3, 16, 16),
        "python examples/deblurring.py --save {folder}",
    ),
}


def load(name: str, folder: str | Path | None = None) -> nn.Module:
    """The trained network of a task, in evaluation mode; its card is the attribute `card`.

        >>> import wellposed as wp
        >>> model = wp.tasks.load("sudoku")
        >>> puzzles, answers = wp.data.load("sudoku", n=5, flatten=False)
        >>> bool((model(puzzles).argmax(dim=1) == answers).all())
        True

    Args:
        name: "chains", "deblurring", "mazes" or "sudoku".
        folder: Where `save` wrote the weights; those that come with the package if not given.

    Raises:
        CheckpointRefused: The weights are missing or damaged, or belong to another architecture.
    """
    design = _design(name)
    place = INCLUDED / name if folder is None else folder_of(folder)
    command = design.command.format(folder=f"{folder or 'FOLDER'}")
    card = read_config(place, name)
    if card is None:
        where = "are not part of this package" if folder is None else f"are not in {place}"
        then = "" if folder is not None else f", then open them by wp.tasks.load({name!r}, FOLDER)"
        raise CheckpointRefused(
            f"The weights of {name!r} {where}. Make them in a clone of the repository by `{command}`{then}."
        )
    remedy = f"Make them anew by `{command}`."
    if card["arguments"] != dict(design.arguments):
        seen, expected = f"{card['arguments']!r:.200}", dict(design.arguments)
        raise CheckpointRefused(f"{place / CONFIG} is of another architecture: {seen}; {name!r} has {expected}. {remedy}")
    network: Any = design.build()
    tensors = read_tensors(place, card, network.state_dict(), remedy)
    check_fixed(tensors, network, f"{place / TENSORS} is of another architecture", CheckpointRefused, remedy)
    network.load_state_dict(tensors)
    network.card = card
    opened: nn.Module = network.eval()
    return opened


def save(network: nn.Module, name: str, folder: str | Path, *, card: Mapping[str, Any] | None = None) -> Path:
    """Writes the weights of a task to a separate folder, as `load` reads them.

    A name stands for one network, so `load` must give the network that was saved: its modules and
    all their settings are compared with those of the name, and its output with that of the stored
    network. That includes `rtol`, `max_steps` and the solver of its layer. To keep others, save
    with those of the name and set them again after `load`. `on_failure` may differ; it is not
    stored.

    Args:
        network: Of the architecture of this name, with finite weights.
        name, folder: As for `load`.
        card: What else the configuration says: data, training, measured numbers. Simple values.

    Examples:
        >>> import tempfile, wellposed as wp
        >>> folder = tempfile.mkdtemp()
        >>> model = wp.tasks.load("chains")
        >>> path = wp.tasks.save(model, "chains", folder, card={"data": "chains of my own"})
        >>> wp.tasks.load("chains", folder).card["data"]
        'chains of my own'

    Raises:
        InvalidArgument: The network is not the one of this name, or has weights that are NaN.
    """
    design, place = _design(name), folder_of(folder)
    if not isinstance(network, nn.Module):
        raise InvalidType(f"tasks.save takes the network of {name!r}; got {type(network).__name__}.")
    state, twin = network.state_dict(), design.build()
    what, remedy = f"This network is not the one of {name!r}", f"Make it by {_call(design)}, or store only its state_dict."
    check_shapes(state, twin.state_dict(), what, InvalidArgument, remedy)
    check_fixed(state, twin, what, InvalidArgument, remedy)
    check_same(network, twin, what, remedy)
    check_finite(state, f"The network of {name!r}", InvalidArgument, "They would not be read back.")
    twin.load_state_dict(state)
    check_output(network, twin, design.shape, what, remedy)
    return write(place, name, design.arguments, state, card)


def _call(design: Architecture) -> str:
    options = ", ".join(f"{key}={value!r}" for key, value in design.arguments.items())
    return f"wp.tasks.{design.make.partition(':')[2]}({options})"


def _design(name: str) -> Architecture:
    if not isinstance(name, str):
        raise InvalidType(f"The name of a task is a text, such as 'sudoku'; got {type(name).__name__}.")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InvalidArgument(f"Unknown task {name!r:.60}; known are {known}.{did_you_mean(str(name)[:60], ARCHITECTURES)}")
    return ARCHITECTURES[name]
