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


def by_hand(cell: TransformerCell, z: Tensor, x: Tensor) -> Tensor:
    """The cell without fused attention: positions turn complex numbers, the softmax is written out."""
    length, half = z.shape[1], cell.width // cell.heads // 2
    qkv = nn.functional.linear(z, cell.W_qkv) + nn.functional.linear(x, cell.U)
    q, k, v = (part.unflatten(2, (cell.heads, 2 * half)).transpose(1, 2) for part in qkv.split(cell.width, dim=2))
    turn = torch.polar(
        torch.ones(length, half).double(), torch.arange(length).outer(10000.0 ** -(torch.arange(half) / half)).double()
    )
    q, k = (torch.complex(part[..., :half], part[..., half:]) * turn for part in (q, k))
    scores = (q @ k.mT.conj()).real / math.sqrt(2 * half)  # <R a, R b> is the real part of R a times the conjugate of R b
    future = torch.ones(length, length).triu(1).bool()
    seen = (torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ v).transpose(1, 2).flatten(2)
    u = nn.functional.layer_norm(x + z + nn.functional.linear(seen, cell.W_o), (cell.width,))
    hidden = nn.functional.linear(u, cell.W_1, cell.b_1).relu()
    return nn.functional.layer_norm(u + nn.functional.linear(hidden, cell.W_2, cell.b_2), (cell.width,))


@pytest.mark.parametrize("graph", [False, True])
def test_cell_agrees_with_the_formula(graph: bool) -> None:
    cell = TransformerCell(8, 2, 12, init_std=0.3, generator=seeded(), dtype=torch.float64)
    z, x = (torch.randn(3, 5, 8, generator=seeded(k), dtype=torch.float64) for k in (1, 2))
    expected = by_hand(cell, z, x)
    with torch.set_grad_enabled(graph):  # two kernels of attention
        torch.testing.assert_close(cell(z, x), expected, rtol=1e-6, atol=1e-6)  # angles of `by_hand` begin in float32
        torch.testing.assert_close(cell(z, cell.prepare(x)), cell(z, x), rtol=0, atol=0)


def test_attention_depends_on_distances() -> None:
    q, k = (torch.randn(1, 1, 1, 8, generator=seeded(i), dtype=torch.float64) for i in (1, 2))
    at = [TransformerCell.turned(q, 3 + s) @ TransformerCell.turned(k, 1 + s).mT for s in (0, 40)]
    torch.testing.assert_close(at[0], at[1])
    assert not torch.allclose(at[0], TransformerCell.turned(q, 4) @ TransformerCell.turned(k, 1).mT)


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
    with pytest.raises(wp.InvalidArgument, match=r"even number of features.* Got width=6 / heads=2 = 3"):
        TransformerCell(6, 2)
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


