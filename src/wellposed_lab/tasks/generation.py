"""What `generate` costs with the equilibrium of the prefix kept, and with all of it solved anew."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from wellposed.nn import TransformerDEQ
from wellposed.solve import Solution

__all__ = ["generation"]

#: Prompts that are continued, each by itself.
PROMPTS = 20


def generation(model: TransformerDEQ, tokens: Tensor, steps: int) -> dict[str, Any]:
    """Continues prompts from the start of a text, both ways, as the layer solves now.

    Args:
        model: Of length at least 2 `steps`.
        tokens: (n,), the first `PROMPTS` windows of `steps` tokens are prompts.
        steps: Tokens of a prompt, and tokens to add.

    Returns:
        "kept" and "anew", each with means over the steps of all prompts: "evaluations" of the cell,
        "positions" that they computed in all, "cpu_ms"; "tokens" that were made, and how many of
        them are "equal" both ways.
    """
    prompts = tokens[: PROMPTS * steps].reshape(-1, 1, steps)
    kept, anew = (_continued(model, prompts, steps, reuse=reuse) for reuse in (True, False))
    made, again = kept.pop("made"), anew.pop("made")
    return {"kept": kept, "anew": anew, "tokens": made.numel(), "equal": int((made == again).sum())}


def _continued(model: TransformerDEQ, prompts: Tensor, steps: int, *, reuse: bool) -> dict[str, Any]:
    solutions: list[Solution] = []
    solve = model.layer.solve

    def recorded(*given: Any) -> Solution:
        solutions.append(solve(*given))
        return solutions[-1]

    with patch.object(model.layer, "solve", recorded), torch.no_grad():
        began = time.process_time()
        made = [model.generate(prompt, steps, reuse=reuse)[:, -steps:] for prompt in prompts]
        seconds = time.process_time() - began
    count = len(prompts) * steps
    assert len(solutions) == count  # a solve for each token
    evaluations = [int(solution.num_steps.max()) for solution in solutions]
    positions = [n * solution.value.shape[1] for n, solution in zip(evaluations, solutions, strict=True)]
    return {
        "evaluations": sum(evaluations) / count,
        "positions": sum(positions) / count,
        "cpu_ms": 1e3 * seconds / count,
        "made": torch.cat(made),
    }
