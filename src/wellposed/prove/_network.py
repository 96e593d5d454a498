"""From a network to the letters of a proof, and all that can be refused before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wellposed.certify._gate import changed, trained_otherwise
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn.activations import ReLU, Softplus, Tanh
from wellposed.nn.families import (
    AbstractNetwork,
    GaussianDEQ,
    ImplicitOnlyDEQ,
    MonotoneDEQ,
    SkipDEQ,
    is_theory_network,
    theory_of,
)
from wellposed.prove._problem import Exact, Parameters, ProvedProblem
from wellposed.prove._slopes import AbstractSlopes, ReLUSlopes, SoftplusSlopes, TanhSlopes
from wellposed.prove.error_free import two_product

#: The networks that `format` defines, and the one whose number that fails is known. Not `FAMILIES`: what a user adds to it is
#: only known by its `Theory`, which does not say which orthogonal matrices stand beside A.
_PROVED: dict[type, str] = {
    GaussianDEQ: "gaussian",
    SkipDEQ: "skip",
    ImplicitOnlyDEQ: "implicit_only",
    MonotoneDEQ: "monotone",
}


def read_network(model: Any, X: Any, y: Any) -> tuple[ProvedProblem, Parameters] | None:
    """The problem and its start, in float64 on the CPU; None for a family whose R is not k times a
    parameter, which has no proof yet.

    Raises:
        InvalidType, InvalidArgument: This network or these data cannot have a proof.
    """
    if not isinstance(model, nn.Module):
        raise InvalidType(f"prove: model must be a network such as wp.GaussianDEQ(d, m); got {type(model).__name__}.")
    # by what the class is derived from: `changed` refuses one that computes something else than its base
    family = next((_PROVED[kind] for kind in type(model).__mro__ if kind in _PROVED), None)
    if family is None or not is_theory_network(model):
        raise InvalidType(_unknown(model))
    if altered := changed(model):
        raise InvalidArgument(f"prove: {altered}")
    theory = model.theory
    _check_parameters(model)
    X, y = _check_data(model, X, y)
    if not theory.recurrent:
        return None
    letters = (theory.recurrent, theory.injected, *theory.readout)
    if other := trained_otherwise(model, (name for name in letters if name not in theory.fixed)):
        raise InvalidArgument(f"prove: {other}")
    stored = dict((*model.named_parameters(), *model.named_buffers()))
    for name in letters:
        if getattr(model, name) is not stored.get(name):
            raise InvalidArgument(
                f"prove: {name} of {type(model).__name__} is not the tensor that is stored under this name, so nothing is "
                "proved about its training; take an object of the original class."
            )
    slopes = _slopes(getattr(model, "activation", None) or ReLU())
    if theory.rectified and slopes.smooth:
        raise InvalidArgument(
            f"prove: {type(model).__name__} injects relu(U x), which has kinks, and the proofs for {slopes.name} need a smooth "
            "network; take its activation ReLU, or GaussianDEQ with this activation."
        )
    _check_rows(X, slopes)
    recurrent = getattr(model, theory.recurrent)
    R = Exact.product(recurrent.T if theory.transposed else recurrent, theory.recurrent_scale)
    U = Exact.product(model.input_matrix(), theory.injection_scale)
    w, *more = (getattr(model, name) for name in theory.readout)
    # 1/sqrt(m) is a part of the network that `format` defines as a rounded quotient
    w = model.readout_weight() if theory.readout_scale != 1.0 else w
    scales = {"R": theory.recurrent_scale, "U": theory.injection_scale, "w": 1.0}
    names = {"R": theory.recurrent, "U": theory.injected, "w": theory.readout[0]}
    if more:
        scales["v"], names["v"] = 1.0, theory.readout[1]
    scales = {part: 0.0 if names[part] in theory.fixed else scale for part, scale in scales.items()}
    start = {name: getattr(model, name).detach().double().cpu().clone() for name in letters}
    at = Parameters(R, U, Exact.product(w, 1.0), Exact.product(more[0], 1.0) if more else None)
    return ProvedProblem(family, slopes, scales, theory.rectified, X, y, start), at


def _unknown(model: nn.Module) -> str:
    name, known = type(model).__name__, "GaussianDEQ, SkipDEQ and ImplicitOnlyDEQ"
    if theory_of(model) is None:
        return f"prove: there are proofs for {known}; got {name}."
    return (
        f"prove: there are proofs for {known}, and {name} is a separate family; the theory that it declares is enough for "
        "wp.certify(model, X, y), but not to follow its descent step by step."
    )


def _slopes(activation: Any) -> AbstractSlopes:
    if isinstance(activation, ReLU):
        return ReLUSlopes()
    if isinstance(activation, Tanh):
        return TanhSlopes()
    if isinstance(activation, Softplus):
        return SoftplusSlopes(centred=activation.centred)
    raise InvalidArgument(
        f"prove: there are proofs for the activations ReLU, Tanh and Softplus; got {type(activation).__name__}."
    )


def _check_parameters(model: AbstractNetwork) -> None:
    name = type(model).__name__
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise InvalidArgument(
                f"prove: {key} of {name} is held fixed (requires_grad=False), and the theorem is about descent on all "
                f"parameters; call {key}.requires_grad_()."
            )
        if parameter.dtype != torch.float64:
            raise InvalidArgument(
                f"prove: {key} of {name} is {parameter.dtype}, and a proof follows descent in float64; "
                "convert the network and the data with .double()."
            )
        _check_values(f"{key} of {name}", parameter)
        if not bool(torch.isfinite(parameter).all()):
            raise InvalidArgument(f"prove: {key} of {name} has NaN or infinite entries; start from finite parameters.")


def _check_values(name: str, tensor: Tensor) -> None:
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "on the device 'meta', without values" if tensor.is_meta else f"stored as {tensor.layout}"
        raise InvalidArgument(f"prove: {name} is {kind}; a proof needs a dense tensor of numbers.")


def _check_data(model: AbstractNetwork, X: Any, y: Any) -> tuple[Tensor, Tensor]:
    for name, tensor in (("X", X), ("y", y)):
        if not isinstance(tensor, Tensor):
            raise InvalidType(f"prove: {name} must be a tensor; got {type(tensor).__name__}.")
        if tensor.dtype != torch.float64:
            raise InvalidArgument(
                f"prove: {name} is {tensor.dtype}, and a proof needs float64; convert it with {name}.double()."
            )
        _check_values(name, tensor)
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidArgument(f"prove: {name} has NaN or infinite entries; clean the data first.")
    if X.dim() != 2 or X.shape[1] != model.in_features or X.shape[0] == 0:
        raise InvalidArgument(f"prove: X must have the shape (n, {model.in_features}) with n >= 1; got {tuple(X.shape)}.")
    if y.shape != X.shape[:1]:
        raise InvalidArgument(
            f"prove: y must have one target for each of the {X.shape[0]} rows of X; got shape {tuple(y.shape)}."
        )
    n = X.shape[0]
    if n > model.width:
        raise InvalidArgument(
            f"prove: {n} samples and {model.width} units: the theorem needs at least as many units as samples; "
            "take a wider network or fewer samples."
        )
    X, y = X.detach().cpu().contiguous(), y.detach().cpu().contiguous()
    _, inverse, counts = torch.unique(X, dim=0, return_inverse=True, return_counts=True)
    if bool((counts > 1).any()):
        first, second = (inverse == int(counts.argmax())).nonzero().flatten().tolist()[:2]
        raise InvalidArgument(
            f"prove: rows {first} and {second} of X are equal, so the tangent kernel is singular and nothing can be proved; "
            "remove one of them."
        )
    return X, y


def _check_rows(X: Tensor, slopes: AbstractSlopes) -> None:
    """Refuses rows whose predictions depend on each other at all parameters.

    These networks have no biases: f(0) = 0 if s(0) = 0, f(c x) = c f(x) for c > 0 if s is ReLU, and
    f(-x) = -f(x) if s is odd.
    """
    zero = (X == 0).all(dim=1).nonzero()
    if len(zero) and float(slopes.value(torch.zeros(1, dtype=torch.float64))) == 0:
        raise InvalidArgument(f"prove: row {int(zero[0])} of X is 0, so its prediction cannot change; remove it.")
    if slopes.smooth and not isinstance(slopes, TanhSlopes):
        return
    unit = X / torch.linalg.vector_norm(X, dim=1, keepdim=True)
    cosine = (unit @ unit.T) * (-1 if slopes.smooth else 1)
    for i, j in (cosine > 1 - 1e-12).triu(1).nonzero().tolist():
        k = int(X[i].abs().argmax())
        # x_i x_jk = x_j x_ik, compared without rounding
        pairs = zip(two_product(X[i], X[j, k]), two_product(X[j], X[i, k]), strict=True)
        dependent = bool((X[i] == -X[j]).all()) if slopes.smooth else all(torch.equal(a, b) for a, b in pairs)
        if dependent:
            how = "opposite, and tanh is odd" if slopes.smooth else "multiples of each other, and ReLU is homogeneous"
            raise InvalidArgument(
                f"prove: rows {i} and {j} of X are {how}, so the tangent kernel is singular and nothing can be proved; "
                "remove one of them."
            )
