"""What an installation has and whether it computes rightly: the checks of `wellposed doctor`.

Every finding is measured here and now. Nothing is written, downloaded or changed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

import wellposed as wp
from wellposed.data._load import NAMES
from wellposed.data.available import files_of, is_available
from wellposed.errors import how_to_install

Level = Literal["good", "note", "wrong"]
#: Of the check of batched LU: oneMKL 2024.2 fails from 8 matrices of 160 x 160 on, with two threads.
BATCH, SIDE, PATIENCE = 16, 200, 60
PROBE = f"""
import torch
torch.manual_seed(0)
A, b = torch.randn({BATCH}, {SIDE}, {SIDE}), torch.randn({BATCH}, {SIDE}, 1)
for x in (torch.linalg.solve(A, b), torch.stack([torch.linalg.solve(*pair) for pair in zip(A, b)])):
    print(float((A.double() @ x.double() - b).norm() / b.norm()))
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        level: "good"; "note" if something works less well or is missing; "wrong" if answers are not
            to be trusted.
        found: What was seen.
        advice: What to do; empty if nothing.
    """

    name: str
    level: Level
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """All findings, in the order in which a reader needs them."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _versions,
        _threads,
        _arithmetic,
        _batched_lu,
        _equilibrium,
        _accelerators,
        _extras,
        _data,
    ]
    return [finding for check in checks for finding in check()]


def _versions() -> Iterator[Finding]:
    yield Finding("wellposed", "good", importlib.metadata.version("wellposed"))
    yield Finding("Python", "good", f"{platform.python_version()} on {platform.system()}, {platform.machine()}")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU only"
    yield Finding("torch", "good", f"{torch.__version__}, built for {built}")
    library = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("BLAS", "good", f"{library[1] if library else 'not known'}, processor instructions {capability}")


def _threads() -> Iterator[Finding]:
    threads, cores = (
        torch.get_num_threads(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    )
    found = f"torch uses {threads}; this process may use {cores} cores"
    if cores is not None and threads > cores:
        yield Finding("threads", "note", found, f"More threads than cores are slow: set OMP_NUM_THREADS={cores}.")
    else:
        yield Finding("threads", "good", found)


def _arithmetic() -> Iterator[Finding]:
    """What proofs and certificates assume of float64: rounding to nearest, gradual underflow."""
    one, eps = torch.ones(8, dtype=torch.float64), 2.0**-52
    nearest = bool((one + eps / 2 == 1).all() and (one + 3 * eps / 2 == 1 + 2 * eps).all())
    tiny = torch.full((8,), 2.0**-1022, dtype=torch.float64)
    gradual = bool((tiny / 2 > 0).all())
    if nearest and gradual:
        yield Finding("arithmetic", "good", "float64 rounds to nearest and underflows gradually, as proofs assume")
        return
    fault = "does not underflow gradually" if nearest else "does not round to nearest"
    advice = (
        "Certificates and proofs made in this process are not valid; look for torch.set_flush_denormal(True) or -ffast-math."
    )
    yield Finding("arithmetic", "wrong", f"float64 {fault}", advice)


def _batched_lu() -> Iterator[Finding]:
    """Some builds solve a batch of larger matrices wrongly on several threads, or hang; the library
    avoids it. Tried in another process, which may be ended."""
    name, what = "batched LU", f"of {BATCH} systems of {SIDE} x {SIDE} in float32"
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PATIENCE, check=True)
        together, alone = map(float, done.stdout.split())
        fault = "" if together <= 100 * alone else f"residual {together:.0e}, one by one {alone:.0e}"
    except (subprocess.SubprocessError, ValueError) as error:
        fault = f"did not end within {PATIENCE} s" if isinstance(error, subprocess.TimeoutExpired) else "failed"
    if fault:
        advice = "wellposed avoids it; do not use torch.linalg.solve, inv or lu_factor on batches in your own code."
        yield Finding(name, "note", f"torch.linalg.solve {what}: {fault}", advice)
    else:
        yield Finding(name, "good", f"residual {together:.0e} {what}, {alone:.0e} one by one")


