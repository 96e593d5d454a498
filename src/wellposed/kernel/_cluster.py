"""The kernel on a Dask cluster: features of blocks of rows are tasks, and so are blocks of the
kernel.

A task that computes features writes them into a folder of the store, and reads them there if it
runs again: whatever happens to workers or to the client, no feature is computed twice. A task that
computes a block writes its chunk. Both are whole or absent, so a lost worker costs what it was at,
and an interrupted computation continues where it was: workers compare the blocks that are done with
their digests, and the client keeps the record of them.
"""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from wellposed._io import replacing
from wellposed._progress import ProgressDisplay
from wellposed.errors import InvalidArgument, InvalidType, RunError, required
from wellposed.kernel._closed_form import ClosedFormMethod, features_of
from wellposed.kernel._gram_blocks import GramBlocks, Terms
from wellposed.kernel._method import KernelLayout, KernelMethod
from wellposed.kernel._storage import AbstractStorage
from wellposed.kernel._zarr import ZarrStorage, open_part, write_chunks
from wellposed.kernel._zarr_checks import FEATURES
from wellposed.kernel._zarr_record import stored_digest

Features = Mapping[str, np.ndarray]
#: Among the features in a file; no feature has a name like this.
_OWNER = "kernel and rows"


def check_cluster(client: Any, chosen: KernelMethod, path: Path | None) -> None:
    """Whether a cluster can do it; nothing to check without one."""
    if client is None:
        return
    distributed = required("distributed", "client= needs dask.distributed", extra="kernels")
    if not isinstance(client, distributed.Client):
        raise InvalidType(
            f"tangent_kernel: client must be a dask.distributed.Client, got {type(client).__name__}. Use Client(address)."
        )
    if path is None or path.suffix != ".zarr":
        raise InvalidArgument(
            f"tangent_kernel: with client= the workers write into a store, so out must end in .zarr, got"
            f" {None if path is None else str(path)!r}."
        )
    if not isinstance(chosen, ClosedFormMethod):
        raise InvalidArgument(
            "tangent_kernel: client= needs a model with tangent_features, whose blocks are independent. Leave client= out."
        )


def compute_on_cluster(
    client: Any,
    chosen: ClosedFormMethod,
    layout: KernelLayout,
    storages: Mapping[str, AbstractStorage],
    display: ProgressDisplay,
) -> None:
    """Computes the blocks that are not done; returns when all of them are in the stores.

    Raises:
        RunError: The scheduler was lost, or a task ended the workers that tried it.
    """
    distributed = required("distributed", "client= needs dask.distributed", extra="kernels")
    try:
        _compute(client, chosen, layout, storages, display, distributed)
    except (distributed.KilledWorker, distributed.CancelledError, distributed.comm.CommClosedError) as error:
        reason = "A task ended every worker that tried it, possibly for want of memory: take a smaller block_size"
        if not isinstance(error, distributed.KilledWorker):
            reason = "The Dask scheduler cannot be reached any more"
        raise RunError(
            f"tangent_kernel: {reason}. What is done is kept beside out, in a folder that ends in .part; the same call"
            " continues from there."
        ) from error


def _compute(
    client: Any,
    chosen: ClosedFormMethod,
    layout: KernelLayout,
    storages: Mapping[str, AbstractStorage],
    display: ProgressDisplay,
    distributed: Any,
) -> None:
    stores = {name: storage for name, storage in storages.items() if isinstance(storage, ZarrStorage)}
    parts = {name: (str(storage.part.resolve()), storage.key) for name, storage in stores.items()}
    folder = Path(next(iter(parts.values()))[0]) / FEATURES
    weight = chosen.shape(layout)[0] * len(storages)
    done = _unchanged(client, stores, parts, chosen)
    missing = [place for place in chosen.places() if not done.get(_start(*place))]
    display.advance(sum(chosen.entries(*place) for place in chosen.places() if done.get(_start(*place))) * weight)
    if missing:
        folder.mkdir(exist_ok=True)
    key = next(iter(parts.values()))[1]
    # The result of a task can be made again on any worker; what is scattered is lost with its worker. As bytes, because Dask
    # has a serialization of modules of its own, which does not take ours; with the class, if no worker could import it.
    cloudpickle = required("cloudpickle", "client= needs dask.distributed", extra="kernels")
    model = _sent(client, bytes, cloudpickle.dumps(chosen.model))
    features: dict[tuple[int, int], Any] = {}

    def features_of_rows(side: int, rows: slice) -> Any:
        side = 0 if chosen.symmetric else side
        if (side, rows.start) not in features:
            X = chosen.inputs[side][rows].cpu().numpy()
            file = str(folder / f"{side}-{rows.start}.npz")
            options = {"dtype": chosen.dtype, "names": chosen.features, "owner": f"{key} {side} {rows.start}"}
            features[side, rows.start] = _sent(client, features_task, model, X, file, **options)
        return features[side, rows.start]

    # Blocks of the same rows come one after the other, and so do the features that they need.
    waiting = {}
    for rows, columns in missing:
        left, right = features_of_rows(0, rows), features_of_rows(1, columns)
        same = chosen.symmetric and rows == columns
        arguments = (left, None if same else right, chosen.terms, rows, columns, parts)
        options = {"symmetric": chosen.symmetric, "by_parameter": layout.by_parameter}
        waiting[client.submit(block_task, *arguments, **options, pure=False)] = (rows, columns)
    try:
        for future in distributed.as_completed(list(waiting)):
            digests, place = future.result(), waiting.pop(future)
            for name, store in stores.items():
                store.record(*place, digests[name])
            # zarr writes no chunk of NaN alone
            seen = (
                s.present(*place, symmetric=chosen.symmetric) or s.done(*place, symmetric=chosen.symmetric)
                for s in stores.values()
            )
            if not all(seen):
                raise InvalidArgument(
                    f"tangent_kernel: a worker wrote a block into {str(folder.parent)!r}, which is not seen from here. Choose a"
                    " folder on a file system that the client and all workers share."
                )
            display.advance(chosen.entries(*place) * weight)
    finally:
        with contextlib.suppress(distributed.comm.CommClosedError):
            client.cancel([*waiting, *features.values()])  # after an error or Ctrl-C the workers are free again