def padded(left: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Tokens and mask of three sequences of different lengths, and these sequences alone."""
    parts = [tokens(1, t, seed=t) for t in (6, 4, 1)]
    mask = torch.zeros(3, 6, dtype=torch.bool)
    together = tokens(seed=9)
    for i, part in enumerate(parts):
        place = slice(6 - part.shape[1], 6) if left else slice(0, part.shape[1])
        mask[i, place], together[i, place] = True, part[0]
    return together, mask, parts


@pytest.mark.parametrize("left", [False, True])
def test_padding_changes_nothing(left: bool) -> None:
    together, mask, parts = padded(left)
    network = model(init_std=0.1)
    network(together, mask).square()[mask].sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    network.zero_grad()
    for i, part in enumerate(parts):
        alone = network(part)
        torch.testing.assert_close(network(together, mask)[i, mask[i]], alone[0], rtol=1e-9, atol=1e-9)
        alone.square().sum().backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-7, atol=1e-9, msg=name)
    z = network.solve(together, mask=mask).value
    assert not bool(z[~mask].any()) and bool(z[mask].any(dim=-1).all())


def counted(network: TransformerDEQ, *args: Any, **options: Any) -> tuple[Tensor, int, int]:
    """What `generate` returns, the evaluations of the cell, and of how many positions in all."""
    seen: list[int] = []
    hook = network.layer.cell.register_forward_hook(lambda cell, given, _: seen.append(given[0].shape[1]))
    made = network.generate(*args, **options)
    hook.remove()
    return made, len(seen), sum(seen)


@pytest.mark.parametrize("seed", [1, 2])
def test_reused_equilibria_generate_the_same_tokens_for_less(seed: int) -> None:
    network = model(init_std=0.1, length=18, rtol=1e-9)
    prompt = tokens(seed=seed)
    quick, evaluations, positions = counted(network, prompt, 12)
    slow, evaluations_slow, positions_slow = counted(network, prompt, 12, reuse=False)
    assert torch.equal(quick, slow) and torch.equal(quick[:, :6], prompt)
    assert evaluations <= evaluations_slow
    assert positions < positions_slow / 5, (positions, positions_slow)
    with torch.no_grad():  # and they are what the network itself would say
        assert torch.equal(network(quick)[:, 5:-1].argmax(dim=2), quick[:, 6:])


def test_generation_from_padded_prompts() -> None:
    network = model(init_std=0.1, length=10, rtol=1e-10)
    together, mask, parts = padded(left=True)
    made = network.generate(together, 4, mask=mask)
    for i, part in enumerate(parts):
        assert torch.equal(made[i, 6:], network.generate(part, 4)[0, part.shape[1] :])
    assert torch.equal(made, network.generate(together, 4, mask=mask, reuse=False))


def test_drawn_tokens_follow_the_temperature() -> None:
    network = model(init_std=0.1, length=8, rtol=1e-6)
    prompt = tokens(1).expand(600, -1)
    with torch.no_grad():
        expected = torch.softmax(network(prompt[:1])[0, -1] / 0.7, dim=0)
    drawn = network.generate(prompt, 1, temperature=0.7, generator=seeded())[:, -1]
    share = torch.bincount(drawn, minlength=11) / 600
    assert bool((share - expected).abs().le(5 * (expected * (1 - expected) / 600).sqrt()).all())
    again = network.generate(prompt, 2, temperature=0.7, generator=seeded())
    assert torch.equal(again[:, 6], drawn)


def test_generate_refuses_what_it_cannot_do() -> None:
    network = model()
    with pytest.raises(wp.InvalidArgument, match="4 tokens and 3 steps are more than length=6"):
        network.generate(tokens(2, 4), 3)
    with pytest.raises(wp.InvalidArgument, match="padding .* must be on the left"):
        network.generate(tokens(2, 4), 2, mask=torch.tensor([[True] * 4, [True] * 3 + [False]]))
    with pytest.raises(
        wp.InvalidArgument, match=r"mask must be bool and of the shape of the tokens, \(3, 6\); got torch.float32"
    ):
        network(tokens(), torch.ones(3, 6))
    with pytest.raises(wp.InvalidArgument, match="'temperature'"):
        network.generate(tokens(2, 4), 2, temperature=-1.0)


def test_newton_and_the_penalty_have_second_derivatives() -> None:
    """The fast kernels of attention have none, on which the solver's products and the penalty rely."""
    network = model(solver=wp.NewtonKrylov(), rtol=1e-8)
    z = network.solve(tokens()).value
    jacobian_penalty(network.layer.cell, z, network.embedded(tokens()), generator=seeded()).backward()
    assert bool(network.layer.cell.W_qkv.grad.any())


def test_what_cannot_be_drawn_gets_one_sentence() -> None:
    network = wp.nn.TransformerDEQ(9, 8, 2, length=6, generator=torch.Generator().manual_seed(0))
    prompt = tokens(2, 4)
    with pytest.raises(wp.InvalidArgument, match=r"the temperature 1e-40 is too small: logits divided by it overflow"):
        network.generate(prompt, 1, temperature=1e-40)
    with pytest.raises(wp.InvalidArgument, match=r"mask must be bool and of the shape of the tokens, \(2, 4\); got .* \(4,\)"):
        network.generate(prompt, 1, mask=torch.ones(4, dtype=torch.bool))
    with pytest.raises(wp.InvalidType, match="mask must be a bool tensor of the shape of the tokens; got list"):
        network.generate(prompt, 1, mask=[True] * 4)
    with pytest.raises(wp.InvalidArgument, match=r"a tensor of shape \(batch, t\) with t >= 1; got list\."):
        network.generate([[1, 2]], 1)
    with pytest.raises(wp.InvalidArgument, match=r"with t >= 1; got shape \(2, 0\)\."):
        network.generate(prompt[:, :0], 1, mask=torch.ones(2, 0, dtype=torch.bool))
    with pytest.raises(wp.InvalidArgument, match="padding .* must be on the left"):
        network.generate(prompt, 1, mask=torch.tensor([[True, True, False, True]]).expand(2, 4))
    with torch.no_grad():
        network.b.fill_(torch.nan)
    for temperature in (0.0, 1.0):
        with pytest.raises(wp.InvalidArgument, match="logits are NaN or infinite"):
            network.generate(prompt, 1, temperature=temperature)
