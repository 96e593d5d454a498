"""The transformer equilibrium: its formula, its causality, its gradient, its memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import wellposed as wp
from wellposed.nn import TransformerCell, TransformerDEQ, jacobian_penalty
from wellposed.nn.vision import WeightTied


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(**options: Any) -> TransformerDEQ:
    made = {"length": 6, "generator": seeded(), "dtype": torch.float64, "on_failure": "raise", **options}
    return TransformerDEQ(11, 8, 2, **made)


def tokens(n: int = 3, t: int = 6, seed: int = 1) -> Tensor:
    return torch.randint(11, (n, t), generator=seeded(seed))


def test_cell_agrees_with_torchs_attention() -> None:
    cell = TransformerCell(8, 2, 12, init_std=0.3, generator=seeded(), dtype=torch.float64)
    z, x = (torch.randn(3, 5, 8, generator=seeded(k), dtype=torch.float64) for k in (1, 2))
    qkv = nn.functional.linear(z, cell.W_qkv) + nn.functional.linear(x, cell.U)
    q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in qkv.split(8, dim=2))
    seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    u = nn.functional.layer_norm(x + z + nn.functional.linear(seen, cell.W_o), (8,))
    hidden = nn.functional.linear(u, cell.W_1, cell.b_1).relu()
    expected = nn.functional.layer_norm(u + nn.functional.linear(hidden, cell.W_2, cell.b_2), (8,))
    torch.testing.assert_close(cell(z, x), expected)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 5))
def test_the_past_does_not_see_the_future(seed: int, cut: int) -> None:
    network, a = model(), tokens(seed=seed)
    b = a.clone()
    b[:, cut:] = tokens(seed=seed + 1)[:, cut:]
    with torch.no_grad():
        whole, other, short = network(a), network(b), network(a[:, :cut])
    torch.testing.assert_close(whole[:, :cut], other[:, :cut], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(whole[:, :cut], short, rtol=1e-8, atol=1e-8)


def test_the_present_sees_the_past() -> None:
    network, a = model(init_std=0.1), tokens()
    b = a.clone()
    b[:, 0] = (b[:, 0] + 1) % 11
    with torch.no_grad():
        assert bool(((network(a) - network(b))[:, 1:].abs().amax(dim=2) > 1e-8).all())


def test_gradient_agrees_with_a_deep_explicit_network() -> None:
    network, a = model(), tokens()
    network(a).square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    network.zero_grad()
    z = WeightTied(network.layer.cell, 200)(network.embedded(a))
    (z @ network.E.mT + network.b).square().sum().backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-7, atol=1e-9, msg=name)


def test_memory_does_not_grow_with_the_depth() -> None:
    """What autograd keeps for backward, counted: the same after 5 and after 50 evaluations of the cell."""

    def kept(network: TransformerDEQ) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            network(tokens())
        return total

    steps = []
    sizes = []
    for rtol in (1e-2, 1e-13):
        network = model(rtol=rtol, solver=wp.Picard())
        sizes.append(kept(network))
        steps.append(int(network.layer.last_solution.num_steps.max()))
    assert steps[1] > 3 * steps[0]
    assert sizes[0] == sizes[1]


def test_learns_to_count() -> None:
    network = model(rtol=1e-3, dtype=torch.float32)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    seen = []
    for k in range(40):
        a = (tokens(16, 1, seed=k) + torch.arange(6)) % 11
        loss = nn.functional.cross_entropy(network(a)[:, :-1].flatten(0, 1), a[:, 1:].flatten())
        z = network.layer.last_solution.value
        penalty = jacobian_penalty(network.layer.cell, z, network.embedded(a), generator=seeded(k))
        optimizer.zero_grad()
        (loss + penalty).backward()
        optimizer.step()
        seen.append(loss.item())
    assert seen[0] > math.log(11) and seen[-1] < 1.0, seen[-1]


def test_bad_arguments() -> None:
    with pytest.raises(wp.InvalidArgument, match="must divide width=8"):
        TransformerCell(8, 3)
    with pytest.raises(wp.InvalidArgument, match="t from 1 to 6"):
        model()(tokens(2, 7))
    for wrong, seen in ((tokens().double(), "torch.float64"), (tokens().numpy(), "ndarray")):
        with pytest.raises(wp.InvalidType, match=rf"int64 tensor of tokens; got {seen}. Convert it, e.g. torch.as_tensor"):
            model()(wrong)
    with pytest.raises(wp.InvalidType, match=r"TransformerDEQ has no option 'max_step'; .*Did you mean 'max_steps'\?"):
        model(max_step=3)


@pytest.mark.parametrize("token", [-1, 11, 99])
def test_tokens_outside_of_the_vocabulary_are_refused(token: int) -> None:
    wrong = tokens()
    wrong[1, 2] = token
    network = model()
    for call in (network, network.solve, network.equilibrium):
        with pytest.raises(wp.InvalidArgument, match=rf"tokens from 0 to 10; got {token}\. .*make the vocabulary larger"):
            call(wrong)


def test_the_ends_of_the_vocabulary_and_no_samples_are_taken() -> None:
    assert model()(torch.tensor([[0, 10]])).shape == (1, 2, 11)
    assert model()(tokens()[:0]).shape == (0, 6, 11)
