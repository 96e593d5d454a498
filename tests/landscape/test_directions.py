"""Directions: seeded, normalized filter by filter, principal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from torch import nn

import wellposed as wp
from wellposed.landscape import filter_normalized, path_directions, random_direction
from wellposed.landscape.directions import flatten, unflatten


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(3, 4)).double()


def test_random_directions_are_seeded() -> None:
    model = network()
    a, b, c = (random_direction(model, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["0.weight"], c["0.weight"])
    assert {name: d.shape for name, d in a.items()} == {name: p.shape for name, p in model.named_parameters()}


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-3, 1e3))
def test_filters_have_the_norm_of_their_weights(seed: int, scale: float) -> None:
    model = network()
    raw = random_direction(model, generator=torch.Generator().manual_seed(seed))
    made = filter_normalized(model, {name: scale * d for name, d in raw.items()})
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            assert not made[name].any()
            continue
        for d, before, theta in zip(made[name], raw[name], parameter, strict=True):
            assert float(d.norm()) == pytest.approx(float(theta.detach().norm()), rel=1e-12)
            torch.testing.assert_close(d / d.norm(), before / before.norm())  # only the length changes


def test_vectors_move_if_asked_or_if_there_is_nothing_else() -> None:
    model = network()
    made = filter_normalized(model, random_direction(model), vectors=True)
    assert float(made["3.bias"].norm()) == pytest.approx(float(model[3].bias.detach().norm()))
    norm = nn.GroupNorm(1, 4)
    assert filter_normalized(norm, random_direction(norm))["weight"].any()


def test_a_filter_of_zeros_does_not_move() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[0] = 0.0
    direction = random_direction(model)
    direction["weight"][1] = 0.0
    made = filter_normalized(model, direction)
    assert not made["weight"].any()


def test_path_directions_agree_with_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    model = network()
    path = [
        {name: p.detach() + t * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
        for t in range(5, -1, -1)
    ]
    made = path_directions(path)
    rows = np.stack([flatten(point).numpy() for point in path])
    # PCA about the end: the rows and their mirror images have the end as their mean, and the same directions.
    pca = PCA(n_components=2).fit(np.concatenate([rows - rows[-1], rows[-1] - rows]))
    for direction, component, explained, expected in zip(
        made.directions, pca.components_, made.explained, pca.explained_variance_ratio_, strict=True
    ):
        assert abs(float(flatten(direction) @ torch.from_numpy(component))) == pytest.approx(1.0, abs=1e-10)
        assert float(explained) == pytest.approx(expected)
    assert made.coordinates.shape == (6, 2) and not made.coordinates[-1].any()


def test_a_path_in_a_plane_is_found_again() -> None:
    generator = torch.Generator().manual_seed(1)
    end = torch.randn(20, generator=generator).double()
    plane = torch.linalg.qr(torch.randn(20, 2, generator=generator).double()).Q
    steps = torch.tensor([[3.0, 1.0], [2.0, -1.0], [0.0, 0.5], [0.0, 0.0]]).double()
    made = path_directions([{"w": end + plane @ step} for step in steps])
    back = made.coordinates @ torch.stack([d["w"] for d in made.directions])
    torch.testing.assert_close(back, steps @ plane.mT)
    assert float(made.explained.sum()) == pytest.approx(1.0)


def test_bad_paths_and_directions() -> None:
    with pytest.raises(wp.InvalidArgument, match="more points than directions"):
        path_directions([{"w": torch.zeros(3)}] * 2)
    with pytest.raises(wp.InvalidArgument, match="fewer than num=2"):
        path_directions([{"w": t * torch.ones(3)} for t in range(4)])
    model = nn.Linear(2, 2)
    with pytest.raises(wp.InvalidArgument, match="shape of the parameter"):
        filter_normalized(model, {"weight": torch.zeros(3), "bias": torch.zeros(2)})
    with pytest.raises(wp.InvalidArgument, match="NaN or infinite"):
        filter_normalized(model, {"weight": torch.full((2, 2), torch.nan), "bias": torch.zeros(2)})
    with pytest.raises(wp.InvalidArgument, match="no parameter that requires a gradient"):
        random_direction(model.requires_grad_(False))
    with pytest.raises(wp.InvalidType, match=r"torch.nn.Module"):
        random_direction(lambda x: x)  # type: ignore[arg-type]


def test_flatten_and_back() -> None:
    direction = random_direction(network())
    back = unflatten(flatten(direction), direction)
    assert all(torch.equal(back[name], direction[name]) for name in direction)
