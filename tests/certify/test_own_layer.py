"""Certificates of layers with cells of one's own: what is proved, and why something is not."""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.certify.local_certificate import LocalCertificate
from wellposed.errors import InvalidArgument, InvalidType

CERTIFIED, VIOLATED, UNDECIDED = wp.Verdict.CERTIFIED, wp.Verdict.VIOLATED, wp.Verdict.UNDECIDED
DOUBLE = torch.float64


class Tanh(nn.Module):
    """tanh(W z + U x), W given."""

    def __init__(self, W: Tensor, inputs: int | None = None) -> None:
        super().__init__()
        self.W = nn.Parameter(W.clone())
        self.U = nn.Parameter(torch.ones(len(W), inputs or len(W), dtype=W.dtype) / len(W))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.t() + x @ self.U.t())


def layer_of(cell: Any, **options: Any) -> wp.EquilibriumLayer:
    return wp.EquilibriumLayer(cell, on_failure="ignore", **options)


def local(layer: nn.Module, x: Tensor) -> LocalCertificate:
    found = wp.certify(layer, x)
    assert isinstance(found, LocalCertificate)
    return found


# for every input


def test_contraction_of_a_cell_of_ones_own() -> None:
    W = torch.diag(torch.tensor([0.5, -0.9, 0.2], dtype=DOUBLE))
    found = wp.certify(layer_of(Tanh(W, 2), state_shape=(3,)))
    assert found.certified and found.theorem == "contraction"
    assert 0.9 <= found.hypotheses[0].value <= 0.9 + 1e-9


def test_monotone_where_nothing_contracts() -> None:
    W = -4 * torch.eye(3, dtype=DOUBLE)
    found = wp.certify(layer_of(Tanh(W)))
    assert found.certified and found.theorem == "monotone" and found.hypotheses[0].value == pytest.approx(-4)
    assert {other.theorem for other in found.others} == {"contraction", "perron_frobenius"}


def test_perron_frobenius_where_the_norm_is_large() -> None:
    W = torch.tensor([[0.0, 30.0], [0.0, 0.5]], dtype=DOUBLE)
    found = wp.certify(layer_of(Tanh(W)))
    assert found.certified and found.theorem == "perron_frobenius" and 0.5 <= found.hypotheses[0].value < 0.51
    assert wp.certify(layer_of(Tanh(W)), theorem="contraction").verdict is UNDECIDED


def test_a_residual_step_is_merged() -> None:
    """z - (z - tanh(W z))/2: the two linear parts are one before norms are taken."""

    class Step(Tanh):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return z - 0.9 * (z - 0.5 * z) + 0.4 * super().forward(z, x)

    found = wp.certify(layer_of(Step(torch.eye(2, dtype=DOUBLE))))
    assert found.certified and found.hypotheses[0].value == pytest.approx(0.55 + 0.4)


def test_a_convolution_contracts_for_images_of_every_size() -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)
            self.conv.weight.data *= 0.5

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.relu(self.conv(z) + x)

    torch.manual_seed(0)
    layer = layer_of(Conv())
    found = wp.certify(layer)
    assert found.certified and "x of shape (batch, 3, any, any) in float32" in found.licenses[0]
    q = found.hypotheses[0].value
    for side in (5, 9):
        z = torch.randn(1, 3, side, side)
        J = torch.func.jacrev(lambda v, z=z: layer.cell.conv(v.reshape(z.shape)).reshape(-1))(z.reshape(-1)).detach()
        assert float(torch.linalg.matrix_norm(J, ord=2)) <= q
    at_size = wp.certify(layer, torch.randn(1, 3, 5, 5)).others[0]
    assert "(batch, 3, 5, 5)" in at_size.licenses[0] and at_size.hypotheses[0].value <= q * (1 + 1e-6)


def test_two_equilibria_refute_uniqueness() -> None:
    layer = layer_of(Tanh(3 * torch.eye(2, dtype=DOUBLE)))
    for found in (wp.certify(layer), wp.certify(layer, torch.zeros(1, 2, dtype=DOUBLE))):
        assert found.verdict is VIOLATED and found.hypotheses[-1].holds is False and not found.licenses


