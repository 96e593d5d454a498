"""Tangent kernels and Gram matrices of equilibrium networks: at finite width, at infinite width, and what they predict."""

from wellposed.kernel._memory import KernelMemory
from wellposed.kernel.arccosine import relu_gram
from wellposed.kernel.deq_limit import deq_ntk
from wellposed.kernel.diagonal import diagonal_limit
from wellposed.kernel.eigenvalue import LeastEigenvalue, least_eigenvalue
from wellposed.kernel.empirical import kernel_memory, tangent_kernel
from wellposed.kernel.linearised import KernelMachine
from wellposed.kernel.operator import TangentKernel
from wellposed.kernel.population import population_gram, population_gram_layers

__all__ = [
    "KernelMachine",
    "KernelMemory",
    "LeastEigenvalue",
    "TangentKernel",
    "deq_ntk",
    "diagonal_limit",
    "kernel_memory",
    "least_eigenvalue",
    "population_gram",
    "population_gram_layers",
    "relu_gram",
    "tangent_kernel",
]
