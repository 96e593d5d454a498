"""Image networks: equilibria, gradients, twins, tasks, Jacobians, landscapes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.nn import MultiscaleDEQ, ResidualDEQ, jacobian_penalty
from wellposed.nn.vision import ClassificationHead, SegmentationHead, equilibrium_spectral_radius


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def residual(**options: Any) -> ResidualDEQ:
    return ResidualDEQ(1, 4, 3, groups=2, generator=seeded(), **{"dtype": torch.float64, "on_failure": "raise", **options})


def multiscale(**options: Any) -> MultiscaleDEQ:
    made = {"groups": 2, "generator": seeded(), "dtype": torch.float64, "on_failure": "raise", **options}
    return MultiscaleDEQ.classifier(1, (4, 4), 3, **made)


def images(n: int = 3, size: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(n, 1, size, size, generator=seeded(seed), dtype=torch.float64)


@pytest.mark.parametrize("make", [residual, multiscale])
def test_the_state_is_an_equilibrium(make: Any) -> None:
    model, X = make(), images()
    x = model.inputs(X)
    z = model.equilibrium(X)
    for a, b in zip(model.cell(z, x), z, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert model(X).shape == (3, 3)
    assert model.solve(X).converged.all()


@pytest.mark.parametrize("make", [residual, multiscale])
def test_gradient_agrees_with_that_of_a_deep_twin(make: Any) -> None:
    model, X = make(), images()
    deep = model.twin(400)
    for network in (model, deep):
        network(X).square().sum().backward()
    found = dict(model.named_parameters())
    others = {name.replace("body.", "layer."): p.grad for name, p in deep.named_parameters()}
    assert set(found) == set(others)
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.grad, others[name], rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("make", [residual, multiscale])
def test_samples_ignore_their_neighbours(make: Any) -> None:
    model, X = make(), images(4)
    with torch.no_grad():
        torch.testing.assert_close(model(X)[2:3], model(X[2:3]))


def test_a_twin_is_a_copy() -> None:
    model = residual()
    twin = model.twin(6)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert model.cell.conv1.weight.any()
    assert twin.body.repeats == 6


def test_two_tasks_on_one_body() -> None:
    classifier = multiscale()
    segmenter = classifier.with_head(SegmentationHead((4, 4), 5, generator=seeded(), dtype=torch.float64))
    X = images(2, 7)
    assert classifier(X).shape == (2, 3) and segmenter(X).shape == (2, 5, 7, 7)
    assert segmenter.layer is classifier.layer and segmenter.encoder is classifier.encoder
    assert isinstance(classifier.head, ClassificationHead)
    segmenter(X).square().sum().backward()
    assert classifier.cell.blocks[1].conv1.weight.grad.any()


def test_segmenter_with_a_stride_has_the_size_of_the_image() -> None:
    model = MultiscaleDEQ.segmenter(3, (4, 4), 2, groups=2, stride=2, generator=seeded(), rtol=1e-3)
    assert model(torch.randn(2, 3, 9, 12, generator=seeded())).shape == (2, 2, 9, 12)


def test_penalty_is_unbiased_for_any_number_of_probes() -> None:
    model, X = residual(init_std=0.1), images(2, 3)
    x = model.inputs(X).detach()
    z = torch.randn(x.shape, generator=seeded(2), dtype=torch.float64)
    J = torch.stack(
        [
            torch.autograd.functional.jacobian(
                lambda v, i=i: model.cell(v.reshape(1, *z.shape[1:]), x[i : i + 1]).reshape(-1), z[i].reshape(-1)
            )
            for i in range(2)
        ]
    )
    exact = J.square().sum() / z.numel()
    for probes in (1, 7):
        draws = torch.stack(
            [jacobian_penalty(model.cell, z, x, probes=probes, generator=seeded(k)).detach() for k in range(420 // probes)]
        )
        error = draws.std() / len(draws) ** 0.5
        assert abs(draws.mean() - exact) < 4 * error
        assert error < 0.05 * exact


def test_penalty_is_differentiable() -> None:
    model, X = residual(init_std=0.1), images(2, 3)
    x = model.inputs(X).detach()
    z = torch.randn(x.shape, generator=seeded(2), dtype=torch.float64)

    def value() -> Tensor:
        return jacobian_penalty(model.cell, z, x, probes=2, generator=seeded(3))

    W = model.cell.conv2.weight
    (grad,) = torch.autograd.grad(value(), W)
    direction = torch.randn(W.shape, generator=seeded(4), dtype=torch.float64)
    found = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            W += step * direction
        found.append(value().item())
        with torch.no_grad():
            W -= step * direction
    assert float((grad * direction).sum()) == pytest.approx((found[0] - found[1]) / 2e-6, rel=1e-5)


def test_penalty_of_a_linear_and_of_a_constant_map() -> None:
    z = torch.zeros(3, 4, dtype=torch.float64)
    made = jacobian_penalty(lambda z, x: 2 * z, z, None, probes=3000, generator=seeded())
    assert made.item() == pytest.approx(4.0, rel=0.03)
    assert float(jacobian_penalty(lambda z, x: x, z, z)) == 0.0


def test_penalized_training_lowers_the_penalty() -> None:
    model, X = residual(init_std=0.03, rtol=1e-6), images(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen = []
    for k in range(12):
        optimizer.zero_grad()
        _, penalty = model.penalized(X, probes=4, generator=seeded(k))
        penalty.backward()
        optimizer.step()
        seen.append(penalty.item())
    assert sum(seen[-3:]) < 0.8 * sum(seen[:3])


@pytest.mark.parametrize("make", [residual, multiscale])
def test_regularized_predicts_after_few_steps_with_their_residual(make: Any) -> None:
    model, X = make(init_std=0.1), images()
    prediction, penalty = model.regularized(X, steps=3, recorded=3, weight=2.0)
    twin = model.twin(3)
    torch.testing.assert_close(prediction, twin(X))
    torch.testing.assert_close(penalty, 2 * model.layer.last_solution.residual.square().mean())
    prediction.square().sum().backward()
    twin(X).square().sum().backward()
    torch.testing.assert_close(next(model.cell.parameters()).grad, next(twin.cell.parameters()).grad)
    assert model.layer.last_solution.num_steps.tolist() == [3, 3, 3] and not model.layer.failure_counts


def test_images_of_other_strides_give_the_same_state() -> None:
    model, X = residual(), torch.randn(3, 5, 5, 1, generator=seeded(1), dtype=torch.float64).permute(0, 3, 1, 2)
    wide = ResidualDEQ(2, 4, 3, groups=2, generator=seeded(), dtype=torch.float64)
    Y = torch.randn(3, 5, 5, 2, generator=seeded(1), dtype=torch.float64).permute(0, 3, 1, 2)
    for network, images_of in ((model, X), (wide, Y)):
        assert network.inputs(images_of).is_contiguous()
        torch.testing.assert_close(network(images_of), network(images_of.contiguous()))


@pytest.mark.parametrize("make", [residual, multiscale])
def test_spectral_radius_agrees_with_dense_eigenvalues(make: Any) -> None:
    model, X = make(), images(2, 4)
    found = model.spectral_radius(X)
    for i in range(2):
        x = model.inputs(X[i : i + 1])
        z = model.solve(X[i : i + 1]).value
        from wellposed._tree import Layout

        layout = Layout.of(z, "z")
        J = torch.autograd.functional.jacobian(
            lambda v, x=x, layout=layout: layout.flatten(model.cell(layout.unflatten(v.unsqueeze(0)), x))[0],
            layout.flatten(z)[0],
        )
        assert found[i].item() == pytest.approx(torch.linalg.eigvals(J).abs().max().item(), rel=1e-6)
        assert found[i] < 1
    with pytest.raises(wp.InvalidArgument, match="batch first with 1 samples"):
        equilibrium_spectral_radius(model.cell, z, model.inputs(X))


def test_dropout_trains_and_vanishes_in_evaluation() -> None:
    model, X = residual(dropout=0.4), images()
    model(X).square().sum().backward()
    assert model.cell.conv2.weight.grad.any()
    model.eval()
    assert torch.equal(model(X), model(X))
    assert isinstance(model.inputs(X), Tensor)
    multi = multiscale(dropout=0.4)
    features, masks = multi.inputs(X)
    assert [m.shape for m in masks] == [f.shape for f in features]
    assert multi(X).shape == (3, 3) and multi.twin(3)(X).shape == (3, 3)


@pytest.mark.parametrize("make", [residual, multiscale])
def test_landscape_of_an_image_network(make: Any) -> None:
    model, X = make(rtol=1e-8), images(4, 6)
    y = torch.tensor([0, 1, 2, 0])
    line = [wp.landscape.filter_normalized(model, wp.landscape.random_direction(model))]
    loss = nn.functional.cross_entropy
    warm, cold = (
        wp.landscape.surface(model, loss, X, y, directions=line, num=9, radius=0.05, warm_start=w, num_starts=k)
        for w, k in ((True, 1), (False, 0))
    )
    assert warm.valid.all() and not cold.valid.any()
    assert warm.values == pytest.approx(cold.values, rel=1e-6)
    assert warm.values[4] == pytest.approx(loss(model(X), y).item(), rel=1e-6)
    trajectory = wp.landscape.trajectory(model, X)
    assert trajectory.converged.all()


def test_state_dict_round_trip() -> None:
    model, X = multiscale(), images()
    other = MultiscaleDEQ.classifier(1, (4, 4), 3, groups=2, generator=seeded(9), dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(X), model(X))


@pytest.mark.parametrize("make", [residual, multiscale, lambda **options: residual(**options).twin(2)])
def test_bad_images(make: Any) -> None:
    model = make()
    for shape in [(3, 25), (3, 3, 5, 5), (2, 3, 1, 5, 5)]:
        seen = re.escape(str(shape))
        with pytest.raises(wp.InvalidArgument, match=rf"images of shape \(batch, 1, height, width\); got {seen}\.$"):
            model(torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(wp.InvalidArgument, match=r"got \(1, 5, 5\)\. .*for one image give X.unsqueeze\(0\)"):
        model(torch.zeros(1, 5, 5, dtype=torch.float64))
    with pytest.raises(wp.InvalidType, match=r"\(batch, 1, height, width\); got ndarray. Convert it, e.g. torch.as_tensor"):
        model(images().numpy())
    for dtype in (torch.float32, torch.uint8):
        with pytest.raises(wp.InvalidType, match=rf"has torch.float64 parameters and got images of {dtype}; convert one"):
            model(images().to(dtype))
    with pytest.raises(wp.InvalidType, match=r"has torch.float32 parameters and got images of torch.float64; convert one"):
        make(dtype=torch.float32)(images())


def test_autocast_takes_images_of_low_precision() -> None:
    model = residual(dtype=torch.float32, on_failure="ignore", max_steps=3)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(images().bfloat16()).shape == (3, 3)
        with pytest.raises(wp.InvalidType, match=r"got images of torch.float64"):
            model(images())


def test_bad_arguments() -> None:
    with pytest.raises(wp.InvalidArgument, match=r"'channels' parameter of MultiscaleDEQ .*Got 8 instead. .* give \(8,\)"):
        MultiscaleDEQ(1, 8, 10, foo=1)  # type: ignore[arg-type, call-arg]
    with pytest.raises(wp.InvalidArgument, match=r"'channels' parameter of ClassificationHead .*Got 8 instead"):
        MultiscaleDEQ.classifier(1, 8, 10)  # type: ignore[arg-type]
    with pytest.raises(wp.InvalidArgument, match=r"'channels' parameter of SegmentationHead .*Got \(\) instead"):
        MultiscaleDEQ.segmenter(1, (), 10)
    with pytest.raises(wp.InvalidArgument, match=r"'channels' parameter of MultiscaleDEQ must be an integer.*Got 4.5 instead"):
        MultiscaleDEQ(1, (4, 4.5), nn.Identity())  # type: ignore[arg-type]
    for refused in (lambda: MultiscaleDEQ(1, (8,), 10), lambda: multiscale().with_head(10)):  # type: ignore[arg-type]
        with pytest.raises(wp.InvalidType, match=r"'head' .* must be a module .*got 10\. .*use MultiscaleDEQ.classifier"):
            refused()
    with pytest.raises(wp.InvalidType, match=r"MultiscaleDEQ has no option 'foo'; those of its solves are solver, gradient"):
        multiscale(foo=1)
    with pytest.raises(wp.InvalidType, match=r"ResidualDEQ has no option 'max_step'; .*Did you mean 'max_steps'\?"):
        residual(max_step=1)
    with pytest.raises(wp.InvalidArgument, match="'classes'"):
        ResidualDEQ(1, 4, 0)
    with pytest.raises(wp.InvalidArgument, match="'stride'"):
        ResidualDEQ(1, 4, 2, stride=0)


def test_more_weight_on_the_input_makes_the_map_contract_better() -> None:
    by_gain = {gain: residual(input_gain=gain, rtol=1e-8) for gain in (1.0, 3.0)}
    radii = [float(model.spectral_radius(images(), generator=seeded()).max()) for model in by_gain.values()]
    assert radii[1] < 0.8 * radii[0]
    assert (residual().cell.norm2.weight == 3).all() and (wp.nn.ResidualCell(4).norm2.weight == 1).all()