def test_several_layers_and_a_model_around_them() -> None:
    good, bad = layer_of(Tanh(0.5 * torch.eye(2))), layer_of(Tanh(3 * torch.eye(2)))
    both = wp.certify(nn.Sequential(good, nn.Linear(2, 2), good.__class__(Tanh(0.1 * torch.eye(2)))))
    assert both.certified and len(both.others) == 2 and all("Layer" in line for line in both.licenses)
    assert wp.certify(nn.Sequential(good, bad)).verdict is VIOLATED
    model = nn.Sequential(nn.Linear(5, 2), good, nn.Linear(2, 1))
    x = torch.randn(4, 5)
    found = local(model, x)
    assert found.verdicts == (CERTIFIED,) * 4 and good.last_solution is None
    z = good(model[0](x)).double()
    z_star = wp.EquilibriumLayer(Tanh(0.5 * torch.eye(2, dtype=DOUBLE)), rtol=1e-14)(model[0](x).double())
    reached = 2e-14 * z_star.norm(dim=1)  # rtol/(1 - 1/2): the bound is as sharp as that
    assert bool(((z - z_star).norm(dim=1) <= found.error_bound + reached).all())


@pytest.mark.parametrize("family", [wp.GaussianDEQ, wp.SkipDEQ, wp.MonotoneDEQ, wp.ImplicitOnlyDEQ, wp.OptEq])
def test_built_in_networks(family: Any) -> None:
    torch.manual_seed(0)
    model = family(4, 8)
    assert wp.certify(model).certified
    found = local(model, torch.randn(3, 4))
    assert found.verdicts == (CERTIFIED,) * 3 and bool((found.error_bound < 1e-3).all())


def test_targets_or_not() -> None:
    with pytest.raises(InvalidArgument, match=r"theorem='radius' is about training, so it needs targets"):
        wp.certify(wp.GaussianDEQ(3, 4), torch.randn(2, 3), theorem="radius")
    with pytest.raises(InvalidType, match="certify needs a torch.nn.Module; got function"):
        wp.certify(lambda z, x: z)
    layer, x = layer_of(Tanh(0.5 * torch.eye(3))), torch.randn(2, 3)
    assert local(layer, x).verdicts == wp.certify(layer, x, torch.zeros(2)).verdicts  # type: ignore[attr-defined]  # a LocalCertificate here
    assert wp.certify(wp.GaussianDEQ(3, 4), theorem="perron_frobenius").theorem == "perron_frobenius"


def test_no_module_is_refused() -> None:
    for module in (nn.Linear(2, 2), nn.ReLU(), nn.Sequential()):
        found = wp.certify(module)
        assert found.verdict is UNDECIDED and "holds no EquilibriumLayer" in found.note


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("x", [None, torch.ones(2, 3, dtype=DOUBLE)])
def test_neither_are_weights_whose_squares_overflow_and_compiled_cells(x: Tensor | None) -> None:
    assert wp.certify(layer_of(Tanh(torch.full((3, 3), 1e200, dtype=DOUBLE))), x).verdict is not CERTIFIED
    found = wp.certify(
        layer_of(torch.jit.trace(Tanh(torch.eye(3, dtype=DOUBLE) / 2), (torch.ones(1, 3, dtype=DOUBLE),) * 2)), x
    )
    assert found.verdict is UNDECIDED and "compiled by torch.jit" in found.note


# near the z that was found


