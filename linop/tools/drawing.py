"""All pictures that linop draws, with Matplotlib (the extra ``plot``): traffic, and the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from linop.operators.operator import LinearOperator
from linop.planning.prediction.traffic import TrafficMatrix, traffic_matrix
from linop.spaces.scalars import Array
from linop.tools.demo import Blur
from linop.writing import target

_CELLS = 256
"""Largest number of workers drawn one per row of a traffic picture; more are binned."""
_NUMBERS = 16
"""Largest number of rows of which every cell has its number printed."""
_SPREAD = 100
"""Ratio of the largest to the smallest number above which the colour scale is logarithmic."""


def restoration(path: Path, photo: Array, data: Array, restored: Array, op: Blur) -> None:
    """Draw the demo's picture to a file: photograph, blocks with halos, data, and restoration."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    axes = figure.subplots(1, 4)
    shown = (photo, photo, data, restored)
    titles = (
        "photograph",
        "blocks, and what each worker needs",
        "blurred, with noise",
        "restored",
    )
    for panel, image, title in zip(axes, shown, titles, strict=True):
        panel.imshow(image, cmap="gray", vmin=0, vmax=1)
        panel.set_title(title, fontsize=10)
        panel.set_axis_off()
    needed = op.exchange.codomain
    for k, worker in enumerate(op.X.partition.workers):
        colour = f"C{k}"
        for space, style, fill in ((op.X, "-", 0.25), (needed, "--", 0.0)):
            rows, columns = space.slices(worker)  # type: ignore[attr-defined]
            axes[1].add_patch(
                Rectangle(
                    (columns.start - 0.5, rows.start - 0.5),
                    columns.stop - columns.start,
                    rows.stop - rows.start,
                    linewidth=1.5,
                    linestyle=style,
                    edgecolor=colour,
                    facecolor=(*_rgb(colour), fill),
                )
            )
    figure.savefig(target(path), dpi=130)


def traffic(path: str | Path, what: LinearOperator | TrafficMatrix) -> None:
    """Draw a traffic matrix to a file: bytes sent from the row's worker to the column's, for one
    application of an operator. Of more than 256 workers, a row is several consecutive ones."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    matrix = what if isinstance(what, TrafficMatrix) else traffic_matrix(what)
    dense, width = matrix.binned(_CELLS)
    first = matrix.workers[::width].tolist()
    shown = np.ma.masked_equal(dense, 0)
    most, least = int(dense.max(initial=1)), int(shown.min()) if shown.count() else 1
    norm = LogNorm(least, most) if most > _SPREAD * least else Normalize(0, most)
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shown, cmap="viridis_r", norm=norm)
    figure.colorbar(image, label="bytes")
    many = f", rows of {width} workers" if width > 1 else ""
    title = "" if isinstance(what, TrafficMatrix) else f"{what}: "
    total = f"{matrix.messages.sum()} messages, {dense.sum()} bytes"
    axes.set_title(f"{title}{total}{many}", fontsize=10)
    axes.set(xlabel="to worker", ylabel="from worker")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(10, integer=True))
        axis.set_major_formatter(lambda k, _: str(first[int(k)]) if 0 <= k < len(first) else "")
    if len(dense) <= _NUMBERS:
        for (row, column), size in np.ndenumerate(dense):
            if size:
                colour = "white" if norm(size) > 0.5 else "black"
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
                axes.text(column, row, str(size), color=colour, **style)
    figure.savefig(target(path), dpi=130)


def _rgb(colour: str) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    return to_rgb(colour)
