"""A proof is about one network: what differs from it, or is not what it seems, is not proved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.errors import InvalidArgument
from wellposed.nn.activations import Softplus, Tanh

D, M, N = 5, 40, 3


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data() -> tuple[Tensor, Tensor]:
    X = torch.randn(N, D, generator=generator(1), dtype=torch.float64)
    return X, torch.randn(N, generator=generator(2), dtype=torch.float64)


def network(kind: type = wp.GaussianDEQ, **options: Any) -> Any:
    return kind(D, M, generator=generator(0), dtype=torch.float64, **options)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("begun", "other"),
    [
        (lambda: network(), lambda: network(activation=Tanh())),
        (lambda: network(activation=Softplus(centred=True)), lambda: network(activation=Softplus(centred=False))),
        (lambda: network(wp.SkipDEQ, gamma=0.1), lambda: network(wp.SkipDEQ, gamma=0.4)),
    ],
    ids=["activation", "shift", "scale"],
)
def test_a_proof_of_another_map_with_the_same_start_is_not_continued(
    begun: Any, other: Any, stored: bool, tmp_path: Path
) -> None:
    X, y = data()
    first, second = begun(), other()
    second.load_state_dict(first.state_dict())
    proof = wp.prove(first, X, y, max_steps=2)
    resume = proof.save(tmp_path) if stored else proof
    with pytest.raises(InvalidArgument, match="the activation, scales and parameters"):
        wp.prove(second, X, y, resume=resume, max_steps=3)
    assert wp.prove(first, X, y, resume=resume, max_steps=3).num_steps == 3


@pytest.mark.parametrize("kind", [wp.SkipDEQ, wp.ImplicitOnlyDEQ])
def test_a_smooth_activation_does_not_make_a_rectified_injection_smooth(kind: type) -> None:
    model = network(kind)
    model.activation = Tanh()
    with pytest.raises(InvalidArgument, match="has kinks"):
        wp.prove(model, *data())


def shared_readouts() -> Any:
    model = network(wp.SkipDEQ)
    model.v.data = model.u.data
    return model


def shared_in_part() -> Any:
    model = network()
    model.U.data = model.W.data.flatten()[7 : 7 + M * D].view(M, D)
    return model


def expanded() -> Any:
    model = network()
    model.U.data = model.U.data[:, :1].expand(M, D)
    return model


def shared_with_a_buffer() -> Any:
    model = network(wp.ImplicitOnlyDEQ)
    model.W = model.A.data.flatten()[: D * M].view(D, M)
    return model


@pytest.mark.parametrize("make", [shared_readouts, shared_in_part, expanded, shared_with_a_buffer])
def test_tensors_that_share_memory_move_each_other_and_are_not_proved(make: Any) -> None:
    model, (X, y) = make(), data()
    with pytest.raises(InvalidArgument, match="share memory"):
        wp.prove(model, X, y)
    with torch.no_grad():
        y = model(X) + 1e-6 * y
    for dynamics in ("flow", "descent"):
        found = wp.certify(model, X, y, theorem="radius", dynamics=dynamics)
        assert not found.certified and "share memory" in found.note


def test_views_of_one_vector_that_do_not_overlap_are_proved() -> None:
    model, (X, y) = network(), data()
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    assert wp.prove(model, X, y, max_steps=1).num_steps == 1
    with torch.no_grad():
        y = model(X) + 1e-6 * y
    assert wp.certify(model, X, y, theorem="radius").certified


class Scaled(wp.GaussianDEQ):
    """W is 300 times what is stored, and trained."""

    @property
    def W(self) -> Tensor:  # type: ignore[override]  # a property in place of a parameter, on purpose
        if "W" not in self._parameters:
            raise AttributeError("W")
        return 300 * self._parameters["W"]


def scaled() -> Any:
    model = network(Scaled)
    with torch.no_grad():
        model._parameters["W"].div_(300)
    return model


def hidden() -> Any:
    model = network()
    vars(model)["W"] = model.W.detach() / 2
    return model


@pytest.mark.parametrize("make", [scaled, hidden])
def test_a_name_that_does_not_give_the_stored_parameter_is_not_certified(make: Any) -> None:
    model, (X, y) = make(), data()
    with torch.no_grad():
        y = model(X) + 1e-6 * y
    for dynamics in ("flow", "descent"):
        found = wp.certify(model, X, y, theorem="radius", dynamics=dynamics)
        assert not found.certified and "is not the tensor that is stored" in found.note
    with pytest.raises(InvalidArgument, match="is not the tensor that is stored"):
        wp.prove(model, X, y)


@pytest.mark.parametrize("step_size", ["auto", 0.1])
def test_a_start_where_no_unit_is_active_is_refused_in_one_sentence(step_size: Any) -> None:
    model, (X, y) = network(), data()
    with torch.no_grad():
        model.U.copy_(-X[0].expand(M, D))
    with pytest.raises(InvalidArgument, match="no unit is active"):
        wp.prove(model, X[:1], y[:1], step_size=step_size)


def test_a_proof_without_recurrent_weights_at_the_start_is_verified(tmp_path: Path) -> None:
    X, y = data()
    proof = wp.prove(network(weight_variance=0.0), X, y)
    assert proof.verdict is wp.Verdict.CERTIFIED
    found = wp.verify(proof.save(tmp_path), steps=100, seed=0)
    assert found.ok, found


class Alternating(wp.SkipDEQ):
    """gamma is 0.1 and 0.3 in turn."""

    reads = 0

    @property
    def gamma(self) -> float:
        self.__dict__["reads"] = self.reads + 1
        return 0.1 if self.reads % 2 else 0.3

    @gamma.setter
    def gamma(self, value: float) -> None:
        pass


class Threefold(torch.nn.Parameter):
    """Its transpose is three times what is stored."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return 3 * found if func is Tensor.t else found