def _equilibrium() -> Iterator[Finding]:
    """A small equilibrium and its gradient against dense algebra."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    W = (0.5 * W / torch.linalg.matrix_norm(W, 2)).requires_grad_()
    x = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    layer = wp.EquilibriumLayer(lambda z, u: z @ W.T + u, rtol=1e-12, gradient=wp.ImplicitGradient(rtol=1e-12))
    z = layer(x)
    (slope,) = torch.autograd.grad(z.sum(), W)
    exact = torch.linalg.solve(torch.eye(6, dtype=torch.float64) - W, x.T).T
    (right,) = torch.autograd.grad(exact.sum(), W)
    error = max(float((a - b).norm() / b.norm()) for a, b in ((z.detach(), exact.detach()), (slope, right)))
    found = f"an equilibrium and its gradient differ by {error:.0e} from dense algebra"
    if error < 1e-9:
        yield Finding("equilibrium", "good", found)
    else:
        yield Finding("equilibrium", "wrong", found, "Answers of this installation are not to be trusted; reinstall torch.")


def _accelerators() -> Iterator[Finding]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("Apple MPS (float32 only: no certificates or proofs)")
    yield Finding(
        "GPU", "good" if names else "note", ", ".join(names) or "none is visible to torch", "" if names else _no_gpu()
    )


def _no_gpu() -> str:
    if torch.version.cuda or torch.version.hip:
        return "This torch is built for GPUs: check the driver and CUDA_VISIBLE_DEVICES if you have one."
    return "Nothing to do without a GPU; with one, install a torch that is built for it."


def _extras() -> Iterator[Finding]:
    """Each optional part: complete, or what it lacks."""
    for extra, packages in extras().items():
        versions = {package: _version(package) for package in packages}
        if missing := [package for package, version in versions.items() if version is None]:
            yield Finding(
                f"extra {extra}", "note", f"without {', '.join(missing)}", f"If you need it: {how_to_install(extra)}."
            )
        else:
            yield Finding(f"extra {extra}", "good", ", ".join(f"{package} {version}" for package, version in versions.items()))


def extras() -> dict[str, list[str]]:
    """The packages of each extra for users, by the metadata of the installed distribution."""
    found: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("wellposed") or []:
        requirement, _, condition = line.partition(";")
        name = re.match(r"[\w.-]+", requirement.strip())
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", condition)
        if name and extra and extra[1] not in ("tests", "docs", "dev") and name[0] != "wellposed":
            found.setdefault(extra[1], []).append(name[0])
    return dict(sorted(found.items()))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _data() -> Iterator[Finding]:
    """Every data set of `wellposed data list`: built in, or whether its files are there."""
    built_in = [name for name in NAMES if not files_of(name)]
    lacking = [name for name in built_in if not is_available(name)]
    found = ", ".join(name for name in built_in if name not in lacking)
    advice = f"For {', '.join(lacking)}: {how_to_install('data')}." if lacking else ""
    yield Finding("built-in data", "note" if lacking else "good", found, advice)
    from_files = [name for name in NAMES if files_of(name)]
    there = [name for name in from_files if is_available(name)]
    others = ", ".join(name for name in from_files if name not in there)
    folder = os.environ.get("WELLPOSED_DATA")
    if not folder:
        advice = f"For {others} set it to a folder with mnist.npz and the like; the others need no files."
        yield Finding("data", "note", "WELLPOSED_DATA is not set", advice)
    elif there:
        found = f"{', '.join(there)} in WELLPOSED_DATA{f'; not {others}' if others else ''}"
        yield Finding("data", "good", found, "`wellposed data check` reads the files.")
    else:
        advice = "`wellposed data list` names the files that belong there."
        yield Finding("data", "note", f"WELLPOSED_DATA={folder} has none of {others}", advice)
