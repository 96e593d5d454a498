"""From a family, by name or object, to a network with as many outputs as an estimator needs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.convex import OptEq
from wellposed.errors import InvalidArgument, InvalidType, did_you_mean
from wellposed.nn import AbstractCell, AbstractContraction, DenseCell, EquilibriumLayer, MonotoneDEQ, Spectral
from wellposed.nn.families import FAMILIES, may_be_ill_posed, theory_of
from wellposed.nn.own import import_class, instantiate, is_cell, state_shape
from wellposed.solve import PeacemanRachford


def _dense(in_features: int, width: int, *, bound: float = 0.9, **factory_kwargs: Any) -> EquilibriumLayer:
    """z = relu(W z + U x + b) with |W| <= bound."""
    return EquilibriumLayer(DenseCell(in_features, width, weight=Spectral(bound), **factory_kwargs))


def _monotone(in_features: int, width: int, *, margin: float = 0.5, **factory_kwargs: Any) -> MonotoneDEQ:
    """With a solver that converges for every monotone network, and a margin for speed."""
    # a tuned step is not pickled: with a fixed one the same network always gives the same numbers
    return MonotoneDEQ(in_features, width, margin=margin, **{"solver": PeacemanRachford(step_size=0.7), **factory_kwargs})


#: The families of the library by name, with those that have no theorem or other defaults.
NETWORKS: dict[str, Callable[..., nn.Module]] = {**FAMILIES, "monotone": _monotone, "dense": _dense, "opteq": OptEq}


class Headed(nn.Module):
    """V z + v on equilibria z, with V_ij ~ N(0, 1/m) and v = 0 at the start.

    Args:
        features: (n, d) -> (n, m) by its `equilibrium(X)`, or by itself if it has none.
        width, outputs: m, k.
        generator, dtype: Of the read-out.
    """

    def __init__(
        self, features: nn.Module, width: int, outputs: int, *, generator: torch.Generator, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.features = features
        self.weight = nn.Parameter(torch.randn(outputs, width, generator=generator, dtype=dtype) / math.sqrt(width))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype))

    def forward(self, X: Tensor) -> Tensor:
        """(n, d) -> (n, k)."""
        return nn.functional.linear(_features(self.features, X), self.weight, self.bias)


def build(
    family: Any,
    shape: tuple[int, int],
    outputs: int | None,
    *,
    options: dict[str, Any],
    generator: torch.Generator,
    dtype: torch.dtype,
) -> nn.Module:
    """The network of an estimator.

    Args:
        family: A name of `NETWORKS`; an import path, a class or a function, called with those of
            in_features, width, generator and dtype that it takes; or a module, of which a copy is
            trained. A cell f(z, x) becomes its equilibrium layer.
        shape: (in_features, width).
        outputs: Numbers a sample; None for one, as a vector (n,), which theory networks return.
        options: Further keywords of the family.
        generator, dtype: Of the parameters.
    """
    base = _base(family, shape, options, generator, dtype)
    for module in base.modules():
        if isinstance(module, EquilibriumLayer) and module.on_failure == "warn":
            module.on_failure = "ignore"  # the estimator counts failures and warns once
    probe = torch.zeros(1, shape[0], dtype=dtype)
    with torch.no_grad():
        if outputs is None and theory_of(base) is not None:
            return base
        features = _features(base, probe)
    if features.dim() != 2:
        raise InvalidArgument(
            f"The family must map (n, {shape[0]}) to (n, m) features; got the shape {tuple(features.shape)} for one sample."
        )
    return Headed(base, features.shape[1], outputs or 1, generator=generator, dtype=dtype)


def contracting(model: nn.Module) -> list[tuple[AbstractContraction, nn.Parameter]]:
    """The contractions among the networks, each with the parameter that its recurrent matrix is a
    multiple of."""
    found = [module for module in model.modules() if may_be_ill_posed(module) and module.theory.recurrent]
    return [(network, getattr(network, network.theory.recurrent)) for network in found]


def _base(
    family: Any, shape: tuple[int, int], options: dict[str, Any], generator: torch.Generator, dtype: torch.dtype
) -> nn.Module:
    if isinstance(family, nn.Module):
        if options:
            raise InvalidArgument(f"family_options={options!r} has no effect on a module, which is already built.")
        expected = getattr(family, "in_features", getattr(getattr(family, "cell", None), "in_features", shape[0]))
        if expected != shape[0]:
            raise InvalidArgument(
                f"The family is a module for {expected} features, and X has {shape[0]}; give a name or a class instead."
            )
        return _layer_of(copy.deepcopy(family).to(dtype), shape, dtype)
    if isinstance(family, str):
        if family not in NETWORKS and "." not in family:
            raise InvalidArgument(
                f"Unknown family {family!r}; known are {', '.join(NETWORKS)}, and import paths such as 'my_package.MyCell'."
                f"{did_you_mean(family, NETWORKS)}"
            )
        family = NETWORKS[family] if family in NETWORKS else import_class(family)
    if not callable(family):
        raise InvalidType(f"family must be a name such as 'gaussian', a class, a function or a module; got {family!r}.")
    offered = {"in_features": shape[0], "width": shape[1], "generator": generator, "dtype": dtype}
    with torch.random.fork_rng(devices=[]):  # a class without `generator` draws from the global one
        torch.manual_seed(generator.initial_seed())
        made = instantiate(family, options, offered, where="family_options", shape=shape)
    return _layer_of(made.to(dtype), shape, dtype)


def _layer_of(module: nn.Module, shape: tuple[int, int], dtype: torch.dtype) -> nn.Module:
    """The module, or the equilibrium layer of a cell f(z, x)."""
    if not is_cell(module):
        return module
    if isinstance(module, AbstractCell):
        return EquilibriumLayer(module)
    return EquilibriumLayer(module, state_shape=state_shape(module, shape[:1], shape[1], dtype))


def _features(module: nn.Module, X: Tensor) -> Tensor:
    equilibrium = getattr(module, "equilibrium", module)
    z: Tensor = equilibrium(X)
    return z
