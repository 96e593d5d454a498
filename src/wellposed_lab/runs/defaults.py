"""What a configuration leaves open (`auto`), filled in so that data, network and loss fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wellposed.data.own import checksum, is_path, own_path
from wellposed_lab.runs.models import kind_of

if TYPE_CHECKING:
    from wellposed_lab.runs.config import Config, DataSection

__all__ = ["LOSSES", "filled_in"]

#: The loss of a task.
LOSSES = {"regression": "squared", "classification": "cross_entropy", "segmentation": "segmentation"}
#: The network of a task, if none is named.
NETWORKS = {"regression": "gaussian", "classification": "dense", "segmentation": "segmenter"}
#: Data without classes to choose from, and what they are for.
WITHOUT_CLASSES = {"sphere": "regression", "moons": "regression", "camvid": "segmentation"}

#: The width of a network of images, if none is said: these are channels, and a step costs their square at every pixel.
CHANNELS = 32


def filled_in(config: Config) -> Config:
    """The configuration with a network, classes, shapes and a loss in the place of `auto`; what was said is never changed.

    The network follows the data, then the loss, then the number of classes; classes and loss follow the network: one output
    learns the classes 0 and 1, a classifier all of them, and data without classes to choose from have none. A network of images
    has 32 channels where no width is said.
    """
    data, model, loss = _of_file(config.data) if is_path(config.data.name) else config.data, config.model, config.loss
    if model.name == "auto":
        model = model.model_copy(update={"name": NETWORKS[_task(config)]})
    kind = kind_of(model.name)
    task = kind.task
    if kind.images and "width" not in model.model_fields_set:
        model = model.model_copy(update={"width": CHANNELS})
    if data.classes == "auto":
        classes = [0, 1] if task == "regression" and data.name not in WITHOUT_CLASSES and not is_path(data.name) else None
        data = data.model_copy(update={"classes": classes})
    if data.flatten == "auto":
        data = data.model_copy(update={"flatten": not kind.images})
    if loss.name == "auto":
        loss = loss.model_copy(update={"name": LOSSES[task]})
    return config.model_copy(update={"data": data, "model": model, "loss": loss})


def _of_file(data: DataSection) -> DataSection:
    """All of a file and as it is, unless said; by its full path, with its checksum, so that a run finds it again as it was."""
    said = data.model_fields_set
    changes: dict[str, Any] = {key: None for key in ("n", "norm") if key not in said}
    path = own_path(data.name).absolute()
    if data.sha256 is None:
        changes["sha256"] = checksum(str(path))
    return data.model_copy(update={**changes, "name": str(path)})


def _task(config: Config) -> str:
    """What a network is asked for that is not named."""
    data, loss = config.data, config.loss
    if data.name in WITHOUT_CLASSES:
        return WITHOUT_CLASSES[data.name]
    if loss.name != "auto":
        return next(task for task, name in LOSSES.items() if name == loss.name)
    if is_path(data.name):  # numbers, unless classes are named
        return "classification" if isinstance(data.classes, list) and len(data.classes) > 2 else "regression"
    return "regression" if data.classes == "auto" or (data.classes is not None and len(data.classes) == 2) else "classification"
