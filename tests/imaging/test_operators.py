"""Forward operators: adjoints, norms and proximal maps against dense matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wellposed.errors import InvalidArgument
from wellposed.imaging import MRI, AbstractForwardOperator, Blur, CompressedSensing, Inpainting, gaussian_kernel, motion_kernel

H, W = 8, 7


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def operators() -> dict[str, tuple[AbstractForwardOperator, int]]:
    """With the number of channels of their images."""
    mask = random(H, W, seed=1) > 0
    return {
        "gaussian blur": (Blur(gaussian_kernel(0.8, 5).double()), 3),
        "motion blur": (Blur(motion_kernel(5, 30).double()), 1),
        "signed kernel": (Blur(random(3, 5, seed=2)), 1),
        "inpainting": (Inpainting(mask), 3),
        "compressed sensing": (
            CompressedSensing((1, H, W), 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64), 1,
        ),
        "mri": (MRI(mask), 2),
    }  # fmt: skip


@pytest.fixture(params=list(operators()))
def case(request: pytest.FixtureRequest) -> tuple[AbstractForwardOperator, int]:
    return operators()[request.param]


def matrix(operator: AbstractForwardOperator, channels: int) -> Tensor:
    """A as a real matrix: complex data are their real and imaginary parts."""
    basis = torch.eye(channels * H * W, dtype=torch.float64).reshape(-1, channels, H, W)
    y = operator.A(basis).flatten(1)
    return (torch.cat([y.real, y.imag], dim=1) if y.is_complex() else y).t()


def test_the_adjoint_is_the_adjoint(case: tuple[AbstractForwardOperator, int]) -> None:
    operator, channels = case
    x = random(4, channels, H, W, seed=4)
    Ax = operator.A(x)
    y = random(*Ax.shape, seed=5)
    y = torch.complex(y, random(*Ax.shape, seed=6)) if Ax.is_complex() else y
    left = (Ax.conj() * y).real.sum() if Ax.is_complex() else (Ax * y).sum()
    right = (x * operator.A_adjoint(y)).sum()
    scale = float(Ax.abs().square().sum().sqrt() * y.abs().square().sum().sqrt())
    assert abs(float(left - right)) <= 1e3 * torch.finfo(torch.float64).eps * scale


def test_norm_and_least_bound_the_eigenvalues(case: tuple[AbstractForwardOperator, int]) -> None:
    operator, channels = case
    values = torch.linalg.svdvals(matrix(operator, channels))
    assert float(values[0]) <= operator.norm
    assert operator.least <= float(values[-1]) ** 2 + 1e-12


def test_the_proximal_map_minimises(case: tuple[AbstractForwardOperator, int]) -> None:
    operator, channels = case
    A = matrix(operator, channels)
    z, gamma = random(2, channels, H, W, seed=7), 3.0
    y = operator.A(random(2, channels, H, W, seed=8))
    flat = y.flatten(1)
    flat = torch.cat([flat.real, flat.imag], dim=1) if y.is_complex() else flat
    dense = torch.linalg.solve(
        torch.eye(A.shape[1], dtype=A.dtype) + gamma * A.t() @ A, (z.flatten(1) + gamma * flat @ A).t()
    ).t()
    torch.testing.assert_close(operator.prox_l2(z, y, gamma).flatten(1), dense, rtol=1e-10, atol=1e-10)


def test_blur_is_a_periodic_convolution() -> None:
    kernel = random(3, 5, seed=9)
    x = random(1, 1, H, W, seed=10)
    padded = torch.nn.functional.pad(x, (2, 2, 1, 1), mode="circular")
    expected = torch.nn.functional.conv2d(padded, kernel.flip(0, 1)[None, None])
    torch.testing.assert_close(Blur(kernel).A(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("angle", [0, 30, 45, 90, 135])
def test_a_motion_has_mass_one_and_its_direction(angle: float) -> None:
    kernel = motion_kernel(9, angle).double()
    assert math.isclose(float(kernel.sum()), 1, rel_tol=1e-5) and float(kernel.min()) >= 0
    offsets = torch.arange(9, dtype=torch.float64) - 4
    up, right = -offsets[:, None], offsets[None, :]
    along = up * math.sin(math.radians(angle)) + right * math.cos(math.radians(angle))
    across = up * math.cos(math.radians(angle)) - right * math.sin(math.radians(angle))
    assert float((kernel * along.square()).sum()) > 5 * float((kernel * across.square()).sum())
    assert abs(float((kernel * along).sum())) < 1e-6 and abs(float((kernel * across).sum())) < 1e-6


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Blur(torch.ones(2, 3)), "odd sizes; got shape \\(2, 3\\)"),
        (lambda: Blur(torch.full((3, 3), math.nan)), "NaN"),
        (lambda: Blur(torch.ones(9, 9)).A(torch.ones(1, 1, 5, 5)), "9 x 9, is larger than the image, 5 x 5"),
        (lambda: Inpainting(torch.ones(4)), "mask \\(height, width\\); got shape \\(4,\\)"),
        (lambda: MRI(torch.ones(4, 4)).A(torch.ones(1, 1, 4, 4)), "real and imaginary part"),
        (lambda: CompressedSensing((1, 2, 2), 5), "5 numbers of an image with 4 pixels"),
        (lambda: CompressedSensing((1, 2, 2), 3).A(torch.ones(1, 1, 3, 3)), "images \\(1, 2, 2\\); got \\(1, 3, 3\\)"),
        (lambda: gaussian_kernel(-1.0), "'sigma' parameter of gaussian_kernel"),
        (lambda: motion_kernel(4, 0.0), "must be odd. Got 4"),
    ],
)
def test_mistakes_are_one_sentence(call: object, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call()  # type: ignore[operator]
