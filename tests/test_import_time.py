"""`import wellposed` costs little more than `import torch`, and loads nothing that may be missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

#: CPU time of `import wellposed`, in that of `import torch`.
MOST = 1.25
REPEATS = 3
HEAVY = (
    "sklearn", "scipy", "matplotlib", "pytest", "rich", "torchdiffeq", "lightning", "gpytorch", "linear_operator", "dask",
    "zarr", "wellposed.testing", "wellposed_lab",
)  # fmt: skip
#: In one process, with the start of Python: torch, what the library adds to it, and then a layer of a function.
PROGRAM = f"""
import json, sys, time
import torch
torch_seconds = time.process_time()
import wellposed as wp
seconds = time.process_time()
heavy = [name for name in {HEAVY!r} if name in sys.modules]
layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(0.5 * z + x))
layer(torch.zeros(2, 3, requires_grad=True)).sum().backward()
print(json.dumps([seconds / torch_seconds, heavy, "torch._dynamo" in sys.modules]))
"""


def run(program: str, **environment: str) -> Any:
    """What a new process prints, as JSON. It may write bytecode: without, the time of compiling would be measured."""
    around = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    around |= {"OMP_NUM_THREADS": "1"} | environment
    return json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=around).stdout)


@pytest.fixture(scope="module")
def imported() -> tuple[float, list[str], bool]:
    """The ratio of the CPU times, what should not have been imported, and whether the compiler was."""
    for _ in range(REPEATS):  # once, unless the bytecode was not written yet, or the machine has disturbed it
        ratio, heavy, compiler = run(PROGRAM)
        if ratio <= MOST:
            break
    return ratio, heavy, compiler


def test_the_library_adds_little_to_torch(imported: tuple[float, list[str], bool]) -> None:
    assert imported[0] <= MOST, f"import wellposed takes {imported[0]:.2f} times the CPU time of import torch"


def test_optional_packages_are_not_imported(imported: tuple[float, list[str], bool]) -> None:
    assert imported[1] == []


def test_a_layer_of_a_function_does_not_load_the_compiler(imported: tuple[float, list[str], bool]) -> None:
    """Its import takes as long as that of torch."""
    assert not imported[2]


@pytest.mark.slow  # torch is compiled into the temporary folder first
def test_import_costs_little_more_than_torch(tmp_path: Path) -> None:
    def measure(module: str) -> float:
        program = f"import {module}, resource; u = resource.getrusage(resource.RUSAGE_SELF); print(u.ru_utime + u.ru_stime)"
        return float(run(program, PYTHONPYCACHEPREFIX=str(tmp_path)))

    for module in ("torch", "wellposed"):
        measure(module)  # writes the bytecode
    # in turn, so that a busy machine is busy for both
    seconds = [(measure("torch"), measure("wellposed")) for _ in range(REPEATS)]
    torch, wellposed = (min(times) for times in zip(*seconds, strict=True))
    assert wellposed <= MOST * torch, f"import wellposed takes {wellposed:.2f} s of CPU time, import torch {torch:.2f} s"
