"""Pictures; the only module that draws (needs the extra ``plot``)."""

from __future__ import annotations

from pathlib import Path

from linop.demo import Blur
from linop.scalars import Array


def restoration(path: Path, photo: Array, data: Array, restored: Array, op: Blur) -> None:
    """Write one picture: photograph, partition with halos, data, and restoration."""
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
    figure.savefig(path, dpi=130)


def _rgb(colour: str) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    return to_rgb(colour)
