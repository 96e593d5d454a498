"""What computes something else than the library's class is not certified as the class."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

import wellposed as wp
from wellposed.certify import Certificate, lipschitz_upper, robustness
from wellposed.certify.radius_certificate import radius
from wellposed.certify.well_posedness import well_posed
from wellposed.errors import InvalidArgument, WellposedError
from wellposed.lightning import EquilibriumMonitor
from wellposed.nn.families import Theory

D, M, N = 6, 40, 4


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data() -> tuple[Tensor, Tensor]:
    X = torch.randn(N, D, generator=generator(1), dtype=torch.float64)
    return X, 0.1 * torch.randn(N, generator=generator(2), dtype=torch.float64)


def network(kind: type = wp.GaussianDEQ, **options: Any) -> Any:
    return kind(D, M, generator=generator(0), dtype=torch.float64, **options)


class Forward(wp.GaussianDEQ):
    def forward(self, X: Tensor) -> Tensor:
        return 30 * super().forward(X)


class Readout(wp.GaussianDEQ):
    def readout(self, Z: Tensor, C: Tensor) -> Tensor:
        return 30 * super().readout(Z, C)


class ReadoutWeight(wp.GaussianDEQ):
    def readout_weight(self) -> Tensor:
        return 30 * self.a


class Equilibrium(wp.GaussianDEQ):
    def _equilibrium(self, C: Tensor, z0: Tensor | None) -> Tensor:
        return 5 * super()._equilibrium(C, z0)


class Injection(wp.GaussianDEQ):
    def injection(self, X: Tensor) -> Tensor:
        return X.square() @ self.U.t() + 1


class Recurrent(wp.GaussianDEQ):
    def recurrent(self) -> Tensor:
        return torch.tanh(3 * self.W) / 10


class Bind(wp.GaussianDEQ):
    def bind(self, C: Tensor) -> Any:
        return super().bind(3 * C)


class Gradients(wp.GaussianDEQ):
    def gradients(self, *args: Any, **options: Any) -> dict[str, Tensor]:
        return {name: 10 * gradient for name, gradient in super().gradients(*args, **options).items()}


class Call(wp.GaussianDEQ):
    def __call__(self, X: Tensor) -> Tensor:
        return 30 * super().__call__(X)


class ForwardSkip(wp.SkipDEQ):
    def forward(self, X: Tensor) -> Tensor:
        return 30 * super().forward(X)


class ForwardMonotone(wp.MonotoneDEQ):
    def forward(self, X: Tensor) -> Tensor:
        return 30 * super().forward(X)


class Mixin:
    def readout(self, Z: Tensor, C: Tensor) -> Tensor:
        return 30 * (Z @ self.a)  # type: ignore[attr-defined]


class Mixed(Mixin, wp.GaussianDEQ):
    pass


class Named(wp.GaussianDEQ):
    """Overrides nothing that computes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.label = "mine"

    def extra_repr(self) -> str:
        return self.label

    def describe(self) -> str:
        return f"{self.label}: {self.width}"


def forward_hook() -> Any:
    model = network()
    model.register_forward_hook(lambda module, inputs, output: 30 * output)
    return model


def pre_hook() -> Any:
    model = network()
    model.register_forward_pre_hook(lambda module, inputs: (30 * inputs[0],))
    return model


def layer_hook() -> Any:
    model = network()
    model.layer.register_forward_hook(lambda module, inputs, output: 30 * output)
    return model


def backward_hook() -> Any:
    model = network()
    model.layer.register_full_backward_hook(lambda module, inputs, outputs: (3 * inputs[0],))
    return model


def parameter_hook() -> Any:
    model = network()
    model.a.register_hook(lambda gradient: 1000 * gradient)
    return model


def accumulated_hook() -> Any:
    model = network()
    model.a.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def replaced() -> Any:
    model = network()
    model.forward = lambda X: 30 * wp.GaussianDEQ.forward(model, X)
    return model


