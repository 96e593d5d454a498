"""Inverse problems in imaging: forward operators, denoisers, and equilibria that reconstruct."""

from wellposed.imaging.cells import DEQADMM, DEQGrad, DEQProx, Reconstructor
from wellposed.imaging.denoisers import AdaptiveDenoiser, BoundedDnCNN, DnCNN
from wellposed.imaging.operators import (
    MRI,
    AbstractForwardOperator,
    Blur,
    CompressedSensing,
    Inpainting,
    gaussian_kernel,
    motion_kernel,
)

__all__ = [
    "AbstractForwardOperator",
    "AdaptiveDenoiser",
    "Blur",
    "BoundedDnCNN",
    "CompressedSensing",
    "DEQADMM",
    "DEQGrad",
    "DEQProx",
    "DnCNN",
    "Inpainting",
    "MRI",
    "Reconstructor",
    "gaussian_kernel",
    "motion_kernel",
]
