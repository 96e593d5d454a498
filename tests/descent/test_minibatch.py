"""The step and the epoch that estimators, runs and papers share."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.descent._minibatch import TOTALS, MinibatchStep, epoch, solves


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = wp.GaussianDEQ(3, 8, generator=generator, dtype=torch.float64, on_failure="ignore")
    return model, *(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((7, 3), (7,)))


def squared(model: nn.Module, scale: float = 1.0) -> Callable[[Tensor, Tensor], tuple[Tensor, float]]:
    return lambda x, y: (scale * 0.5 * (model(x) - y).square().sum(), len(x))


def test_an_epoch_is_that_of_a_plain_loop() -> None:
    model, X, y = problem()
    twin, order = copy.deepcopy(model), torch.tensor([6, 0, 3, 5, 1, 2, 4])
    projected: list[int] = []
    own, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    step = MinibatchStep(model, own, squared(model), clip=0.3, project=lambda: projected.append(1))
    totals = [0.0] * len(TOTALS)
    seen = list(epoch(lambda rows: step(X, y, rows, 2.0), order.split(3), totals))
    loss = 0.0
    for rows in order.split(3):
        plain.zero_grad()
        value = 0.5 * (twin(X[rows]) - y[rows]).square().mean()
        value.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        plain.step()
        loss += float(value.detach()) * len(rows)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    assert len(projected) == 3 and [float(sums[-1]) for sums in seen if sums is not None] == [2.0, 2.0, 2.0]
    named = dict(zip(TOTALS, totals, strict=True))
    assert math.isclose(named["loss"], loss, rel_tol=1e-12) and named["items"] == named["solved"] == 7
    assert named["equilibrium_steps"] >= 7 and named["unconverged"] == 0
    assert solves(model, adjoint=True)[1:] == (1.0, 0.0)  # the last batch has one sample


def test_what_is_not_finite_ends_the_epoch_and_leaves_the_parameters() -> None:
    model, X, y = problem()
    before = copy.deepcopy(model.state_dict())
    steps = {
        "loss": MinibatchStep(model, torch.optim.SGD(model.parameters(), 0.1), squared(model, math.inf)),
        # a finite loss, whose gradient is 0 times infinity
        "gradient": MinibatchStep(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            lambda x, y: ((0.0 * model(x)).abs().sqrt().sum(), len(x)),
            clip=1.0,
        ),
    }
    for step in steps.values():
        totals = [0.0] * len(TOTALS)
        assert list(epoch(lambda rows, step=step: step(X, y, rows), torch.arange(7).split(3), totals)) == [None]
        assert totals == [0.0] * len(TOTALS)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])
