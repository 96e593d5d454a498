"""Layers about which less is proved than their tapes say, and those that a solver cannot differentiate."""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.certify._followed import Followed
from wellposed.certify._rows import rows_touch
from wellposed.certify.local_certificate import LocalCertificate

CERTIFIED, UNDECIDED = wp.Verdict.CERTIFIED, wp.Verdict.UNDECIDED
DOUBLE = torch.float64


def local(layer: nn.Module, x: Tensor) -> LocalCertificate:
    found = wp.certify(layer, x)
    assert isinstance(found, LocalCertificate)
    return found


def test_rows_that_depend_on_each_other_are_found_also_where_they_are_equal() -> None:
    def cell(z: Tensor, x: Tensor) -> Tensor:
        mean = z.mean(0, keepdim=True)
        return 0.5 * mean + (z - mean) + x  # with z, z +- t is an equilibrium too

    x = torch.full((2, 1), 0.2, dtype=DOUBLE)
    found = local(wp.EquilibriumLayer(cell), x)
    assert found.verdicts == (UNDECIDED, UNDECIDED) and "depend on each other" in found.note
    assert local(wp.EquilibriumLayer(cell), x[:1]).certified  # alone it is 0.5 z + x


_W = 0.4 * torch.eye(2, dtype=DOUBLE)
#: Cells that contract as long as there is one row, or two.
_COUPLED = {
    "all with the first": lambda s, z, x: torch.tanh(z @ s.W) + x + 1.5 * torch.tanh(3 * (z - z[:1])),
    "each with the one above": lambda s, z, x: torch.tanh(z @ s.W) + x + 0.9 * torch.cat([torch.zeros_like(z[:1]), z[:-1]]),
    "batches of three rows": lambda s, z, x: torch.tanh(z @ s.W) * (1 if z.shape[0] < 3 else 9) + x,
    "the last of three rows": lambda s, z, x: torch.tanh(z @ s.W) + x + (torch.arange(len(z)) > 1).to(z)[:, None] * z,
}


class _Cell(nn.Module):
    def __init__(self, f: Callable[..., Tensor]) -> None:
        super().__init__()
        self.W = nn.Parameter(_W.clone())
        self._f = f

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self._f(self, z, x)


@pytest.mark.parametrize("f", _COUPLED.values(), ids=_COUPLED)
def test_what_contracts_in_small_batches_alone_is_not_certified_for_every_input(f: Callable[..., Tensor]) -> None:
    found = wp.certify(wp.EquilibriumLayer(_Cell(f)))
    assert found.verdict is UNDECIDED
    assert "depend on each other" in found.note or "a row otherwise in a batch of 3 rows" in found.note


def test_a_map_that_is_another_in_the_batch_of_x_is_not_certified_row_by_row() -> None:
    x = 0.1 * torch.arange(6, dtype=DOUBLE).view(3, 2)
    layer = wp.EquilibriumLayer(_Cell(_COUPLED["batches of three rows"]))
    followed = Followed(layer, layer, x)
    assert "in a batch of 3 rows" in followed.objection_to_rows(3) and not followed.objection_to_rows(2)
    layer = wp.EquilibriumLayer(_Cell(lambda s, z, x: torch.cat([z[:3], 9 * z[3:]]) @ s.W + x))
    followed = Followed(layer, layer, torch.zeros(5, 2, dtype=DOUBLE))
    assert "in a batch of 5 rows" in followed.objection_to_rows(2, 3, 5) and not followed.objection_to_rows(2, 3)


@pytest.mark.parametrize("size", [1e-10, 1e-14])
def test_rows_that_depend_on_other_rows_of_x_are_not_certified_one_by_one(size: float) -> None:
    cell = _Cell(lambda s, z, x: torch.tanh(z @ s.W) + x + size * x.mean(0))
    found = local(wp.EquilibriumLayer(cell), torch.tensor([[0.1, 0.2], [0.3, 0.5]], dtype=DOUBLE))
    assert not found.certified or found.licenses[0].startswith("The batch of 2 coupled rows")


