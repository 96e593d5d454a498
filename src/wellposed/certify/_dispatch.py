"""certify: the theorems that fit a model, and the strongest of what they prove."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from wellposed.certify._certificate import Certificate
from wellposed.certify._measure import check_data, measure
from wellposed.certify._own import OwnTheorem, certificate_by, check_theorem
from wellposed.certify.radius_certificate import radius, radius_at
from wellposed.certify.theorems.gao2022 import gao2022
from wellposed.certify.theorems.gao2023 import gao2023
from wellposed.certify.theorems.ling2022 import ling2022
from wellposed.certify.theorems.nguyen2022 import nguyen2022
from wellposed.certify.well_posedness import contraction, monotone, perron_frobenius
from wellposed.convex import AbstractDenseOptEq
from wellposed.errors import InvalidArgument, did_you_mean
from wellposed.nn import AbstractNetwork, GaussianDEQ, ImplicitOnlyDEQ, MonotoneDEQ, SkipDEQ

__all__ = ["certify"]

CONVERGENCE: dict[str, Callable[..., Certificate]] = {
    "radius": radius,
    "ling2022": ling2022,
    "nguyen2022": nguyen2022,
    "gao2022": gao2022,
    "gao2023": gao2023,
}
WELL_POSED: dict[str, Callable[[Any], Certificate]] = {
    "contraction": contraction,
    "monotone": monotone,
    "perron_frobenius": perron_frobenius,
}


def certify(
    model: AbstractNetwork | AbstractDenseOptEq, X: Tensor, y: Tensor, *, theorem: str | OwnTheorem = "auto", **options: Any
) -> Certificate:
    r"""Checks a theorem on a model and data, at the present parameters.

        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(20, 100, dtype=torch.float64)
        >>> X, y = torch.randn(5, 20, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
        >>> certificate = wp.certify(model, X, y, theorem="radius")
        >>> certificate.verdict in (wp.Verdict.CERTIFIED, wp.Verdict.UNDECIDED)
        True

    Everything is computed in float64 with one-sided bounds, whatever the dtype of the model, and nothing is changed.

    Args:
        model: A theory network; any module if `theorem` is a callable.
        X: (n, d) inputs.
        y: (n,) targets.
        theorem: "radius" (ours), "ling2022", "nguyen2022", "gao2022", "gao2023"; "contraction", "monotone",
            "perron_frobenius" for existence and uniqueness alone; "auto" tries all that fit and returns the strongest that
            holds, with the others in `Certificate.others`. In order: the flow, descent with layer-wise steps, the theorem of
            the paper. If none holds, the radius certificate for the flow says why. A theorem of your own is a callable
            (model, X, y) -> Certificate; see docs/howto/theorem.md.
        options: Of the theorem, e.g. `dynamics="descent"` for "radius" and "nguyen2022"; none for "auto". A callable gets them
            as keyword arguments.
    """
    check_theorem(theorem)
    if not isinstance(theorem, str):
        return certificate_by(theorem, model, X, y, options)
    known = ("auto", *CONVERGENCE, *WELL_POSED)
    if theorem not in known:
        hint = did_you_mean(theorem, known)
        raise InvalidArgument(f"Unknown theorem {theorem!r}; known are {', '.join(known)}.{hint}")
    check_data(model, X, y)
    if theorem == "auto":
        _check_options("auto", options, ())
        return _auto(model, X, y)
    if theorem in WELL_POSED:
        _check_options(theorem, options, ())
        return WELL_POSED[theorem](model)
    function = CONVERGENCE[theorem]
    _check_options(theorem, options, tuple(inspect.signature(function).parameters)[3:])
    return function(model, X, y, **options)


def _check_options(theorem: str, options: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in options:
        if name not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no options"
            raise InvalidArgument(f"theorem={theorem!r} {takes}; got {name!r}.{did_you_mean(name, known)}")


def _auto(model: AbstractNetwork | AbstractDenseOptEq, X: Tensor, y: Tensor) -> Certificate:
    if isinstance(model, AbstractDenseOptEq):
        flow, descent = radius(model, X, y), radius(model, X, y, dynamics="descent")
        strongest, other = (descent, flow) if descent.certified and not flow.certified else (flow, descent)
        return replace(strongest, others=(other,))
    at = measure(model, *check_data(model, X, y))
    tried = [radius_at(at, "flow", 1.0), radius_at(at, "descent", "largest")]
    if isinstance(model, GaussianDEQ):
        tried.append(ling2022(model, X, y))
    elif isinstance(model, MonotoneDEQ):
        tried += [nguyen2022(model, X, y, dynamics="descent"), nguyen2022(model, X, y, dynamics="flow")]
    elif isinstance(model, SkipDEQ):
        tried.append(gao2022(model, X, y))
    elif isinstance(model, ImplicitOnlyDEQ):
        tried.append(gao2023(model, X, y))
    tried.append(monotone(model) if isinstance(model, MonotoneDEQ) else contraction(model))
    strongest = next((certificate for certificate in tried[:-1] if certificate.certified), tried[0])
    return replace(strongest, others=tuple(other for other in tried if other is not strongest))
