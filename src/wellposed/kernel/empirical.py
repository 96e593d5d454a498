"""The tangent kernel of a finite model."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._progress import announced, progress_display
from wellposed.errors import InvalidArgument
from wellposed.kernel._closed_form import ClosedFormMethod, has_closed_form
from wellposed.kernel._cluster import check_cluster, compute_on_cluster
from wellposed.kernel._generic import GenericMethod
from wellposed.kernel._kernel_memory import KernelMemory
from wellposed.kernel._method import BLOCK_SIZE, TOTAL, KernelLayout, KernelMethod, check_batches, check_model, check_option
from wellposed.kernel._storage import AbstractStorage, FileStorage, MemoryStorage, check_target, file_of_parameter
from wellposed.kernel._zarr import ZarrStorage, fingerprint

METHODS = ("auto", "closed", "generic")
_LOG = logging.getLogger(__name__)


def tangent_kernel(
    model: nn.Module,
    X: Tensor,
    X2: Tensor | None = None,
    *,
    by_parameter: bool = False,
    method: str = "auto",
    out: str | os.PathLike[str] | None = None,
    block_size: int | None = None,
    memory: int | None = None,
    progress: bool = False,
    per_output: bool = False,
    client: Any = None,
) -> Any:
    r"""K_ij = <df(x_i)/dtheta, df(x'_j)/dtheta>, exact at the present parameters, block by block.

    The closed form takes networks with `tangent_features`: sums of Hadamard products of Gram
    matrices, e.g. for `GaussianDEQ` G + (P P^T) o (G + X X^T) [ling2022]; O(n^2 (m + d)) after the
    features, memory O(n m + n^2). The generic method takes any model, by gradients of one sample
    after the other; O(n^2 p) for p parameters. Only parameters with `requires_grad` count. Where X2
    is None the result is exactly symmetric. Nothing here has a graph.

        >>> import torch, wellposed as wp
        >>> wp.kernel.tangent_kernel(torch.nn.Linear(3, 1, bias=False), torch.eye(3))
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])

    Args:
        model: Maps (n, ...) to (n,) or (n, c), each sample by itself; in the mode (train or eval)
            that it is in.
        X: (n, ...) inputs, the rows of the kernel.
        X2: (n2, ...) inputs, the columns; X if not given.
        by_parameter: Return a dict, parameter name -> its part; the parts sum up to the kernel.
        method: "closed", "generic", or "auto": closed where the model has `tangent_features`.
        out: A `.npy` file or a `.zarr` store (extra `kernels`) to write into, block by block; the
            result is then its `numpy.memmap` or `zarr.Array`. It appears under its name when it is
            complete. An interrupted closed form continues in a `.zarr` store: its blocks are in
            `kernel.zarr.part`. With `by_parameter`, `kernel.npy` stands for `kernel.W.npy` and so
            on.
        block_size: Closed form: rows and columns of a block (512). Generic: samples whose gradients
            are held at once.
        memory: Bytes that the work may take besides data and parameters. Raises if the estimate
            is larger; if not given, the limit is the free memory. The generic method holds as many
            gradients as it allows (else 2 GiB).
        progress: Show the estimate and a progress bar on stderr. The estimate is always logged.
        per_output: Return (c, n, n2), a kernel for each output, without the entries between
            outputs.
        client: A `dask.distributed.Client`: its workers compute the features, once, and the blocks,
            and write them into the `.zarr` store `out`, in a folder that all of them see. What a
            lost worker was at is computed by another one.

    Returns:
        (n, n2) for a model with one output. For c outputs (n c, n2 c), where row i c + k is output
        k of sample i (the order of `model(X).reshape(-1)`), or (c, n, n2) if `per_output`. dtype
        and device are those of the outputs.
    """
    options: dict[str, Any] = {"method": method, "block_size": block_size, "memory": memory, "function": "tangent_kernel"}
    with announced(f"computing the tangent kernel of {type(model).__name__} at {len(X)} inputs"):
        chosen = choose_method(model, X, X2, **options)
        path = check_target(out, chosen.dtype)
        check_cluster(client, chosen, path)
        layout = KernelLayout(by_parameter, per_output, in_memory=path is None)
        estimate = chosen.memory(layout)
        text = f"tangent kernel {chosen.size} x {chosen.size2}, {chosen.outputs} output(s), {chosen.dtype}: about {estimate}"
        _LOG.info(text)
        if progress:
            print(text, file=sys.stderr, flush=True)
        if client is None:  # the workers of a cluster hold the features
            estimate.check(memory, chosen.device, advice=chosen.advice)
        if path is not None:
            estimate.check_disk(path.parent)
        stored = path is not None and path.suffix == ".zarr"
        key = fingerprint(chosen, layout, X, X2, block_size or BLOCK_SIZE) if stored else ""
        return _compute(chosen, layout, path, key=key, client=client, show=progress)


def kernel_memory(
    model: nn.Module,
    X: Tensor,
    X2: Tensor | None = None,
    *,
    by_parameter: bool = False,
    method: str = "auto",
    out: str | os.PathLike[str] | None = None,
    block_size: int | None = None,
    memory: int | None = None,
    per_output: bool = False,
) -> KernelMemory:
    """What `tangent_kernel` with the same arguments would take, beyond data and parameters;
    computes a few rows only.

    Examples:
        >>> import torch, wellposed as wp
        >>> memory = wp.kernel.kernel_memory(wp.GaussianDEQ(4, 32), torch.ones(100, 4))
        >>> memory.kernel  # 100 x 100 numbers of 4 bytes
        40000
    """
    chosen = choose_method(model, X, X2, method=method, block_size=block_size, memory=memory, function="kernel_memory")
    return chosen.memory(KernelLayout(by_parameter, per_output, in_memory=out is None))


def choose_method(
    model: nn.Module,
    X: Tensor,
    X2: Tensor | None = None,
    *,
    method: str = "auto",
    block_size: int | None = None,
    memory: int | None = None,
    dtype: torch.dtype | None = None,
    function: str,
) -> KernelMethod:
    """The method for the kernel, with its arguments checked; `function` is who asks."""
    check_model(model, function)
    check_batches(X, X2, function)
    check_option(method, METHODS, "method", function)
    for name, value in (("block_size", block_size), ("memory", memory)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidArgument(f"{function}: {name} must be a positive integer, got {value!r}.")
    closed = has_closed_form(model)
    if method == "closed" and not closed:
        raise InvalidArgument(
            f"{function}: {type(model).__name__} has no tangent_features for its own forward, so no closed form. Use "
            "method='generic'."
        )
    if method == "generic" or not closed:
        return GenericMethod(model, X, X2, memory=memory, block_size=block_size, dtype=dtype)
    return ClosedFormMethod(model, X, X2, block_size=block_size, dtype=dtype)


def _compute(chosen: KernelMethod, layout: KernelLayout, path: Path | None, *, key: str, client: Any, show: bool) -> Any:
    names = chosen.parameters if layout.by_parameter else (TOTAL,)
    shape = chosen.shape(layout)
    public = shape if layout.per_output else shape[1:]
    storages: dict[str, AbstractStorage] = {}
    with contextlib.ExitStack() as stack, torch.no_grad():
        for name in names:
            target = path if path is None or not name else file_of_parameter(path, name)
            if target is None:
                storage: AbstractStorage = MemoryStorage(shape, public, chosen.dtype, chosen.device)
            elif target.suffix == ".zarr":
                options: Any = {"block_size": chosen.block_size, "continues": chosen.continues, "norms": chosen.norms}
                storage = ZarrStorage(target, shape, public, chosen.dtype, key=f"{name} {key}", **options)
            else:
                storage = FileStorage(target, shape, public, chosen.dtype)
            storages[name] = stack.enter_context(storage)

        def done(rows: slice, columns: slice) -> bool:
            return all(storage.done(rows, columns, symmetric=chosen.symmetric) for storage in storages.values())

        entries = shape[0] * shape[1] * shape[2] * len(names)
        with progress_display("tangent kernel", entries, show=show, line="{title}: {percent} %") as display:
            if client is not None:
                assert isinstance(chosen, ClosedFormMethod)
                compute_on_cluster(client, chosen, layout, storages, display)
            else:
                for block in chosen.blocks(layout, done):
                    if not block.parts:
                        display.advance(chosen.entries(block.rows, block.columns) * shape[0] * len(names))
                    for name, part in block.parts.items():
                        display.advance(storages[name].write(part, block.rows, block.columns, symmetric=chosen.symmetric))
    results = {name: storage.result for name, storage in storages.items()}
    return results if layout.by_parameter else results[TOTAL]