def _sent(client: Any, task: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A task with data, which must be sent, however large: Dask would warn."""
    config = required("dask", "client= needs dask.distributed", extra="kernels").config
    with config.set({"distributed.admin.large-graph-warning-threshold": "1 TB"}):
        return client.submit(task, *args, **options, pure=False)


def _start(rows: slice, columns: slice) -> tuple[int, int]:
    return rows.start, columns.start


def _unchanged(
    client: Any, stores: Mapping[str, ZarrStorage], parts: Mapping[str, tuple[str, str]], chosen: ClosedFormMethod
) -> dict[tuple[int, int], bool]:
    """First row and column of recorded blocks -> whether they hold what was written; the workers
    read them."""
    recorded = {}
    for place in chosen.places():
        digests = {name: store.recorded(*place) for name, store in stores.items()}
        if all(digests.values()):
            task = client.submit(check_task, digests, *place, parts, symmetric=chosen.symmetric, pure=False)
            recorded[_start(*place)] = task
    return dict(zip(recorded, client.gather(list(recorded.values())), strict=True))


def check_task(
    digests: Mapping[str, str], rows: slice, columns: slice, parts: Mapping[str, tuple[str, str]], *, symmetric: bool
) -> bool:
    """Whether the stores hold a block with these digests."""
    arrays = {name: open_part(*part) for name, part in parts.items()}
    return all(stored_digest(arrays[name], rows, columns, symmetric=symmetric) == digest for name, digest in digests.items())


def features_task(
    model: bytes, X: np.ndarray, file: str, *, dtype: torch.dtype, names: tuple[str, ...], owner: str
) -> Features:
    """Features of some rows: read from the file if they are there, else computed and written.

    Args:
        model: Pickled.
        X: (r, d) the rows.
        file: Where the features are kept.
        dtype, names: Of the features.
        owner: The kernel and the rows; features with another owner are not taken over.
    """
    stored = _stored_features(Path(file), owner)
    if stored is not None:
        return stored
    found = features_of(_loaded(model), torch.from_numpy(X)).features
    features = {name: found[name].to(dtype).numpy() for name in names}
    with replacing(Path(file)) as target:
        np.savez(target, allow_pickle=False, **features, **{_OWNER: np.array(owner)})
    return features


def _loaded(model: bytes) -> nn.Module:
    try:
        loaded: nn.Module = pickle.loads(model)
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(
            f"tangent_kernel: a worker cannot load the model ({error}). Install the package of its class on all workers."
        ) from error
    return loaded


def _stored_features(file: Path, owner: str) -> Features | None:
    """Features that were written; None without a sound file of this owner."""
    try:
        with np.load(file) as stored:  # members have checksums
            found = dict(stored)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return found if str(found.pop(_OWNER, "")) == owner else None


def block_task(
    left: Features,
    right: Features | None,
    terms: Terms,
    rows: slice,
    columns: slice,
    parts: Mapping[str, tuple[str, str]],
    *,
    symmetric: bool,
    by_parameter: bool,
) -> dict[str, str]:
    """Computes one block and writes it into its store, or its parts into theirs; `parts` has folder
    and key of each. Returns their digests."""
    both = (left, left if right is None else right)
    sides = [{name: torch.from_numpy(value) for name, value in side.items()} for side in both]
    size = max(rows.stop - rows.start, columns.stop - columns.start)
    whole = (slice(0, rows.stop - rows.start), slice(0, columns.stop - columns.start))
    grams = GramBlocks(sides[0], sides[1], terms, block_size=size, symmetric=right is None)
    return {
        name: write_chunks(open_part(*parts[name]), part, rows, columns, symmetric=symmetric)
        for name, part in grams.block(*whole, by_parameter=by_parameter).items()
    }