def test_a_reason_says_whether_a_row_or_a_batch_is_not_known() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 0.3 * z + x + 0.01 * torch.special.i0e(z))
    assert local(layer, torch.ones(8, 2)).reasons[0].startswith("The operation special_i0e is not known")
    layer = wp.EquilibriumLayer(lambda z, x: 0.3 * z + x + (0 * torch.special.i0e(z) if len(z) > 1 else 0))
    assert local(layer, torch.ones(8, 2)).reasons[0].startswith("A row alone can be followed, but not a batch of 8 rows: The")


def test_an_input_without_a_batch_is_named() -> None:
    layer = wp.EquilibriumLayer(_Cell(lambda s, z, x: torch.tanh(z @ s.W) + x))  # which takes a vector too
    x = torch.tensor([0.1, 0.2], dtype=DOUBLE)
    found = local(layer, x)
    assert not found.certified and "which is one number for each sample: if it is one, give x.unsqueeze(0)" in found.note
    assert local(layer, x.unsqueeze(0)).certified


@pytest.mark.parametrize("mix", [lambda x: x - x.mean(0, keepdim=True), lambda x: x.sort(0)[0], lambda x: x.flip(0)])
def test_rows_that_depend_on_each_other_by_x_are_certified_as_this_batch_alone(mix: Callable[[Tensor], Tensor]) -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 0.9 * torch.tanh(z) + mix(x))
    x = torch.tensor([[0.3, 0.5], [0.1, 0.2], [0.2, -0.4]], dtype=DOUBLE)
    assert bool((layer(x)[0] - layer(x[:1])[0]).abs().max() > 0.1)
    found = local(layer, x)
    assert found.certified and found.licenses[0].startswith("The batch of 3 coupled rows, which is one sample,")
    assert "about the batch of 3 rows, and says nothing about a row alone" in found.note
    for other, part in ((layer, x[:1]), (wp.EquilibriumLayer(layer.cell, coupled=True), x)):
        assert local(other, part).certified and "of 3 rows, and says nothing" not in local(other, part).note


def test_what_couples_rows_is_read_from_the_tape_as_from_the_jacobian() -> None:
    torch.manual_seed(0)
    inner = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0, dtype=DOUBLE).eval()
    x = torch.randn(3, 2, 4, dtype=DOUBLE)
    for mixed in (False, True):
        layer = wp.EquilibriumLayer(_Cell(lambda s, z, x, mixed=mixed: s.inner(z.transpose(0, 1) if mixed else z).view_as(x)))
        layer.cell.inner = inner
        jacobian = torch.autograd.functional.jacobian(lambda z, cell=layer.cell: cell(z, x), x).reshape(3, 8, 3, 8)
        coupled = any(bool(jacobian[i, :, j].any()) for i in range(3) for j in range(3) if i != j)
        assert coupled is mixed
        assert rows_touch(Followed(layer, layer, x)._batch_tape(3), 3) is mixed


def test_a_cell_without_a_second_derivative_is_certified() -> None:
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0, dtype=DOUBLE)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.3 * self.inner(z + x)

    layer = wp.EquilibriumLayer(Attention()).eval()
    assert all(verdict is CERTIFIED for verdict in local(layer, torch.randn(2, 3, 4, dtype=DOUBLE)).verdicts)


def test_neither_does_a_hard_sigmoid_raise() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: z * nn.functional.hardsigmoid(3 * z) + x, state_shape=(2,))
    assert wp.certify(layer).verdict in (UNDECIDED, wp.Verdict.VIOLATED)


