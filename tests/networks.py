"""The theory networks once more, from the letters of their papers: what the tests of `nn/models` compare with.

Nothing here calls the code under test. A map is written as its paper writes it, an equilibrium is found by a loop or by dense
algebra on the active set, and kernels come from dense Jacobians.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import wellposed as wp
from equilibria import F64, normal

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A network and its definition.

    Attributes:
        make: (in_features, width, **options) -> the network under test.
        recurrent: tensors -> (m, m) what multiplies z.
        injection: tensors, (n, d) -> (n, m).
        readout: tensors, (n, m), (n, d) -> (n,).
        readout_weight: tensors -> (m,).
    """

    make: Callable[..., wp.nn.AbstractNetwork]
    recurrent: Callable[[Tensors], Tensor]
    injection: Callable[[Tensors, Tensor], Tensor]
    readout: Callable[[Tensors, Tensor, Tensor], Tensor]
    readout_weight: Callable[[Tensors], Tensor]

    def __call__(
        self, in_features: int = 3, width: int = 7, *, seed: int = 0, dtype: torch.dtype = F64, **options: Any
    ) -> wp.nn.AbstractNetwork:
        """The network, drawn from a seed, that raises whenever a solve fails."""
        generator = torch.Generator().manual_seed(seed)
        return self.make(in_features, width, generator=generator, dtype=dtype, **{"on_failure": "raise", **options})

    def any_size(self, in_features: int, width: int, *, seed: int) -> wp.nn.AbstractNetwork:
        """The network, scaled down if it was drawn as no contraction: a small matrix may well be."""
        monotone = self is FAMILIES["monotone"]
        network = self(in_features, width, seed=seed, **({} if monotone else {"on_ill_posed": "ignore"}))
        norm = float(torch.linalg.matrix_norm(self.recurrent(tensors_of(network)), 2))
        if not monotone and norm > 0.9:
            with torch.no_grad():
                (network.W if isinstance(network, wp.GaussianDEQ) else network.A).mul_(0.9 / norm)
            network.on_ill_posed = "raise"
        return network

    def map(self, tensors: Tensors, Z: Tensor, X: Tensor) -> Tensor:
        """(n, m) relu(R z + c(x))."""
        return torch.relu(Z @ self.recurrent(tensors).T + self.injection(tensors, X))


GAMMA, GAMMA0, MARGIN = 0.2, 0.3, 0.5


def _monotone(t: Tensors) -> Tensor:
    identity = torch.eye(t["B"].shape[0], dtype=t["B"].dtype)
    return (1 - MARGIN) * identity - t["A"].T @ t["A"] + t["B"] - t["B"].T


def _implicit(init: str, gamma0: float) -> Family:
    def gamma(t: Tensors) -> float:
        return gamma0 / math.sqrt(len(t["b"]))

    return Family(
        lambda d, m, **options: wp.ImplicitOnlyDEQ(d, m, gamma0=gamma0, init=init, **options),
        lambda t: gamma(t) * t["A"].T,
        lambda t, X: torch.relu(X @ t["W"]),
        lambda t, Z, X: Z @ t["b"] / math.sqrt(len(t["b"])),
        lambda t: t["b"] / math.sqrt(len(t["b"])),
    )


FAMILIES: dict[str, Family] = {
    "gaussian": Family(
        wp.GaussianDEQ,
        lambda t: t["W"],
        lambda t, X: X @ t["U"].T,
        lambda t, Z, X: Z @ t["a"],
        lambda t: t["a"],
    ),
    "skip": Family(
        lambda d, m, **options: wp.SkipDEQ(d, m, gamma=GAMMA, **options),
        lambda t: GAMMA / math.sqrt(len(t["u"])) * t["A"],
        lambda t, X: torch.relu(X @ t["W"].T) / math.sqrt(len(t["u"])),
        lambda t, Z, X: Z @ t["u"] + torch.relu(X @ t["W"].T) / math.sqrt(len(t["u"])) @ t["v"],
        lambda t: t["u"],
    ),
    "implicit_only": _implicit("gaussian", GAMMA0),
    "half_normal": _implicit("half_normal", 0.5),
    "diagonal": _implicit("diagonal", 0.5),
    "monotone": Family(
        lambda d, m, **options: wp.MonotoneDEQ(d, m, margin=MARGIN, **options),
        _monotone,
        lambda t, X: X @ t["U"].T,
        lambda t, Z, X: Z @ t["u"],
        lambda t: t["u"],
    ),
}
#: Those that contract, and so have a policy.
CONTRACTIONS = [name for name in FAMILIES if name != "monotone"]


