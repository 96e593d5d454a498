"""Tangent kernels and Gram matrices of equilibrium networks: at finite width, at infinite width,
and what they predict."""

from wellposed.kernel._stack import WideLayer
from wellposed.kernel.deq_limit import deq_ntk
from wellposed.kernel.eigenvalue import least_eigenvalue
from wellposed.kernel.empirical import kernel_memory, tangent_kernel
from wellposed.kernel.linearised import KernelMachine
from wellposed.kernel.operator import TangentKernel
from wellposed.kernel.wide_limits import diagonal_limit, population_gram, population_gram_layers, relu_gram

__all__ = [
    "KernelMachine",
    "TangentKernel",
    "WideLayer",
    "deq_ntk",
    "diagonal_limit",
    "kernel_memory",
    "least_eigenvalue",
    "population_gram",
    "population_gram_layers",
    "relu_gram",
    "tangent_kernel",
]
