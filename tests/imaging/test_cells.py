"""Reconstructing cells: their factors, gradients and foreign operators."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.imaging import (
    DEQADMM,
    MRI,
    AdaptiveDenoiser,
    Blur,
    BoundedDnCNN,
    DEQGrad,
    DEQProx,
    DnCNN,
    Inpainting,
    Reconstructor,
    gaussian_kernel,
)

CELLS = [DEQGrad, DEQProx, DEQADMM]
Cell = DEQGrad | DEQProx | DEQADMM


def bounded(channels: int = 1, *, size: float = 1.0, depth: int = 2) -> BoundedDnCNN:
    network = BoundedDnCNN(channels, 4, depth, bound=0.9, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        for K in network.kernels:
            K *= size
        for i, b in enumerate(network.biases):
            b.copy_(0.1 * torch.randn(b.shape, generator=torch.Generator().manual_seed(i), dtype=b.dtype))
    return network


def jacobian(function: object, z: Tensor) -> Tensor:
    n = z.numel()
    return torch.autograd.functional.jacobian(function, z).reshape(n, n)  # type: ignore[no-untyped-call, arg-type]


@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
def test_the_bound_of_the_denoiser_holds(size: float) -> None:
    network = bounded(2, size=size, depth=3)
    for seed in range(5):
        x = torch.randn(1, 2, 5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert float(torch.linalg.matrix_norm(jacobian(network, x), ord=2)) <= network.lipschitz
    assert network.lipschitz <= 0.9 * (1 + 1e-9)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("size", [0.1, 30.0])
def test_the_factor_bounds_the_jacobian(kind: type[Cell], size: float) -> None:
    cell = kind(Blur(gaussian_kernel(0.7, 3).double()), bounded(size=size)).double()
    y = torch.randn(1, 1, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert cell.contraction < 1
    for seed in range(5):
        z = torch.randn(1, 1, 5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert float(torch.linalg.matrix_norm(jacobian(lambda u: cell(u, y), z), ord=2)) <= cell.contraction


@pytest.mark.parametrize("kind", CELLS)
def test_gradients_against_unrolling(kind: type[Cell]) -> None:
    cell = kind(Inpainting(torch.rand(5, 6, generator=torch.Generator().manual_seed(2)) > 0.3), bounded()).double()
    y = cell.operator.A(torch.rand(3, 1, 5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    model = Reconstructor(cell, rtol=1e-12, max_steps=2000, on_failure="raise")
    image = model(y)
    exact = torch.autograd.grad(image.sin().sum(), list(cell.parameters()))
    z = cell.initial(y)
    for _ in range(min(1500, math.ceil(math.log(1e-8) / math.log(cell.contraction)))):
        z = cell(z, y)
    unrolled = cell.image(z, y)
    torch.testing.assert_close(image, unrolled, rtol=1e-7, atol=1e-7)
    for g, h in zip(exact, torch.autograd.grad(unrolled.sin().sum(), list(cell.parameters())), strict=True):
        torch.testing.assert_close(g, h, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", CELLS)
def test_the_error_bound_holds(kind: type[Cell]) -> None:
    cell = kind(Blur(gaussian_kernel(0.7, 3).double()), bounded()).double()
    y = torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    rough, fine = (
        wp.EquilibriumLayer(cell, rtol=rtol, max_steps=5000, on_failure="raise").solve(y, cell.initial(y).detach())
        for rtol in (1e-2, 1e-13)
    )
    distance = (rough.value - fine.value).flatten(1).norm(dim=1)
    assert bool((distance <= rough.error_bound(cell.contraction)).all())


@pytest.mark.parametrize("kind", CELLS)
def test_complex_data(kind: type[Cell]) -> None:
    mask = torch.rand(6, 6, generator=torch.Generator().manual_seed(5)) > 0.4
    cell = kind(MRI(mask), bounded(2)).double()
    y = cell.operator.A(torch.rand(3, 2, 6, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64))
    model = Reconstructor(cell, rtol=1e-8, on_failure="raise", max_steps=2000)
    image = model(y)
    assert image.shape == (3, 2, 6, 6) and not image.is_complex()
    alone = torch.cat([model(part) for part in y.split(1)])
    torch.testing.assert_close(image, alone, rtol=1e-5, atol=1e-6)


class Foreign:
    """An object with A and A_adjoint, as of another library."""

    def A(self, x: Tensor) -> Tensor:
        return 2 * x.flip(-1)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return 2 * y.flip(-1)


def test_operators_of_other_libraries() -> None:
    cell = DEQProx(Foreign(), bounded(), norm=2.0).double()
    y = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    assert Reconstructor(cell, on_failure="raise", max_steps=500)(y).shape == y.shape
    assert DEQProx(Foreign(), adaptive(), norm=2.0).double()(y, y).shape == y.shape  # it has no prox_l2
    with pytest.raises(InvalidArgument, match="needs a bound of \\|A\\| .* give norm="):
        DEQGrad(Foreign(), bounded())
    with pytest.raises(InvalidType, match="has no prox_l2"):
        DEQADMM(Foreign(), bounded(), norm=2.0)
    with pytest.raises(InvalidType, match="Reconstructor expects"):
        Reconstructor(wp.nn.DenseCell(3, 4))


def test_a_free_network_has_no_factor() -> None:
    assert DEQProx(Inpainting(torch.ones(4, 4)), DnCNN()).contraction == math.inf
    assert not DEQGrad(Inpainting(torch.ones(4, 4)), DnCNN()).contraction < 1
    assert not DEQADMM(Inpainting(torch.ones(4, 4)), torch.nn.Identity()).contraction < 1


@pytest.mark.parametrize("shape", [(6, 8), (5, 7)])
def test_a_network_of_blocks_sees_every_second_pixel_as_a_channel(shape: tuple[int, int]) -> None:
    network = DnCNN(1, 3, 2, scale=2, generator=torch.Generator().manual_seed(0)).double()
    x = torch.rand(2, 1, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows, columns = (torch.arange(size + size % 2).clamp(max=size - 1) for size in shape)  # the last is repeated
    whole = x[:, :, rows][:, :, :, columns]
    blocks = torch.cat([whole[:, :, i::2, j::2] for i in range(2) for j in range(2)], dim=1)
    plain = DnCNN(4, 3, 2).double()
    plain.load_state_dict(network.state_dict())
    expected = torch.empty_like(whole)
    for k, part in enumerate(plain(blocks).split(1, dim=1)):
        expected[:, :, k // 2 :: 2, k % 2 :: 2] = part
    torch.testing.assert_close(network(x), expected[:, :, : shape[0], : shape[1]])


def adaptive(size: float = 1.0, scale: int = 1) -> AdaptiveDenoiser:
    generator = torch.Generator().manual_seed(0)
    network = AdaptiveDenoiser(1, 3, hidden=4, depth=3, scale=scale, bound=0.8, generator=generator).double()
    with torch.no_grad():
        network.kernel *= size
        network.log_threshold += 2.0
    return network


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(("size", "scale"), [(0.1, 1), (30.0, 2)])
def test_the_factor_holds_whatever_the_data_decide(kind: type[Cell], size: float, scale: int) -> None:
    cell = kind(Blur(gaussian_kernel(0.7, 3).double()), adaptive(size, scale)).double()
    assert cell.contraction < 1
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        z, y = (torch.randn(1, 1, 6, 7, generator=generator, dtype=torch.float64) for _ in range(2))
        assert float(torch.linalg.matrix_norm(jacobian(lambda u, y=y: cell(u, y), z), ord=2)) <= cell.contraction
        slope = jacobian(lambda u, y=y: cell.network(u, cell.operator, y), z)
        assert float(torch.linalg.matrix_norm(slope, ord=2)) <= cell.network.lipschitz <= 0.8 * (1 + 1e-9)


@pytest.mark.parametrize("kind", CELLS)
def test_gradients_of_an_adaptive_network(kind: type[Cell]) -> None:
    cell = kind(Blur(gaussian_kernel(0.7, 3).double()), adaptive()).double()
    y = torch.rand(2, 1, 6, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    image = Reconstructor(cell, rtol=1e-12, max_steps=2000, on_failure="raise")(y)
    f, arguments = cell._function(y)
    z = cell.initial(y)
    for _ in range(min(1200, math.ceil(math.log(1e-8) / math.log(cell.contraction)))):
        z = f(z, *arguments)
    unrolled = cell.image(z, y)
    parameters = list(cell.parameters())
    exact, expected = (torch.autograd.grad(value.sin().sum(), parameters) for value in (image, unrolled))
    for g, h in zip(exact, expected, strict=True):
        torch.testing.assert_close(g, h, rtol=1e-5, atol=1e-7)


def test_images_of_a_batch_are_adapted_one_by_one() -> None:
    cell = DEQGrad(Blur(gaussian_kernel(0.7, 3).double()), adaptive()).double()
    y = torch.rand(3, 1, 6, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    model = Reconstructor(cell, rtol=1e-10, max_steps=2000, on_failure="raise")
    torch.testing.assert_close(model(y), torch.cat([model(part) for part in y.split(1)]), rtol=1e-8, atol=1e-8)


def test_an_operator_of_deepinv_fits() -> None:
    physics = pytest.importorskip("deepinv.physics", reason="deepinv is not installed")
    kernel = gaussian_kernel(0.7, 3).double()
    y = torch.rand(2, 1, 6, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    fitting = [(DEQGrad, physics.Blur(filter=kernel[None, None], padding="circular"))]
    fitting.append((DEQADMM, physics.BlurFFT((1, 6, 8), filter=kernel[None, None])))  # its prox is exact, that of Blur is not
    for kind, theirs in fitting:
        images = [
            Reconstructor(kind(operator, bounded(), norm=1.0).double(), rtol=1e-9, max_steps=2000, on_failure="raise")(y)
            for operator in (Blur(kernel), theirs)
        ]
        torch.testing.assert_close(images[0], images[1], rtol=1e-8, atol=1e-8)
