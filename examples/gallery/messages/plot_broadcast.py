"""
Compare three broadcasts: direct, tree and ring
===============================================

One worker has an array that eight need. It can send it to each of the others, one after the
other; those that have it can help, in a tree; or it goes around in pieces. Which is best
depends on the size of the array. Here the three are operators: you can watch them, prove
that they do the same, and ask what they cost.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.animation import FuncAnimation

import linop

workers = range(8)

# %%
# Three ways to write a broadcast
# -------------------------------
# Each is a list of rounds, and a round a list of copies (from, to, piece) between workers.
# The ring cuts the array in eight pieces: first worker 0 scatters them, then each worker
# passes on, round by round, the piece that it got last.

eighth = [slice(k, k + 1) for k in workers]
ways = {
    "one after the other": [[(0, k, slice(0, 8))] for k in workers[1:]],
    "tree": [[(k, k + m, slice(0, 8)) for k in range(m)] for m in (1, 2, 4)],
    "ring": [[(0, k, eighth[k]) for k in workers[1:]]]
    + [[(k, k + 1, eighth[k - r]) for k in workers[:7]] for r in range(7)],
}


def operator(rounds, n=1):
    """The rounds as an operator on eight arrays of 8 · n numbers, one on each worker."""
    F = linop.Space([linop.Region(f"w{k}", 8 * n, k) for k in workers])
    steps = []
    for copies in rounds:
        step = linop.identity(F)
        for a, b, piece in copies:
            part = slice(piece.start * n, piece.stop * n)
            step = linop.copy(F, F[f"w{a}"][part], F[f"w{b}"][part]) @ step
        steps.append(step)
    return linop.in_steps(*reversed(steps))


# %%
# The same map: a proof for all arrays, not a test on some. The adjoint of each is a sum of
# all arrays on worker 0, with its arrows reversed; it was derived.

direct, tree, ring = (operator(rounds) for rounds in ways.values())
assert tree.equals(direct) and ring.equals(direct)
x = direct.codomain.vector({f"w{k}": np.full(8, 1.0 + k) for k in workers})
assert (tree.H(x)["w0"] == 36).all()

# %%
# Round by round
# --------------
# The darker a worker, the more it has of the array.

angles = np.pi / 2 - 2 * np.pi * np.arange(8) / 8
at = np.stack([np.cos(angles), np.sin(angles)], axis=1)
figure, axes = plt.subplots(1, 3, figsize=(9, 3.6), layout="constrained")
held = {}
for name, rounds in ways.items():
    has = np.zeros((len(rounds) + 1, 8, 8), bool)
    has[0, 0] = True
    for r, copies in enumerate(rounds):
        has[r + 1] = has[r]
        for a, b, piece in copies:
            has[r + 1, b, piece] |= has[r, a, piece]
    assert has[-1].all()
    held[name] = has


def draw(r):
    for panel, (name, rounds) in zip(axes, ways.items(), strict=True):
        panel.clear()
        now = held[name][min(r, len(rounds))].mean(axis=1)
        panel.scatter(*at.T, 500, c=now, cmap="Blues", vmin=0, vmax=1.4, edgecolor="black")
        for k in workers:
            panel.text(*at[k], str(k), ha="center", va="center")
        arrow = {"arrowstyle": "-|>", "color": "C1", "lw": 2, "shrinkA": 12, "shrinkB": 12}
        for a, b, _ in rounds[r] if r < len(rounds) else []:
            panel.annotate("", at[b], at[a], arrowprops=arrow)
        done = f"round {r + 1} of {len(rounds)}" if r < len(rounds) else "done"
        panel.set(
            title=f"{name}: {done}", xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal"
        )
        panel.set_axis_off()


animation = FuncAnimation(figure, draw, frames=9, interval=900)
plt.show()

# %%
# Which is best
# -------------
# ``simulate`` predicts the time for any size. Short arrays go fastest in few rounds, by the
# tree; long ones in small pieces, around the ring. The number of bytes a worker sends is
# the reason: the root sends the array seven times, in the tree three times, and in the ring
# less than once, and then everybody an eighth in each round.

network = linop.planning.Network(latency=1e-5, per_byte=1e-10, per_byte_copied=0)
sizes = 8 ** np.arange(1, 9)
figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
times = {}
for (name, rounds), style in zip(ways.items(), ("o:", "s--", "^-"), strict=True):
    times[name] = [linop.simulate(operator(rounds, n // 8), network).time for n in sizes]
    panel.loglog(8 * sizes, times[name], style, label=name)
panel.set(
    xlabel="bytes of the array",
    ylabel="seconds, predicted",
    title="broadcast to eight workers",
)
panel.legend()
assert min(times, key=lambda name: times[name][0]) == "tree"
assert min(times, key=lambda name: times[name][-1]) == "ring"
plt.show()

# %%
# The bytes are those that the backend counts:


def counted(backend, op):
    op.compile(backend)(np.full(8 * 64, float(backend.worker)))
    return sum(row.bytes for row in backend.counters())


for name, rounds in ways.items():
    op = operator(rounds, 64)
    sent = sum(linop.launch(lambda b, op=op: counted(b, op), workers=8))
    print(f"{name}: {op.cost().bytes} bytes predicted, {sent} counted")
    assert op.cost().bytes == sent

# %%
# Read on: :doc:`/tutorial`.
