"""A process that runs the contenders of one module when told to: JSON lines in, JSON lines out.

    {"load": "problem.npz"}                          -> {}
    {"prepare": "torchdeq anderson"}                 -> {}
    {"run": "torchdeq anderson"}                     -> {"forward": seconds, "total": seconds, ...}
    {"run": "torchdeq anderson", "save": "out.npz"}  -> the same, and the arrays in a file

An exception is answered with {"error": ...}; the process lives on.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
import warnings

import numpy as np


class Worker:
    def __init__(self, module: str) -> None:
        self.contenders = importlib.import_module(f"contenders.{module}").CONTENDERS
        self.arrays: dict[str, np.ndarray] = {}
        self.prepared: dict = {}

    def answer(self, request: dict) -> dict:
        if "load" in request:
            self.prepared.clear()
            self.arrays = dict(np.load(request["load"]))
            return {}
        if "prepare" in request:
            name = request["prepare"]
            self.prepared[name] = self.contenders[name](dict(self.arrays))
            return {}
        gc.collect()
        result = self.prepared[request["run"]]()
        if request.get("save") and result.z is not None:
            arrays = {"z": result.z, "dW": result.dW, "dU": result.dU, "da": result.da}
            np.savez(request["save"], **{name: np.asarray(value) for name, value in arrays.items()})
        return {
            "forward": result.forward_seconds,
            "total": result.total_seconds,
            "forward_steps": result.forward_steps,
            "adjoint_steps": result.adjoint_steps,
            "note": result.note,
        }


def main() -> None:
    # The protocol keeps the real stdout; whatever a library prints goes to stderr.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    try:
        worker = Worker(sys.argv[1])
        channel.write(json.dumps({"contenders": list(worker.contenders)}) + "\n")
    except Exception as error:
        channel.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        return
    for line in sys.stdin:
        try:
            reply = worker.answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        channel.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
