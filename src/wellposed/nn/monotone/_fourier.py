"""Monotone convolutions on a torus: exact resolvents in Fourier space."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.linalg.direct import batched_solve
from wellposed.nn.maps.operator import AbstractOperator, OperatorCache
from wellposed.nn.monotone._lattice import Lattice, largest_norm_upper, symbol


class FourierOperator(AbstractOperator):
    r"""The W of `TierWeights` on circular images; one tier is a single convolution.

        (W z)_i = D_i z_i + K_i z_(i-1)

    D_i commutes with shifts by 2 of its tier (by 1 for the last one) and is one complex matrix per
    frequency; so is K_i, between the phases of one tier and the next. Only half of the spectrum
    exists, the resolvent inverts the D_i and substitutes forward (backward for the transpose), and
    no graph is kept through any of it: cotangents are outer products of spectra.

    Args:
        diagonal: [(frequencies, p^2 C, p^2 C)] D_i.
        coupling: [(frequencies, C_i, 4 C_(i-1))] K_i of tiers 1, 2, ...
        lattices: Of the tiers, with their phases.
        margin: m.
        memory: Of the cell.
    """

    def __init__(
        self,
        diagonal: tuple[Tensor, ...],
        coupling: tuple[Tensor, ...],
        lattices: tuple[Lattice, ...],
        *,
        margin: float,
        memory: OperatorCache | None = None,
    ) -> None:
        super().__init__((*diagonal, *coupling), memory)
        self._lattices, self._margin = lattices, margin
        self._targets = tuple(Lattice(t.channels, t.height, t.width) for t in lattices)  # of couplings: phase 1
        self._sizes = [lattice.features for lattice in lattices]

    @property
    def _D(self) -> tuple[Tensor, ...]:
        return self.plain[: len(self._lattices)]

    @property
    def _K(self) -> tuple[Tensor, ...]:
        return self.plain[len(self._lattices) :]

    def with_tensors(self, *tensors: Tensor) -> FourierOperator:
        tiers = len(self._lattices)
        return FourierOperator(tensors[:tiers], tensors[tiers:], self._lattices, margin=self._margin)

    def product(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._apply(z, self._D, self._K)

    def tracked(self, z: Tensor) -> Tensor:
        tiers = len(self._lattices)
        return self._apply(z, self.tensors[:tiers], self.tensors[tiers:])

    def _apply(self, z: Tensor, D: tuple[Tensor, ...], K: tuple[Tensor, ...]) -> Tensor:
        spectra = [lattice.spectrum(part) for lattice, part in zip(self._lattices, self._split(z), strict=True)]
        fields = [lattice.field(_times(Z, M)) for lattice, Z, M in zip(self._lattices, spectra, D, strict=True)]
        for i, M in enumerate(K):
            fields[i + 1] = fields[i + 1] + self._targets[i + 1].field(_times(spectra[i], M))
        return _joined(fields)

    def transposed(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        parts = self._split(p)
        D, K = self._adjoints(self._D, "D"), self._adjoints(self._K, "K")
        fields = []
        for i, (lattice, M) in enumerate(zip(self._lattices, D, strict=True)):
            spectrum = _times(lattice.spectrum(parts[i]), M)
            if i < len(K):  # on the same lattice: tier i by phases, tier i + 1 by pixels
                spectrum += _times(self._targets[i + 1].spectrum(parts[i + 1]), K[i])
            fields.append(lattice.field(spectrum))
        return _joined(fields)

    def cotangents(self, p: Tensor, z: Tensor, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        z_parts, p_parts = self._split(z), self._split(p)
        tiers = len(self._lattices)
        results: list[Tensor | None] = []
        for i, lattice in enumerate(self._lattices):
            results.append(_outer(lattice, p_parts[i], lattice, z_parts[i]) if needed[i] else None)
        for i in range(len(self._K)):
            wanted = needed[tiers + i]
            results.append(_outer(self._targets[i + 1], p_parts[i + 1], self._lattices[i], z_parts[i]) if wanted else None)
        return tuple(results)

    def resolvent(self, v: Tensor, step_size: float, *, transpose: bool = False) -> Tensor:
        inverses: list[Tensor] = self.cached(("inverse", step_size), lambda: self._inverses(step_size))
        if transpose:
            inverses = self.cached(("adjoint inverse", step_size), lambda: [_adjoint(M) for M in inverses])
        parts = self._split(v)
        tiers = len(self._lattices)
        spectra: list[Tensor] = [torch.empty(0)] * tiers
        for i in reversed(range(tiers)) if transpose else range(tiers):
            lattice = self._lattices[i]
            rhs = parts[i]
            if transpose:
                S = lattice.spectrum(rhs)
                if i + 1 < tiers:
                    above = self._targets[i + 1].spectrum(self._lattices[i + 1].field(spectra[i + 1]))
                    S = S + step_size * _times(above, self._adjoints(self._K, "K")[i])
                spectra[i] = _times(S, inverses[i])
            else:
                if i > 0:
                    rhs = rhs + step_size * self._targets[i].field(_times(spectra[i - 1], self._K[i - 1]))
                spectra[i] = _times(lattice.spectrum(rhs), inverses[i])
        return _joined([lattice.field(S) for lattice, S in zip(self._lattices, spectra, strict=True)])

    def _adjoints(self, matrices: tuple[Tensor, ...], name: str) -> list[Tensor]:
        """M^H of every frequency, cached: a lazy conjugate is copied at every product."""
        adjoints: list[Tensor] = self.cached(("adjoint", name), lambda: [_adjoint(M) for M in matrices])
        return adjoints

    def _inverses(self, a: float) -> list[Tensor]:
        inverses = []
        for D in self._D:
            identity = torch.eye(D.shape[-1], dtype=D.dtype, device=D.device)
            inverses.append(batched_solve((1 + a) * identity - a * D, identity.expand_as(D).contiguous()))
        return inverses

    def monotonicity(self) -> tuple[float, float]:
        """The margin and the norm from those of the blocks, with bounds of the rounding."""
        norms = []
        for D in self._D:
            identity = torch.eye(D.shape[-1], dtype=D.dtype, device=D.device)
            norms.append(largest_norm_upper(identity - D))
        couplings = [largest_norm_upper(K) for K in self._K]
        L = max(norms) + max(couplings, default=0.0)  # a block diagonal plus a block off-diagonal part
        bands = max(D.shape[-1] for D in self._D)
        slack = 16 * (bands + 4) * torch.finfo(self._D[0].real.dtype).eps * (1 + L)
        return self._margin - slack, L + slack

    def _split(self, z: Tensor) -> tuple[Tensor, ...]:
        return z.split(self._sizes, dim=1)


def diagonal_symbol(A: Tensor, S: Tensor, C: Tensor | None, lattice: Lattice, margin: float) -> Tensor:
    """(1 - m) I - A^H A - C^H C + S at every frequency, with a graph to the kernels.

    Args:
        A: (C, C, k, k). S: (C, C, k, k), skew as an operator. C: (C', C, k, k) to the next tier
            with stride 2, or None.
        lattice: Of the tier.
        margin: m.
    """
    a = symbol(A, lattice.size, lattice.phases)
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    D = (1 - margin) * identity - a.mH @ a + symbol(S, lattice.size, lattice.phases)
    if C is not None:
        c = symbol(C, lattice.size, lattice.phases, strided=True)
        D = D - c.mH @ c
    return D


def coupling_symbol(A: Tensor, C: Tensor, target: Lattice) -> Tensor:
    """-2 A^H C from the phases of a tier to the pixels of the next."""
    size = (target.height, target.width)
    return -2 * symbol(A, size).mH @ symbol(C, size, 2, strided=True)


def _times(Z: Tensor, M: Tensor) -> Tensor:
    """(frequencies, batch, in) by (frequencies, out, in)."""
    return torch.bmm(Z, M.transpose(1, 2))


def _adjoint(M: Tensor) -> Tensor:
    return M.mH.resolve_conj()


def _outer(left: Lattice, p: Tensor, right: Lattice, z: Tensor) -> Tensor:
    """The gradient of <p, M z> in the symbol of M, in PyTorch's convention d/dRe + i d/dIm."""
    P, Z = left.spectrum(p), right.spectrum(z)
    return torch.bmm(P.transpose(1, 2), Z.conj()) * left.weights(P)[:, None, None]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