def test_the_bounds_at_a_known_equilibrium() -> None:
    """z = tanh(0) + x/2 z ... : the affine map z = z/2 + x has z* = 2 x, (I - J)^-1 = 2."""

    class Half(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return z / 2 + x

    x = torch.tensor([[1.0, -3.0], [0.25, 0.0]])
    layer = layer_of(Half(), rtol=1e-3, solver=wp.Picard())
    found = local(layer, x)
    error = (layer(x) - 2 * x).double().norm(dim=1)
    assert bool((error > 1e-4).all())  # rough on purpose
    assert bool((error <= found.error_bound).all() and (found.error_bound <= error * (1 + 1e-9) + 1e-12).all())
    assert bool((found.gradient_error < 1e-12).all() and (found.radius == torch.inf).all())


def test_a_kink_at_the_equilibrium() -> None:
    """relu(z/2 + x) + z^2/5 at x = 0 has a kink at z* = 0: quotients in [0, 1/2] still prove it."""

    class Kink(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.relu(z / 2 + x) + z**2 / 5

    found = local(layer_of(Kink()), torch.zeros(1, 2))
    assert found.verdicts == (VIOLATED,)  # z = 5/2 is another
    assert float(found.error_bound[0]) < 1e-12 and found.gradient_error[0].isfinite()


def test_a_singular_equilibrium_is_undecided_with_evidence() -> None:
    class Cubic(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return z - z**3 + x

    found = local(layer_of(Cubic()), torch.zeros(2, 1))
    assert found.verdicts == (UNDECIDED,) * 2 and "least singular value of I - J" in found.reasons[0]
    assert found.measured["least singular value of I - J, estimate"] == 0 and "prove nothing" in found.note


def test_samples_are_judged_one_by_one() -> None:
    layer = layer_of(Tanh(torch.tensor([[1.0]], dtype=DOUBLE)))  # singular at z = 0 only
    found = local(layer, torch.tensor([[0.7], [0.0], [-2.0]], dtype=DOUBLE))
    assert found.verdicts == (CERTIFIED, UNDECIDED, CERTIFIED) and found.verdict is UNDECIDED
    assert [bool(reason) for reason in found.reasons] == [False, True, False]
    assert found.error_bound.isfinite().tolist() == [True, False, True] and "index 1" in found.note


def test_coupled_rows_are_one_sample() -> None:
    class Mean(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(z.mean(dim=0, keepdim=True) / 2 + x)

    coupled = layer_of(Mean(), coupled=True)
    assert "size of the batch matters" in wp.certify(coupled).note
    assert "batches of 4 coupled rows" in wp.certify(coupled, torch.randn(4, 2)).others[0].licenses[0]
    assert "rows depend on each other" in wp.certify(layer_of(Mean())).note
    for layer in (layer_of(Mean(), coupled=True), layer_of(Mean())):
        found = local(layer, torch.randn(3, 2))
        assert found.verdicts == (CERTIFIED,) * 3 and len(set(found.error_bound.tolist())) == 1


def test_what_is_licensed_has_numbers() -> None:
    """Upper bounds with three digits, so they are rounded up."""
    found = local(layer_of(Tanh(0.5 * torch.eye(2, dtype=DOUBLE))), torch.ones(3, 2, dtype=DOUBLE))
    numbers = [float(number) for number in re.findall(r"largest: ([\d.e+-]+)", found.licenses[0])]
    for number, bounds in zip(numbers, (found.error_bound, found.gradient_error), strict=True):
        assert float(bounds.max()) <= number <= 1.01 * float(bounds.max())
    assert found.to_latex().count("largest: $") == 2
    none = wp.certify(layer_of(Tanh(5 * torch.eye(2, dtype=DOUBLE))), torch.zeros(0, 2, dtype=DOUBLE))
    assert "equilibria seen from 1 start," in none.note


def test_the_record_of_a_certificate() -> None:
    found = local(layer_of(Tanh(3 * torch.eye(2))), torch.tensor([[0.0, 0.0], [5.0, 5.0]]))
    again = LocalCertificate.from_json(found.to_json())
    assert again == found and torch.equal(again.error_bound, found.error_bound) and "VIOLATED" in str(again)


def test_no_samples() -> None:
    assert local(layer_of(Tanh(torch.eye(2))), torch.zeros(0, 2)).verdict is UNDECIDED


# why something is not proved


class Odd(nn.Module):
    """A contraction with something odd in it."""

    def __init__(self, odd: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.odd, self.lin, self.calls = odd, nn.Linear(3, 3), 0
        self.register_buffer("kept", torch.zeros(1, 3))
        self.lin.weight.data *= 0.3

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.odd(self, z, x)


CAPTURED = torch.eye(3) / 2


def _changing(cell: Any, z: Tensor, x: Tensor) -> Tensor:
    cell.kept.add_(1e-9)
    return cell.lin(z) + x


def _keeping(cell: Any, z: Tensor, x: Tensor) -> Tensor:
    out = cell.lin(z) + x + 0.1 * cell.kept
    cell.kept = z.detach()[:1] * 1.0
    return out


def _counting(cell: Any, z: Tensor, x: Tensor) -> Tensor:
    cell.calls += 1
    return cell.lin(z) * (1 - 1 / (1 + cell.calls)) + x


ODD: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "random": (lambda c, z, x: nn.functional.dropout(c.lin(z), 0.1, training=True) + x, "draws random numbers"),
    "noise": (lambda c, z, x: c.lin(z) + x + 1e-9 * torch.randn(3), "draws random numbers"),
    "numpy": (lambda c, z, x: torch.from_numpy(z.detach().numpy().copy()) / 2 + x, "out of torch|could not be followed"),
    "list": (lambda c, z, x: torch.tensor(z.tolist()) / 2 + x, "out of torch|values of z"),
    "decision": (lambda c, z, x: c.lin(z) + x if float(z.detach().sum()) < 100 else z, "values of z"),
    "captured": (lambda c, z, x: z @ CAPTURED + x, "neither a parameter, nor a buffer, nor part of x"),
    "unknown": (lambda c, z, x: torch.special.bessel_j0(c.lin(z)) + x, "special_bessel_j0 is not known"),
    "sorted": (lambda c, z, x: c.lin(z.sort(dim=1).values) + x, "sort is not known"),
    "changes": (_changing, "changes a parameter, a buffer"),
    "keeps": (_keeping, "keeps a state: kept"),
    "counts": (_counting, "keeps a state: calls"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_followed_is_undecided(name: str) -> None:
    odd, reason = ODD[name]
    torch.manual_seed(0)
    layer, x = layer_of(Odd(odd), max_steps=30), torch.randn(2, 3)
    found = local(layer, x)
    assert found.verdicts == (UNDECIDED,) * 2 and not found.error_bound.isfinite().any()
    assert re.search(reason, found.reasons[0]), found.reasons[0]


def _hooked(layer: Any) -> None:
    layer.cell.lin.register_forward_hook(lambda module, given, out: out * 1.5)


def _patched(layer: Any) -> None:
    layer.cell.lin.forward = types.MethodType(lambda self, z: 2 * z, layer.cell.lin)


def _overridden(layer: Any) -> None:
    class Twice(nn.Linear):
        def forward(self, z: Tensor) -> Tensor:
            return 2 * super().forward(z)

    layer.cell.lin = Twice(3, 3)


def _not_finite(layer: Any) -> None:
    layer.cell.lin.weight.data[0, 0] = torch.nan


def _batch_norm(layer: Any) -> None:
    layer.cell.lin = nn.BatchNorm1d(3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hooked, "has a forward or backward hook"),
        (_patched, "forward was replaced on"),
        (_overridden, "overrides forward"),
        (_not_finite, "NaN or infinite"),
    ],
)
def test_a_changed_object_is_undecided(change: Callable[[Any], None], reason: str) -> None:
    layer = layer_of(Odd(lambda c, z, x: c.lin(z) + x), max_steps=10)
    change(layer)
    found = local(layer, torch.randn(1, 3))
    assert found.verdicts == (UNDECIDED,) and reason in found.reasons[0]
    assert wp.certify(layer).verdict is UNDECIDED and reason in wp.certify(layer).note


def test_an_input_by_which_it_decides_is_one_input() -> None:
    layer = layer_of(Odd(lambda c, z, x: c.lin(z) + x if float(x.sum()) < 100 else z + x))
    x = torch.randn(1, 3)
    found = local(layer, x)
    assert found.verdicts == (CERTIFIED,) and "decisions by the values of x" in found.others[0].note


def test_a_container_may_have_its_own_forward() -> None:
    class Chain(nn.Sequential):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(z) + x

    torch.manual_seed(0)
    chain = Chain(nn.Linear(3, 3), nn.Tanh())
    assert local(layer_of(chain), torch.randn(1, 3)).verdicts == (CERTIFIED,)


def test_large_states() -> None:
    """No dense matrix: the contraction alone bounds the error."""

    class Wide(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(z) / 2 + x

    x = torch.randn(2, 3000, dtype=DOUBLE)
    found = local(layer_of(Wide(), rtol=1e-6), x)
    z_star = layer_of(Wide(), rtol=1e-15)(x)
    assert found.verdicts == (CERTIFIED,) * 2
    assert bool(((layer_of(Wide(), rtol=1e-6)(x) - z_star).norm(dim=1) <= found.error_bound).all())

    class Steep(Wide):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.sin(2 * z) / 2 + x

    assert "3000 entries" in local(layer_of(Steep()), x).reasons[0]


class Started(nn.Module):
    """A model that starts its layer near one of the two stable equilibria of tanh(2 z)."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.layer, self.named = wp.EquilibriumLayer(lambda z, x: torch.tanh(2 * z) + 0 * x), named

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layer(x, z0=x.sign()) if self.named else self.layer(x, x.sign())
        return z


@pytest.mark.parametrize("named", [True, False])
def test_the_start_that_a_model_gives_is_kept(named: bool) -> None:
    """From zeros the layer finds 0, at which tanh(2 z) repels; from its own start 0.9575 or its negative."""
    x = torch.tensor([[0.3], [-0.2]], dtype=torch.float64)
    found = wp.certify(Started(named), x)
    assert isinstance(found, LocalCertificate)
    assert all(verdict is not wp.Verdict.UNDECIDED for verdict in found.verdicts)
    assert found.measured["spectral radius of J, estimate"] < 0.2  # 2 at zero
    assert float(found.error_bound.max()) < 1e-9


def test_a_layer_is_certified_from_a_given_start() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(2 * z) + 0 * x)
    x = torch.tensor([[0.3], [-0.2]], dtype=torch.float64)
    found = wp.certify(layer, x, z0=x.sign())
    assert isinstance(found, LocalCertificate) and found.measured["spectral radius of J, estimate"] < 0.2
    assert torch.equal(found.error_bound, wp.certify(Started(named=True), x).error_bound)


@pytest.mark.parametrize(
    ("cell", "z0"),
    [
        (lambda z, x: (0.5 * torch.tanh(z[1]) + x, 0.3 * z[0]), lambda z: (z, z)),
        (lambda z, x: {"a": 0.5 * torch.tanh(z["b"]) + x, "b": 0.3 * z["a"]}, lambda z: {"a": z, "b": z}),
    ],
)
def test_a_state_of_several_tensors_is_certified_from_its_start(cell: Any, z0: Any) -> None:
    layer, x = wp.EquilibriumLayer(cell), torch.randn(2, 3, dtype=torch.float64)
    with pytest.raises(wp.InvalidArgument, match="give"):
        wp.certify(layer, x)
    found = wp.certify(layer, x, z0=z0(torch.zeros(2, 3, dtype=torch.float64)))
    assert isinstance(found, LocalCertificate) and found.verdicts == (CERTIFIED,) * 2
    assert found.others[0].certified and "states of shape (batch, 3), (batch, 3)" in found.others[0].licenses[0]


def test_a_start_is_that_of_a_layer_at_an_input() -> None:
    x, layer = torch.ones(2, 3), layer_of(Tanh(torch.eye(3) / 2))
    for given, options in (((nn.Sequential(layer), x), {}), ((layer,), {}), ((layer, x, x), {"theorem": "radius"})):
        with pytest.raises(wp.InvalidArgument, match=r"certify\(layer, x, z0=z0\)"):
            wp.certify(*given, z0=x, **options)


def test_networks_that_start_at_their_own_state() -> None:
    """Of a multiscale network the state is a tuple, which only its start shows."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"groups": 1, "generator": generator, "dtype": torch.float64}
    X = torch.randn(1, 1, 4, 4, dtype=torch.float64, generator=generator)
    for model in (wp.nn.ResidualDEQ(1, 2, 3, **options), wp.nn.MultiscaleDEQ.classifier(1, (2, 2), 3, **options)):
        found = wp.certify(model, X)
        assert found.certified, found.note
        with pytest.raises(wp.InvalidArgument, match="Certify its graphs one by one"):
            wp.certify(Grouped(model.layer), model.inputs(X))


class Grouped(nn.Module):
    def __init__(self, layer: wp.EquilibriumLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x, groups=torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bound_is_about_the_z_that_is_returned_in_low_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = layer_of(Tanh((0.2 * torch.randn(3, 3)).to(dtype))), torch.randn(4, 3).to(dtype)
    exact = wp.EquilibriumLayer(copy.deepcopy(layer.cell).double(), rtol=1e-14)
    errors = (layer(x).detach().double() - exact(x.double()).detach()).norm(dim=1)
    found = local(layer, x)
    assert found.certified and bool((errors <= found.error_bound).all())
    assert bool((found.error_bound <= 2 * errors).all() and (errors > torch.finfo(dtype).eps / 64).any())