class Quantised(nn.Module):
    """tanh of 0.05 (13 - 16) z, which is 0.05 * 253 z in the arithmetic of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("q", torch.tensor([[13]], dtype=torch.uint8))
        self.register_buffer("zero", torch.tensor(16, dtype=torch.uint8))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ ((self.q - self.zero).to(z.dtype) * 0.05)) + x


class Masks(nn.Module):
    """tanh(3 (2 - (True + True)) z): the sum is True, so the factor is 3."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True]))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(3 * (2 - (self.mask + self.mask) * 1) * z) + x


@pytest.mark.parametrize("cell", [Quantised(), Masks()])
def test_integers_and_masks_are_computed_as_pytorch_does(cell: nn.Module) -> None:
    layer = wp.EquilibriumLayer(cell, state_shape=(1,), on_failure="ignore")
    assert not wp.certify(layer).certified  # it has three equilibria at x = 0
    assert local(layer, torch.ones(1, 1)).verdicts[0] is not UNDECIDED  # and the tape gives what the cell gives


def test_integers_of_x_are_taken_for_this_x_alone() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(0.5 * z) + (x.to(torch.int64) + 1) * 0.1)
    found = local(layer, torch.ones(1, 2, dtype=DOUBLE))
    assert found.certified and found.input_error.tolist() == [torch.inf]


def test_windows_that_overlap_have_many_terms() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 0.5 * nn.functional.avg_pool1d(z.unsqueeze(1), 99, 1, 49).squeeze(1) + x)
    tape = Followed(layer, layer, torch.zeros(1, 100, dtype=DOUBLE)).tape(0)
    assert max(step.terms for step in tape.steps) >= 99


def test_a_divisor_that_turns_signs_is_refused() -> None:
    def cell(z: Tensor, x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(torch.tanh(z).view(-1, 1, 1, 2), 1, divisor_override=-1).view(-1, 2) + x

    found = local(wp.EquilibriumLayer(cell, on_failure="ignore"), torch.zeros(1, 2, dtype=DOUBLE))
    assert found.verdicts == (UNDECIDED,) and "avg_pool2d" in found.note


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(2 * z + x))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(0 * x, self.layer(x))  # the second input has three equilibria


def test_a_layer_that_is_called_twice_is_not_certified_by_its_first_call() -> None:
    found = local(Twice(), torch.full((1, 1), 3.0, dtype=DOUBLE))
    assert found.verdict is UNDECIDED and "calls this layer 2 times" in found.note and not found.licenses


def test_no_equilibrium_is_certified_at_the_jump_of_softplus() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 0.5 * nn.functional.softplus(z) + x, on_failure="ignore")
    x = torch.tensor([[10 - 5e-10]], dtype=DOUBLE)  # 0.5 softplus(z) + x - z jumps from plus to minus at z = 20
    assert local(layer, x).verdicts == (UNDECIDED,)
    away = local(layer, torch.zeros(1, 1, dtype=DOUBLE))
    assert away.certified and "no other anywhere" not in away.licenses[0] and away.radius.isfinite().all()


