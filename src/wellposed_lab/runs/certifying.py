"""The certificate of a network on its training data, for training and for the command line."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wellposed.certify import Certificate, certify
from wellposed.certify._dispatch import WELL_POSED, has_certificate
from wellposed.certify.own_layer import has_layers
from wellposed_lab.runs.own_class import OwnNetwork

__all__ = ["certificate_of", "is_due"]

#: Theorems of a network that is known by its equilibrium layers alone.
OF_LAYERS = ("auto", "well_posed", *WELL_POSED)


def certificate_of(model: nn.Module, X: Any, y: Tensor, theorem: str = "auto") -> Certificate | None:
    """The certificate; None if no theorem of this name is about the network.

    Networks of the theory are certified with their data. Of others with equilibrium layers, what is
    proved for every input.

    Args:
        model: At its present parameters.
        X, y: The training samples.
        theorem: As for `wellposed.certify`.
    """
    if has_certificate(model):
        return certify(model, X, y, theorem=theorem)
    if has_layers(model) and theorem in OF_LAYERS:
        return certify(model, theorem=theorem)
    return None


def is_due(model: nn.Module, theorem: str, *, last: bool) -> bool:
    """Whether training certifies a network after this epoch.

    A network of one's own is certified at the end of the run only: where nothing is proved, that
    can take half a minute. The networks of `models.MODELS` without a theorem are left out: they are
    not certified.

    Args:
        model, theorem: As for `certificate_of`.
        last: Whether this is the last epoch.
    """
    return has_certificate(model) or (last and isinstance(model, OwnNetwork) and has_layers(model) and theorem in OF_LAYERS)
