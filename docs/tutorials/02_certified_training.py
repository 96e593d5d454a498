# %% [markdown]
# # A network that certifies itself while it trains
#
# Usually one can only watch a training curve. For some equilibrium networks one can do better: at
# the present parameters, with the present data, a short computation *proves* that gradient descent
# from here ends at zero training loss, and how fast. `wp.certify` does that computation, with
# bounds that are on the safe side of every rounding error. In this tutorial a network is trained
# under this proof, the promise is compared with what happens, and you see where the proof ends.
#
# You need `pip install -c constraints.txt '.[plot,flow]'`. The data are random.

# %%
import torch
from matplotlib.figure import Figure

import wellposed as wp

BLUE, RED, GREEN = "#0072B2", "#D55E00", "#009E73"  # distinct also for most colour-blind readers

X, y = wp.data.load("sphere", n=10, features=50, norm="sqrt_d", seed=0, dtype=torch.float64)


def network(seed=0):
    """z = relu(W z + U x), y = a . z with 200 units and Gaussian weights."""
    return wp.GaussianDEQ(50, 200, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# %% [markdown]
# ## What is known at the start
#
# A certificate lists the hypotheses of its theorem as numbers, and ends in one of three verdicts:
# CERTIFIED, VIOLATED (a hypothesis is false) or UNDECIDED. The theorem is sufficient and not
# necessary, so the last two do *not* mean that training will fail.

# %%
net = network()
print(wp.certify(net, X, y, theorem="radius"))

# %% [markdown]
# Nothing is proved yet about plain gradient flow, where all parameters move at one speed: the
# residual is so large that the parameters may move far, where the bounds of the theorem do not
# hold. But the speeds can be chosen. If the hidden parameters W and U move more slowly than the
# read-out a, the features change less, and there is always a ratio of speeds that can be proved.
# Ask for it with `dynamics="descent"`:

# %%
licence = wp.certify(net, X, y, theorem="radius", dynamics="descent")
print(licence)
assert licence.certified

# %% [markdown]
# It licenses step sizes, one for each parameter, and promises a factor by which the residual
# shrinks in every step. `step_size="certified"` takes exactly these steps, and raises without a
# certificate.

# %%
history = wp.descend(net, X, y, step_size="certified", steps=150)
promised = history.certified_residual()
assert (history.residual_norm <= promised).all()
print(f"loss {history.loss[0]:.2f} -> {history.loss[-1]:.1e}; promised at most {float(promised[-1]) ** 2 / 2:.1e}")

# %% [markdown]
# ## The picture: measured against certified

# %%
figure = wp.plot.losses({"certified steps": history})
figure.axes[0].set_title("The dashed line was known before the first step", fontsize=10)

# %% [markdown]
# **What to notice.** The dashed line is not a fit. It was printed above, before training began, and
# the solid line has to stay below it. It stays far below, because a proof covers the worst case.
# The price of the early proof is a slow hidden layer: look at the step sizes of W and U.
#
# ## A proof that arrives on the way
#
# With one step size for everything there is no certificate at the start. But while the loss falls,
# the distance that the parameters may still move falls too, and at some point the proof succeeds.
# `CertificateMonitor` tries every few steps and records when. From that point we follow the exact
# gradient *flow*, because this certificate is about the flow, and renew the certificate along the
# way.

# %%
net = network()
before = wp.CertificateMonitor(every=1, stop=True)
descent = wp.descend(net, X, y, step_size=1e-3, steps=200, callbacks=[before])
step, loss = before.first
print(f"from step {step} on, at loss {loss:.1e}, convergence of the flow to zero loss is a theorem")

after = wp.CertificateMonitor(every=1)
times = torch.linspace(0, 0.05, 11, dtype=torch.float64)[1:].tolist()
flow = wp.flow(net, X, y, times=times, rtol=1e-6, callbacks=[after])
for record in after.records[::3]:
    print(f"time {record['time']:.3f}: loss {record['loss']:.1e}, certified rate {record['certified_rate']:.1f}")

# %%
figure = Figure(figsize=(8, 3.5), layout="constrained")
left, right = figure.subplots(1, 2, width_ratios=(2, 3))
left.plot(descent["step"], descent.loss, ".-", color=BLUE, linewidth=1.6, markersize=4)
left.axvline(step, color=GREEN, linewidth=2, linestyle=":")
left.annotate("proved", (step, descent.loss[0]), (-4, -4), textcoords="offset points", ha="right", color=GREEN, fontsize=9)
left.set(xlabel="step of descent", ylabel="loss", yscale="log", title="Until the proof succeeds")
right.plot(flow["time"], flow.loss, color=BLUE, linewidth=2.2, label="measured")
for i, record in enumerate(after.records[:-1:3]):
    t = torch.linspace(record["time"], times[-1], 50, dtype=torch.float64)
    bound = record["loss"] * torch.exp(-2 * record["certified_rate"] * (t - record["time"]))
    right.plot(t, bound, "--", color=RED, linewidth=1.2, label=None if i else "certified, from each dot on")
    later = flow["time"] >= record["time"]
    promised = record["loss"] * torch.exp(-2 * record["certified_rate"] * (flow["time"] - record["time"]))
    assert (flow.loss <= promised * (1 + 1e-5))[later].all()  # up to the tolerance of the integrator
    right.plot(record["time"], record["loss"], "o", color=RED, markersize=5)
right.set(xlabel="time of the flow", ylabel="loss", yscale="log", title="From there on: measured against certified")
right.legend(fontsize=8)
for ax in (left, right):
    ax.grid(alpha=0.3)

# %% [markdown]
# **What to notice.** Every dashed line starts at a certificate and stays above the measured loss
# for ever; that is the theorem. Later certificates are steeper, because less of the way remains in
# which something could go wrong.
#
# ## What can go wrong
#
# **Data that contradict themselves.** Give the first two inputs the same values and different
# labels. Zero loss is impossible, and no certificate may say otherwise:

# %%
X_bad, y_bad = X.clone(), y.clone()
X_bad[1] = X_bad[0]
y_bad[0], y_bad[1] = 1.0, -1.0
net = network()
monitor = wp.CertificateMonitor(every=25)
stuck = wp.descend(net, X_bad, y_bad, step_size=1e-3, steps=150, callbacks=[monitor])
print("verdicts:", [record["verdict"] for record in monitor.records])
print(f"loss at the end {stuck.loss[-1]:.6f}; the least that any function can reach is {(y_bad[0] - y_bad[1]) ** 2 / 4:.6f}")
print(f"least eigenvalue of the tangent kernel, proved to be at least {wp.least_eigenvalue(net, X_bad).lower:.1e}")

# %% [markdown]
# **Steps that are too large.** A certificate for the flow is not a licence for steps of any size.
# With steps twenty times as large W leaves the region where it contracts. This is found before an
# equilibrium is used whose existence is not proved; the parameters are set back to the last good
# point, and the error holds the history.

# %%
net = network()
try:
    wp.descend(net, X, y, step_size=2e-2, steps=150)
except wp.IllPosed as error:
    wild = error.history
    print(error)
print("losses until then:", [f"{value:.1e}" for value in wild.loss.tolist()])

# %%
figure = Figure(figsize=(6.4, 3.4), layout="constrained")
ax = figure.subplots()
ax.plot(stuck["step"], stuck.loss, color=RED, linewidth=1.8, label="contradictory labels: never certified")
ax.axhline(float((y_bad[0] - y_bad[1]) ** 2 / 4), color=RED, linestyle=":", linewidth=1.2, label="the least that is possible")
ax.plot(
    descent["step"],
    descent.loss,
    color=BLUE,
    linestyle="--",
    linewidth=1.8,
    label=f"consistent labels: certified at step {step}",
)
ax.plot(
    wild["step"],
    wild.loss,
    "^-",
    color="black",
    markersize=4,
    linewidth=1.2,
    label="steps 20 times as large: refused at step 2",
)
ax.set(xlabel="step of descent", ylabel="loss", yscale="log", xlim=(-1, 60))
ax.grid(alpha=0.3)
ax.legend(fontsize=8)

# %% [markdown]
# **And the limits.** The theorem is about full-batch descent and flow on the sum of squares,
# about the training loss only, and about small numbers of samples: on 100 images of MNIST it holds
# only when the loss is tiny. Adam, minibatches and cross entropy are not covered; there a
# certificate still proves that the equilibria exist and are unique.
#
# ## Where to read on
#
# - [What is proved, when](../certificates.md): the theorems with their proofs, and measured
#   records.
# - [Training](../training.md): `descend`, `flow`, histories and callbacks.
# - [Findings](../findings.md): what the published theorems get wrong, and how it was checked.
# - [The next tutorial](03_kernels.md): the kernel whose least eigenvalue is the rate.
