"""What the theorems know of a family of networks: declared by the family, read by kernels,
certificates and training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from wellposed.nn.families._contraction import AbstractContraction
    from wellposed.nn.families._network import AbstractNetwork


@dataclass(frozen=True)
class Theory:
    r"""The letters and constants of z = relu(R z + c), y = w . z (+ w' . c) for one network.

    R = k Q A Q' with orthogonal Q, Q' (or none), so |dR|_F = k |dA|_F, and c = l U x or l relu(U
    x). A family whose R depends on its parameters in another way leaves `recurrent` empty and has a
    method `sensitivity(measurement)`, see `AbstractSensitivity`.

    Attributes:
        recurrent: Name of A. injected: Name of the parameter or buffer behind U.
        readout: Names of w and, if c is read out too, of w'.
        fixed: Those of the names above that are buffers, which are never trained.
        recurrent_scale, injection_scale, readout_scale: k, l, and what multiplies w and w'.
        transposed: Whether R is k A^T.
        rectified: Whether c = l relu(U x).
        margin: m with sym(I - R) >= m by construction (well-posed by monotonicity); None if
            well-posed while |R| < 1.
        homogeneous: Whether there are no biases: c and y are positively homogeneous in x.
        closed_form: Whether the network has `linearise` and `gradients`. One without measures
            itself, with a method `sensitivity_at(X, y)`.
        theorem: Key of the theorem of its paper, a file of `wellposed.certify.theorems`; empty if
            there is none.
        options: Attributes with which a network of another width is drawn,
            `type(network)(in_features, width, **options)`; None if it cannot be.
        limit: Key and number of its tangent kernel at infinite width, where that is known.
    """

    recurrent: str = ""
    injected: str = ""
    readout: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    recurrent_scale: float = 1.0
    injection_scale: float = 1.0
    readout_scale: float = 1.0
    transposed: bool = False
    rectified: bool = False
    margin: float | None = None
    homogeneous: bool = False
    closed_form: bool = True
    theorem: str = ""
    options: tuple[str, ...] | None = None
    limit: tuple[str, float] | None = None

    @property
    def skip(self) -> bool:
        """Whether c is read out too."""
        return len(self.readout) == 2

    @property
    def trained_readout(self) -> tuple[str, ...]:
        """Names of the parameters that read out."""
        return tuple(name for name in self.readout if name not in self.fixed)


def theory_of(model: object) -> Theory | None:
    """What a network declares, or None for any other object."""
    found = getattr(model, "theory", None)
    return found if isinstance(found, Theory) else None


def contradiction(network: AbstractNetwork) -> str:
    """Where the scales of a declared theory do not fit what the network computes, in a sentence;
    empty if they do.

    Compares norms at the present parameters: it finds mistakes and proves nothing. A family with
    its own `sensitivity` does not use the scales.
    """
    if hasattr(network, "sensitivity"):
        return ""
    theory, norm = network.theory, torch.linalg.vector_norm
    with torch.no_grad():
        R, v, U = network.recurrent(), network.readout_weight(), network.input_matrix()
        pairs = [("readout_scale", norm(v), abs(theory.readout_scale) * norm(getattr(network, theory.readout[0])))]
        if theory.recurrent:
            pairs.append(("recurrent_scale", norm(R), abs(theory.recurrent_scale) * norm(getattr(network, theory.recurrent))))
        if theory.homogeneous:
            C = network.injection(torch.eye(U.shape[1], dtype=U.dtype, device=U.device))
            pairs.append(("injection_scale", norm(C), abs(theory.injection_scale) * norm(U.relu() if theory.rectified else U)))
    for name, seen, declared in pairs:
        if not torch.isclose(seen, declared, rtol=1e-4, atol=0.0, equal_nan=True):
            return (
                f"The theory that {type(network).__name__} declares does not fit what it computes: by {name} a norm "
                f"is {float(declared):.6g}, and it is {float(seen):.6g}."
            )
    if theory.trained_readout and theory.readout_scale != 1:
        return (
            f"{type(network).__name__} trains a read-out that is multiplied by readout_scale={theory.readout_scale:g}; the "
            "theorems are about a read-out without a scale. Put the scale into the parameter."
        )
    return ""


def is_theory_network(model: object) -> TypeGuard[AbstractNetwork]:
    """Whether a model declares a theory and has `linearise` and `gradients`."""
    theory = theory_of(model)
    return theory is not None and theory.closed_form


def may_be_ill_posed(model: object) -> TypeGuard[AbstractContraction]:
    """Whether a model is a theory network that is well-posed while |R| < 1, and bounds |R|."""
    return is_theory_network(model) and model.theory.margin is None and hasattr(model, "contraction_upper")
