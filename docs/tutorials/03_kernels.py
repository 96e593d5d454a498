# %% [markdown]
# # Kernels, from finite to infinite width
#
# Near its start, a wide network trains almost like a linear model whose features are the gradients
# of its predictions. The inner products of these gradients are the *tangent kernel* H. Gradient
# flow moves the predictions f on the training set by f' = -H (f - y), so the eigenvalues of H are
# the rates at which errors die, and the least one is the rate of the slowest. As the width grows, H
# (divided by the width) becomes a fixed matrix that can be computed without drawing any network. In
# this tutorial you compute both, see one become the other, and train with either.
#
# You need `pip install -c constraints.txt '.[plot]'`.

# %%
import math

import torch
from matplotlib.figure import Figure

import wellposed as wp
from wellposed.kernel import KernelMachine, deq_ntk

BLUE, RED, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "0.45"  # distinct also for most colour-blind readers

# points on a circle, described by a few waves so that neighbours are similar and none are equal
angles = torch.linspace(0, 2 * math.pi, 25, dtype=torch.float64)[:-1]


def features(angle):
    """(n,) -> (n, 8) of norm sqrt(8)."""
    waves = [wave(k * angle) / k for k in (1, 2, 3, 4) for wave in (torch.cos, torch.sin)]
    X = torch.stack(waves, dim=1)
    return X * 8**0.5 / X.norm(dim=1, keepdim=True)


X = features(angles)
y = torch.sign(torch.sin(angles + 0.3)) * 0.8 + 0.3 * torch.cos(3 * angles)

# %% [markdown]
# ## The kernel of one network
#
# `tangent_kernel` is exact at the present parameters. For the networks of this library it is a sum
# of products of Gram matrices, one for each parameter; a Jacobian is never formed. `deq_ntk` is its
# limit.


