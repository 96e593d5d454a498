"""Asking a network for its tangent features: a few rows at a time, and checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn.tangent import TangentFeatures

__all__ = ["features_of", "has_closed_form", "is_view_of", "rows_at_once"]

#: Bytes of the widest feature of the rows that are solved at once: the solver holds several times as much.
FEATURE_BYTES = 2 * 1024**2
#: Fewer rows would not keep the processor busy.
LEAST_ROWS = 64


def has_closed_form(model: nn.Module) -> bool:
    return callable(getattr(model, "tangent_features", None))


def rows_at_once(model: nn.Module, dtype: torch.dtype) -> int:
    """How many rows to solve at once, before the width of the features is known: that of the parameters tells."""
    width = max((size for parameter in model.parameters() for size in parameter.shape), default=1)
    return max(LEAST_ROWS, FEATURE_BYTES // (dtype.itemsize * width))


def is_view_of(feature: Tensor, X: Tensor) -> bool:
    same = feature.data_ptr() == X.data_ptr() and feature.dtype == X.dtype
    return same and feature.shape[1:] == X.shape[1:] and feature.stride() == X.stride()


def features_of(model: nn.Module, X: Tensor) -> TangentFeatures:
    """The features of some rows, checked; for authors of networks, a mistake is named."""
    name = type(model).__name__
    if X.dim() != 2:
        raise InvalidArgument(f"tangent_kernel: X must be (n, d) for {name}, samples as rows; got shape {tuple(X.shape)}.")
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is not None and X.dtype != parameter.dtype:
        raise InvalidArgument(
            f"tangent_kernel: X must have the dtype of the parameters of {name}, {parameter.dtype}; got {X.dtype}. "
            f"Use X.to({parameter.dtype})."
        )
    with torch.no_grad():
        found = model.tangent_features(X)  # type: ignore[operator]
    if not isinstance(found, TangentFeatures):
        raise InvalidType(f"{name}.tangent_features must return TangentFeatures, got {type(found).__name__}.")
    for products in found.terms.values():
        for term in products:
            for left, right in term.factors:
                _check_pair(found.features, left, right, X.shape[0], name)
    return found


def _check_pair(features: Mapping[str, Tensor], left: str, right: str, rows: int, model: str) -> None:
    for name in (left, right):
        if name not in features:
            raise InvalidArgument(f"{model}.tangent_features: a term names the feature {name!r}, which is not among them.")
        if features[name].dim() != 2 or features[name].shape[0] != rows:
            raise InvalidArgument(
                f"{model}.tangent_features: feature {name!r} must be ({rows}, k), got {tuple(features[name].shape)}."
            )
    if features[left].shape[1] != features[right].shape[1]:
        raise InvalidArgument(
            f"{model}.tangent_features: {left!r} and {right!r} must have equal width to be multiplied; "
            f"got {features[left].shape[1]} and {features[right].shape[1]}."
        )