def replaced_in_layer() -> Any:
    model = network()
    solve = model.layer.solve
    model.layer.solve = lambda *args, **options: solve(*args, **options)
    return model


def other_cell() -> Any:
    model = network()
    model.layer = network().layer
    return model


def no_layer() -> Any:
    model = network()
    model.layer = nn.Identity()
    return model


def weight_norm() -> Any:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(network(), "W")


CLASSES = [Forward, Readout, ReadoutWeight, Equilibrium, Injection, Recurrent, Bind, Gradients, Call, Mixed]
OTHERS = [ForwardSkip, ForwardMonotone]
MAKERS: list[Callable[[], Any]] = [
    *(functools.partial(network, kind) for kind in (*CLASSES, *OTHERS)),
    *(forward_hook, pre_hook, layer_hook, backward_hook, parameter_hook, accumulated_hook),
    *(replaced, replaced_in_layer, other_cell, no_layer, weight_norm),
]


def name_of(make: Any) -> str:
    return make.args[0].__name__ if isinstance(make, functools.partial) else make.__name__


@pytest.mark.parametrize("make", MAKERS, ids=name_of)
def test_what_was_changed_is_not_certified(make: Callable[[], Any]) -> None:
    model, (X, y) = make(), data()
    theorems = ["auto", "radius", "contraction", "monotone", "perron_frobenius"]
    theorems += ["ling2022"] if isinstance(model, wp.GaussianDEQ) else []
    theorems += ["gao2022"] if isinstance(model, wp.SkipDEQ) else []
    theorems += ["nguyen2022"] if isinstance(model, wp.MonotoneDEQ) else []
    for theorem in theorems:
        certificate = wp.certify(model, X, y, theorem=theorem)
        for found in (certificate, *certificate.others):
            assert found.verdict is wp.Verdict.UNDECIDED
            assert "library's own class" in found.note and found.note.count(". ") <= 1
    with pytest.raises(InvalidArgument, match="lipschitz_upper: The proof is about the library's own class"):
        lipschitz_upper(model)
    with pytest.raises(InvalidArgument, match="generalization_bound: The proof is about the library's own class"):
        wp.generalization_bound(model, X, y)
    with pytest.raises(WellposedError, match="library's own class"):
        wp.descend(model, X, y, step_size="certified", steps=2)
    assert wp.suggest(model, X, y) == []


def test_a_network_without_its_layer_is_one_sentence() -> None:
    model, (X, y) = no_layer(), data()
    assert "its layer is a module Identity without a cell" in wp.certify(model, X, y).note
    with pytest.raises(InvalidArgument, match="prove: .* its layer is a module Identity without a cell"):
        wp.prove(model, X, y)
    for use in (model, model.solve, model.tangent_features, lambda X: wp.descend(model, X, y, step_size=0.1, steps=1)):
        with pytest.raises(WellposedError, match=r"GaussianDEQ.layer must be an EquilibriumLayer, .* got Identity\."):
            use(X)


@pytest.fixture
def global_hook() -> Iterator[None]:
    handle = torch_module.register_module_forward_hook(lambda module, inputs, output: output)
    yield
    handle.remove()


def test_a_global_hook(global_hook: None) -> None:
    certificate = wp.certify(network(), *data(), theorem="contraction")
    assert certificate.verdict is wp.Verdict.UNDECIDED and "global module hook" in certificate.note


def same(first: Certificate, second: Certificate) -> bool:
    return first == second and first.others == second.others


def test_a_subclass_that_overrides_nothing_is_certified_as_its_parent() -> None:
    X, y = data()
    mine, parent = network(Named), network()
    assert radius(parent, X, y, dynamics="descent").certified
    for theorem in ("contraction", "perron_frobenius", "radius"):
        assert same(wp.certify(mine, X, y, theorem=theorem), wp.certify(parent, X, y, theorem=theorem))
    assert lipschitz_upper(mine) == lipschitz_upper(parent)


