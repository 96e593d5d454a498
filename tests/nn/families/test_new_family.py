"""A new family is one class: kernels, certificates, Lipschitz bounds and suggestions read its `theory`."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.linalg.directed import ROUNDING, up, vector_norm_upper
from wellposed.nn.families import FAMILIES, Theory, is_theory_network
from wellposed.nn.families._contraction import AbstractContraction
from wellposed.nn.families._declared import contradiction
from wellposed.nn.tangent import TangentFeatures, gram, outer

F64 = torch.float64


class RotatedDEQ(AbstractContraction):
    r"""z = relu(k Q A Q' z + l U x), y = w . z, with fixed orthogonal Q and Q': |dR|_F = k |dA|_F."""

    def __init__(
        self,
        in_features: int,
        width: int,
        *,
        k: float = 0.3,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, width, **options)
        draw: dict[str, Any] = {"generator": generator, "dtype": dtype}
        self.k, self.l = k, 0.7
        self.A = nn.Parameter(torch.randn(width, width, **draw) / math.sqrt(width))
        self.U = nn.Parameter(torch.randn(width, in_features, **draw))
        self.w = nn.Parameter(torch.randn(width, **draw) / math.sqrt(width))
        self.register_buffer("Q", torch.linalg.qr(torch.randn(width, width, **draw))[0])
        self.register_buffer("P", torch.linalg.qr(torch.randn(width, width, **draw))[0])

    @property
    def theory(self) -> Theory:
        scales = {"recurrent_scale": self.k, "injection_scale": self.l}
        return Theory("A", "U", ("w",), **scales, homogeneous=True, options=("k",))

    def recurrent(self) -> Tensor:
        return self.k * self.Q @ self.A @ self.P

    def recurrent_error(self) -> float:
        # two products of m terms each; the factors that were drawn are orthogonal up to rounding, which counts as theirs
        norms = math.prod(vector_norm_upper(factor) for factor in (self.Q, self.A, self.P))
        return up(self.k * 4 * (self.width + 4) * ROUNDING * norms)

    def injection(self, X: Tensor) -> Tensor:
        return self.l * X @ self.U.t()

    def readout_weight(self) -> Tensor:
        return self.w

    def _tangent(self, X: Tensor, C: Tensor, Z: Tensor, P: Tensor) -> TangentFeatures:
        # dy/dA = k (Q^T p) (P z)^T
        features = {"Z": Z, "QP": P @ self.Q, "PZ": Z @ self.P.t(), "P": P, "X": X}
        return TangentFeatures(features, {"A": outer("QP", "PZ", self.k**2), "U": outer("P", "X", self.l**2), "w": gram("Z")})

    def _remedy(self) -> str:
        return "Take a smaller k"


def problem(seed: int, n: int = 5) -> tuple[RotatedDEQ, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = RotatedDEQ(6, 40, generator=generator, dtype=F64)
    X = torch.randn(n, 6, generator=generator, dtype=F64)
    return model, X, torch.randn(n, generator=generator, dtype=F64)


@pytest.mark.parametrize("seed", range(3))
def test_its_kernel_is_that_of_autograd(seed: int) -> None:
    model, X, _ = problem(seed)
    closed, generic = (wp.tangent_kernel(model, X, method=method) for method in ("closed", "generic"))
    assert is_theory_network(model)
    assert float((closed - generic).abs().max()) <= 1e-10 * float(closed.abs().max())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_its_certificate_holds_over_400_steps(seed: int) -> None:
    model, X, y = problem(seed)
    with torch.no_grad():
        y = model(X) + 0.05 * y
    certificate = wp.certify(model, X, y, theorem="radius", dynamics="descent")
    assert certificate.verdict is wp.Verdict.CERTIFIED
    assert set(certificate.step_size) == set(certificate.radii) == {"A", "U", "w"}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    history = wp.descend(model, X, y, step_size=dict(certificate.step_size), steps=400)
    first = float(history.residual_norm[0])
    for k, residual in enumerate(history.residual_norm.tolist()):
        assert residual <= certificate.rate**k * first * (1 + 1e-9)
    for name, p in model.named_parameters():
        assert float((p.detach() - start[name]).norm()) <= certificate.radii[name]


def test_the_rest_of_the_library_knows_it() -> None:
    model, X, y = problem(0)
    found = wp.certify(model, X, y)
    assert {other.theorem for other in (found, *found.others)} == {"radius", "contraction"}  # it has no paper
    assert wp.certify.contraction(model).certified
    upper = wp.certify.lipschitz_upper(model)
    assert float(wp.certify.lipschitz_lower(model, X, steps=5).max()) <= upper.prediction <= upper.plain
    assert {"hidden_rate", "descent"} <= {suggestion.kind for suggestion in wp.suggest(model, X, y)}
    monitor = wp.CertificateMonitor(every=5)
    wp.descend(model, X, y, step_size=1e-3, steps=10, callbacks=[monitor])
    assert len(monitor.records) == 3
    with pytest.raises(wp.InvalidType, match="ling2022 is a theorem about GaussianDEQ; got RotatedDEQ"):
        wp.certify(model, X, y, theorem="ling2022")
    assert not wp.generalization_bound(model, X, y).trained


def test_a_bias_that_is_not_declared_is_seen() -> None:
    class Biased(RotatedDEQ):
        @property
        def theory(self) -> Theory:
            return super().theory

        def injection(self, X: Tensor) -> Tensor:
            return super().injection(X) + 1.0

    generator = torch.Generator().manual_seed(0)
    model = Biased(6, 40, generator=generator, dtype=F64)
    X = 2.0**250 * torch.randn(3, 6, generator=generator, dtype=F64)
    certificate = wp.certify(model, X, torch.zeros(3, dtype=F64), theorem="radius")
    assert "Biased declares does not fit what it computes: it is declared homogeneous" in certificate.note


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"recurrent_scale": 0.003}, "by recurrent_scale a norm is"),
        ({"injection_scale": 7.0}, "by injection_scale a norm is"),
        ({"readout_scale": 0.5}, "by readout_scale a norm is"),
    ],
)
def test_scales_that_do_not_fit_prove_nothing(wrong: dict[str, float], says: str) -> None:
    class Mistaken(RotatedDEQ):
        @property
        def theory(self) -> Theory:
            return dataclasses.replace(super().theory, **wrong)

    model, X, y = drawn(Mistaken)
    for dynamics in ("flow", "descent"):
        certificate = wp.certify(model, X, y, theorem="radius", dynamics=dynamics)
        assert certificate.verdict == wp.Verdict.UNDECIDED and says in certificate.note


class Bias(RotatedDEQ):
    """A fixed bias, and a scale of the injection that is far too small."""

    @property
    def theory(self) -> Theory:
        return Theory("A", "U", ("w",), recurrent_scale=self.k, injection_scale=0.01)

    def injection(self, X: Tensor) -> Tensor:
        return 20 * X @ self.U.t() + torch.linspace(-1, 1, self.width, dtype=X.dtype)


class Diagonal(RotatedDEQ):
    """Only the diagonal of A counts, and nothing else is in A at the start: the norms agree."""

    def __init__(self, in_features: int, width: int, **options: Any) -> None:
        super().__init__(in_features, width, **options)
        with torch.no_grad():
            self.A.copy_(torch.diag(torch.linspace(-2, 2, width)))

    @property
    def theory(self) -> Theory:
        return Theory("A", "U", ("w",), recurrent_scale=self.k, injection_scale=self.l, homogeneous=True)

    def recurrent(self) -> Tensor:
        return self.k * torch.diag(torch.diag(self.A))


class Normalized(RotatedDEQ):
    @property
    def theory(self) -> Theory:
        scale = 0.9 / float(self.A.detach().norm())
        return Theory("A", "U", ("w",), recurrent_scale=scale, injection_scale=self.l, homogeneous=True)

    def recurrent(self) -> Tensor:
        return 0.9 * self.A / self.A.norm()


class Cubed(RotatedDEQ):
    """The cube of the identity is the identity."""

    @property
    def theory(self) -> Theory:
        return super().theory

    def injection(self, X: Tensor) -> Tensor:
        return super().injection(X**3)


class Length(RotatedDEQ):
    @property
    def theory(self) -> Theory:
        return super().theory

    def readout_weight(self) -> Tensor:
        return torch.full_like(self.w, self.width**-0.5) * self.w.norm()


class Saturated(RotatedDEQ):
    @property
    def theory(self) -> Theory:
        return super().theory

    def readout(self, Z: Tensor, C: Tensor) -> Tensor:
        return 0.2 * torch.tanh(Z @ self.w)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Bias, "by injection_scale a norm is"),
        (Diagonal, "by recurrent_scale a norm is"),
        (Normalized, "by recurrent_scale a norm is"),
        (Cubed, "by injection_scale a norm is"),
        (Length, "not linear in w"),
        (Saturated, r"readout\(Z, C\) is not"),
    ],
)
def test_a_theory_that_does_not_fit_elsewhere_proves_nothing(kind: type, says: str) -> None:
    """Each of these has the right norms at its start, and a certificate would be false."""
    model, X, y = drawn(kind)
    with torch.no_grad():
        y = model(X) + 1e-3 * y
    for dynamics in ("flow", "descent"):
        certificate = wp.certify(model, X, y, theorem="radius", dynamics=dynamics)
        assert certificate.verdict is wp.Verdict.UNDECIDED and re.search(says, certificate.note)


class InnerBias(RotatedDEQ):
    """relu(U x + b): a bias inside the relu, declared."""

    factor = 1.0

    @property
    def theory(self) -> Theory:
        scales = {"recurrent_scale": self.k, "injection_scale": self.factor * self.l}
        return dataclasses.replace(super().theory, **scales, rectified=True, homogeneous=False)

    def injection(self, X: Tensor) -> Tensor:
        return torch.relu(super().injection(X) + torch.linspace(-1, 1, self.width, dtype=X.dtype))


class TooSmallInside(InnerBias):
    factor = 0.5


def test_a_bias_inside_a_relu_may_be_declared() -> None:
    for kind, fits in ((InnerBias, True), (TooSmallInside, False)):
        model, X, _ = drawn(kind)
        assert (contradiction(model, X) == "") is fits


@pytest.mark.parametrize("family", FAMILIES.values())
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_families_of_the_library_declare_what_they_compute(family: type, dtype: torch.dtype) -> None:
    model = family(6, 20, generator=torch.Generator().manual_seed(0), dtype=dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert contradiction(model, torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=F64)) == ""
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_certificate_says_that_a_foreign_theory_is_assumed() -> None:
    model, X, y = drawn(RotatedDEQ)
    with torch.no_grad():
        y = model(X) + 0.01 * y
    certificate = wp.certify(model, X, y, theorem="radius", dynamics="descent")
    assert certificate.certified and "Assumed: RotatedDEQ computes what it declares" in certificate.note
    own = wp.GaussianDEQ(6, 40, generator=torch.Generator().manual_seed(0), dtype=F64)
    assert "Assumed" not in wp.certify(own, X, y, theorem="contraction").note


def test_a_trained_read_out_with_a_scale_is_undecided() -> None:
    """Its features have the scale too, which the theorem does not know: a rate would be false."""

    class Quiet(RotatedDEQ):
        @property
        def theory(self) -> Theory:
            return dataclasses.replace(super().theory, readout_scale=0.3)

        def readout_weight(self) -> Tensor:
            return 0.3 * self.w

    model, X, y = drawn(Quiet)
    certificate = wp.certify(model, X, y, theorem="radius", dynamics="descent")
    assert certificate.verdict == wp.Verdict.UNDECIDED and "Put the scale into the parameter" in certificate.note


class Again(RotatedDEQ):
    def injection(self, X: Tensor) -> Tensor:
        return 30 * super().injection(X)


class AgainRecurrent(RotatedDEQ):
    def recurrent(self) -> Tensor:
        return torch.tanh(super().recurrent())


class Doubled(RotatedDEQ):
    """Twice the injection, and a theory that says so."""

    @property
    def theory(self) -> Theory:
        return dataclasses.replace(super().theory, injection_scale=-2 * self.l)

    def injection(self, X: Tensor) -> Tensor:
        return -2 * super().injection(X)

    def _tangent(self, X: Tensor, C: Tensor, Z: Tensor, P: Tensor) -> TangentFeatures:
        found = super()._tangent(X, C, Z, P)
        return TangentFeatures(found.features, {**found.terms, "U": outer("P", "X", 4 * self.l**2)})


class ForwardDEQ(Doubled):
    def forward(self, X: Tensor) -> Tensor:
        return 30 * super().forward(X)


class Scaled(wp.GaussianDEQ):
    """A family derived from one of the library: another injection, declared."""

    @property
    def theory(self) -> Theory:
        return Theory("W", "U", ("a",), injection_scale=2.0, homogeneous=True)

    def injection(self, X: Tensor) -> Tensor:
        return 2 * super().injection(X)

    def _tangent(self, X: Tensor, C: Tensor, Z: Tensor, P: Tensor) -> TangentFeatures:
        found = super()._tangent(X, C, Z, P)
        return TangentFeatures(found.features, {**found.terms, "U": outer("P", "X", 4.0)})


class Claiming(Scaled):
    """Declares the theorem of a paper that is about another injection."""

    @property
    def theory(self) -> Theory:
        return dataclasses.replace(super().theory, theorem="ling2022")


class Shifted(wp.MonotoneDEQ):
    """Its bounds are its own, but the margin that it inherits is not that of its matrix."""

    def recurrent(self) -> Tensor:
        return super().recurrent() + 5 * torch.eye(self.width, dtype=self.A.dtype)

    def sensitivity(self, measurement: Any) -> Any:
        return super().sensitivity(measurement)


def drawn(kind: type, seed: int = 0) -> tuple[Any, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = kind(6, 40, generator=generator, dtype=F64)
    X = torch.randn(4, 6, generator=generator, dtype=F64)
    return model, X, torch.randn(4, generator=generator, dtype=F64)


@pytest.mark.parametrize("kind", [Doubled, Scaled])
def test_a_class_that_declares_its_theory_is_certified(kind: type) -> None:
    model, X, y = drawn(kind)
    closed, generic = (wp.tangent_kernel(model, X, method=method) for method in ("closed", "generic"))
    assert float((closed - generic).abs().max()) <= 1e-10 * float(closed.abs().max())
    y = model(X).detach() + 0.01 * y
    certificate = wp.certify(model, X, y, theorem="radius", dynamics="descent")
    assert certificate.certified and wp.certify(model, X, y, theorem="contraction").certified
    upper = wp.certify.lipschitz_upper(model)
    assert float(wp.certify.lipschitz_lower(model, X, steps=5).max()) <= upper.prediction
    assert upper.input_norm >= float(torch.linalg.matrix_norm(model.injection(torch.eye(6, dtype=F64)).detach(), ord=2))
    assert wp.generalization_bound(model, X, y).bound > 0 and wp.suggest(model, X, y) is not None
    history = wp.descend(model, X, y, step_size=dict(certificate.step_size), steps=50)
    first = float(history.residual_norm[0])
    assert all(r <= certificate.rate**k * first * (1 + 1e-9) for k, r in enumerate(history.residual_norm.tolist()))


def hooked() -> Any:
    model = drawn(RotatedDEQ)[0]
    model.layer.register_forward_hook(lambda module, inputs, output: 30 * output)
    return model


def patched() -> Any:
    model = drawn(RotatedDEQ)[0]
    model.injection = lambda X: 30 * RotatedDEQ.injection(model, X)
    return model


def patched_sensitivity() -> Any:
    model = drawn(wp.GaussianDEQ)[0]
    model.sensitivity = lambda point: wp.certify.Contractive(point, Theory("W", "U", ("a",), recurrent_scale=1e-9))
    return model


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: drawn(Again)[0], "the class Again overrides injection"),
        (lambda: drawn(AgainRecurrent)[0], "the class AgainRecurrent overrides recurrent"),
        (lambda: drawn(ForwardDEQ)[0], "the class ForwardDEQ overrides forward"),
        (hooked, "its submodule layer .* has a forward or backward hook"),
        (patched, "injection was replaced on the instance"),
        (patched_sensitivity, "sensitivity was replaced on the instance"),
    ],
)
def test_what_a_family_does_not_declare_is_not_certified(make: Any, change: str) -> None:
    model, (_, X, y) = make(), drawn(RotatedDEQ)
    for theorem in ("auto", "radius", "contraction", "monotone", "perron_frobenius"):
        certificate = wp.certify(model, X, y, theorem=theorem)
        assert certificate.verdict is wp.Verdict.UNDECIDED and re.search(change, certificate.note)
    for function in (wp.certify.lipschitz_upper, lambda model: wp.generalization_bound(model, X, y)):
        with pytest.raises(wp.InvalidArgument, match=change):
            function(model)
    assert wp.suggest(model, X, y) == []


def test_the_theorem_of_a_paper_is_about_its_own_network() -> None:
    model, X, y = drawn(Claiming)
    certificate = wp.certify(model, X, y, theorem="ling2022")
    assert certificate.verdict is wp.Verdict.UNDECIDED and "the class Claiming overrides theory" in certificate.note


def test_a_margin_that_another_matrix_does_not_have() -> None:
    model, X, y = drawn(Shifted)
    assert wp.certify(model, X, y, theorem="monotone").verdict is wp.Verdict.VIOLATED
    assert wp.certify(model, X, y, theorem="radius").verdict is wp.Verdict.UNDECIDED


def test_the_rounding_of_a_matrix_that_is_computed_elsewhere() -> None:
    class Product(wp.GaussianDEQ):
        def recurrent(self) -> Tensor:
            return self.W @ self.W.t()

        def sensitivity(self, measurement: Any) -> Any:
            raise NotImplementedError

    model = drawn(Product)[0]
    gamma = model.width * ROUNDING
    assert model.recurrent_error() >= gamma * float((model.W.abs() @ model.W.abs().t()).detach().norm())
    assert drawn(wp.GaussianDEQ)[0].recurrent_error() == 0.0


def test_the_type_of_a_network_is_rarely_asked_for() -> None:
    """A family declares what others need; where a type is asked for, a comment on that line or the one before says why."""
    asked = re.compile(r"isinstance\([^#]*(DEQ|OptEq|AbstractNetwork|AbstractContraction|MonotoneClassifier)")
    found = []
    for path in sorted(Path(wp.__file__).parents[1].rglob("*.py")):
        lines = path.read_text(encoding="utf-8").split("\n")
        found += [(path.name, "\n".join(lines[i - 1 : i + 1])) for i, line in enumerate(lines) if asked.search(line)]
    assert len(found) <= 10
    assert [name for name, text in found if "#" not in text] == []
