"""
Filter an EEG in pieces, without seams
======================================

A long record is cut in time over workers, and each filters its piece. If it does so alone,
the first and the last samples of each piece are wrong, since a filter reads samples before
and after. You want what one process would have.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cbook import get_sample_data

import linop

record = np.frombuffer(get_sample_data("eeg.dat").read()).reshape(800, 4)
record = record - record.mean(axis=0)
seconds = 10 * np.arange(800) / 800

# %%
# The filter
# ----------
# 61 weights that let pass what swings 8 to 13 times a second, the alpha rhythm: a
# difference of two low-pass filters, under a window. As a stencil along time it is an
# operator on the record, and its four channels are filtered alike.

n = np.arange(-30, 31)
passed = sum(sign * 2 * f / 80 * np.sinc(2 * f / 80 * n) for f, sign in ((13, 1), (8, -1)))
weights = passed * np.hamming(61)
X = linop.TensorSpace(record.shape, linop.Partition((4, 1)))
alpha = linop.stencil(X, weights[:, None])


def main(backend):
    mine = record[X.slices(backend.worker)]
    together = alpha.compile(backend)(mine)
    alone = np.apply_along_axis(np.convolve, 0, mine, weights, "same")
    return together, alone, backend.counters()[0].bytes


together, alone, sent = zip(*linop.launch(main, workers=4), strict=True)
together, alone = np.concatenate(together), np.concatenate(alone)

# %%
# Predicted and counted
# ---------------------
# Thirty samples of four channels go over each of three seams, in both directions: that is
# all.

whole = np.apply_along_axis(np.convolve, 0, record, weights, "same")
assert abs(together - whole).max() < 1e-12 * abs(whole).max()
assert alpha.cost().bytes == sum(sent) == 3 * 2 * 30 * 4 * 8
print(f"{sum(sent)} bytes were sent, of {record.nbytes} bytes of the record")

# %%
# Where the pieces are filtered alone, errors at the seams are as large as the rhythm
# itself.

error = abs(alone - whole).max(axis=1)
print(f"largest error at a seam: {error.max() / abs(whole).max():.0%} of the largest swing")
assert error.max() > 0.2 * abs(whole).max() and error[40:160].max() < 1e-9

figure, axes = plt.subplots(3, 1, figsize=(8, 6.5), sharex=True, layout="constrained")
for panel, values, title in (
    (axes[0], record, "the record: four channels"),
    (axes[1], whole, "its alpha rhythm, filtered by four workers together"),
):
    step = np.ptp(values) * 0.6
    panel.plot(seconds, values + step * np.arange(4), linewidth=0.8, color="black")
    panel.set(title=title, yticks=[])
axes[2].plot(seconds, error / abs(whole).max(), color="C3")
axes[2].set(title="error where each worker filters its piece alone", xlabel="seconds")
for panel in axes:
    for worker in (1, 2, 3):
        panel.axvline(seconds[X.slices(worker)[0].start], color="C0", linestyle="--")
plt.show()

# %%
# Read on: :doc:`/stencils`.
