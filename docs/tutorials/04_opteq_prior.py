# %% [markdown]
# # Choosing an equilibrium by a prior
#
# Most equilibrium networks have no meaning beyond "the point where nothing changes". An *OptEq*
# network [xie2021] has one: its equilibrium minimises a convex function phi that can be written
# down, because W stands on both sides of the activation, z = W^T s(W z + U x + b). Once you know
# what is minimised you can say what you would *like*: a sparse equilibrium, a small one, one inside
# a box. In this tutorial you look at phi, pick one of many equilibria by a prior, build a prior
# into a network, and see what neither of these does.
#
# You need `pip install -c constraints.txt '.[plot]'`.

# %%
import warnings

import numpy as np
import torch
from matplotlib.figure import Figure

import wellposed as wp
from wellposed.convex import L1, InverseNorm, SquaredL2, select_equilibrium
from wellposed.convex.selection import sequential_averaging

BLUE, RED, GREEN = "#0072B2", "#D55E00", "#009E73"  # distinct also for most colour-blind readers

# %% [markdown]
# ## Many equilibria
#
# Usually `norm_bound=0.95` keeps |W| below 1, and there is exactly one equilibrium. Here is a
# network of two units made for the occasion, with |W| = 1: every point of a segment is an
# equilibrium.

# %%
many, first, last = wp.convex.line_of_equilibria()
least_norm = 0.6 / (1 - 0.6**2) * many.b.detach()  # known by hand for this network
x = torch.zeros(6, 1, dtype=torch.float64)  # six copies of the one input, for six starts
T = many.bind(x)

on_segment = torch.stack([first + t * (last - first) for t in np.linspace(0, 1, 6)])
print("residual on the segment:", (T(on_segment) - on_segment).norm(dim=1).max().item())
print("phi on the segment:     ", [round(v, 9) for v in wp.convex.objective(many, x)(on_segment).tolist()])

# %% [markdown]
# phi is the same along the whole segment: it cannot tell these points apart, and neither can an
# iteration. The plain one ends wherever it happens to arrive. The *sequential averaging* of Theorem
# 4 of the paper adds a pull towards smaller R, which fades: slowly enough that the pull decides
# along the segment, and fast enough that the limit is an equilibrium.

# %%
starts = torch.tensor([[3.2, -0.5], [3.0, 1.5], [1.8, 2.1], [-0.2, 1.9], [2.4, -0.2], [0.4, 2.3]], dtype=torch.float64)
with torch.no_grad():
    plain = [starts]
    for _ in range(60):
        plain.append(T(plain[-1]))

    averaged = []

    def recorded(z):
        averaged.append(z)
        return T(z)

    found = sequential_averaging(recorded, starts, SquaredL2(0.5), steps=2000)
print("ends of plain iteration:", [[round(v, 2) for v in row] for row in plain[-1].tolist()])
print("ends of the averaging:  ", [[round(v, 2) for v in row] for row in found.value.tolist()])
print("the least norm is at    ", [round(v, 2) for v in least_norm.tolist()], "| proved by Theorem 4:", found.is_proved)

# %% [markdown]
# ## The picture

# %%
horizontal, vertical = np.linspace(-0.9, 3.6, 121), np.linspace(-0.9, 2.5, 101)
plane = torch.tensor(np.stack(np.meshgrid(horizontal, vertical), axis=-1).reshape(-1, 2))
phi = wp.convex.objective(many, torch.zeros(len(plane), 1, dtype=torch.float64))(plane).reshape(101, 121).numpy()

figure = Figure(figsize=(8.4, 3.6), layout="constrained")
panels = figure.subplots(1, 2, sharex=True, sharey=True)
for ax, title, ways in zip(panels, ("Plain iteration", "Averaging, R = |z|^2 / 2"), (plain, averaged), strict=True):
    ax.set_facecolor("0.85")  # where phi is infinite
    drawn = ax.contourf(horizontal, vertical, np.ma.masked_invalid(phi), levels=14, cmap="viridis")
    ax.plot(*torch.stack([first, last]).T.numpy(), color="white", linewidth=3, label="equilibria", zorder=2)
    for sample in range(len(starts)):
        way = torch.stack(ways)[:, sample].detach().numpy()
        ax.plot(*way.T, color=RED, linewidth=1.2, zorder=3)
        ax.plot(*way[0], "o", color="white", markeredgecolor="black", markersize=5, zorder=4)
        ax.plot(*way[-1], "D", color=RED, markeredgecolor="white", markersize=6, zorder=5)
    ax.plot(*least_norm.numpy(), "*", color="black", markeredgecolor="white", markersize=15, label="least norm", zorder=6)
    ax.plot(0, 0, "+", color="black", markersize=9, zorder=4)
    ax.set(title=title, xlabel="first unit")
panels[0].set_ylabel("second unit")
panels[0].plot([], [], "o", color="white", markeredgecolor="black", markersize=5, label="starts")
panels[0].plot([], [], "D", color=RED, markeredgecolor="white", markersize=6, label="ends")
panels[0].legend(fontsize=7, loc="upper right", facecolor="0.75")
figure.colorbar(drawn, ax=panels, label="phi, grey: infinite")

# %% [markdown]
# **What to notice.** On the left every start keeps its own equilibrium. On the right all of them
# come to the star, the point of the segment that is nearest to the origin (the cross).
#
# How near, after how many steps? This is a theorem about *where*, not a fast method:

