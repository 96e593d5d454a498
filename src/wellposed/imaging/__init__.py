"""Inverse problems in imaging: forward operators, denoisers, and equilibria that reconstruct."""

from wellposed.imaging.cells import DEQADMM, DEQGrad, DEQProx
from wellposed.imaging.denoisers import AdaptiveDenoiser, BoundedDnCNN, DnCNN
from wellposed.imaging.kernels import gaussian_kernel, motion_kernel
from wellposed.imaging.operators import MRI, AbstractForwardOperator, Blur, Inpainting
from wellposed.imaging.reconstructor import Reconstructor
from wellposed.imaging.sensing import CompressedSensing

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
