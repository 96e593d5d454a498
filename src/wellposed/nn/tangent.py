"""Tangent kernels in closed form: sums of Hadamard products of Gram matrices.

The gradient of a prediction with respect to a weight matrix is an outer product (or a short sum of
them), so the inner product of two of them is a product of inner products: for dy_i/dW = p_i z_i^T,

    <dy_i/dW, dy_j/dW> = (p_i . p_j) (z_i . z_j).

A network that says which vectors these are has its tangent kernel computed without any Jacobian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GramProduct:
    """K_ij = coefficient * prod_k <L_k[i], R_k[j]>, a Hadamard product of Gram matrices.

    Attributes:
        factors: Pairs of feature names (left, right): the left one of sample i, the right one of
            sample j.
        coefficient: A number.
    """

    factors: tuple[tuple[str, str], ...]
    coefficient: float = 1.0


@dataclass(frozen=True)
class TangentFeatures:
    """What the tangent kernel of a network is made of, for a batch of inputs.

    The kernel between two batches is, parameter by parameter, the sum of its `GramProduct`s with
    left features from the first batch and right ones from the second.

    Attributes:
        features: name -> (n, k): per-sample vectors such as equilibria Z, masked adjoints P, inputs
            X.
        terms: parameter name -> its part of the kernel.
    """

    features: Mapping[str, Tensor]
    terms: Mapping[str, tuple[GramProduct, ...]]


def outer(left: str, right: str, coefficient: float = 1.0) -> tuple[GramProduct, ...]:
    """The kernel part of a matrix whose gradient is l r^T: (L L^T) o (R R^T)."""
    return (GramProduct(((left, left), (right, right)), coefficient),)


def gram(feature: str) -> tuple[GramProduct, ...]:
    """The kernel part of a vector whose gradient is the feature itself."""
    return (GramProduct(((feature, feature),)),)