# %%
def draw(width, seed):
    return wp.GaussianDEQ(8, width, weight_variance=0.08, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


net = draw(200, 0)
H = wp.tangent_kernel(net, X) / net.width
parts = wp.tangent_kernel(net, X, by_parameter=True)
print({name: tuple(part.shape) for name, part in parts.items()})

limit = deq_ntk(X, weight_variance=0.08)
print(f"one network of width 200 is {(H - limit).norm() / limit.norm():.0%} away from the limit")

# the same number by brute force: gradients of every prediction
rows = [torch.cat([g.flatten() for g in torch.autograd.grad(net(X[i : i + 1]), net.parameters())]) for i in range(3)]
J = torch.stack([row.detach() for row in rows])
assert torch.allclose(J @ J.T / 200, H[:3, :3])

# %% [markdown]
# ## The picture: kernels settle

# %%
widths = [16, 64, 256, 512]
kernels = {m: [wp.tangent_kernel(draw(m, seed), X) / m for seed in range(6 if m < 500 else 4)] for m in widths}

figure = Figure(figsize=(8.4, 2.5), layout="constrained")
panels = figure.subplots(1, 4)
high = float(limit.max())
for ax, name, matrix in zip(
    panels,
    ("width 16", "width 64", "width 512", "infinite width"),
    (kernels[16][0], kernels[64][0], kernels[512][0], limit),
    strict=True,
):
    drawn = ax.imshow(matrix.numpy(), cmap="viridis", vmin=0, vmax=high, extent=(0, 360, 360, 0))
    ax.set(title=name, xticks=(0, 180, 360), yticks=(0, 180, 360), xlabel="angle, degrees")
panels[0].set_ylabel("angle, degrees")
figure.colorbar(drawn, ax=panels, label="kernel / width", shrink=0.9, extend="max")

# %% [markdown]
# How fast? Theory says that the distance falls like one over the root of the width. Every dot is
# one random network:

# %%
figure = Figure(figsize=(8, 3.3), layout="constrained")
left, right = figure.subplots(1, 2)
means = []
for m in widths:
    errors = [float((matrix - limit).norm() / limit.norm()) for matrix in kernels[m]]
    means.append(math.sqrt(sum(e * e for e in errors) / len(errors)))
    left.plot([m] * len(errors), errors, "o", color=BLUE, alpha=0.5, markersize=5, markeredgewidth=0)
left.plot(widths, means, color=BLUE, linewidth=1.8, label="root mean square")
left.plot(widths, [means[0] * math.sqrt(widths[0] / m) for m in widths], "--", color=GREY, label="width^(-1/2)")
left.set(xlabel="width", ylabel="relative distance to the limit", xscale="log", yscale="log", title="Kernels settle")
left.set_xticks(widths, [str(m) for m in widths])
left.set_xticks([], minor=True)
left.legend(fontsize=8)
order = range(1, len(X) + 1)
for m, color, style in ((16, RED, "v:"), (64, GREEN, "s--"), (512, BLUE, "o-")):
    right.plot(order, torch.linalg.eigvalsh(kernels[m][0]).flip(0), style, color=color, markersize=3, label=f"width {m}")
right.plot(order, torch.linalg.eigvalsh(limit).flip(0), color="black", linewidth=1.5, label="infinite width")
right.set(xlabel="number", ylabel="eigenvalue / width", yscale="log", title="The rates of learning")
right.legend(fontsize=8)
for ax in (left, right):
    ax.grid(alpha=0.3)

# %% [markdown]
# **What to notice.** On the right, width 64 has the large eigenvalues nearly right. It is the small
# ones, the patterns that are learned last, for which narrow networks are wrong, and these decide
# how long training takes.
#
# The least eigenvalue decides about certificates, so it comes with a proof: `value` is an
# approximation, `lower` a bound that holds in spite of rounding.

# %%
for m in widths:
    least = wp.least_eigenvalue(draw(m, 0), X)
    print(f"width {m:5d}: least eigenvalue / width {least.value / m:.2e}, proved to be at least {least.lower / m:.2e}")

# %% [markdown]
# ## Train with either
#
# `KernelMachine` solves the linear dynamics at any time in closed form, t = infinity included.
# Beside it we train real networks with the same small steps. Both start at their own predictions,
# so we compare how far the *loss* has come.

# %%
steps = 100
records = {}
for m in (64, 512):
    net = draw(m, 1)
    K0 = wp.tangent_kernel(net, X)
    with torch.no_grad():
        start = net(X)
    machine = KernelMachine(K0, y, start)
    step_size = 0.5 / float(torch.linalg.eigvalsh(K0)[-1])
    history = wp.descend(net, X, y, step_size=step_size, steps=steps)
    frozen = [float((machine.predict_descent(k, step_size) - y).square().sum() / 2) for k in range(0, steps + 1, 5)]
    moved = float((wp.tangent_kernel(net, X) - K0).norm() / K0.norm())
    apart = float((net(X).detach() - machine.predict_descent(steps, step_size)).norm() / y.norm())
    records[m] = (history, frozen)
    print(f"width {m}: kernel moved by {moved:.1%}, predictions of network and linear model {apart:.2%} apart")

fine = torch.linspace(0, 2 * math.pi, 200, dtype=torch.float64)
regression = KernelMachine(limit, y).predict(math.inf, deq_ntk(features(fine), X, weight_variance=0.08))

# %%
figure = Figure(figsize=(8, 3.3), layout="constrained")
left, right = figure.subplots(1, 2)
for (m, (history, frozen)), color in zip(records.items(), (GREEN, BLUE), strict=True):
    left.plot(history["step"], history.loss, color=color, linewidth=1.8, label=f"width {m}, trained")
    left.plot(range(0, steps + 1, 5), frozen, "--", color=color, linewidth=1.2, label=f"width {m}, kernel frozen")
left.set(xlabel="step of descent", ylabel="loss", yscale="log", title="A network and its linear model")
left.legend(fontsize=8)
degrees = 180 / math.pi
right.plot(fine * degrees, regression, color="black", linewidth=1.5, label="infinite width, t = infinity")
right.plot(angles * degrees, y, "o", color=RED, markersize=4, label="data")
right.set(
    xlabel="angle, degrees", ylabel="prediction", xticks=(0, 90, 180, 270, 360), title="Kernel regression between samples"
)
right.legend(fontsize=8, loc="lower left")
for ax in (left, right):
    ax.grid(alpha=0.3)

# %% [markdown]
# **What to notice.** The dashed lines come from the kernel at the start alone. The wide network
# follows its linear model more closely than the narrow one, because its kernel moves less.
#
# ## What can go wrong
#
# **Equal samples.** Two equal inputs make two equal rows, the least eigenvalue is zero, and no
# width repairs that. The bound says 0 and not a small positive number that rounding made up:

# %%
doubled = torch.cat([X, X[:1]])
least = wp.least_eigenvalue(draw(256, 0), doubled)
print(f"value {least.value:.1e}, proved to be at least {least.lower}")

# %% [markdown]
# **Modules that mix samples.** A kernel entry belongs to two samples. If a module lets samples see
# each other, as batch normalization does in training mode, the kernel is not defined, and you are
# told so:

# %%
mixing = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)).double()
try:
    wp.tangent_kernel(mixing, X)
except wp.WellposedError as error:
    print(type(error).__name__, "|", error)

# %% [markdown]
# **The limit does not predict everything.** It describes wide networks of this initialization that
# are trained a little. The narrow network above already left it.
#
# ## Where to read on
#
# - [Tangent kernels](../kernels.md): closed forms, your own modules, memory, kernels that are never
#   stored.
# - [Their limits](../kernels_limit.md): other activations, other conventions, digits near equal and
#   opposite samples.
# - [What is proved, when](../certificates.md): what the least eigenvalue is needed for.
# - [The next tutorial](04_opteq_prior.md): choosing an equilibrium by a prior.
