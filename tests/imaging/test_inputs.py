"""Images, data and foreign operators that do not fit are refused in a sentence; an empty batch is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.imaging import (
    DEQADMM,
    MRI,
    AbstractForwardOperator,
    AdaptiveDenoiser,
    Blur,
    BoundedDnCNN,
    CompressedSensing,
    DEQGrad,
    DEQProx,
    DnCNN,
    Inpainting,
    Reconstructor,
    gaussian_kernel,
)

MASK = torch.ones(8, 8)


def operators() -> list[AbstractForwardOperator]:
    return [Blur(gaussian_kernel(1.0)), Inpainting(MASK), CompressedSensing((2, 8, 8), 5), MRI(MASK)]


@pytest.mark.parametrize("operator", operators(), ids=lambda operator: type(operator).__name__)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool], ids=str)
def test_integers_are_refused(operator: AbstractForwardOperator, dtype: torch.dtype) -> None:
    x = torch.ones(1, 2, 8, 8)
    y = operator.A(x)
    whole = torch.ones(y.shape, dtype=dtype)
    for call in (
        lambda: operator.A(x.to(dtype)), lambda: operator.normal(x.to(dtype)), lambda: operator.A_adjoint(whole),
        lambda: operator.prox_l2(x.to(dtype), y, 1.0), lambda: operator.prox_l2(x, whole, 1.0),
    ):  # fmt: skip
        with pytest.raises(InvalidType, match=rf"{type(operator).__name__} expects .*; got {dtype}.*float"):
            call()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: MRI(MASK).A(torch.ones(1, 2, 1, 8)), "MRI has a mask of shape \\(8, 8\\), .*; got \\(1, 1, 8\\)"),
        (lambda: MRI(MASK).A_adjoint(torch.ones(1, 8, 1)), "MRI has a mask .*; got \\(1, 8, 1\\)"),
        (lambda: MRI(MASK).A_adjoint(torch.ones(8, 8)), "MRI expects data \\(batch, height, width\\); got \\(8, 8\\)"),
        (lambda: MRI(MASK).prox_l2(torch.ones(1, 2, 4, 4), torch.ones(1, 8, 8), 1.0), "MRI has a mask"),
        (lambda: Inpainting(MASK).A(torch.ones(1, 1, 1, 8)), "Inpainting has a mask .*; got \\(1, 1, 1, 8\\)"),
        (lambda: Inpainting(MASK).A_adjoint(torch.ones(1, 1, 4, 4)), "Inpainting has a mask .*; got \\(1, 1, 4, 4\\)"),
        (lambda: Inpainting(torch.ones(3, 8, 8)).A(torch.ones(1, 1, 8, 8)), "\\(3, 8, 8\\), .*; got \\(1, 1, 8, 8\\)"),
        (lambda: Inpainting(MASK).prox_l2(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 8, 8), 1.0), "Inpainting has a mask"),
        (lambda: CompressedSensing((1, 8, 8), 5).A_adjoint(torch.ones(2, 4)), "data \\(batch, 5\\); got \\(2, 4\\)"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(call: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call()


def test_one_mask_serves_all_channels() -> None:
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for mask in (MASK, MASK[None], MASK[:1], MASK[:, :1]):
        assert torch.equal(Inpainting(mask).A(x), x)
    assert MRI(MASK[:, :1]).A(x[:, :2]).shape == (2, 8, 8)


def test_a_mask_of_other_numbers_measures_or_does_not() -> None:
    """A mask put in the place of the first one is not of bool; A must still not exceed its norm."""
    x = torch.ones(1, 2, 8, 8)
    for operator in (Inpainting(MASK), MRI(MASK)):
        operator.mask = 7 * MASK
        assert float(operator.A(x).norm()) <= operator.norm * float(x.norm())


@pytest.mark.parametrize("kind", [DEQGrad, DEQProx, DEQADMM])
def test_an_empty_batch_has_no_images(kind: Any) -> None:
    for operator in operators():
        x = torch.ones(0, 2, 8, 8)
        y = operator.A(x)
        assert y.shape[0] == 0 and y.dtype == operator.A(torch.ones(1, 2, 8, 8)).dtype
        assert operator.A_adjoint(y).shape == operator.normal(x).shape == operator.prox_l2(x, y, 1.0).shape == x.shape
        model = Reconstructor(kind(operator, BoundedDnCNN(2, 4, 1)))
        assert model(y).shape == x.shape and model.error_bound(y).shape == (0,)
    assert wp.tasks.deblurrer(4)(torch.rand(0, 3, 16, 16)).shape == (0, 3, 16, 16)


class Own:
    """An operator of a user: twice the image."""

    norm: Any = 2.0

    def A(self, x: Tensor) -> Tensor:
        return 2 * x

    A_adjoint = A


def own(**attributes: Any) -> Own:
    operator = Own()
    for name, value in attributes.items():
        setattr(operator, name, value)
    return operator


def test_the_norm_of_an_operator_may_be_a_tensor() -> None:
    for kind in (DEQGrad, DEQProx):
        plain = kind(Own(), BoundedDnCNN(1, 4, 1)).contraction
        for norm in (torch.tensor(2.0), torch.tensor([2.0], dtype=torch.float64), 2):
            cell = kind(own(norm=norm), BoundedDnCNN(1, 4, 1))
            assert cell.norm == 2.0 and math.isclose(cell.contraction, plain, rel_tol=1e-5)
        assert kind(Own(), BoundedDnCNN(1, 4, 1), norm=torch.tensor(2.0)).norm == 2.0


@pytest.mark.parametrize("kind", [DEQGrad, DEQProx])
@pytest.mark.parametrize("norm", [-1.0, 0.0, math.nan, math.inf, torch.tensor(-1.0)])
def test_norms_that_no_operator_has(kind: Any, norm: Any) -> None:
    for make in (lambda: kind(own(norm=norm), BoundedDnCNN(1, 4, 1)), lambda: kind(Own(), BoundedDnCNN(1, 4, 1), norm=norm)):
        with pytest.raises(InvalidArgument, match=rf"The 'norm' parameter of {kind.__name__} must be a float in \(0, inf\)"):
            make()


@pytest.mark.parametrize("norm", [True, "1", torch.ones(2), Own.A])
def test_norms_that_are_not_numbers(norm: Any) -> None:
    with pytest.raises(InvalidArgument, match="needs a bound of \\|A\\| .* give norm="):
        DEQGrad(own(norm=norm), BoundedDnCNN(1, 4, 1))
    with pytest.raises(InvalidArgument, match="The 'norm' parameter of DEQGrad must be a float in"):
        DEQGrad(Own(), BoundedDnCNN(1, 4, 1), norm=norm)


@pytest.mark.parametrize("least", [5.0, -1.0, math.nan, "x", torch.tensor(4.5)])
def test_a_least_eigenvalue_beyond_the_norm(least: Any) -> None:
    with pytest.raises(InvalidArgument, match="'least', .* of the operator of DEQProx must be a number in \\[0, 4\\]"):
        DEQProx(own(least=least), BoundedDnCNN(1, 4, 1))
    cell = DEQProx(own(least=4.0), BoundedDnCNN(1, 4, 1, bound=0.5), step=0.9)
    assert 0.05 <= cell.contraction < 0.051
    cell.operator.least = least  # later, too
    with pytest.raises(InvalidArgument, match="'least'"):
        _ = cell.contraction


@pytest.mark.parametrize("constant", [-1.0, "x"])
def test_constants_that_no_network_has(constant: Any) -> None:
    network = BoundedDnCNN(1, 4, 1)
    network.__class__ = type("Claim", (BoundedDnCNN,), {"lipschitz": constant})
    with pytest.raises(InvalidArgument, match="'lipschitz' of the network of DEQGrad must be a number of at least 0"):
        _ = DEQGrad(Own(), network).contraction


def reconstructors() -> dict[str, Reconstructor]:
    """One for each cell and network, for images of one channel."""
    blur, made = Blur(gaussian_kernel(1.0)), {}
    for cell in (DEQGrad, DEQProx, DEQADMM):
        for network in (BoundedDnCNN(1, 4, 2, bound=0.9), AdaptiveDenoiser(1, 4, hidden=4, depth=2), DnCNN(1, 4, 2)):
            made[f"{cell.__name__} {type(network).__name__}"] = Reconstructor(cell(blur, network), rtol=1e-2, max_steps=5)
    return made


@pytest.mark.parametrize(("name", "model"), reconstructors().items(), ids=lambda part: part if isinstance(part, str) else "")
@pytest.mark.parametrize(
    ("y", "error", "says"),
    [
        (torch.ones(2, 3, 8, 8), InvalidArgument, r"images \(batch, 1, height, width\).*; A\^T y has shape \(2, 3, 8, 8\)"),
        (torch.ones(1, 8, 8), InvalidArgument, r"shape \(1, 8, 8\).*y\.unsqueeze\(0\)"),
        (torch.ones(8, 8), InvalidArgument, r"images \(batch, 1, height, width\).*shape \(8, 8\)"),
        (torch.ones(1, 1, 1, 8, 8), InvalidArgument, r"images \(batch, 1, height, width\).*shape \(1, 1, 1, 8, 8\)"),
        (
            torch.ones(2, 1, 8, 8).double(),
            InvalidType,
            r"float32 parameters and got data of torch.float64.*y\.to\(torch.float32\)",
        ),
        (torch.ones(2, 1, 8, 8).half(), InvalidType, r"float32 parameters and got data of torch.float16"),
        (torch.ones(2, 1, 8, 8).byte(), InvalidType, r"torch.uint8.*\.float\(\) / 255"),
        (torch.ones(2, 1, 8, 8).numpy(), InvalidType, r"a tensor of data; got ndarray.*torch\.as_tensor"),
        (None, InvalidType, r"a tensor of data; got NoneType"),
    ],
    ids=["channels", "one image", "no channel", "video", "float64", "float16", "bytes", "numpy", "none"],
)
def test_data_that_do_not_fit_the_network_are_refused(
    name: str, model: Reconstructor, y: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        model(y)


def test_a_network_in_half_precision_is_refused_where_its_operator_cannot_follow() -> None:
    mri = Reconstructor(DEQADMM(MRI(MASK), BoundedDnCNN(2, 4, 2, bound=0.9)))
    blur = Reconstructor(DEQProx(Blur(gaussian_kernel(1.0)), BoundedDnCNN(1, 4, 2, bound=0.9)))
    with pytest.raises(InvalidType, match=r"Fourier transform.*torch.float16.*\.float\(\)"):
        mri.half()(torch.ones(1, 8, 8).half())
    with pytest.raises(InvalidType, match=r"Fourier transform.*torch.bfloat16.*\.float\(\)"):
        blur.bfloat16()(torch.ones(1, 1, 8, 8).bfloat16())


def test_measurements_and_their_bounds_must_fit_the_last_images() -> None:
    sensing = CompressedSensing((1, 8, 8), 5, dtype=torch.float32)
    with pytest.raises(InvalidType, match=r"float32 parameters and got data of torch.float64"):
        Reconstructor(DEQProx(sensing, BoundedDnCNN(1, 4, 2, bound=0.9)))(torch.ones(2, 5).double())
    with pytest.raises(InvalidType, match=r"CompressedSensing.*torch.float32.*got .*torch.float64"):
        sensing.A(torch.ones(1, 1, 8, 8).double())
    model = Reconstructor(DEQProx(Blur(gaussian_kernel(1.0)), BoundedDnCNN(1, 4, 2, bound=0.9)), rtol=1e-2)
    model(torch.ones(2, 1, 8, 8))
    for y in (torch.ones(3, 1, 8, 8), torch.ones(2, 1, 8, 9)):
        with pytest.raises(InvalidArgument, match=r"error_bound.*last images, \(2, 1, 8, 8\); got data of images"):
            model.error_bound(y)


def test_one_image_that_is_not_finite_does_not_harm_the_others() -> None:
    model = Reconstructor(DEQProx(Blur(gaussian_kernel(1.0)), BoundedDnCNN(1, 4, 2, bound=0.9)), rtol=1e-4)
    y = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    alone = model(y[[0, 2]])
    y[1, 0, 3, 3] = math.nan
    with pytest.warns(wp.errors.WellposedWarning, match="NOT_FINITE|not finite"):
        together = model(y)
    assert torch.equal(together[[0, 2]], alone) and bool(together[1].isnan().all())


def test_the_range_of_images_is_not_asked_for_under_transforms() -> None:
    model = wp.tasks.deblurrer(4)
    y = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    mapped = torch.func.vmap(lambda v: model(v.unsqueeze(0))[0])(y)
    model.largest = None  # no range is asked for
    assert torch.equal(mapped, torch.func.vmap(lambda v: model(v.unsqueeze(0))[0])(y))
