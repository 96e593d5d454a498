"""Residual and multiscale cells, their twins, dropout and norms that do not change within a solve."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import wellposed as wp
from wellposed.nn import MultiscaleCell, ResidualCell
from wellposed.nn.vision import VariationalDropout, WeightTied


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def test_residual_cell_is_its_formula() -> None:
    cell = ResidualCell(4, 6, groups=2, init_std=0.3, generator=seeded(), dtype=torch.float64)
    with torch.no_grad():
        for k, parameter in enumerate(p for p in cell.parameters() if p.dim() == 1):
            parameter.copy_(noise(len(parameter), seed=k))
    z, x = noise(2, 4, 5, 5), noise(2, 4, 5, 5, seed=2)

    def norm(v: Tensor, module: nn.GroupNorm) -> Tensor:
        grouped = v.reshape(v.shape[0], 2, -1)
        mean, variance = grouped.mean(dim=2, keepdim=True), grouped.var(dim=2, unbiased=False, keepdim=True)
        scaled = ((grouped - mean) / torch.sqrt(variance + 1e-5)).reshape(v.shape)
        return scaled * module.weight[:, None, None] + module.bias[:, None, None]

    h = norm(F.conv2d(z, cell.conv1.weight, padding=1).clamp(min=0), cell.norm1)
    h = norm(x + F.conv2d(h, cell.conv2.weight, padding=1), cell.norm2)
    torch.testing.assert_close(cell(z, x), norm((z + h).clamp(min=0), cell.norm3))


def test_weights_are_drawn_from_the_generator() -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    a, b = (ResidualCell(4, generator=seeded(3)) for _ in range(2))
    assert torch.equal(a.conv1.weight, b.conv1.weight)
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is left alone
    wide = ResidualCell(32, init_std=0.05, generator=seeded())
    assert wide.conv1.weight.detach().std().item() == pytest.approx(0.05, rel=0.05)


def test_multiscale_cell_mixes_all_resolutions() -> None:
    cell = MultiscaleCell((4, 6, 2), groups=2, init_std=0.2, generator=seeded(), dtype=torch.float64)
    x = (noise(2, 4, 7, 5), noise(2, 6, 4, 3), noise(2, 2, 2, 2))
    z = tuple(noise(*part.shape, seed=3) for part in x)
    out = cell(z, x)
    assert [part.shape for part in out] == [part.shape for part in x]
    for source in range(3):
        moved = list(z)
        moved[source] = moved[source] + noise(*moved[source].shape, seed=9)
        assert all(not torch.allclose(a, b) for a, b in zip(cell(tuple(moved), x), out, strict=True))


def test_multiscale_cell_is_its_formula() -> None:
    cell = MultiscaleCell((4, 2), groups=2, init_std=0.2, generator=seeded(), dtype=torch.float64)
    x = (noise(2, 4, 6, 6), noise(2, 2, 3, 3))
    z = tuple(noise(*part.shape, seed=3) for part in x)
    y = [block(part, feature) for block, part, feature in zip(cell.blocks, z, x, strict=True)]
    up = F.conv2d(y[1], cell.mixers[0][1].weight).repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    down = F.conv2d(y[0], cell.mixers[1][0][0].weight, stride=2, padding=1)
    expected = (cell.norms[0](torch.relu(y[0] + up)), cell.norms[1](torch.relu(y[1] + down)))
    for a, b in zip(cell(z, x), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("repeats", [1, 6, 11, 18])
def test_weight_tied_repeats(repeats: int) -> None:
    cell = ResidualCell(4, groups=2, generator=seeded(), dtype=torch.float64)
    x = noise(3, 4, 4, 4)
    z = torch.zeros_like(x)
    for _ in range(repeats):
        z = cell(z, x)
    assert torch.equal(WeightTied(cell, repeats)(x), z)
    start = noise(3, 4, 4, 4, seed=4)
    assert torch.equal(WeightTied(cell, 1)(x, start), cell(start, x))


def test_weight_tied_of_any_function() -> None:
    assert float(WeightTied(lambda z, x: 0.5 * z + x, 3)(torch.ones(1))) == 1.75


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), p=st.sampled_from([0.0, 0.1, 0.5, 0.9]))
def test_masks_have_two_values_and_mean_one(seed: int, p: float) -> None:
    dropout = VariationalDropout(p, generator=seeded(seed))
    mask = dropout(torch.zeros(20, 50))
    if mask is None:
        assert p == 0.0
        return
    assert set(mask.unique().tolist()) <= {0.0, float(torch.tensor(1 / (1 - p)))}
    assert mask.mean().item() == pytest.approx(1.0, abs=6 * (p / (1 - p) / 1000) ** 0.5 + 1e-6)


def test_dropout_draws_anew_in_training_and_nothing_in_evaluation() -> None:
    dropout = VariationalDropout(0.5, generator=seeded())
    like = torch.zeros(4, 10)
    assert not torch.equal(dropout(like), dropout(like))
    assert copy.deepcopy(dropout).eval()(like) is None
    assert dropout.training


def test_masks_stay_with_their_samples_within_a_solve() -> None:
    """Samples leave at different times, so the batch is compacted; each evaluation must still see each sample's own mask."""
    seen: list[tuple[Tensor, Tensor]] = []

    class Spy(ResidualCell):
        def forward(self, z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
            if not torch.is_grad_enabled():
                seen.append((x[0].detach(), x[1]))
            return super().forward(z, x)

    model = wp.nn.ResidualDEQ(1, 4, 3, groups=2, dropout=0.3, generator=seeded(), dtype=torch.float64, rtol=1e-10)
    spy = Spy(4, groups=2, generator=seeded(), dtype=torch.float64)
    model.layer.cell = spy
    # many rows, most of which end early: it pays to take them out
    X = noise(64, 1, 5, 5) * torch.tensor([1.0] * 8 + [0.001] * 56).double().reshape(-1, 1, 1, 1)
    model(X)
    features, masks = seen[0]
    assert len({part[0].shape[0] for part in seen}) > 1
    for x, mask in seen:
        for row, one in zip(x, mask, strict=True):
            owner = next(i for i in range(64) if torch.equal(features[i], row))
            assert torch.equal(masks[owner], one)


def test_weight_norm_is_constant_and_trains() -> None:
    model = wp.nn.ResidualDEQ(1, 4, 3, groups=2, weight_norm=True, generator=seeded(), dtype=torch.float64)
    before = model.cell.conv1.weight.detach().clone()
    assert model.solve(noise(2, 1, 4, 4)).converged.all()
    assert torch.equal(model.cell.conv1.weight, before)
    model(noise(2, 1, 4, 4)).square().sum().backward()
    names = [name for name, p in model.cell.named_parameters() if "conv1" in name and p.grad is not None and p.grad.any()]
    assert len(names) == 2  # the length and the direction


def test_bad_arguments() -> None:
    with pytest.raises(wp.InvalidArgument, match="must be odd"):
        ResidualCell(4, kernel_size=2)
    with pytest.raises(wp.InvalidArgument, match="'init_std'"):
        ResidualCell(4, init_std=0.0)
    with pytest.raises(wp.InvalidArgument, match=r"'input_gain'.* Got -1"):
        ResidualCell(4, input_gain=-1.0)
    with pytest.raises(wp.InvalidArgument, match="at least one resolution"):
        MultiscaleCell(())
    with pytest.raises(wp.InvalidArgument, match="'p' parameter"):
        VariationalDropout(1.0)
    with pytest.raises(wp.InvalidArgument, match="'repeats'"):
        WeightTied(ResidualCell(4), 0)
    with pytest.raises(wp.InvalidType, match="callable"):
        WeightTied(3, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (4, 1), (8, 2), (12, 3), (16, 4), (30, 6), (48, 8), (7, 1)])
def test_default_groups_leave_four_channels_in_each(channels: int, groups: int) -> None:
    cell = ResidualCell(channels, generator=seeded())
    assert cell.norm3.num_groups == groups


def test_means_over_the_image_tell_images_apart_unless_every_channel_is_a_group() -> None:
    x = noise(2, 8, 6, 6)
    blind, seeing = (
        ResidualCell(8, groups=g, generator=seeded(), dtype=torch.float64)(torch.zeros_like(x), x).mean(dim=(2, 3))
        for g in (8, None)
    )
    torch.testing.assert_close(blind, torch.zeros_like(blind))
    assert float((seeing[0] - seeing[1]).detach().abs().max()) > 0.1
