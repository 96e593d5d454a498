r"""Certificates for any layer: what is proved comes with a proof, the rest with evidence.

The statements are about the map of the stored weights and of x in exact arithmetic: a float32
weight is a number. What a cell computes from parameters, or from x, by an operation that is not
known (a singular value decomposition in a parametrization, say) is taken as it was rounded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wellposed._torch import apart
from wellposed._tree import leaves
from wellposed.certify._followed import Followed, guessed_input, objection
from wellposed.certify._image_sizes import is_same_for_other_images
from wellposed.certify._inputs import every_input, states
from wellposed.certify._local import local_certificate, second_equilibrium, without_proof
from wellposed.certify._sample import ASSUMED, as_rounded
from wellposed.certify._tape import Tape, TapeRefused, cause
from wellposed.certify._uniqueness import Constants, constants
from wellposed.certify.certificate import Certificate, Hypothesis, Verdict
from wellposed.certify.local_certificate import LocalCertificate
from wellposed.certify.well_posedness import has_one_equilibrium, well_posed
from wellposed.errors import InvalidArgument, WellposedError
from wellposed.nn import EquilibriumLayer
from wellposed.nn.families import is_theory_network
from wellposed.solve._record import SolveRecord

C = TypeVar("C", bound=Certificate)
#: Sizes of batches in which a row must have the same map as alone, besides that of x.
_SIZES = (2, 3)
_NOTHING = "Nothing is proved about existence or uniqueness; the conditions are sufficient, not necessary."


def certify_layers(model: nn.Module, x: Any = None, theorem: str = "auto", z0: Any = None) -> Certificate:
    r"""Existence and uniqueness of the equilibria of any module; never refuses one.

    Without an input: one equilibrium for every input, of the shapes and dtypes that it names.
    With one: the same for each sample, in a ball around the z that was found (a
    `LocalCertificate`), with the first in its `others`.

    Args:
        model: A module with any number of `EquilibriumLayer`s; all of them are looked at.
        x: Its input, batch first.
        theorem: "auto", "contraction", "monotone" or "perron_frobenius": what may prove one
            equilibrium for every input.
        z0: Where the model, which is a layer, starts at x.
    """
    layers = [module for module in model.modules() if isinstance(module, EquilibriumLayer)]
    if not layers:
        note = (
            f"{type(model).__name__} holds no EquilibriumLayer, so there is no equilibrium to prove anything about. Put a cell "
            "f(z, x) into wellposed.EquilibriumLayer(cell)."
        )
        return Certificate(theorem, Verdict.UNDECIDED, note=note)
    entered = _entered(model, layers, x, z0)
    if len(layers) == 1:
        return _of_layer(layers[0], model, entered.get(id(layers[0])), x, theorem, _built_in(model, x, theorem))
    found = []
    for layer in layers:
        inside = entered.get(id(layer))
        found.append(_of_layer(layer, model, inside, x, theorem, _built_in(layer, inside and inside[0], theorem)))
    return _of_all(found)


def has_layers(model: nn.Module) -> bool:
    """Whether there is an equilibrium in it."""
    return any(isinstance(module, EquilibriumLayer) for module in model.modules())


def _of_layer(
    layer: EquilibriumLayer, model: nn.Module, inside: Any, x: Any, theorem: str, known: Certificate | None
) -> Certificate:
    if x is not None and inside is None:
        note = "The model did not call this layer, so nothing is known of its input."
        return Certificate(_title(theorem), Verdict.UNDECIDED, note=note)
    followed = None if x is None else Followed(layer, model, *inside[:2])
    shown = followed if followed is not None and followed.batch else None
    everywhere = known if known is not None and known.certified else None
    if everywhere is None:
        everywhere = _attempted(
            lambda: _of_parts(layer, model, shown, theorem),
            lambda reason: Certificate(_title(theorem), Verdict.UNDECIDED, note=reason),
        )
    if followed is None:
        return everywhere
    found = _attempted(
        lambda: local_certificate(followed, everywhere), lambda reason: without_proof(followed, everywhere, reason)
    )
    return found if inside[2] == 1 else _of_first_call(found, inside[2])


def _attempted(prove: Callable[[], C], otherwise: Callable[[str], C]) -> C:
    """What is proved; if the computation of the proof fails, what `otherwise` makes of the reason.

    What this library raises on purpose is about the arguments, and passes.
    """
    try:
        return prove()
    except WellposedError:
        raise
    except Exception as error:
        return otherwise(f"The proof could not be computed: {cause(error)}")


def _of_first_call(found: LocalCertificate, times: int) -> LocalCertificate:
    """UNDECIDED, if it was certified: the other calls were not looked at. The numbers of the first
    are kept."""
    note = f"The model calls this layer {times} times; only the first call was looked at. {found.note}".strip()
    if not found.certified:
        return replace(found, note=note)
    hypotheses = tuple(replace(hypothesis, holds=None) for hypothesis in found.hypotheses)
    return replace(found, verdict=Verdict.UNDECIDED, hypotheses=hypotheses, licenses=(), note=note)


def _of_parts(layer: EquilibriumLayer, model: nn.Module, followed: Followed | None, theorem: str) -> Certificate:
    """One equilibrium for every input, from the parts of the cell.

    Args:
        layer: The layer. model: What holds it.
        followed: The layer with an input, of which the shape is used; None takes one that fits.
        theorem: As in `certify_layers`.
    """
    if reason := objection(layer, model):
        return Certificate(_title(theorem), Verdict.UNDECIDED, note=reason)
    guessed = followed is None
    if followed is None:
        x = None if layer.coupled else guessed_input(layer, model)
        if x is None:
            why = (
                "Its rows are coupled, so that the size of the batch matters"
                if layer.coupled
                else "The shape of x is not known"
            )
            note = f"{why}. Give an input: certify(layer, x)."
            return Certificate(_title(theorem), Verdict.UNDECIDED, note=note)
        followed = Followed(layer, model, x)
    try:
        tape = followed.tape(0)
    except TapeRefused as refused:
        return Certificate(_title(theorem), Verdict.UNDECIDED, note=str(refused))
    if reason := followed.objection_to_rows(*_SIZES, followed.batch):
        return Certificate(_title(theorem), Verdict.UNDECIDED, note=reason)
    if tape.reads_x:
        note = "It takes decisions by the values of x, so what holds for one input may not hold for others."
        return Certificate(_title(theorem), Verdict.UNDECIDED, note=note)
    vector = all(leaf.dim() <= 2 for leaf in leaves(followed.x) if isinstance(leaf, Tensor))
    found = constants(tape, multiply_out=vector or not guessed)
    if found.every_size and not is_same_for_other_images(followed, tape, found.contraction):
        found = replace(found, every_size=False)
    every_size = found.every_size and not followed.coupled
    inputs, where = every_input(followed, every_size=every_size), states(followed, every_size=every_size)
    certificate = _judged(found, tape, theorem, inputs, where, _assumed(followed, found))
    if certificate.certified or not guessed:
        return certificate
    second = second_equilibrium(followed)
    return certificate if second is None else replace(second, others=(certificate,))


def _judged(found: Constants, tape: Tape, theorem: str, inputs: str, where: str, assumed: str) -> Certificate:
    finite = "" if found.finite else " at which the cell is finite"
    first = f"For {inputs}{finite} there is exactly one equilibrium{where}."
    picard = "Picard() converges to it from any start"
    tried = {
        "contraction": (
            Hypothesis.compare(
                "the map contracts", "|f(v) - f(w)| <= q |v - w|, q < 1", found.contraction, "<", 1.0, refutes=False
            ),
            (f"{first} {picard}, by a factor of {found.contraction:.6g} in every step.",),
        ),
        "monotone": (
            Hypothesis.compare(
                "the operator is strongly monotone", "sup <g(v) - g(w), v - w>/|v - w|^2 < 1", found.monotone, "<", 1.0,
                refutes=False,
            ),
            (f"{first} Picard() is not licensed: it may diverge.",),
        ),
        "perron_frobenius": (
            Hypothesis.compare(
                "the absolute values contract", "|f(v) - f(w)| <= P |v - w|, rho(P) < 1", found.perron_frobenius, "<", 1.0,
                refutes=False,
            ),
            (f"{first} {picard}, in a weighted maximum norm.",),
        ),
    }  # fmt: skip
    note, left_out = " ".join((assumed, *as_rounded(tape.computed))), " ".join(found.remarks)
    made = []
    for name, (hypothesis, licenses) in tried.items():
        if theorem not in ("auto", name):
            continue
        if left_out:  # the number is that of another function
            hypothesis = replace(hypothesis, value=None, holds=None)
        verdict = Verdict.CERTIFIED if hypothesis.holds else Verdict.UNDECIDED
        given: dict[str, Any] = {"licenses": licenses, "note": note} if hypothesis.holds else {"note": left_out or _NOTHING}
        measured = {} if hypothesis.value is None else {hypothesis.equation: hypothesis.value}
        made.append(Certificate(name, verdict, (hypothesis,), measured=measured, **given))
    strongest = next((certificate for certificate in made if certificate.certified), made[0])
    return replace(strongest, others=tuple(other for other in made if other is not strongest))


def _assumed(followed: Followed, found: Constants) -> str:
    if followed.coupled:
        return ASSUMED
    rows = max(*_SIZES, followed.batch)
    images = ", and images of other sizes as it does the two that were compared" if found.every_size else ""
    return f"{ASSUMED[:-1]}, and computes batches of more than {rows} rows as it does smaller ones{images}."


def _title(theorem: str) -> str:
    return "contraction" if theorem == "auto" else theorem


def _built_in(model: nn.Module, x: Any, theorem: str) -> Certificate | None:
    """The certificate of a built-in network, where it has one of this kind."""
    if not (is_theory_network(model) or has_one_equilibrium(model)):
        return None
    try:
        return well_posed(model, x, theorem)
    except InvalidArgument:  # of a theorem that is not about this network, or that needs an input
        return None


def _entered(model: nn.Module, layers: list[EquilibriumLayer], x: Any, z0: Any) -> dict[int, Any]:
    """The input and the start that the model first gives to each layer, by identity, and how often
    it calls it."""
    if x is None:
        return {}
    if model in layers and len(layers) == 1:
        return {id(model): (x, z0, 1)}
    entered: dict[int, Any] = {}

    def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        bound = inspect.signature(EquilibriumLayer.forward).bind(module, *given, **named).arguments
        times = entered[id(module)][2] + 1 if id(module) in entered else 1
        first = entered[id(module)][:2] if times > 1 else (bound["x"], bound.get("z0"))
        entered[id(module)] = (*first, times)
        if bound.get("groups") is not None:
            raise InvalidArgument("The model gives groups to a layer. Certify its graphs one by one, with coupled=True.")

    hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    records = [layer._record for layer in layers]
    for layer in layers:
        layer._record = SolveRecord(coupled=set(layer._record.coupled))
    try:
        with torch.no_grad(), apart():
            model(x) if z0 is None else model(x, z0)
    finally:
        for hook in hooks:
            hook.remove()
        for layer, record in zip(layers, records, strict=True):
            layer._record = record
    return entered


def _of_all(found: list[Certificate]) -> Certificate:
    """Of several layers: CERTIFIED if all are, VIOLATED if one is."""
    verdicts = [certificate.verdict for certificate in found]
    proved = sum(certificate.certified for certificate in found)
    violated = Verdict.VIOLATED in verdicts
    hypothesis = Hypothesis(
        "each layer is certified", "of the layers in `others`", float(proved), float(len(found)), ">=",
        True if proved == len(found) else (False if violated else None),
    )  # fmt: skip
    if proved == len(found):
        licenses = tuple(f"Layer {i}: {line}" for i, certificate in enumerate(found) for line in certificate.licenses)
        return Certificate("every layer", Verdict.CERTIFIED, (hypothesis,), licenses=licenses, others=tuple(found))
    note = "; ".join(f"layer {i}: {c.note}" for i, c in enumerate(found) if not c.certified)
    verdict = Verdict.VIOLATED if violated else Verdict.UNDECIDED
    return Certificate("every layer", verdict, (hypothesis,), note=note, others=tuple(found))