# %%
distance = (torch.stack(averaged) - least_norm).norm(dim=2).max(dim=1).values.detach().numpy()
k = np.arange(1, len(distance) + 1)
figure = Figure(figsize=(6, 3.3), layout="constrained")
ax = figure.subplots()
ax.loglog(k, distance, color=RED, linewidth=1.8, label="averaging, farthest of six starts")
ax.loglog(k, distance[-1] * (k / k[-1]) ** -0.3, "--", color="0.4", linewidth=1.2, label="k^(-0.3)")
worst = float((plain[-1] - least_norm).norm(dim=1).max())
ax.axhline(worst, color=BLUE, linewidth=1.8, linestyle=":", label="plain iteration, farthest of six starts")
ax.set(xlabel="steps k", ylabel="distance to the equilibrium of least norm")
ax.grid(alpha=0.3)
ax.legend(fontsize=8)

# %% [markdown]
# ## A prior in the architecture
#
# Where there is one equilibrium, nothing can be selected; then the prior becomes part of the map.
# `prior=L1(weight)` puts the proximal operator of weight |z|_1 behind the layer, and training goes
# through it. The task: a function of two out of ten inputs.

# %%
generator = torch.Generator().manual_seed(0)
X = torch.randn(160, 10, generator=generator, dtype=torch.float64)
y = X[:, 0].abs() - 0.5 * X[:, 1]
train, test = slice(0, 80), slice(80, 160)

weights = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
results = []
for weight in weights:
    prior = L1(weight) if weight else None
    net = wp.OptEq(10, 40, prior=prior, rtol=1e-6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(80):
        optimizer.zero_grad()
        (net(X[train]) - y[train]).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        active = (net.equilibrium(X[test]).abs() > 1e-9).double().mean().item()
        errors = [(net(X[part]) - y[part]).square().mean().item() / y[part].var().item() for part in (train, test)]
    results.append((active, *errors))
    print(
        f"weight {weight:4.2f}: {active:4.0%} of the features not zero, error {errors[0]:.3f} (train), {errors[1]:.3f} (test)"
    )

# %%
figure = Figure(figsize=(8, 3.1), layout="constrained")
left, right = figure.subplots(1, 2)
active, on_train, on_test = zip(*results, strict=True)
places = range(len(weights))
left.bar(places, [100 * share for share in active], color=BLUE)
left.set(ylabel="features that are not zero, %", title="What the prior does", ylim=(0, 105))
right.plot(places, on_train, "s--", color=GREEN, markersize=5, label="train")
right.plot(places, on_test, "o-", color=RED, markersize=5, label="test")
right.set(ylabel="squared error / variance of y", title="What it costs, or gives", ylim=(0, None))
right.legend(fontsize=8)
for ax in (left, right):
    ax.set_xlabel("weight of the l1 prior")
    ax.set_xticks(list(places), [f"{weight:g}" for weight in weights])
    ax.grid(alpha=0.3, axis="y")

# %% [markdown]
# **What to notice.** The features become sparse exactly, not approximately: a proximal operator
# sets them to zero. Here the sparse networks also fit better after the same number of steps, on the
# training samples too. So it is not only restraint that helps: the threshold bends a map that is
# otherwise close to linear. This is one task and one seed; do not expect it everywhere.
#
# ## What can go wrong
#
# **The equilibrium of a prior does not minimise phi + R.** The paper reads as if it did. What is
# minimised has a block more, phi(z1) + R(z) + |z1 - z|^2/2, and `objective` gives that one. Compare
# at the equilibrium of a small network:

# %%
small = wp.OptEq(3, 8, prior=SquaredL2(0.2), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
bare = wp.OptEq(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
x = torch.randn(1, 3, generator=generator, dtype=torch.float64)
phi_bare, z = wp.convex.objective(bare, x), small.solve(x).value
# the minimiser of phi + R solves z = prox_phi(z - 2 * 0.2 z): plain steps on it
best, f = z.clone(), bare.bind(x)
with torch.no_grad():
    for _ in range(500):
        best = f(best - 0.4 * best)
total = [float(phi_bare(point)) + 0.2 * float(point.square().sum()) for point in (z, best)]
print(f"phi + R at the equilibrium {total[0]:.6f}, at its minimiser {total[1]:.6f}; they are {(z - best).norm():.3f} apart")

# %% [markdown]
# **A prior that is not convex** is allowed, with a warning: nothing says any more which equilibrium
# is found.

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with torch.no_grad():
        away = select_equilibrium(many, x[:, :1], InverseNorm(1.0, eps=0.5), steps=2000, z0=first[None])
print([str(warning.message) for warning in caught])
print("ends at", [round(v, 2) for v in away.value[0].tolist()], "| proved:", away.is_proved)

# %% [markdown]
# **At |W| = 1 there may also be none.** z = relu(z + c) has no equilibrium if some c is positive.
# The layer reports it; one bound below 1 excludes it.

# %%
none = wp.OptEq(1, 2, norm_bound=None, dtype=torch.float64, on_failure="ignore")
with torch.no_grad():
    none.W.copy_(torch.eye(2))
    none.U.zero_()
    none.b.fill_(0.5)
print(none.solve(x[:, :1]))

# %% [markdown]
# ## Where to read on
#
# - [OptEq](../opteq.md): deep and convolutional networks, objectives, priors, and what the paper
#   prints wrongly.
# - [Findings](../findings.md): the corrected statements, each with the check that computes it.
# - [The next tutorial](05_landscape.md): the loss around a network, and its holes.
