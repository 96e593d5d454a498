"""Whom a proof is about: never a parent of what is computed, never a family that is only known by its theory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from exact_descent import problem
from wellposed.nn.families import FAMILIES, AbstractContraction, Theory

TINY = (2, 16, 4, 1)


class Same(wp.GaussianDEQ):
    """Adds something beside what is computed."""

    def describe(self) -> str:
        return "the same network"


class OtherForward(wp.GaussianDEQ):
    def forward(self, X: Tensor) -> Tensor:
        return 2 * super().forward(X)


class OtherMap(wp.GaussianDEQ):
    def injection(self, X: Tensor) -> Tensor:
        return super().injection(X) + 1.0


class OtherScale(wp.GaussianDEQ):
    """Declares what it computes, and a certificate believes it; the steps of its descent are others."""

    @property
    def theory(self) -> Theory:
        return Theory("W", "U", ("a",), recurrent_scale=0.5, homogeneous=True)

    def recurrent(self) -> Tensor:
        return 0.5 * self.W


class Doubled:
    """Mixed in before the network."""

    def readout(self, Z: Tensor, C: Tensor) -> Tensor:
        return 2 * (Z @ self.a)  # type: ignore[attr-defined]


class Mixed(Doubled, wp.GaussianDEQ):
    pass


#: A name of the class in front of the parameter of this name.
Halved = type("Halved", (wp.GaussianDEQ,), {"W": property(lambda self: 0.5 * self._parameters["W"])})


class MoreParameters(wp.GaussianDEQ):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))


class Mirrored(AbstractContraction):
    """A family of its own: z = relu(k Q A z + U x) with the fixed reflection Q, which its theory allows and does not name."""

    def __init__(self, in_features: int, width: int, parent: wp.GaussianDEQ) -> None:
        super().__init__(in_features, width)
        self.A, self.U, self.w = (nn.Parameter(p.detach().clone()) for p in (parent.W, parent.U, parent.a))

    @property
    def theory(self) -> Theory:
        return Theory("A", "U", ("w",), homogeneous=True)

    def recurrent(self) -> Tensor:
        return self.A.flip(0)

    def injection(self, X: Tensor) -> Tensor:
        return X @ self.U.t()

    def readout_weight(self) -> Tensor:
        return self.w

    def _tangent(self, X: Tensor, C: Tensor, Z: Tensor, P: Tensor) -> Any:
        raise NotImplementedError

    def _remedy(self) -> str:
        return "Take a smaller A"


def turned_into(kind: type) -> tuple[Any, Tensor, Tensor]:
    model, X, y = problem(*TINY)
    model.__class__ = kind
    return model, X, y


def test_a_subclass_that_computes_the_same_is_proved_as_its_parent() -> None:
    model, X, y = turned_into(Same)
    proof = wp.prove(model, X, y)
    expected = wp.prove(*problem(*TINY))
    assert proof.verdict is wp.Verdict.CERTIFIED and proof.family == "gaussian"
    assert (proof.num_steps, proof.delta, proof.rate) == (expected.num_steps, expected.delta, expected.rate)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OtherForward, "overrides forward"),
        (OtherMap, "overrides injection"),
        (OtherScale, "overrides theory"),
        (Mixed, "overrides readout"),
        (Halved, "W of Halved is not the tensor that is stored"),
    ],
)
def test_a_subclass_that_computes_something_else_is_refused(kind: type, words: str) -> None:
    model, X, y = turned_into(kind)
    with pytest.raises(wp.InvalidArgument, match=words):
        wp.prove(model, X, y)


def test_a_method_that_was_replaced_on_the_instance_is_refused() -> None:
    model, X, y = problem(*TINY)
    model.forward = lambda X: torch.zeros(len(X), dtype=torch.float64)
    with pytest.raises(wp.InvalidArgument, match="forward was replaced"):
        wp.prove(model, X, y)


def test_additional_parameters_are_another_training() -> None:
    _, X, y = problem(*TINY)
    model = MoreParameters(4, 16, dtype=torch.float64)
    with pytest.raises(wp.InvalidArgument, match=r"trains U, W, a; of this MoreParameters U, W, a, extra"):
        wp.prove(model, X, y)


def test_a_parametrized_weight_is_another_training() -> None:
    model, X, y = problem(*TINY)
    nn.utils.parametrizations.weight_norm(model, "U")
    with pytest.raises(wp.InvalidArgument, match="prove: "):
        wp.prove(model, X, y)


@pytest.mark.parametrize("registered", [False, True])
def test_an_own_family_is_refused_even_if_it_is_registered(registered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its theory does not say that the rows of A are reversed: a proof for R = A would be about another network."""
    parent, X, y = problem(*TINY)
    model = Mirrored(4, 16, parent)
    if registered:
        monkeypatch.setitem(FAMILIES, "mirrored", Mirrored)
    with pytest.raises(wp.InvalidType, match="Mirrored is a separate family"):
        wp.prove(model, X, y)