class Labelled(torch.nn.Parameter):
    """Computes what a parameter computes."""

    label = "mine"


def threefold() -> Any:
    model = network()
    model.U = Threefold(model.U.detach())
    return model


def replaced_on_a_parameter() -> Any:
    model = network()
    model.U.t = lambda: 3 * Tensor.t(model.U)
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: network(Alternating), "overrides gamma"),
        (threefold, "a Threefold, is not a plain tensor .it overrides __torch_function__"),
        (replaced_on_a_parameter, "is not a plain tensor .it overrides t"),
    ],
    ids=["alternating gamma", "torch function", "method"],
)
def test_numbers_that_are_not_what_is_stored_are_not_certified(make: Any, said: str) -> None:
    model, (X, y) = make(), data()
    for theorem in ("radius", "contraction"):
        found = wp.certify(model, X, y, theorem=theorem)
        assert not found.certified and re.search(said, found.note), found
    with pytest.raises(InvalidArgument, match=said):
        wp.prove(model, X, y, max_steps=1)
    assert not wp.certify(model).certified


def test_a_parameter_of_a_class_that_overrides_nothing_is_proved() -> None:
    model, (X, y) = network(), data()
    model.U = Labelled(model.U.detach())
    assert wp.prove(model, X, y, max_steps=1).num_steps == 1


@pytest.mark.parametrize("name", ["apply_", "slope"])
def test_a_method_that_was_replaced_on_the_activation_is_not_proved(name: str) -> None:
    model = wp.GaussianDEQ(3, 12, activation=wp.nn.Tanh(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    method = getattr(model.activation, name)
    object.__setattr__(model.activation, name, lambda v: 0.9 * method(v))
    with pytest.raises(wp.errors.InvalidArgument, match=f"{name} was replaced on the activation Tanh"):
        wp.prove(model, torch.eye(3, dtype=torch.float64)[:2], torch.ones(2, dtype=torch.float64))
