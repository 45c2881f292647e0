"""README's picture of speed: the ratios to raw mpi4py that `run.py` left in results/openmpi.md.

    python benchmarks/movement/plot.py

writes docs/pictures/speed.svg. It needs the extra `plot`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/openmpi.md"
PICTURE = ROOT / "docs/pictures/speed.svg"
OPERATIONS = {
    "broadcast": "broadcast",
    "sum-reduce": "sum-reduce",
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "repartition P×1 → 1×P": "repartition",
    "halo 2-D": "halo exchange 2-D",
    "halo 3-D": "halo exchange 3-D",
}
"""The names in the table, and in the picture from top to bottom."""
SIZES = "1 KiB", "64 KiB", "1 MiB", "16 MiB"
SHADES = "#c6dbef", "#6baed6", "#2171b5", "#08306b"


class Ratio(NamedTuple):
    """One comparison: linop's median time over that of raw mpi4py."""

    operation: str
    direction: str
    size: str
    ratio: float


def measured(path: Path = RESULTS) -> list[Ratio]:
    """All comparisons with raw mpi4py on two ranks that have a ratio, of any operation and size."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 8 and cells[3:5] == ["2", "raw mpi4py"] and cells[8]:
            found.append(Ratio(cells[0], cells[1], cells[2], float(cells[8])))
    return found


def shown(path: Path = RESULTS) -> list[Ratio]:
    """The comparisons in the picture."""
    return [one for one in measured(path) if one.operation in OPERATIONS and one.size in SIZES]


def draw(path: Path = PICTURE) -> None:
    """Write the picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "linop"  # the same file for the same numbers
    from matplotlib.lines import Line2D
    from matplotlib.pyplot import subplots

    figure, axes = subplots(figsize=(7.2, 3.8), layout="constrained")
    figure.patch.set_facecolor("#fcfcfa")
    axes.set_facecolor("#fcfcfa")
    names = [*OPERATIONS]
    for one in shown():
        back = one.direction == "adjoint"
        axes.plot(
            one.ratio,
            names.index(one.operation) + (0.16 if back else -0.16),
            marker="^" if back else "o",
            color=SHADES[SIZES.index(one.size)],
            markeredgecolor="#1b1b1b",
            markeredgewidth=0.5,
            markersize=5 + 1.2 * SIZES.index(one.size),
            clip_on=False,
        )
    axes.axvline(1, color="#1b1b1b", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(0.125, 2)
    ticks = [0.125, 0.25, 0.5, 1, 2]
    axes.set_xticks(ticks, ["⅛", "¼", "½", "1 = raw MPI", "2"])
    axes.minorticks_off()
    axes.set_yticks(range(len(names)), [*OPERATIONS.values()])
    axes.invert_yaxis()
    axes.set_xlabel("time of linop / time of raw mpi4py (left is faster)")
    axes.grid(axis="x", linewidth=0.4)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    legend = [
        Line2D([], [], marker=m, color="w", markeredgecolor="#1b1b1b", label=label)
        for m, label in (("o", "forward"), ("^", "adjoint"))
    ]
    legend += [
        Line2D(
            [],
            [],
            marker="s",
            linestyle="",
            color=shade,
            markersize=5 + 1.2 * k,
            label=size,
            markeredgecolor="#1b1b1b",
            markeredgewidth=0.5,
        )
        for k, (shade, size) in enumerate(zip(SHADES, SIZES, strict=True))
    ]
    figure.legend(handles=legend, loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw()
