"""One causal transformer block with rotary positions, as a cell."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed._checks import check_interval, check_positive_integer
from wellposed.errors import InvalidArgument


class TransformerCell(nn.Module):
    r"""One post-norm transformer block [vaswani2017] with its input injected [bai2019].

        u = norm(x + z + W_o attention(W_qkv z + U x)),   f(z, x) = norm(u + W_2 relu(W_1 u))

    Attention is causal: position t sees positions up to t, so that z_t depends on x_1, ..., x_t
    alone. Queries and keys are turned by angles that grow with the position [su2021], so attention
    depends on distances and not on positions. Nothing bounds the Jacobian; weights start small
    (`init_std`) so that equilibria are found at first. A departure: x also enters the sum before
    the first norm. Without it small weights leave norm(z + little), close to the identity, with no
    preferred point.

    Args:
        width: Features of a position.
        heads: Must divide the width, into parts of even length.
        hidden: Rows of W_1; four times the width if not given.
        init_std: Standard deviation of the entries of W_qkv, W_o, W_1, W_2.
        generator, device, dtype: Of the parameters.

    Examples:
        >>> import torch, wellposed as wp
        >>> x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
        >>> layer = wp.EquilibriumLayer(wp.nn.TransformerCell(8, heads=2), rtol=1e-4)
        >>> layer(x).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int | None = None,
        *,
        init_std: float = 0.02,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        for name, value in (("width", width), ("heads", heads), ("hidden", hidden)):
            check_positive_integer("TransformerCell", name, value)
        if width % heads:
            raise InvalidArgument(f"The 'heads' parameter of TransformerCell must divide width={width}. Got {heads} instead.")
        if width // heads % 2:
            raise InvalidArgument(
                f"A head of TransformerCell must have an even number of features, which rotary positions turn in pairs. "
                f"Got width={width} / heads={heads} = {width // heads}."
            )
        check_interval("TransformerCell", "init_std", init_std, low=0.0, closed="neither")
        self.width, self.heads, self.hidden = width, heads, hidden
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}

        def drawn(rows: int, columns: int, std: float) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns, **factory_kwargs).normal_(0.0, std, generator=generator))

        self.W_qkv, self.W_o = drawn(3 * width, width, init_std), drawn(width, width, init_std)
        self.U = drawn(3 * width, width, 1 / math.sqrt(width))
        self.W_1, self.W_2 = drawn(hidden, width, init_std), drawn(width, hidden, init_std)
        self.b_1, self.b_2 = (
            nn.Parameter(torch.zeros(hidden, **factory_kwargs)),
            nn.Parameter(torch.zeros(width, **factory_kwargs)),
        )
        self.norm1, self.norm2 = nn.LayerNorm(width, **factory_kwargs), nn.LayerNorm(width, **factory_kwargs)

    def prepare(self, x: Tensor, mask: Tensor | None = None, past: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        """What does not change with z, computed once for all evaluations: to be given as x.

        Args:
            x: (batch, t, width) inputs.
            mask: (batch, past + t), True for tokens and False for padding, whose state is 0 and
                which no other position sees.
            past: Keys and values of earlier positions, from `keys_and_values`.
        """
        inputs = {"x": x, "injected": x @ self.U.mT}
        if mask is not None:
            inputs["mask"] = mask
        if past is not None:
            inputs["keys"], inputs["values"] = past
        return inputs

    def forward(self, z: Tensor, x: Tensor | dict[str, Tensor]) -> Tensor:
        """(batch, t, width) states z and inputs x, or what `prepare` made of them -> next state."""
        inputs = self.prepare(x) if isinstance(x, Tensor) else x
        q, k, v = self._attended(z, inputs)
        # the fast kernels have no second derivative, which Jacobian-vector products and penalties need
        with sdpa_kernel(SDPBackend.MATH) if torch.is_grad_enabled() else nullcontext():
            seen = nn.functional.scaled_dot_product_attention(q, k, v, **self._visible(q, k, inputs))
        joined = seen.transpose(1, 2).reshape(z.shape)
        u = self.norm1(inputs["x"] + z + joined @ self.W_o.mT)
        z_next: Tensor = self.norm2(u + torch.relu(u @ self.W_1.mT + self.b_1) @ self.W_2.mT + self.b_2)
        if "mask" in inputs:
            z_next = z_next * inputs["mask"][:, -z.shape[1] :].unsqueeze(2)
        return z_next

    def keys_and_values(self, z: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(batch, heads, past + t, features) of all positions so far, at the state z."""
        _, k, v = self._attended(z, inputs)
        return k, v

    def _attended(self, z: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of z, keys and values of past and z, (batch, heads, positions, features)."""
        batch, t, _ = z.shape
        qkv = (
            (z @ self.W_qkv.mT + inputs["injected"])
            .reshape(batch, t, 3, self.heads, self.width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        earlier = inputs["keys"].shape[2] if "keys" in inputs else 0
        q, k = self.turned(qkv[:2], earlier).unbind()
        v = qkv[2]
        if earlier:
            k, v = torch.cat([inputs["keys"], k], dim=2), torch.cat([inputs["values"], v], dim=2)
        return q, k, v

    @staticmethod
    def turned(qk: Tensor, earlier: int = 0) -> Tensor:
        """(..., t, n) queries or keys with rotary positions, after `earlier` ones [su2021].

        Rotates the pair (i, i + n/2) of the n features at position t by the angle t 10000^(-2i/n).
        """
        half = qk.shape[-1] // 2
        exact: dict[str, Any] = {"device": qk.device, "dtype": torch.promote_types(qk.dtype, torch.float32)}
        rates = 10000.0 ** (-torch.arange(half, **exact) / half)
        angles = torch.arange(earlier, earlier + qk.shape[-2], **exact).unsqueeze(1) * rates
        cos, sin = angles.cos().to(qk.dtype), angles.sin().to(qk.dtype)
        a, b = qk[..., :half], qk[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    @staticmethod
    def _visible(q: Tensor, k: Tensor, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """Which positions see which, as attention takes it."""
        t, all_positions = q.shape[2], k.shape[2]
        if "mask" not in inputs and t == all_positions:
            return {"is_causal": True}
        causal = torch.ones(t, all_positions, dtype=torch.bool, device=q.device).tril(all_positions - t)
        if "mask" not in inputs:
            return {"attn_mask": causal}
        itself = torch.eye(t, all_positions, dtype=torch.bool, device=q.device).roll(all_positions - t, 1)
        # padding sees itself: a softmax over nothing is NaN
        return {"attn_mask": (causal & inputs["mask"][:, None, None, :]) | itself}

    def extra_repr(self) -> str:
        return f"{self.width}, heads={self.heads}, hidden={self.hidden}"
