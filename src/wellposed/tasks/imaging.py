"""Sharp images from blurred ones with noise, as an equilibrium."""

from __future__ import annotations

import torch

from wellposed._checks import Policy
from wellposed.imaging import AdaptiveDenoiser, Blur, DEQGrad, Reconstructor, gaussian_kernel
from wellposed.implicit import ImplicitGradient


def deblurrer(
    width: int = 40,
    *,
    sigma: float = 1.0,
    size: int = 7,
    channels: int = 3,
    bound: float = 0.5,
    rtol: float = 1e-3,
    max_steps: int = 60,
    on_failure: Policy = "warn",
    generator: torch.Generator | None = None,
) -> Reconstructor:
    """A network that removes a Gaussian blur, `DEQGrad` with an `AdaptiveDenoiser` of 8 filters.

        >>> import torch, wellposed as wp
        >>> wp.tasks.deblurrer(8)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 3, 32, 32])

    `layer.cell.contraction` is below 1, so every image has one reconstruction, whatever the weights
    are, as long as they are finite float32 or float64 numbers and the weight w of the denoiser does
    not vanish: see `DEQGrad`. `error_bound(y)` says how far from it the images are at most.

    Images are in [0, 1]; data of other scales, where a pixel is above 10, are refused (`largest` of
    the `Reconstructor`).

    Args:
        width: Channels of the network that adapts the denoiser to the data.
        sigma, size: Standard deviation of the blur in pixels, and the side of its kernel.
        channels: Of the images.
        bound: Of the Lipschitz constant of the denoiser, in (0, 1).
        rtol, max_steps, on_failure: As for `EquilibriumLayer`.
        generator: Of the parameters.
    """
    denoiser = AdaptiveDenoiser(channels, 8, hidden=width, scale=2, bound=bound, generator=generator)
    cell = DEQGrad(Blur(gaussian_kernel(sigma, size)), denoiser, weight=4.0)
    gradient = ImplicitGradient(rtol=3e-2)  # loose, but not so loose that training ends at another image
    model = Reconstructor(cell, gradient=gradient, rtol=rtol, max_steps=max_steps, on_failure=on_failure)
    model.largest = 10.0
    return model
