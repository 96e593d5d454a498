"""deblurrer: certificates, learning at seconds size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp


def psnr(output: Tensor, image: Tensor) -> float:
    return float(-10 * torch.log10((output - image).square().flatten(1).mean(1)).mean())


def test_every_image_is_within_the_proved_distance_of_its_equilibrium() -> None:
    data = wp.data.load("deblurring_leaves", n=3, n_test=1, size=16, dtype=torch.float64)
    model = wp.tasks.deblurrer(6, generator=torch.Generator().manual_seed(0), on_failure="raise").double()
    factor = model.layer.cell.contraction
    assert 0.59 < factor < 0.61  # 1 - 4 (1 - 0.5)/(1 + 4)
    with torch.no_grad():
        rough = model(data.X)
        bound = model.layer.last_solution.error_bound(factor)
        exact = wp.imaging.Reconstructor(model.layer.cell, rtol=1e-11, max_steps=1000, on_failure="raise")(data.X)
        residual = (model.layer.cell(exact, data.X) - exact).flatten(1).norm(dim=1)
    distance = (rough - exact).flatten(1).norm(dim=1)
    assert float(distance.min()) > 1e-6 and bool((distance <= bound + residual / (1 - factor)).all())


def test_images_of_another_scale_are_refused() -> None:
    model = wp.tasks.deblurrer(4, generator=torch.Generator().manual_seed(0))
    images = torch.randint(256, (2, 3, 8, 8), generator=torch.Generator().manual_seed(1)).float()
    with pytest.raises(wp.InvalidArgument, match=r"images in \[0, 1\], with some noise; .* reaches \d+.* Divide the data"):
        model(images)
    noisy = images / 255 + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(2))
    assert model(noisy).shape == images.shape
    model.largest = None  # as asked for
    assert model(images).shape == images.shape
    assert wp.tasks.load("deblurring").largest == 10.0


def test_deblurring_is_learned_in_seconds() -> None:
    data = wp.data.load("deblurring_leaves", n=16, n_test=8, size=24)
    model = wp.tasks.deblurrer(8, generator=torch.Generator().manual_seed(0), on_failure="ignore")
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        (model(data.X) - data.y).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        restored = model(data.X_test)
    assert psnr(restored, data.y_test) > psnr(data.X_test, data.y_test) + 0.5
    assert model.layer.cell.contraction < 1


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_of_images(channels: int) -> None:
    y = torch.rand(2, channels, 10, 12, generator=torch.Generator().manual_seed(0))
    model = wp.tasks.deblurrer(4, channels=channels, generator=torch.Generator().manual_seed(0), on_failure="ignore")
    assert model(y).shape == y.shape


def test_the_first_estimate_keeps_the_mean_of_an_image() -> None:
    """What the free network sees and corrects has mean 0: it cannot restore a mean that was lost."""
    model = wp.tasks.deblurrer(4, generator=torch.Generator().manual_seed(0)).double()
    cell, y = model.layer.cell, torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        for parameter in (*cell.network.kernels, *cell.network.biases):
            parameter.zero_()  # then p is the first estimate
        estimate = cell.network.condition(cell.operator, y)[1]
    kept = float(cell.operator.kernel.double().sum())  # 1 to the rounding of float32
    torch.testing.assert_close(estimate.mean(dim=(2, 3)), y.mean(dim=(2, 3)), rtol=8 * abs(kept - 1) + 1e-12, atol=0)


def test_the_weights_of_the_package_restore_drawn_images() -> None:
    data = wp.data.load("deblurring_leaves", n=1, n_test=4, size=48, seed=7)
    model = wp.tasks.load("deblurring")
    with torch.no_grad():
        restored = model(data.X_test)
    assert model.layer.cell.contraction < 1 and bool(model.layer.last_solution.converged.all())
    assert psnr(restored, data.y_test) > psnr(data.X_test, data.y_test) + 4
