"""What images and data must be, in one sentence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wellposed._torch import transforms_active
from wellposed.errors import InvalidArgument, InvalidType


def check_numbers(owner: str, x: Tensor, *, what: str = "images", complex_too: bool = False) -> None:
    """`what` must have floating-point entries."""
    if not (x.is_floating_point() or (complex_too and x.is_complex())):
        convert = ".float() / 255 if they are in [0, 255]" if x.dtype == torch.uint8 else ".float()"
        raise InvalidType(f"{owner} expects {what} of floating-point numbers; got {x.dtype}. Convert them, e.g. by {convert}.")


def check_transform(owner: str, x: Tensor) -> None:
    """There is no Fourier transform of numbers of 16 bits."""
    if x.dtype in (torch.float16, torch.bfloat16):
        raise InvalidType(
            f"{owner} computes a Fourier transform, which needs float32 or float64; got {x.dtype}. Convert data and network, "
            "e.g. by .float()."
        )


def check_data(cell: nn.Module, network: Any, y: Any) -> None:
    """Data must be a tensor of the dtype of a network of this package; one of your own may convert
    them."""
    owner = type(cell).__name__
    if not isinstance(y, Tensor):
        raise InvalidType(
            f"{owner} expects a tensor of data; got {type(y).__name__}. Convert them, e.g. by torch.as_tensor(y).float()."
        )
    check_numbers(owner, y, what="data", complex_too=True)
    if not hasattr(network, "apply_weights"):
        return
    dtype = next(network.parameters()).dtype
    # autocast converts numbers of at most 32 bits by itself
    cast = torch.is_autocast_enabled(y.device.type) and torch.float64 not in (y.dtype, dtype)
    if dtype != (y.real.dtype if y.is_complex() else y.dtype) and not cast:
        hint = "" if y.is_complex() else f", e.g. y.to({dtype})"
        name = type(network).__name__
        raise InvalidType(f"{name} has {dtype} parameters and got data of {y.dtype}; convert one of them{hint}.")


def check_image(cell: nn.Module, network: Any, image: Tensor) -> None:
    """What an operator makes of data must be images with the channels of the network."""
    channels = getattr(network, "channels", None)
    if image.dim() != 4 or channels not in (None, image.shape[1]):
        hint = " The first dimension is the batch: for one image give y.unsqueeze(0)." if image.dim() == 3 else ""
        raise InvalidArgument(
            f"{type(network).__name__} in {type(cell).__name__} takes images (batch, {channels or 'channels'}, height, width); "
            f"A^T y has shape {tuple(image.shape)}.{hint}"
        )


def check_range(owner: str, image: Tensor, largest: float | None) -> None:
    """Images in [0, 255] are not those in [0, 1] that a network was made for."""
    if transforms_active():
        return  # no values are known
    seen = float(image.detach().abs().max()) if largest is not None and image.numel() else 0.0
    if largest is not None and seen > largest:
        raise InvalidArgument(
            f"{owner} expects images in [0, 1], with some noise; |A^T y| reaches {seen:.4g}. Divide the data, e.g. by 255 if "
            f"their images are in [0, 255], or raise its `largest`, {largest:g}."
        )


def check_binary(owner: str, mask: Any) -> None:
    """A mask says what is measured: other numbers than 0 and 1 would be rounded to 1."""
    if not isinstance(mask, Tensor):
        raise InvalidType(f"{owner} expects a tensor as mask; got {type(mask).__name__}.")
    other = mask[(mask != 0) & (mask != 1)]
    if other.numel():
        raise InvalidArgument(
            f"{owner} expects a mask of 0 and 1, whether a number is measured; got {other.reshape(-1)[0].item()}. Threshold "
            "it, e.g. by mask > 0.5."
        )


def check_mask(owner: str, mask: Tensor, shape: torch.Size) -> None:
    """The mask must not enlarge what it multiplies."""
    pairs = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.dim() > len(shape) or any(size not in (1, of) for size, of in pairs):
        raise InvalidArgument(
            f"{owner} has a mask of shape {tuple(mask.shape)}, which does not fit what it measures; got {tuple(shape)}."
        )
