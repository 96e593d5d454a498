"""The two parts of the closed form, timed apart: the features, and the Gram products of features that are there."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.nn.tangent import TangentFeatures

from . import Run
from .kernel_ours import network


class Solved(nn.Module):
    """A network whose features are known, for the inputs X and rows of them."""

    def __init__(self, model: nn.Module, X: Tensor) -> None:
        super().__init__()
        self.known, self.start = model.tangent_features(X), X.data_ptr()

    def tangent_features(self, X: Tensor) -> TangentFeatures:
        first = (X.data_ptr() - self.start) // (X.element_size() * X.shape[1])
        rows = slice(first, first + X.shape[0])
        return TangentFeatures({name: feature[rows] for name, feature in self.known.features.items()}, self.known.terms)


def parts(arrays: dict) -> Callable[[], Run]:
    """Forward: the features. Total: the kernel from them, without the time of the features."""
    model, X = network(arrays)
    solved = Solved(model, X)

    def run() -> Run:
        start = perf_counter()
        with torch.no_grad():
            model.tangent_features(X)
        middle = perf_counter()
        wp.tangent_kernel(solved, X)
        return Run(middle - start, perf_counter() - middle)

    return run


CONTENDERS = {"parts": parts}
