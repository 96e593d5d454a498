"""Networks that write themselves to a folder, and are made again from it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from wellposed._stored import CONFIG, TENSORS, folder_of, read_config, read_tensors, write
from wellposed.errors import CheckpointRefused, InvalidArgument, required
from wellposed.nn import activations
from wellposed.nn.layer import EquilibriumLayer

Network = TypeVar("Network", bound="Pretrained")
#: Arguments that say where and how a network is drawn, not what it is.
_DRAWN = ("generator", "device")
#: A name on the hub, with its owner or without.
_NAME_ON_HUB = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
#: Depth and number of entries of an argument in a configuration.
_DEPTH, _ENTRIES = 4, 1000


class Pretrained(nn.Module):
    """A network with the conventions of the Hugging Face hub, without the network.

        >>> import tempfile, torch, wellposed as wp
        >>> folder = tempfile.mkdtemp()
        >>> model = wp.GaussianDEQ(4, 32)
        >>> path = model.save_pretrained(folder)
        >>> again = wp.GaussianDEQ.from_pretrained(folder)
        >>> torch.equal(again.W, model.W)
        True

    `config.json` has the arguments with which the network was made, `model.safetensors` its
    parameters and buffers. Nothing is unpickled, and the files name no code.

    A module of your own inherits it: `class Mine(Pretrained): ...`. Its constructor takes simple
    values, dtypes and activations of `wellposed.nn`, and also works under `torch.device("meta")`;
    other arguments (a solver, a gradient) are not stored, and `from_pretrained` asks for them by
    name.
    """

    _made_with: dict[str, Any]
    card: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets the constructor of each class remember its arguments."""
        super().__init_subclass__(**kwargs)
        if (init := cls.__dict__.get("__init__")) is not None:
            cls.__init__ = _remembering(init)  # type: ignore[method-assign]

    def save_pretrained(self, folder: Any, *, card: Mapping[str, Any] | None = None) -> Path:
        """Writes `config.json` and `model.safetensors`; returns the path of the first.

        Args:
            folder: Made if it does not exist.
            card: What else the configuration says: data, training, measured numbers.
        """
        stored, missing = _split(self._made_with)
        state = self.state_dict()
        dtypes = {str(value.dtype).removeprefix("torch.") for value in state.values() if value.is_floating_point()}
        if len(dtypes) > 1:
            raise InvalidArgument(f"A network of one dtype can be stored; this one has {', '.join(sorted(dtypes))}.")
        own = {"library_name": "wellposed", "torch_dtype": "".join(dtypes), "not_stored": missing}
        return write(folder_of(folder), type(self).__name__, stored, state, card, **own)

    @classmethod
    def from_pretrained(cls: type[Network], folder: Any, **arguments: Any) -> Network:
        """The network of a folder, in evaluation mode; its configuration is the attribute `card`.

        Args:
            folder: Where `save_pretrained` wrote, or `owner/name` on the hub, if huggingface_hub is
                installed and there is no folder of that name.
            arguments: Of the constructor: those that the configuration does not have, and changes
                that keep the shapes of the weights, such as `rtol`. Without them `rtol`,
                `max_steps` and `on_failure` are those of the file, as in `card["arguments"]`;
                tolerances of 1 and more, with which everything converges, are refused.

        Raises:
            CheckpointRefused: The files are missing or damaged, or belong to another network.
        """
        place = folder_of(folder)
        if not place.is_dir():
            place = _downloaded(str(folder))
        config = read_config(place, cls.__name__)
        if config is None:
            raise CheckpointRefused(f"{place} has no {CONFIG}; write one with save_pretrained.")
        absent = config.get("not_stored", [])
        if not isinstance(absent, list) or not all(type(name) is str for name in absent):
            raise CheckpointRefused(f"{place / CONFIG}: not_stored must be a list of names; got {absent!r:.80}.")
        if needed := [name for name in absent if name not in arguments]:
            raise InvalidArgument(
                f"{place / CONFIG} does not have {', '.join(needed)}; give them to {cls.__name__}.from_pretrained."
            )
        if drawn := [name for name in _DRAWN if name in config["arguments"]]:
            raise CheckpointRefused(f"{place / CONFIG} has the argument {drawn[0]!r}, which is never stored; give your own.")
        chosen = {name: _decoded(value, 0) for name, value in config["arguments"].items()} | arguments
        dtype = _dtype(config.get("torch_dtype"))
        if dtype is not None and not dtype.is_floating_point:
            raise CheckpointRefused(f"{place / CONFIG}: torch_dtype must be a floating point dtype; got {dtype}.")
        try:
            with torch.device("meta"):  # shapes without memory: a width from a stranger may be 10^9
                wanted = cls(**chosen).to(dtype).state_dict()
            tensors = read_tensors(place, config, wanted, "Save the network again with save_pretrained.")
            network = cls(**chosen).to(dtype)
        except CheckpointRefused:
            raise
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # the last two are of torch
            fault = " ".join(str(error).split())[:300]
            raise CheckpointRefused(f"{place / CONFIG} does not fit {cls.__name__}: {fault}") from error
        _check_tolerances(network, f"{place / CONFIG}", arguments)
        network.load_state_dict(tensors)
        network.card = config
        return network.eval()

    def push_to_hub(self, repo_id: str, *, card: Mapping[str, Any] | None = None) -> Any:
        """Uploads what `save_pretrained` writes; needs huggingface_hub and a login."""
        hub = required("huggingface_hub", "Uploading needs huggingface_hub", extra="hub")
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, card=card)
            api = hub.HfApi()
            api.create_repo(repo_id, exist_ok=True)
            return api.upload_folder(repo_id=repo_id, folder_path=folder)