class Masked(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * nn.functional.scaled_dot_product_attention(z, z + x, z, attn_mask=self.mask) + x


def test_a_mask_of_infinities_is_named_and_one_of_booleans_serves() -> None:
    kept, x = torch.tensor([[True, False], [True, True]]), torch.full((1, 2, 3), 0.1, dtype=DOUBLE)
    layer = wp.EquilibriumLayer(Masked(torch.zeros(2, 2, dtype=DOUBLE).masked_fill(~kept, -torch.inf)))
    for everywhere in (wp.certify(layer), wp.certify(nn.Sequential(layer), theorem="contraction")):
        assert everywhere.verdict is UNDECIDED and "cell.mask has NaN or infinite" in everywhere.note
        assert "Use a mask of booleans" in everywhere.note
    found = local(layer, x)
    assert found.verdicts == (UNDECIDED,) and "buffer cell.mask has NaN or infinite" in found.note
    assert local(wp.EquilibriumLayer(Masked(kept)), x).certified


class Drawing(nn.Module):
    """z/2 + x, whose factor 1/2 is changed a little by a number that is drawn."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw, self.factor = draw, nn.Parameter(torch.tensor([0.5]))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return (self.factor + self.draw()) * z + x


OWN = random.Random(0)


def seldom(draw: Callable[[], float]) -> float:
    return float(draw() < 1e-9)


DRAWS: dict[str, tuple[Callable[[], float], str]] = {
    "python": (lambda: 1e-5 * random.random(), "random numbers .Python's random"),
    "seldom": (lambda: float(random.random() < 1e-9), "random numbers .Python's random"),
    "numpy": (lambda: 1e-5 * float(np.random.rand()), "random numbers .numpy.random"),  # noqa: NPY002  # on purpose
    "gauss": (lambda: 1e-5 * float(np.random.standard_normal()), "random numbers .numpy.random"),  # noqa: NPY002
    "own": (functools.partial(random.Random(0).uniform, 0.0, 1e-5), "two values for the same z and x, so it is random"),
    "own, seldom": (lambda: float(OWN.random() < 1e-9), "names a generator of random numbers .Random"),
    "own of numpy": (functools.partial(seldom, np.random.default_rng(0).random), "generator of random numbers .Generator"),
    "system": (lambda: float(os.urandom(8) == bytes(8)), "names urandom"),
    "clock": (lambda: float(time.time() < 0), "names time"),
    "autograd": (lambda: float(torch.is_grad_enabled() and False), "names is_grad_enabled"),
    "turns": (functools.partial(next, itertools.cycle((0.0, 1e-5))), "keeps a state outside of its module"),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_draws_outside_of_torch_is_undecided(name: str) -> None:
    draw, reason = DRAWS[name]
    layer = wp.EquilibriumLayer(Drawing(draw), state_shape=(3,), on_failure="ignore")
    everywhere = wp.certify(layer)
    assert everywhere.verdict is UNDECIDED and re.search(reason, everywhere.note), everywhere
    found = local(layer, torch.ones(2, 3))
    assert found.verdicts == (UNDECIDED,) * 2 and re.search(reason, found.reasons[0]), found


def test_a_number_that_stays_is_certified() -> None:
    layer = wp.EquilibriumLayer(Drawing(lambda: 0.1), state_shape=(3,))
    everywhere, found = wp.certify(layer), local(layer, torch.ones(2, 3))
    assert everywhere.certified and found.certified
    for certificate in (everywhere, found):
        assert "Assumed: the cell is a function of z and x" in certificate.note
    assert "batches of more than 3 rows" in everywhere.note


@pytest.mark.parametrize("shift", [lambda b: math.inf, torch.log, lambda b: b / b.norm()])
def test_nothing_is_certified_with_a_constant_that_is_not_finite(shift: Callable[[Tensor], Any]) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.zeros(2))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.5 * z + x + shift(self.b)

    layer = wp.EquilibriumLayer(Shifted())
    assert wp.certify(layer).verdict is wp.Verdict.UNDECIDED and "NaN or infinite" in wp.certify(layer).note
    with torch.no_grad():
        layer.cell.b.fill_(1.0)
    assert wp.certify(layer).certified is (shift(torch.ones(2)) is not math.inf)


@pytest.mark.parametrize("f", [lambda z, x: 3 * z.flip(-1) + x, lambda z, x: torch.tanh(2 * z.sum(-1, keepdim=True) + x)])
def test_inference_mode_changes_no_certificate(f: Callable[[Tensor, Tensor], Tensor]) -> None:
    layer, x = wp.EquilibriumLayer(f, on_failure="ignore", rtol=1e-2), torch.ones(2, 3, dtype=torch.float64)
    outside = [wp.certify(layer), local(layer, x)]
    with torch.inference_mode():
        inside = [wp.certify(layer), local(layer, 1 * x)]
    assert [str(found) for found in inside] == [str(found) for found in outside] and not inside[0].certified
