"""A small MonotoneDEQ in the letters of [nguyen2022]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wellposed.nn import MonotoneDEQ
from wellposed_lab.papers.audit._problems import F64, commutation, eye, generator, sphere, vec

__all__ = ["Letters"]


class Letters:
    """Samples in columns, Kronecker matrices formed.

    Args:
        seed: Of data and network.
        n: Width. N: Samples. d: Features.
        margin: m.
    """

    def __init__(self, seed: int = 0, n: int = 4, N: int = 3, *, d: int = 2, margin: float = 0.5) -> None:
        X, y = sphere(N, d, seed)
        self.model = MonotoneDEQ(d, n, margin=margin, generator=generator(seed), dtype=F64)
        self.n, self.N, self.X, self.y, self.rows = n, N, X.t(), y, X
        with torch.no_grad():
            self.model.u.copy_(torch.randn(n, generator=generator(seed + 9), dtype=F64))
            self.A, self.u, self.W = self.model.A.clone(), self.model.u.clone(), self.model.recurrent().clone()
            self.Z = self.model.equilibrium(X).t()
            masks = (self.W @ self.Z + self.model.U @ self.X) > 0
        self.D = torch.diag(vec(masks.to(F64)))
        self.Q = eye(n * N) - self.D @ torch.kron(eye(N), self.W)
        self.P_A = -(eye(n * n) + commutation(n, n)) @ torch.kron(eye(n), self.A.t().contiguous())
        self.P_B = eye(n * n) - commutation(n, n)

    def features(self) -> Tensor:
        """Q^(-1) D (Z^T kron I_n): d vec(Z)/d vec(W)."""
        return torch.linalg.solve(self.Q, self.D @ torch.kron(self.Z.t().contiguous(), eye(self.n)))

    def readout(self) -> Tensor:
        """I_N kron u^T."""
        return torch.kron(eye(self.N), self.u.unsqueeze(0))

    def jacobian(self, name: str) -> Tensor:
        """(N, size) by autograd, parameters as vec."""
        outputs = self.model(self.rows)
        parameter: Any = getattr(self.model, name)
        grads = [torch.autograd.grad(output, parameter, retain_graph=True)[0] for output in outputs]
        return torch.stack([vec(g) if g.dim() == 2 else g for g in grads])