def tensors_of(network: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, detached copies."""
    return {name: t.detach().clone() for name, t in (*network.named_parameters(), *network.named_buffers())}


def parameters_of(network: torch.nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in network.named_parameters()}


def inputs(n: int = 5, d: int = 3, *, seed: int = 1) -> Tensor:
    """(n, d) on the sphere of radius sqrt(d), as [ling2022] wants them."""
    X = normal(n, d, seed=seed)
    return X * math.sqrt(d) / X.norm(dim=1, keepdim=True)


def dense_equilibrium(family: Family, tensors: Tensors, X: Tensor) -> Tensor:
    """(n, m) by dense algebra: z_S = (I - R_SS)^(-1) c_S on the right active set S, and 0 elsewhere.

    The set is guessed by Peaceman-Rachford steps, written out (they converge for contractions and monotone maps), and right
    if z_S >= 0 and R z + c <= 0 off S: then z is the equilibrium, whoever guessed.
    """
    R, C = family.recurrent(tensors), family.injection(tensors, X)
    identity = torch.eye(R.shape[0], dtype=R.dtype)
    inverse = torch.linalg.inv(identity + (identity - R))
    z = u = torch.zeros_like(C)
    for _ in range(300):
        for _ in range(20):
            reflected = 2 * z - u
            u = 2 * (reflected + C) @ inverse.T - reflected
            z = torch.relu(u)
        Z = torch.zeros_like(C)
        for i, S in enumerate(z > 0):
            if S.any():
                Z[i, S] = torch.linalg.solve(identity[S][:, S] - R[S][:, S], C[i, S])
        if bool((Z >= 0).all()) and bool(((Z > 0) | (Z @ R.T + C <= 0)).all()):
            return Z
    raise AssertionError("no active set is right; a pre-activation may be too near 0")


def dense_adjoint(family: Family, tensors: Tensors, Z: Tensor) -> Tensor:
    """(n, m) the p_i: (I - R_SS)^(-T) v_S on the active set S of sample i, and 0 elsewhere."""
    R, v = family.recurrent(tensors), family.readout_weight(tensors)
    P = torch.zeros_like(Z)
    for i, z in enumerate(Z):
        S = z > 0
        if S.any():
            part = torch.eye(int(S.sum()), dtype=R.dtype) - R[S][:, S]
            P[i, S] = torch.linalg.solve(part.T, v[S])
    return P


def dense_jacobian(family: Family, tensors: Tensors, X: Tensor, name: str) -> Tensor:
    """(n, number of entries) d y_i/d parameter, by the implicit function theorem on the whole batch as one vector."""
    Z = dense_equilibrium(family, tensors, X)

    def with_parameter(value: Tensor) -> dict[str, Tensor]:
        return {**tensors, name: value}

    def of_state(flat: Tensor) -> Tensor:
        return family.map(tensors, flat.reshape(Z.shape), X).flatten()

    jacobian = torch.func.jacrev
    f_z = jacobian(of_state)(Z.flatten())
    f_t = jacobian(lambda value: family.map(with_parameter(value), Z, X).flatten())(tensors[name]).flatten(1)
    z_t = torch.linalg.solve(torch.eye(Z.numel(), dtype=Z.dtype) - f_z, f_t)
    y_z = jacobian(lambda flat: family.readout(tensors, flat.reshape(Z.shape), X))(Z.flatten())
    y_t = jacobian(lambda value: family.readout(with_parameter(value), Z, X))(tensors[name]).flatten(1)
    return y_z @ z_t + y_t


def generic_predictions(family: Family, tensors: Tensors, X: Tensor) -> Tensor:
    """(n,) with a graph, through `EquilibriumLayer` over a plain function, which knows nothing of dense maps."""
    solver = wp.NewtonKrylov() if "B" in tensors else None
    layer = wp.EquilibriumLayer(
        lambda z, x: family.map(tensors, z, x),
        solver,
        on_failure="raise",
        rtol=1e-13,
        max_steps=1000,
        state_shape=tuple(family.readout_weight(tensors).shape),
    )
    return family.readout(tensors, layer(X), X)


def kernels(left: wp.nn.tangent.TangentFeatures, right: wp.nn.tangent.TangentFeatures) -> dict[str, Tensor]:
    """The kernel parts, by the definition in `TangentFeatures`."""
    parts: dict[str, Tensor] = {}
    for name, terms in left.terms.items():
        total: Tensor | None = None
        for term in terms:
            product = torch.full((), term.coefficient, dtype=F64)
            for a, b in term.factors:
                product = product * (left.features[a] @ right.features[b].T)
            total = product if total is None else total + product
        assert total is not None
        parts[name] = total
    return parts
