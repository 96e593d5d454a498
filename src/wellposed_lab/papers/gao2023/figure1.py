"""[gao2023, Figure 1]: only the implicit layer is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wellposed.nn import ImplicitOnlyDEQ
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide
from wellposed_lab.papers.experiment import Result
from wellposed_lab.papers.gao2022.figure1 import last_test_loss
from wellposed_lab.papers.width_results import FALLS, Values, WidthResults, speed
from wellposed_lab.papers.widths import AbstractWidthStudy, WidthConfig

__all__ = ["Gao2023Figure1"]

#: Below 1/3, so that A may move by sqrt(m); the paper allows up to 1, where a Gaussian A has no contraction.
GAMMA0 = 0.3
#: "decreased to 0" within a finite training: the loss falls below this part of its start.
ZERO = 0.01
#: "consistently": between two looks a test loss may rise by this part of its start.
WOBBLE = 0.01
_SECTION = "[gao2023, Section 6]"


class Gao2023Figure1(AbstractWidthStudy):
    """ImplicitOnlyDEQ on MNIST."""

    name = "gao2023/figure1"
    title = "training the implicit layer only"
    paper = "gao2023"
    claims = (
        Claim(
            "to_zero",
            "The training loss is consistently decreased to 0.",
            _SECTION,
            f"in every run it falls from each look to the next, and ends below {ZERO:g} of its start",
        ),
        Claim(
            "error",
            "The training error is decreased to 0.",
            _SECTION,
            "no training sample is misclassified at the end of any run",
        ),
        Claim("faster", "Wider implicit layers converge faster.", _SECTION, f"mean log10(loss) over the steps: {FALLS}"),
        Claim(
            "test",
            "Test loss and test error are reduced consistently.",
            _SECTION,
            f"in every run the test loss never rises by more than {WOBBLE:g} of its start between two looks and ends below it, "
            "and the test error does not end above its start",
        ),
        Claim("test_wider", "A wider network has better test performance.", _SECTION, f"test loss at the end: {FALLS}"),
        Claim(
            "well_posed",
            "The equilibrium stays well-posed: gamma |A(t)| < 1.",
            "[gao2023, Theorem 3.1]",
            "an upper bound at every step of every run is below 1",
        ),
    )
    departures = (
        "The paper speaks of gradient flow and does not print a step; we take descent with the step 1/lambda_max(H) of the "
        "widest network at its start, the same for all widths.",
        f"A(0) is Gaussian with gamma0 = {GAMMA0:g}: its norm is about 2 sqrt(m) and not sqrt(m), so gamma0 must be below 1/2.",
        "Computed in float32; equilibria and adjoints are solved to a relative residual of 1e-6.",
    )
    quick = WidthConfig(data=("mnist",), widths=(50, 150, 450), n=100, n_test=200, steps=300, points=20)
    full = WidthConfig(data=("mnist",), widths=(500, 1000, 2000), reference=2000, n=1000, n_test=1000, steps=1000, points=20)

    def network(self, features: int, width: int, generator: torch.Generator) -> ImplicitOnlyDEQ:
        policies: dict[str, Any] = {"on_ill_posed": "ignore", "on_failure": "ignore"}
        return ImplicitOnlyDEQ(features, width, gamma0=GAMMA0, generator=generator, **policies)

    def judge(self, config: WidthConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        of = WidthResults(results)
        return {
            "to_zero": _to_zero(of),
            "error": of.everywhere(lambda values: values["train_error"][-1], 1e-12),
            "faster": of.falls(speed),
            "test": of.everywhere(_test_rise, WOBBLE),
            "test_wider": of.falls(last_test_loss),
            "well_posed": of.contracts(),
        }


def _to_zero(of: WidthResults) -> ClaimFinding:
    """Whether the loss falls all the way, and how much of it is left."""
    losses = [values["loss"] for values in of.runs()]
    rose = sum(any(later >= earlier for earlier, later in zip(loss, loss[1:], strict=False)) for loss in losses)
    left = [loss[-1] / loss[0] for loss in losses]
    text = f"part left {min(left):.3g} to {max(left):.3g} in {len(left)} runs; in {rose} of them it rose between two looks"
    return decide(rose == 0 and max(left) < ZERO, text, left=left, rose=rose)


def _test_rise(values: Values) -> float:
    """The greatest rise of the test loss between two looks, in parts of its start; infinite if it
    or the error ends above its start."""
    loss, error = values["test_loss"], values["test_error"]
    if loss[-1] >= loss[0] or error[-1] > error[0]:
        return math.inf
    return max(later - earlier for earlier, later in zip(loss, loss[1:], strict=False)) / loss[0]