class Family(wp.GaussianDEQ):
    """An injection of its own, and a proof about it: the read-out is all that moves in `least`."""

    def injection(self, X: Tensor) -> Tensor:
        return 2 * (X @ self.U.t())

    def sensitivity(self, measurement: Any) -> Any:
        return wp.certify.Contractive(measurement, Theory("W", "U", ("a",), injection_scale=2.0), sharpen=())


class FamilyForward(Family):
    def forward(self, X: Tensor) -> Tensor:
        return 30 * super().forward(X)


def test_a_family_with_its_own_sensitivity() -> None:
    X, y = data()
    assert radius(network(Family), X, y, dynamics="descent").certified
    assert wp.certify(network(Family), X, y, theorem="contraction").certified
    assert wp.certify(network(Family), X, y).theorem == "radius"
    wp.generalization_bound(network(Family), X, y)
    # the theorems of the papers and the formulas of the parent are about the parent's injection
    assert "overrides injection" in wp.certify(network(Family), X, y, theorem="ling2022").note
    with pytest.raises(InvalidArgument, match="overrides injection"):
        lipschitz_upper(network(Family))
    # a measurement reads equilibria and the read-out, not forward
    assert "overrides forward" in radius(network(FamilyForward), X, y, dynamics="descent").note


@pytest.mark.parametrize("module", [None, "wellposed.nn", "torch"])
def test_a_class_made_by_type_is_not_one_of_the_library(module: str | None) -> None:
    X, y = data()
    named = {} if module is None else {"__module__": module}
    for forward in (lambda self, X: wp.GaussianDEQ.forward(self, X) ** 2, functools.partial(lambda X: X[:, 0])):
        made = type("Made", (wp.GaussianDEQ,), {"forward": forward, **named})
        assert "overrides forward" in wp.certify(network(made), X, y).note
        with pytest.raises(InvalidArgument, match="overrides forward"):
            lipschitz_upper(network(made))
    cell = type("Made", (wp.nn.DenseCell,), {"forward": lambda self, z, x: 3 * z + 1, **named})
    assert wp.certify(wp.EquilibriumLayer(cell(4, 6))).verdict is not wp.Verdict.CERTIFIED
    same = type("Same", (wp.GaussianDEQ,), named)
    assert wp.certify(network(same), X, y).verdict is wp.certify(network(), X, y).verdict
    same.forward = lambda self, X: 2 * wp.GaussianDEQ.forward(self, X)
    assert "overrides forward" in wp.certify(network(same), X, y).note


def test_hooks_of_the_library_do_not_count() -> None:
    model, (X, y) = network(), data()
    before = radius(model, X, y, dynamics="descent")
    monitor = EquilibriumMonitor.__new__(EquilibriumMonitor)  # without lightning it cannot be made, only its hook
    model.layer.register_forward_hook(monitor._after_solve)
    assert before.certified and radius(model, X, y, dynamics="descent") == before


class ForwardOptEq(wp.OptEq):
    def forward(self, X: Tensor) -> Tensor:
        return 30 * super().forward(X)


class FeaturesOptEq(wp.OptEq):
    def features(self, X: Tensor) -> Tensor:
        return X + 1


@pytest.mark.parametrize("kind", [ForwardOptEq, FeaturesOptEq])
def test_opteq(kind: type) -> None:
    X, y = data()
    for dynamics in ("flow", "descent"):
        certificate = wp.certify(network(kind), X, y, theorem="radius", dynamics=dynamics)
        assert certificate.verdict is wp.Verdict.UNDECIDED and "overrides" in certificate.note
    assert wp.certify(network(kind), X, y).note == certificate.note
    assert well_posed(network(kind), X).note == certificate.note
    assert radius(network(wp.OptEq), X, y, dynamics="descent").certified  # the parent is
    with pytest.raises(InvalidArgument, match="overrides"):
        wp.generalization_bound(network(kind), X, y)


