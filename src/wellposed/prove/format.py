r"""How a proof is stored: `proof.json` and `proof.safetensors` in one folder. Version 3.

This docstring is the definition: a program that checks a proof needs nothing else. All numbers are
float64; JSON has them with 17 digits, which gives back the same bits. `null` is "not known", and
infinite or NaN numbers do not occur. Names that are not listed here do not occur either.

Every number is checked, but for `seconds` and `attempts`, which are not part of the proof. A bound
that follows from no other number is rounded to its safe side, to **six decimal digits** (marked
"6"), and one with more digits is not valid. All other numbers follow from these.

**The network.** z = s(R z + c), f = w . z + v . c, with an activation s applied entry by entry; one
sample is a row. The parameters theta of the network, in its own letters, are in `start`. Descent on
theta is the same as descent on scaled parameters (R, U, w, v), with one step size for each:

    family          R                 c                   w             v
    gaussian        W                 U x                 a             absent (no term v . c)
    skip            k A               relu(l W x)         u             v
    implicit_only   k A^T             relu(W^T x)         b/sqrt(m)     absent

    R = k A,   U = l (input matrix),   R' = R - eta k^2 dF/dR,   U' = U - eta l^2 dF/dU,
    w' = w - eta dF/dw,   v' = v - eta dF/dv,            F = |r|^2/2,   r_i = f_i - y_i

with `scales` = {"R": k, "U": l, "w": 1, "v": 1}; a scale 0 means that this part is not trained. k
and l are the float64 numbers of the file (of implicit_only, b/sqrt(m) is the float64 quotient), and
R, U, w, v are exact: the products with k and l are stored as high + low. Distances are measured in
theta: |d|^2 = |dR|_F^2/k^2 + |dU|_F^2/l^2 + |dw|^2 + |dv|^2 over the trained parts.

**proof.json**

    format            "wellposed-proof"
    version           3
    program           version of the library that wrote it
    verdict           "proved" or "undecided"
    reason            a sentence; empty if proved
    family            "gaussian", "skip" or "implicit_only"
    activation        {"name": "relu" | "tanh" | "softplus", "shift": c}: softplus is
                      log(1 + e^v) - c, c the float64 number log(2) if it is centred, else 0;
                      shift is 0 for relu and tanh
    sizes             {"n": samples, "m": width, "d": inputs}
    scales            see above
    step_size         eta
    num_steps         K: how many steps of descent the proof follows
    delta, loss       delta_K, and |r|^2/2 at the computed point K
    radius, rate      of the tail (below); null if undecided
    distance       6  >= |theta_j - theta_0| for all exact iterates j >= K; null if undecided
    seconds           time that it took; not part of the proof
    assumptions       list of sentences
    hashes            {"X": ..., "y": ..., "start.W": ..., ...}: SHA-256, in hexadecimal, of the
                      bytes of each tensor of proof.safetensors (little endian, row by row)
    steps             one list per column, see below
    tail              null if undecided, else one number per name, see below
    checkpoints       list of the steps k that have a checkpoint; 0 and K are among them
    attempts          list of {"step", "loss", "reason", "shortfall"}: where the tail was tried and
                      did not hold; the last is a guess or null. Not part of the proof
    seal              SHA-256 of this document without its seal, as JSON with sorted keys and
                      without spaces

`steps`: lists of length K; entry k is about the step from point k to point k + 1. `delta` has K + 1
entries, and its first is 0.

    delta             delta_k: the exact iterate is within this distance of the computed one
    loss              |r|^2/2 at the computed point k
    expansion      6  M_k >= |sum_i r_i Hess f_i| on the ball of radius delta_k about that point;
                      null for delta = 0, where no error can grow
    jacobian       6  L_k >= |J| on this ball
    omega          6  >= the largest eigenvalue of (R + R^T)/2 at the computed point, by at most
                      0.021, from m = 800 on by at most 0.13
    error          6  eps_k >= |exact step from the computed point k - computed point k + 1|, and
                      eps_k >= eta |J^T r - G|, where J^T r is the exact gradient at the computed
                      point and G the one made, in exact arithmetic, of the stored Z, P, Q, C, r
                      (see checkpoints)
    mask_ratio     6  least |pre-activation|/(its largest change on the ball), over samples and
                      units; above 1; null for smooth activations and for delta = 0. The change of
                      unit u is at most delta |xi_i| (1 + (|R_u| + k delta)/(1 - omega - k delta)),
                      R_u a row of R, xi_i = (k z_i, l x_i); in c = relu(..) l delta |x_i|
    residual       6  >= |r| at the exact iterate k

The inequalities between them, in exact arithmetic, for all k < K:

    delta_{k+1} >= (1 + eta M_k) delta_k + eps_k,     eta L_k^2 <= 2,
    omega_k + k delta_k < 1  (this k is the scale of R),     mask_ratio_k > 1,
    |r| <= residual_k <= 4/3 (|r| + L_k delta_k),     |r|^2/2 = loss_k.

A number that follows from others is not looser than it must be, so that a number changed alone
contradicts the others: delta_{k+1}, and in the tail c, s1, slope, radius and 1 - rate, to 1e-8 (the
last also up to 2^-51); kappa to 5e-7.

By Theorem A of the documentation (page 'What is proved, when') then |theta_k - theta~_k| <=
delta_k.

`tail` (activation relu): at the computed point K, in the ball of radius `radius` + delta_K.

    residual       6  e >= |r| at the exact iterate K
    s, L           6  bounds of the singular values of N, for all pairs (J, secant S), N = (S + J)/2
    f              6  >= |F|, F = (S - J)/2
    e0             6  >= |S F^T|
    g, g0          6  g >= 0, and |F^T r|^2 <= g |N^T r|^2 + g0 |r|^2 for all vectors r; both null
                      if g = 0 and g0 = f^2 are as good
    kappa             > 0, and <= (A1 x^2 + A2 - min(f^2, g x^2 + g0) - eta h E - eta E^2/2)/(x + f)
                      for all x in [s, L], with t = eta L^2, A1 = 1 - t/2 - eta s^2/2, A2 = t s^2/2,
                      E = f x + e0, h^2 = (s^2 + L^2)(x^2 - s^2) + s^4
    switches          how many pairs (sample, unit) have a pre-activation of at most its largest
                      change in the ball: as for mask_ratio, with rho = radius + delta_K for delta;
                      no other pair can change its slope
    omega          6  as in `steps`, at point K

    kappa eta (L + f) <= 1,     radius >= residual/kappa,     rate >= 1 - eta kappa (s + f).

`tail` (smooth activations): |J - J'| <= Lambda |theta - theta'| in the ball.

    residual       6  e as above
    s0, L          6  <= sigma_min(J) at the computed point K; >= |J| in the ball
    Lambda         6  the Lipschitz constant
    c                 c x <= min over y in [x, L] of A1(x) y + A2(x)/y for all 0 < x <= s0, A1 and
                      A2 as above with s = x
    slope             kappa at the edge of the ball: <= c s1 - eta Lambda L e/2
    s1                > 0, and <= s0 - Lambda (delta_K + radius)
    omega          6  as in `steps`, at point K

    radius (c (s0 - Lambda delta_K - Lambda radius/2) - eta Lambda L e/2) >= e,   slope > 0,
    eta L c s0 <= 1,     rate >= 1 - eta slope s1.

Conclusion in both cases: the exact iterates K, K + 1, ... stay within `radius` of the exact iterate
K, and |r_{K+j}| <= rate^j e.

**proof.safetensors**

    X (n, d), y (n,)      the data
    start.NAME            parameters and buffers of the network, in its own letters and shapes
    checkpoint.k.R        (m, m), also U (m, d), w (m,), v (m,): high parts of the computed point k;
                          a part that is not trained is in checkpoint 0 only
    checkpoint.k.R.low    (m, m), also U, w, v: low parts, float32 or float64, exact; absent if 0
    checkpoint.k.Z, .P    (n, m) computed equilibria and adjoints p = D (w + R^T p), D the slopes
    checkpoint.k.Q, .C    (n, m) only if c = relu(..): q = D' (p + v) with D' the slopes of c, and c
    checkpoint.k.r        (n,) computed residuals
    checkpoint.k.Z.low    also P, Q, C, r: low parts in float64; absent if 0

Z, P, Q, C and r are the step that was made at point k, in short. Checkpoint K has none of them: no
step begins there, and everything about point K follows from its parameters.

What was computed is always the sum high + low. The gradient G of step k, in R, U, w, v, is made of
these sums as

    (sum_i r_i p_i z_i^T,   sum_i r_i q_i x_i^T,   sum_i r_i z_i,   sum_i r_i c_i),

q = p if Q is absent, with norm |G|^2 = k^2 |G_R|^2 + l^2 |G_U|^2 + |G_w|^2 + |G_v|^2 over the
trained parts.
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wellposed._io import check_outputs, write_whole
from wellposed._reading import read_bytes, read_object
from wellposed.certify import Verdict
from wellposed.errors import InvalidArgument, MissingPackage, RunError, how_to_install
from wellposed.prove._problem import Exact, Parameters, ProvedProblem
from wellposed.prove._slopes import AbstractSlopes, ReLUSlopes, SoftplusSlopes, TanhSlopes
from wellposed.prove.seal import seal

if TYPE_CHECKING:
    from wellposed.prove.proof import Proof

NAME, VERSION = "wellposed-proof", 3
JSON, TENSORS = "proof.json", "proof.safetensors"
#: Largest sizes in bytes that are read.
_MOST_JSON, _MOST_TENSORS = 1 << 28, 1 << 34
_PARTS = ("R", "U", "w", "v")
#: Of a proof and of its record.
_FIELDS = (
    *("reason", "step_size", "num_steps", "delta", "loss", "radius", "rate", "distance", "seconds", "family", "sizes"),
    *("steps", "tail", "attempts"),
)


def save(proof: Proof, folder: Path) -> Path:
    """Writes both files, each atomically; the JSON last."""
    problem = proof._problem
    if problem is None:
        raise InvalidArgument(f"No step was followed, so there is nothing to save; the proof is undecided: {proof.reason}")
    tensors = {"X": problem.X, "y": problem.y} | {f"start.{name}": value for name, value in problem.start.items()}
    for step, kept in proof._checkpoints.items():
        tensors |= {f"checkpoint.{step}.{name}": value for name, value in kept.items()}
    record = {
        "format": NAME,
        "version": VERSION,
        "program": metadata.version("wellposed"),
        "verdict": "proved" if proof.verdict is Verdict.CERTIFIED else "undecided",
        "reason": proof.reason,
        "family": proof.family,
        "activation": {"name": problem.slopes.name, "shift": problem.slopes.shift},
        "sizes": proof.sizes,
        "scales": problem.scales,
        "step_size": proof.step_size,
        "num_steps": proof.num_steps,
        "delta": proof.delta,
        "loss": proof.loss,
        "radius": proof.radius,
        "rate": proof.rate,
        "distance": proof.distance,
        "seconds": proof.seconds,
        "assumptions": list(proof.assumptions),
        "hashes": {name: sha256(value) for name, value in tensors.items()},
        "steps": proof.steps,
        "tail": proof.tail,
        "checkpoints": sorted(proof._checkpoints),
        "attempts": proof.attempts,
    }
    record["seal"] = seal(record)
    content = _safetensors().save({name: value.contiguous().clone() for name, value in tensors.items()})
    check_outputs(folder, [JSON, TENSORS])
    write_whole(folder / TENSORS, content, begun=False)
    write_whole(folder / JSON, json.dumps(record, indent=1, allow_nan=False).encode(), begun=False)
    return folder


def load(folder: Path) -> Proof:
    """A proof as it was stored; nothing in it is checked beyond its form and its checksums."""
    from wellposed.prove.proof import Proof

    record = read_object(folder / JSON, limit=_MOST_JSON, error=RunError)
    content = read_bytes(folder / TENSORS, limit=_MOST_TENSORS, error=RunError)
    if record is None or content is None:
        raise RunError(f"{folder} has no stored proof: it needs {JSON} and {TENSORS}; write them with proof.save(folder).")
    if record.get("format") != NAME or record.get("version") != VERSION:
        raise RunError(f"{folder / JSON} is not a proof of version {VERSION}: format {record.get('format')!r}.")
    library = _safetensors()
    if record.get("seal") != seal(record):
        raise RunError(f"{folder / JSON} was changed after it was written: its seal does not fit; prove it again.")
    try:
        tensors: dict[str, Tensor] = library.load(content)
        if record["hashes"] != {name: sha256(value) for name, value in tensors.items()}:
            raise ValueError("a tensor is not the one that proof.json names")
        problem, at, checkpoints = _parsed(record, tensors)
        return Proof(
            verdict=Verdict.CERTIFIED if record["verdict"] == "proved" else Verdict.UNDECIDED,
            activation=record["activation"]["name"],
            assumptions=tuple(record["assumptions"]),
            _problem=problem,
            _at=at,
            _checkpoints=checkpoints,
            **{name: record[name] for name in _FIELDS},
        )
    except Exception as error:  # of whatever kind: the file is not what it says
        raise RunError(f"{folder} has a proof that cannot be read ({type(error).__name__}: {error}).") from error


def _parsed(
    record: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[ProvedProblem, Parameters, dict[int, dict[str, Tensor]]]:
    start = {name.removeprefix("start."): value for name, value in tensors.items() if name.startswith("start.")}
    slopes = slopes_named(**record["activation"])
    rectified = record["family"] != "gaussian"
    problem = ProvedProblem(record["family"], slopes, dict(record["scales"]), rectified, tensors["X"], tensors["y"], start)
    checkpoints: dict[int, dict[str, Tensor]] = {step: {} for step in record["checkpoints"]}
    for name, value in tensors.items():
        if name.startswith("checkpoint."):
            _, step, key = name.split(".", 2)
            checkpoints[int(step)][key] = value
    found = checkpoints[0] | {
        key: value for key, value in checkpoints[record["num_steps"]].items() if key.partition(".")[0] in _PARTS
    }
    parts = {}
    for part in _PARTS:
        if part in found:
            low = checkpoints[record["num_steps"] if part in problem.trained else 0].get(f"{part}.low")
            parts[part] = Exact(found[part], torch.zeros_like(found[part]) if low is None else low.double())
    return problem, Parameters(**parts), checkpoints


def slopes_named(name: str, shift: float) -> AbstractSlopes:
    """The activation that a stored proof names."""
    if name == "softplus":
        return SoftplusSlopes(centred=shift != 0)
    return {"relu": ReLUSlopes, "tanh": TanhSlopes}[name]()


def sha256(tensor: Tensor) -> str:
    """Of the bytes of a tensor, row by row, little endian."""
    array = tensor.detach().cpu().contiguous().numpy()
    return hashlib.sha256(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()).hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingPackage(f"Storing proofs needs safetensors: {how_to_install('runs')}.") from error
    return safetensors.torch
