"""The usual transformer with a few layers, to compare `TransformerDEQ` with."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from wellposed.nn import TransformerCell

__all__ = ["ExplicitTransformer"]


class ExplicitTransformer(nn.Module):
    """Pre-norm layers; embedding, read-out and rotary positions as in `TransformerDEQ`.

    Args:
        vocabulary: Number of tokens.
        width: Features of a position.
        heads: Of attention.
        layers: Depth.
        hidden: Features inside the perceptron of a layer; see `hidden_for_equal_parameters`.
        generator: Of the parameters.
    """

    def __init__(
        self, vocabulary: int, width: int, heads: int, *, layers: int, hidden: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.E = nn.Parameter(torch.empty(vocabulary, width).normal_(0.0, width**-0.5, generator=generator))
        self.b = nn.Parameter(torch.zeros(vocabulary))
        self.layers = nn.Sequential(*(_Layer(width, heads, hidden, generator) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, t) -> (batch, t, vocabulary) logits of the next token."""
        z = self.layers(math.sqrt(self.E.shape[1]) * nn.functional.embedding(tokens, self.E))
        logits: Tensor = self.norm(z) @ self.E.mT + self.b
        return logits

    @staticmethod
    def hidden_for_equal_parameters(cell: TransformerCell, layers: int) -> int:
        """The hidden features with which all layers have nearly as many parameters as the cell."""
        d = cell.width
        wanted = sum(p.numel() for p in cell.parameters()) - 2 * d - layers * (4 * d * d + 5 * d)  # norms, attention, bias
        return max(1, round(wanted / (layers * (2 * d + 1))))


class _Layer(nn.Module):
    """z + W_o attention(norm(z)), then z + W_2 relu(W_1 norm(z))."""

    def __init__(self, width: int, heads: int, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        for linear, std in ((self.qkv, width**-0.5), (self.up, width**-0.5), (self.out, 0.02), (self.down, 0.02)):
            nn.init.normal_(linear.weight, 0.0, std, generator=generator)
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.bias)

    def forward(self, z: Tensor) -> Tensor:
        """(batch, t, width) -> the same."""
        batch, t, width = z.shape
        qkv = self.qkv(self.norm1(z)).reshape(batch, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = TransformerCell.turned(qkv[:2]).unbind()
        seen = nn.functional.scaled_dot_product_attention(q, k, qkv[2], is_causal=True)
        z = z + self.out(seen.transpose(1, 2).reshape(batch, t, width))
        z_next: Tensor = z + self.down(torch.relu(self.up(self.norm2(z))))
        return z_next
