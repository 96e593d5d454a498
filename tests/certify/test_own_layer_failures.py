"""An error in the computation of a proof is a reason why nothing is proved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wellposed as wp
from wellposed.certify import _local, own_layer
from wellposed.certify._followed import Followed
from wellposed.certify.local_certificate import LocalCertificate
from wellposed.errors import InvalidArgument

UNDECIDED = wp.Verdict.UNDECIDED


@pytest.mark.parametrize("place", [(own_layer, "constants"), (_local, "enclose")])
def test_an_error_in_the_proof_is_a_reason(place: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise raised

    layer, x = wp.EquilibriumLayer(lambda z, x: torch.tanh(2 * z + x).sum(-1, keepdim=True) / 9), torch.ones(2, 1)
    monkeypatch.setattr(*place, fail)
    raised: BaseException = RuntimeError("no memory left\nfor this")
    found = wp.certify(layer, x)
    assert isinstance(found, LocalCertificate)
    failed = found.others[0] if place[0] is own_layer else found
    assert failed.verdict is UNDECIDED and "could not be computed: RuntimeError: no memory left" in failed.note
    if failed is found:
        assert found.verdicts == (UNDECIDED,) * 2 and "no memory left" in found.reasons[0] and found.others[0].certified
    else:
        assert found.certified
        assert wp.certify(layer).verdict is UNDECIDED
    for raised in (KeyboardInterrupt(), InvalidArgument("of the argument")):
        with pytest.raises(type(raised)):
            wp.certify(layer, x)


def test_an_error_of_the_cell_itself_is_raised() -> None:
    with pytest.raises((RuntimeError, InvalidArgument), match="mat1|cell"):
        wp.certify(wp.EquilibriumLayer(lambda z, x: z @ torch.ones(4, 4) + x), torch.ones(2, 3))


def test_after_a_failed_proof_nothing_is_said_of_one_row_if_the_solve_finds_rows_coupled() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 0.1 * z.mean(0) + x)
    followed = Followed(layer, layer, torch.rand(3, 2))
    found = _local.without_proof(followed, wp.Certificate("contraction", wp.Verdict.CERTIFIED), "reason")
    assert followed.coupled and found.others[0].verdict is UNDECIDED and len(found.verdicts) == 3
