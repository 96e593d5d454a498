"""Networks of whole tasks for configurations: graphs, images, puzzles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wellposed.errors import InvalidArgument
from wellposed.nn import MultiscaleDEQ
from wellposed.tasks import NodeClassifier, PuzzleSolver, deblurrer

if TYPE_CHECKING:
    from wellposed_lab.runs.models import Design

__all__ = ["deblurring", "multiscale_segmenter", "nodes", "puzzle"]


def nodes(d: Design) -> nn.Module:
    """A classifier of the nodes of chains."""
    if len(d.shape) != 2:
        raise InvalidArgument(f"model.name='node_classifier' needs chains of nodes, as of data.name=chains; got {d.shape}.")
    return NodeClassifier(d.shape[1], d.width, d.classes, **d.options, **d.factory_kwargs, **d.solver_kwargs)


def deblurring(d: Design) -> nn.Module:
    """An equilibrium that restores blurred images."""
    if len(d.shape) != 3:
        raise InvalidArgument(f"model.name='deblurring' needs images, as of data.name=deblurring; got {d.shape}.")
    generator, dtype = d.factory_kwargs["generator"], d.factory_kwargs["dtype"]
    return deblurrer(d.width, channels=d.shape[0], generator=generator, **d.options, **d.solver_kwargs).to(dtype)


def multiscale_segmenter(d: Design) -> nn.Module:
    """Logits of every pixel, of two resolutions."""
    if len(d.shape) != 3:
        raise InvalidArgument(f"model.name='multiscale_segmenter' needs images, as of data.name=camvid; got {d.shape}.")
    sizes: dict[str, Any] = {"stride": 4 if min(d.shape[1:]) >= 64 else 1, "groups": 1}
    return MultiscaleDEQ.segmenter(d.shape[0], (d.width, d.width), d.classes, **sizes, **d.factory_kwargs, **d.solver_kwargs)


def puzzle(make: Callable[..., PuzzleSolver], data: str) -> Callable[[Design], nn.Module]:
    """Makes a solver of puzzles; `data` names those that fit."""

    def made(d: Design) -> nn.Module:
        solver = make(d.width, generator=d.factory_kwargs["generator"], **d.solver_kwargs).to(d.factory_kwargs["dtype"])
        try:
            solver.start(torch.zeros(1, *d.shape, dtype=d.factory_kwargs["dtype"]))
        except InvalidArgument as error:
            raise InvalidArgument(f"{error} Choose data.name={data}.") from None
        return solver

    return made