class Cell(wp.nn.DenseCell):
    def bind(self, x: Tensor) -> Any:
        return super().bind(10 * x)


class Layer(wp.EquilibriumLayer):
    def forward(self, *args: Any, **options: Any) -> Any:
        return 10 * super().forward(*args, **options)


class Steep(wp.nn.ReLU):
    def __call__(self, v: Tensor) -> Tensor:
        return 3 * super().__call__(v)


def test_layers() -> None:
    options: dict[str, Any] = {"weight": wp.nn.Spectral(0.9), "generator": generator(0), "dtype": torch.float64}
    layers = [
        (wp.EquilibriumLayer(Cell(D, M, **options)), "submodule cell .Cell. overrides bind"),
        (Layer(wp.nn.DenseCell(D, M, **options)), "class Layer overrides forward"),
        (wp.EquilibriumLayer(wp.nn.DenseCell(D, M, Steep(), **options)), "activation Steep overrides __call__"),
    ]
    for layer, message in layers:
        with pytest.raises(InvalidArgument, match=message):
            lipschitz_upper(layer)
        certificate = well_posed(nn.Sequential(layer, nn.Linear(M, 1)), data()[0])
        assert certificate.verdict is wp.Verdict.UNDECIDED and "overrides" in certificate.note
    plain = wp.EquilibriumLayer(wp.nn.DenseCell(D, M, **options))
    assert lipschitz_upper(plain).contraction < 1
    assert well_posed(nn.Sequential(plain, nn.Linear(M, 1)), data()[0]).certified


class Classifier(wp.nn.MonotoneClassifier):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(50 * x)


class Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 50 * super().forward(x)


def test_classifiers() -> None:
    X = data()[0]
    options: dict[str, Any] = {"margin": 0.5, "generator": generator(0), "dtype": torch.float64}
    plain = wp.nn.MonotoneClassifier.dense(D, M, 3, **options)
    hooked = wp.nn.MonotoneClassifier.dense(D, M, 3, **options)
    hooked.register_forward_pre_hook(lambda module, inputs: (50 * inputs[0],))
    headed = wp.nn.MonotoneClassifier.dense(D, M, 3, **options)
    headed.head = Head(M, 3, dtype=torch.float64)
    y = plain(X).argmax(dim=1)
    assert (robustness(plain, X, y).radius > 0).all()
    for model in (Classifier.dense(D, M, 3, **options), hooked, headed):
        for function in (lipschitz_upper, lambda model: robustness(model, X, y)):
            with pytest.raises(InvalidArgument, match="library's own class"):
                function(model)


class Tenfold(nn.Module):
    def forward(self, V: Tensor) -> Tensor:
        return 10 * V

    def right_inverse(self, W: Tensor) -> Tensor:
        return W / 10


def large(kind: type) -> Any:
    """What the theorems of the papers ask for: no read-out, and large features."""
    model = network(kind, **({"weight_variance": 0.001} if kind is wp.GaussianDEQ else {"margin": 1.0}))
    with torch.no_grad():
        (model.a if kind is wp.GaussianDEQ else model.u).zero_()
        model.U.mul_(1e5)
    return model


@pytest.mark.parametrize(
    ("kind", "theorem", "readout"), [(wp.GaussianDEQ, "ling2022", "a"), (wp.MonotoneDEQ, "nguyen2022", "u")]
)
def test_theorems_of_papers_train_their_own_parameters(kind: type, theorem: str, readout: str) -> None:
    X, y = data()
    assert wp.certify(large(kind), X, y, theorem=theorem).certified
    other, additional, frozen = large(kind), large(kind), large(kind)
    parametrize.register_parametrization(other, readout, Tenfold())
    additional.extra = nn.Parameter(torch.zeros(2))
    getattr(frozen, readout).requires_grad_(False)
    for model in (other, additional, frozen):
        certificate = wp.certify(model, X, y, theorem=theorem)
        assert certificate.verdict is wp.Verdict.UNDECIDED and "The theorem trains" in certificate.note
