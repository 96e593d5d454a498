"""Losses of runs: means over samples or pixels, with the measures that are reported beside them."""

from __future__ import annotations

import abc

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.implicit.gradient import AbstractUnrolled
from wellposed.nn import EquilibriumLayer

__all__ = [
    "AbstractLoss",
    "CrossEntropy",
    "NextToken",
    "Reconstruction",
    "Segmentation",
    "Squared",
    "by_few_steps",
    "residual_weight",
]

#: The weight of the residual after few steps, if none is given: see benchmarks/recipe.py.
RESIDUAL = 10.0


class AbstractLoss(abc.ABC):
    """A mean over counted items, samples or pixels; sums, so that batches and processes add up."""

    @abc.abstractmethod
    def total(self, output: Tensor, y: Tensor) -> Tensor:
        """The sum of the loss over the counted items, with a graph."""

    def count(self, y: Tensor) -> int:
        """The number of counted items."""
        return y.shape[0]

    @abc.abstractmethod
    def tally(self, output: Tensor, y: Tensor) -> Tensor:
        """(k,) float64 sums from which `measures` are computed, without a graph."""

    @abc.abstractmethod
    def measures(self, tally: Tensor, count: int) -> dict[str, float]:
        """Names and values, from a sum of tallies."""


class Squared(AbstractLoss):
    """|y_hat - y|^2/2; the accuracy counts equal signs, if the targets are -1 and +1."""

    def __init__(self, *, signs: bool) -> None:
        self.signs = signs

    def total(self, output: Tensor, y: Tensor) -> Tensor:
        if output.shape != y.shape:
            raise InvalidArgument(
                f"The squared loss needs predictions of the shape of the targets, {tuple(y.shape)}; got {tuple(output.shape)}. "
                "A network with several outputs takes loss.name=cross_entropy."
            )
        return 0.5 * (output - y).square().sum()

    def tally(self, output: Tensor, y: Tensor) -> Tensor:
        return ((output * y) > 0).sum().double().reshape(1)

    def measures(self, tally: Tensor, count: int) -> dict[str, float]:
        return {"accuracy": float(tally[0]) / count} if self.signs else {}


class Reconstruction(AbstractLoss):
    """The mean squared error of the pixels of an image; the mean of the peak signal-to-noise ratios
    of images in [0, 1], in dB."""

    def total(self, output: Tensor, y: Tensor) -> Tensor:
        if output.shape != y.shape:
            raise InvalidArgument(
                f"The loss of images needs outputs of the shape of the targets, {tuple(y.shape)}; got {tuple(output.shape)}."
            )
        return (output - y).square().flatten(1).mean(dim=1).sum()

    def tally(self, output: Tensor, y: Tensor) -> Tensor:
        errors = (output - y).double().square().flatten(1).mean(dim=1).clamp(min=1e-20)  # equal images have 200 dB
        return -10 * torch.log10(errors).sum().reshape(1)

    def measures(self, tally: Tensor, count: int) -> dict[str, float]:
        return {"psnr": float(tally[0]) / max(count, 1)}


class CrossEntropy(AbstractLoss):
    """-log softmax of the true class."""

    def total(self, output: Tensor, y: Tensor) -> Tensor:
        _check_logits(output, y)
        return nn.functional.cross_entropy(output, y, reduction="sum")

    def tally(self, output: Tensor, y: Tensor) -> Tensor:
        return (output.argmax(dim=1) == y).sum().double().reshape(1)

    def measures(self, tally: Tensor, count: int) -> dict[str, float]:
        return {"accuracy": float(tally[0]) / count}


class Segmentation(AbstractLoss):
    """Cross-entropy of every pixel that counts; accuracy of pixels, mean intersection over union.

    The mean is over the classes in the truth or the predictions of counted pixels.

    Args:
        classes: Number of logits.
        ignore_index: The label that does not count.
    """

    def __init__(self, classes: int, *, ignore_index: int) -> None:
        self.classes, self.ignore_index = classes, ignore_index

    def total(self, output: Tensor, y: Tensor) -> Tensor:
        _check_logits(output, y)
        return nn.functional.cross_entropy(output, y, ignore_index=self.ignore_index, reduction="sum")

    def count(self, y: Tensor) -> int:
        return int((y != self.ignore_index).sum())

    def tally(self, output: Tensor, y: Tensor) -> Tensor:
        counted = y != self.ignore_index
        pairs = y[counted] * self.classes + output.argmax(dim=1)[counted]
        return torch.bincount(pairs, minlength=self.classes**2).double()

    def measures(self, tally: Tensor, count: int) -> dict[str, float]:
        confusion = tally.reshape(self.classes, self.classes)
        both = confusion.diagonal()
        either = confusion.sum(dim=0) + confusion.sum(dim=1) - both
        present = either > 0
        miou = float((both[present] / either[present]).mean()) if bool(present.any()) else 0.0
        return {"accuracy": float(both.sum()) / max(count, 1), "miou": miou}


class NextToken(AbstractLoss):
    """-log softmax of the next token at every position; perplexity is exp of the mean."""

    def total(self, output: Tensor, y: Tensor) -> Tensor:
        if output.dim() != 3 or output.shape[:2] != y.shape:
            raise InvalidArgument(
                f"The loss of next tokens needs logits of shape (n, length, vocabulary) for targets of shape {tuple(y.shape)}; "
                f"got {tuple(output.shape)}."
            )
        return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum")

    def count(self, y: Tensor) -> int:
        return y.numel()

    def tally(self, output: Tensor, y: Tensor) -> Tensor:
        right = (output.argmax(dim=2) == y).sum().double()
        return torch.stack([right, self.total(output, y).double()])

    def measures(self, tally: Tensor, count: int) -> dict[str, float]:
        return {"accuracy": float(tally[0]) / count, "perplexity": float((tally[1] / count).exp())}


def _check_logits(output: Tensor, y: Tensor) -> None:
    if output.dim() != y.dim() + 1 or output.shape[0] != y.shape[0] or output.shape[2:] != y.shape[1:]:
        raise InvalidArgument(
            f"Cross-entropy needs logits of shape (n, classes, ...) for targets of shape {tuple(y.shape)}; got "
            f"{tuple(output.shape)}."
        )


def residual_weight(model: nn.Module, given: float | None) -> float:
    """The weight of the residual in training by few steps; 0 for networks that do not train so.

    Args:
        model: The network; image networks have a method `regularized`.
        given: `loss.residual` of the configuration.
    """
    if hasattr(model, "regularized"):
        return RESIDUAL if given is None else given
    if given:
        raise InvalidArgument(
            f"loss.residual={given:g} is for networks with a method `regularized`, such as model.name=residual; "
            f"{type(model).__name__} has none. Omit it."
        )
    return 0.0


def by_few_steps(model: nn.Module, given: float | None) -> bool:
    """Whether training takes a fixed number of steps and looks for no equilibria, so that one that
    is not found there says nothing.

    Args:
        model: The network, in training mode.
        given: `loss.residual` of the configuration.
    """
    layers = [module for module in model.modules() if isinstance(module, EquilibriumLayer)]
    unrolled = bool(layers) and all(isinstance(layer.gradient, AbstractUnrolled) for layer in layers)
    return unrolled or residual_weight(model, given) > 0