def _check_tolerances(network: nn.Module, what: str, given: Mapping[str, Any]) -> None:
    """Tolerances that a caller did not give must be below 1."""
    for name in ("rtol", "atol"):
        for layer in network.modules():
            value = getattr(layer, name) if isinstance(layer, EquilibriumLayer) else None
            if value is not None and name not in given and not value < 1:
                raise CheckpointRefused(f"{what} states {name}={value:g}, expected below 1. Give {name}= to from_pretrained.")


def _remembering(init: Any) -> Any:
    @functools.wraps(init)
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        if "_made_with" not in self.__dict__:  # the constructor of the object's own class, which is called first
            bound = inspect.signature(init).bind(self, *args, **kwargs)
            named = dict(list(bound.arguments.items())[1:])
            for parameter in bound.signature.parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:
                    named |= named.pop(parameter.name, {})
            object.__setattr__(self, "_made_with", named)
        init(self, *args, **kwargs)

    return remember


def _split(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Arguments as JSON, and the names of those that cannot be."""
    stored, missing = {}, []
    for name, value in arguments.items():
        if name in _DRAWN:
            continue
        try:
            stored[name] = _encoded(value, 0)
        except TypeError:
            missing.append(name)
    return stored, missing


def _encoded(value: Any, depth: int) -> Any:
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (tuple, list)) and depth < _DEPTH and len(value) <= _ENTRIES:
        return [_encoded(part, depth + 1) for part in value]
    if type(value) in _ACTIVATIONS.values():
        fields = {item.name: _encoded(getattr(value, item.name), depth + 1) for item in dataclasses.fields(value) if item.init}
        return {"activation": type(value).__name__, "arguments": fields}
    raise TypeError


def _decoded(value: Any, depth: int) -> Any:
    """What `_encoded` wrote; `CheckpointRefused` for anything else."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, list) and depth < _DEPTH and len(value) <= _ENTRIES:
        return tuple(_decoded(part, depth + 1) for part in value)
    if isinstance(value, dict) and value.keys() == {"dtype"}:
        return _dtype(value["dtype"])
    if isinstance(value, dict) and value.keys() == {"activation", "arguments"} and isinstance(value["arguments"], dict):
        kind = _ACTIVATIONS.get(value["activation"]) if type(value["activation"]) is str else None
        if kind is not None:
            try:
                return kind(**{name: _decoded(part, depth + 1) for name, part in value["arguments"].items()})
            except (TypeError, ValueError) as error:
                raise CheckpointRefused(f"{CONFIG} has an activation that cannot be made: {error}.") from error
    raise CheckpointRefused(f"{CONFIG} has an argument that is not a number, a text, a dtype or an activation: {value!r:.80}.")


def _dtype(name: Any) -> torch.dtype | None:
    """Of a name such as "float64"; None of ""."""
    found = getattr(torch, name, None) if type(name) is str else None
    if name != "" and not isinstance(found, torch.dtype):
        raise CheckpointRefused(f"{CONFIG} has an unknown dtype: {name!r:.40}.")
    return found


#: The activations that a configuration may name.
_ACTIVATIONS: dict[str, Any] = {
    kind.__name__: kind
    for kind in vars(activations).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == activations.__name__
}


def _downloaded(name: str) -> Path:
    """The folder of a network of the hub."""
    missing = f"There is no folder {name!r:.200}"
    if re.fullmatch(_NAME_ON_HUB, name) is None:
        raise CheckpointRefused(f"{missing}; give the one that save_pretrained wrote.")
    why = f"{missing}, and a name on the Hugging Face hub needs huggingface_hub"
    hub = required("huggingface_hub", why, extra="hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=[CONFIG, TENSORS]))
    except Exception as error:  # no network, no such name, no access, a full disk: many kinds
        raise CheckpointRefused(
            f"{missing}, and nothing of that name came from the Hugging Face hub ({type(error).__name__}). "
            "Check the path, or the name and the network."
        ) from error
