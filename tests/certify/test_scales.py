"""Inputs, labels and parameters from 1e-300 to 1e300: nothing raises, nothing is certified in vain, and 2^k is only a unit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from certificate_problems import problem
from wellposed.certify import Certificate, Verdict, lipschitz_upper, robustness
from wellposed.errors import WellposedError
from wellposed.linalg.directed import LARGEST, down, rate_after, up, vector_norm_lower, vector_norm_upper

F64 = torch.float64
#: The theorems of each family, with their options.
THEOREMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "gaussian": [("ling2022", {}), ("contraction", {}), ("perron_frobenius", {})],
    "skip": [("gao2022", {}), ("gao2022", {"dynamics": "descent"}), ("contraction", {})],
    "implicit": [("gao2023", {}), ("contraction", {})],
    "monotone": [("nguyen2022", {}), ("nguyen2022", {"dynamics": "flow"}), ("monotone", {})],
    "opteq": [],
    "deep": [],
}
RADIUS: list[tuple[str, dict[str, Any]]] = [
    ("radius", {"hidden_rate": "largest"}),
    ("radius", {"dynamics": "descent"}),
]
EXPONENTS = (-300, -200, -170, -155, -150, -100, -78, -60, -30, 0, 30, 60, 78, 100, 150, 155, 170, 200, 300)


def network(family: str, seed: int = 0) -> tuple[Any, Tensor, Tensor]:
    """A small problem that the radius certificate decides in its favour: read-out 0, labels small."""
    if family in ("opteq", "deep"):
        g = torch.Generator().manual_seed(seed)
        X, y = torch.randn(3, 5, generator=g, dtype=F64), torch.randn(3, generator=g, dtype=F64)
        model: Any = (
            wp.OptEq(5, 20, generator=g, dtype=F64) if family == "opteq" else wp.DeepOptEq(5, (20, 20), generator=g, dtype=F64)
        )
    else:
        model, X, y = problem(family, seed, n=3, d=5, m=20)
    if family == "implicit":
        with torch.no_grad():
            y = model(X) + 1e-6 * (y - model(X))
        return model, X, y
    with torch.no_grad():
        for name in {"gaussian": "a", "skip": "uv", "monotone": "u"}.get(family, "w"):
            getattr(model, name).zero_()
    return model, X, 1e-6 * y


def check(certificate: Certificate) -> None:
    """What CERTIFIED promises, and that the certificate can be read."""
    assert str(certificate) and Certificate.from_json(certificate.to_json()).theorem == certificate.theorem
    if certificate.verdict is not Verdict.CERTIFIED:
        assert certificate.step_size is certificate.rate is certificate.radii is certificate.rates is None
        return
    steps = certificate.step_size
    for number in steps.values() if isinstance(steps, Mapping) else () if steps is None else (steps,):
        assert 0 < number < math.inf
    if certificate.dynamics == "descent":
        assert certificate.rate is not None and 0 <= certificate.rate < 1 and steps is not None
    if certificate.dynamics == "flow":
        assert certificate.rate is not None and 0 < certificate.rate < math.inf
    for radius in (certificate.radii or {}).values():
        assert 0 <= radius < math.inf


def cases(family: str, exponents: tuple[int, ...]) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
    """Scaled: inputs; labels; both; every parameter and buffer on its own."""
    for exponent in exponents:
        scale = 10.0**exponent
        model, X, y = network(family)
        yield f"X 1e{exponent}", model, X * scale, y
        yield f"y 1e{exponent}", model, X, y * scale
        yield f"X and y 1e{exponent}", model, X * scale, y * scale
        for name, _ in (*model.named_parameters(), *model.named_buffers()):
            model, X, y = network(family)
            with torch.no_grad():
                dict((*model.named_parameters(), *model.named_buffers()))[name].mul_(scale)
            yield f"{name} 1e{exponent}", model, X, y


def sweep(family: str, exponents: tuple[int, ...]) -> dict[Verdict, int]:
    """Every theorem in every case; the number of verdicts."""
    count = dict.fromkeys(Verdict, 0)
    for label, model, X, y in cases(family, exponents):
        for theorem, options in (*RADIUS, *THEOREMS[family]):
            try:
                certificate = wp.certify(model, X, y, theorem=theorem, **options)
                check(certificate)
            except Exception as error:
                raise AssertionError(f"{family}, {label}, {theorem} {options}: {error!r}") from error
            count[certificate.verdict] += 1
    return count


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", THEOREMS)
def test_no_scale_raises_or_certifies_in_vain(family: str) -> None:
    count = sweep(family, (-300, -155, 78))
    assert count[Verdict.CERTIFIED] > 0 and count[Verdict.UNDECIDED] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", THEOREMS)
def test_no_scale_raises_or_certifies_in_vain_anywhere(family: str) -> None:
    sweep(family, EXPONENTS)


@pytest.mark.parametrize("exponent", [-480, -190, 7, 300, *(pytest.param(e, marks=pytest.mark.slow) for e in (-300, 190, 480))])
@pytest.mark.parametrize("family", ["gaussian", "skip", "implicit", "monotone"])
def test_a_power_of_two_is_only_a_unit(family: str, exponent: int) -> None:
    model, X, y = network(family)
    c = 2.0**exponent
    for theorem, options in (*RADIUS, *(case for case in THEOREMS[family] if case[0] in ("ling2022", "nguyen2022"))):
        here = wp.certify(model, X, y, theorem=theorem, **options)
        there = wp.certify(model, X * c, y * c, theorem=theorem, **options)
        assert there.verdict is here.verdict
        assert there.radii == pytest.approx(here.radii, rel=1e-9) if here.radii else there.radii is None
        if here.rate is not None and there.rate is not None:
            factor = c * c if here.dynamics == "flow" else 1.0
            assert there.rate == pytest.approx(here.rate * factor, rel=1e-9)
        if here.step_size is not None and there.step_size is not None:
            pairs = zip(_numbers(here.step_size), _numbers(there.step_size), strict=True)
            assert all(b == pytest.approx(a / c / c, rel=1e-9) for a, b in pairs)
    assert wp.certify(model, X, y, theorem="radius", dynamics="descent").certified  # or nothing was compared


def _numbers(step: float | Mapping[str, float]) -> list[float]:
    return list(step.values()) if isinstance(step, Mapping) else [step]


@pytest.mark.parametrize("family", ["gaussian", "opteq"])
def test_a_rate_beyond_float64_is_undecided_and_says_so(family: str) -> None:
    model, X, y = network(family)
    for scale in (1e-160, 1e160):
        for dynamics in ("flow", "descent"):
            certificate = wp.certify(model, X * scale, y * scale, theorem="radius", dynamics=dynamics, hidden_rate="largest")
            assert certificate.verdict is Verdict.UNDECIDED
            assert "range of float64" in certificate.note


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e-78, 1e78, 1e170, 1e300])
def test_suggestions_and_the_monitor_at_any_scale(scale: float) -> None:
    model, X, y = network("gaussian")
    for suggestion in wp.suggest(model, X * scale, y * scale):
        check(suggestion.certificate)
        assert suggestion.certificate.certified
    monitor = wp.CertificateMonitor(every=1)
    try:
        wp.descend(model, X * scale, y * scale, step_size=1e-9, steps=2, callbacks=[monitor])
    except WellposedError:
        return  # training may fail at this scale, with its own sentence
    assert monitor.certificate is not None
    check(monitor.certificate)


@pytest.mark.parametrize("exponent", [-900, -520, 520, 900])
def test_lipschitz_bounds_are_proportional(exponent: int) -> None:
    c = 2.0**exponent
    for family, injected, read in (("gaussian", "U", ("a",)), ("skip", "W", ("u", "v")), ("monotone", "U", ("u",))):
        model, _, _ = problem(family, 0, n=3, d=5, m=20)
        here = lipschitz_upper(model)
        for names in ((injected,), read):
            model, _, _ = problem(family, 0, n=3, d=5, m=20)
            with torch.no_grad():
                for name in names:
                    getattr(model, name).mul_(c)
            there = lipschitz_upper(model)
            assert there.prediction == pytest.approx(here.prediction * c, rel=1e-9)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("exponent", [-700, -530, 530, 700])
def test_robust_radii_do_not_grow_out_of_underflow(exponent: int) -> None:
    g = torch.Generator().manual_seed(0)
    model = wp.nn.MonotoneClassifier.dense(4, 12, 3, margin=0.5, generator=g, dtype=F64, rtol=1e-9, max_steps=5000)
    x = torch.randn(6, 4, generator=g, dtype=F64)
    y = model(x).argmax(dim=1)
    here = robustness(model, x, y)
    with torch.no_grad():
        model.cell.U.mul_(2.0**exponent)
    there = robustness(model, x * 2.0**-exponent, y)  # the same network, its inputs in another unit
    assert bool((here.radius > 0).all())
    assert torch.allclose(there.radius * 2.0**exponent, here.radius, rtol=1e-9, atol=0)
    with torch.no_grad():
        model.head.weight.mul_(2.0**exponent)
        model.head.bias.mul_(2.0**exponent)
    third = robustness(model, x * 2.0**-exponent, y)
    # the bisection begins elsewhere, where a product of both has vanished; it ends within 8/2^10 of the same radius
    assert torch.allclose(third.radius * 2.0**exponent, here.radius, rtol=8 / 2**10, atol=0)


FLOATS = (0.0, 5e-324, 1e-320, 2.3e-308, 1e-155, 1.0, 1e155, LARGEST, math.inf)


def test_directed_rounding_at_the_ends_of_the_range() -> None:
    for x in (*FLOATS, *(-x for x in FLOATS)):
        assert down(x) <= x <= up(x)
        assert down(x) < LARGEST * 2 and not math.isnan(down(x)) and not math.isnan(up(x))
        if math.isfinite(x):
            assert down(x) < x < up(x)
    assert up(math.nan) == math.inf and down(math.nan) == -math.inf
    assert down(math.inf) == LARGEST and up(-math.inf) == -LARGEST and up(LARGEST) == math.inf
    assert up(1e-200 * 1e-200) > 0  # 1e-400 has underflowed, and is positive


def test_rates_keep_a_small_decrease() -> None:
    assert rate_after(1e-14) < 1 and rate_after(1e-17) == 1.0 and rate_after(-1.0) == 1.0 and rate_after(math.nan) == 1.0
    assert 0.5 <= rate_after(0.5) <= 0.5 * (1 + 1e-11)


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e-160, 1.0, 1e160, 1e300])
def test_norms_of_vectors_at_any_scale(scale: float) -> None:
    v = torch.full((16,), scale, dtype=F64)
    exact = 4.0 * v[0].item()
    assert 0 < vector_norm_lower(v) < exact < vector_norm_upper(v) or scale == 5e-324
    assert vector_norm_lower(v) <= exact <= vector_norm_upper(v) < math.inf
