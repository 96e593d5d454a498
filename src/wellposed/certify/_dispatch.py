"""certify: the theorems that fit a model, and the strongest of what they prove."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._package import CallablePackage
from wellposed._progress import announced
from wellposed.certify._gate import check_data, declared_outside
from wellposed.certify._recorded import contradictions
from wellposed.certify.certificate import Certificate, Verdict
from wellposed.certify.measurement import measure
from wellposed.certify.own_layer import certify_layers, has_layers
from wellposed.certify.radius_certificate import radius, radius_at
from wellposed.certify.theorems import PAPERS, TRIED
from wellposed.certify.well_posedness import contraction, has_one_equilibrium, monotone, perron_frobenius, well_posed
from wellposed.errors import InvalidArgument, InvalidType, did_you_mean
from wellposed.nn import EquilibriumLayer
from wellposed.nn.families import is_theory_network, theory_of

#: (model, X, y, **options) -> Certificate.
OwnTheorem = Callable[..., Certificate]
CONVERGENCE: dict[str, OwnTheorem] = {"radius": radius, **PAPERS}
WELL_POSED: dict[str, Callable[[Any], Certificate]] = {
    "contraction": contraction,
    "monotone": monotone,
    "perron_frobenius": perron_frobenius,
}


def certify(
    model: nn.Module,
    X: Any = None,
    y: Tensor | None = None,
    *,
    z0: Any = None,
    theorem: str | OwnTheorem = "auto",
    **options: Any,
) -> Certificate:
    r"""Checks a theorem on a model and data, at the present parameters.

        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(20, 100, dtype=torch.float64)
        >>> X, y = torch.randn(5, 20, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
        >>> certificate = wp.certify(model, X, y, theorem="radius")
        >>> certificate.verdict in (wp.Verdict.CERTIFIED, wp.Verdict.UNDECIDED)
        True

    Everything is computed in float64 with one-sided bounds, whatever the dtype of the model, and
    nothing is changed.

    Any module with equilibrium layers has a certificate of existence and uniqueness:
    `certify(model)` for every input of the shape that it names, `certify(layer, x)` for each
    sample, near the z that is found, with a bound of its error: a `LocalCertificate`. What cannot
    be proved is UNDECIDED, with the reason. See docs/howto/own_layer.md.

    Args:
        model: A theory network, or any module.
        X: (n, d) inputs; what the module takes, if there is no y.
        y: (n,) targets; only theorems about training read them.
        z0: Where a layer starts at X, as in `layer(X, z0)`: needed if z is a dict or tuple.
        theorem: "radius" (ours), "ling2022", "nguyen2022", "gao2022", "gao2023"; "contraction",
            "monotone", "perron_frobenius" for existence and uniqueness alone, or "well_posed"
            for the one of them that fits the model; "auto" tries all that fit and returns the
            strongest that holds, with the others in `Certificate.others`. In order: the flow,
            descent with layer-wise steps, the theorem of the paper. If none holds, the radius
            certificate for the flow says why (an OptEq network then has its certificate of
            uniqueness). A theorem of your own is a callable (model, X, y) -> Certificate; see
            docs/howto/theorem.md.
        options: Of the theorem, e.g. `dynamics="descent"` for "radius" and "nguyen2022"; none
            for "auto". A callable gets them as keyword arguments.
    """
    check_theorem(theorem)
    if z0 is not None:
        _check_start(model, X, theorem)
    # bounds of norms are derivatives, which inference mode does not have
    with (
        torch.inference_mode(False),
        announced(f"certifying {type(model).__name__} by theorem={getattr(theorem, '__name__', theorem)!r}"),
    ):
        if not isinstance(theorem, str):
            return certificate_by(theorem, model, X, y, options)
        found = _certify(model, X, y, z0, theorem, options)
    if found.certified and theory_of(model) is not None and declared_outside(model):
        assumed = f"Assumed: {type(model).__name__} computes what it declares, which was compared at random points."
        found = replace(found, note=f"{found.note} {assumed}".strip())
    return found


def _check_start(model: Any, X: Any, theorem: object) -> None:
    if isinstance(model, EquilibriumLayer) and X is not None and isinstance(theorem, str) and theorem not in CONVERGENCE:
        return
    raise InvalidArgument(
        f"z0 is the start of a layer at an input: certify(layer, x, z0=z0). Got {type(model).__name__}"
        f"{' without an input' if X is None else ''}, theorem={getattr(theorem, '__name__', theorem)!r}. In a larger model "
        "call the layer as layer(x, z0)."
    )


def _certify(model: nn.Module, X: Any, y: Tensor | None, z0: Any, theorem: str, options: dict[str, Any]) -> Certificate:
    """By a theorem that has a name."""
    known = ("auto", *CONVERGENCE, *WELL_POSED, "well_posed")
    if theorem not in known:
        hint = did_you_mean(theorem, known)
        raise InvalidArgument(f"Unknown theorem {theorem!r}; known are {', '.join(known)}.{hint}")
    function = CONVERGENCE.get(theorem)
    _check_options(theorem, options, tuple(inspect.signature(function).parameters)[3:] if function else ())
    if y is None:
        return _without_targets(model, X, z0, theorem)
    if theorem not in CONVERGENCE and not has_certificate(model) and has_layers(model):
        return _without_training(certify_layers(model, X, "auto" if theorem == "well_posed" else theorem, z0), model)
    if theorem == "well_posed" or (theory_of(model) is None and has_one_equilibrium(model)):
        return _without_training(well_posed(model, X, "auto" if theorem == "well_posed" else theorem), model)
    check_data(model, X, y)
    if function is not None:
        return function(model, X, y, **options)
    if theorem == "auto":
        return _auto(model, X, y)
    return WELL_POSED[theorem](model) if is_theory_network(model) else well_posed(model, X, theorem)


def _without_training(certificate: Certificate, model: nn.Module) -> Certificate:
    """Says that the targets were not read."""
    note = f"y was not read: this is about equilibria, not about the training of {type(model).__name__}."
    if theory_of(model) is None:
        note += " No theorem about its training is known."
    return replace(certificate, note=f"{note} {certificate.note}".strip())


def _without_targets(model: nn.Module, X: Any, z0: Any, theorem: str) -> Certificate:
    """Existence and uniqueness, of any module."""
    if theorem in CONVERGENCE:
        raise InvalidArgument(f"theorem={theorem!r} is about training, so it needs targets: certify(model, X, y).")
    if not isinstance(model, nn.Module):
        raise InvalidType(f"certify needs a torch.nn.Module; got {type(model).__name__}.")
    if X is None and theorem in WELL_POSED and is_theory_network(model):
        return WELL_POSED[theorem](model)
    return certify_layers(model, X, "auto" if theorem == "well_posed" else theorem, z0)


def has_certificate(model: nn.Module) -> bool:
    """Whether `certify` has a theorem about this kind of model."""
    return theory_of(model) is not None or has_one_equilibrium(model)


def check_theorem(theorem: object, model: nn.Module | None = None, X: Any = None, y: Any = None) -> None:
    """Raises unless this is a name or can be called; with a model, also where `certify` will raise,
    on two samples.

    A model without a certificate takes every theorem, because none is evaluated.
    """
    if not isinstance(theorem, str) and not callable(theorem):
        raise InvalidType(
            f"theorem must be a name or a callable (model, X, y) -> Certificate; got {type(theorem).__name__} {theorem!r:.60}."
        )
    if model is not None and theorem != "auto" and has_certificate(model):
        certify(model, X[:2], y[:2], theorem=theorem)


def certificate_by(theorem: OwnTheorem, model: Any, X: Any, y: Tensor | None, options: Mapping[str, Any]) -> Certificate:
    """What the callable returns, checked to be a certificate that agrees with itself.

    Args:
        theorem: (model, X, y, **options) -> Certificate.
        model: Any; the theorem decides which kinds it is about.
        X, y: As the caller gave them.
        options: Keyword arguments of the theorem.
    """
    name = getattr(theorem, "__name__", type(theorem).__name__)
    _check_signature(name, theorem, options)
    found = theorem(model, X, y, **options)
    if not isinstance(found, Certificate):
        raise InvalidType(f"theorem={name} must return a wellposed.certify.Certificate; it returned {type(found).__name__}.")
    if not isinstance(found.verdict, Verdict):
        raise InvalidType(f"theorem={name} must give its certificate a wellposed.Verdict; got verdict={found.verdict!r:.60}.")
    if found.certified and (open_ones := [h.name for h in found.hypotheses if h.holds is not True]):
        raise InvalidArgument(
            f"theorem={name} returned CERTIFIED although its hypothesis {open_ones[0]!r} does not hold. Return VIOLATED or "
            "UNDECIDED there."
        )
    if wrong := contradictions(found, found.verdict):
        raise InvalidArgument(f"theorem={name} returned a certificate that contradicts itself: {wrong[0]}.")
    return found


class CertifyPackage(CallablePackage):
    """The class of `wellposed.certify`, which is called like the function of its name."""

    def __call__(
        self,
        model: nn.Module,
        X: Any = None,
        y: Tensor | None = None,
        *,
        z0: Any = None,
        theorem: str | OwnTheorem = "auto",
        **options: Any,
    ) -> Certificate:
        return certify(model, X, y, z0=z0, theorem=theorem, **options)


CertifyPackage.__call__.__doc__ = certify.__doc__


def _check_signature(name: str, theorem: OwnTheorem, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(theorem)
    except ValueError:  # built-in functions have none
        return
    try:
        signature.bind(None, None, None, **options)
    except TypeError as error:
        given = "".join(f", {option}=..." for option in options)
        raise InvalidArgument(
            f"theorem={name} is called as {name}(model, X, y{given}), but it is {name}{signature}."
        ) from error


def _check_options(theorem: str, options: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in options:
        if name not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no options"
            raise InvalidArgument(f"theorem={theorem!r} {takes}; got {name!r}.{did_you_mean(name, (*known, 'theorem'))}")


def _auto(model: Any, X: Tensor, y: Tensor) -> Certificate:
    theory = model.theory
    if theory.closed_form:
        point = measure(model, *check_data(model, X, y))
        tried = [radius_at(point, "flow", 1.0), radius_at(point, "descent", "largest")]
    else:
        tried = [radius(model, X, y), radius(model, X, y, dynamics="descent")]
    if theory.theorem:
        tried += [PAPERS[theory.theorem](model, X, y, **options) for options in TRIED.get(theory.theorem, ({},))]
    strongest = next((certificate for certificate in tried if certificate.certified), None)
    if theory.closed_form or strongest is None:
        tried.append(well_posed(model, X, "auto"))
    if strongest is None:
        strongest = tried[-1] if tried[-1].certified and not theory.closed_form else tried[0]
    return replace(strongest, others=tuple(other for other in tried if other is not strongest))
