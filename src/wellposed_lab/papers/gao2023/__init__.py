"""Experiments of [gao2023]."""

from wellposed_lab.papers.gao2023.figure1 import Gao2023Figure1
from wellposed_lab.papers.gao2023.kernel_machine import KernelMachineStudy

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = (Gao2023Figure1(), KernelMachineStudy())
