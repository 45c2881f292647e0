"""Pictures of halos: for each worker of a grid the block that it gets, and who sends which part.

The parts are the transfers of the operator's normal form: of a halo exchange they are the bulk,
which the worker holds, and the halos, which its neighbours send, corners included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from linop.errors import ArgumentError
from linop.normal_form.boxes import Ints
from linop.normal_form.movement import Movement
from linop.normal_form.stages import HasStages
from linop.planning.routing import routes_into
from linop.spaces.pictures import SLANT, Oblique, drawn_dims, holders, unit_of
from linop.spaces.tensor import TensorSpace
from linop.svg import MARGIN, SOFT, Drawing, Picture, colour, short, text_width

_MOST = {1: 8, 2: 5, 3: 3}
"""Workers along a dimension that are drawn, by the number of dimensions."""
_PARTS = 200
"""Parts of a block that are drawn."""
_SIDES = {1: (760.0,), 2: (420.0, 640.0), 3: (140.0, 260.0, 360.0)}
"""Pixels that all blocks of a dimension take at most, without gaps."""
_LEAST, _STRIP, _APART, _SIDE = 30.0, 40.0, 26.0, 20.0
"""Pixels: of a block at least, of one in one dimension downwards; between blocks; of a label."""


@dataclass(frozen=True)
class Part:
    """A part of a worker's block.

    Attributes:
        sender: the worker that has it.
        start, stop: its indices in the block, in all dimensions.
    """

    sender: int
    start: tuple[int, ...]
    stop: tuple[int, ...]


def halos(op: HasStages) -> Picture:
    """The blocks of an operator's codomain, in the grid of workers: what each worker has itself,
    and what others send it, hatched, with the senders' numbers.

    Args:
        op: data movement between tensor spaces, such as `linop.halo_exchange`. At most three
            dimensions are drawn, those that are cut first.

    Raises:
        ArgumentError: the codomain is no `TensorSpace`, or the operator contains local operators.

    Example:
        >>> X = linop.TensorSpace((6, 6), linop.Partition((2, 2)))
        >>> picture = linop.pictures.halos(linop.halo_exchange(X, 3))
        >>> print(picture.summary)
        Blocks of x on 2×2 workers, and who sends which part of them
    """
    movement = op.stages.merged
    if movement is None or not isinstance(movement.codomain, TensorSpace):
        what = "local operators" if movement is None else "a codomain that is no TensorSpace"
        raise ArgumentError(
            f"halos: data movement into a TensorSpace expected, such as linop.halo_exchange(X, 3); "
            f"given an operator with {what}; op.draw() draws any operator"
        )
    return _Halos(movement, movement.codomain).picture(_name(op))


def _name(op: HasStages) -> str:
    symbol = getattr(op, "symbol", None)
    return short(symbol(), 44) if symbol is not None else "Halos"


def parts_of(movement: Movement, workers: Sequence[int]) -> dict[int, list[Part]]:
    """The parts of each worker's block, of a movement into a tensor space.

    Args:
        workers: sorted.
    """
    found: dict[int, list[Part]] = {worker: [] for worker in workers}
    if not workers:
        return found
    ndim = movement.codomain.regions[0].ndim if len(movement.codomain) else 0
    coming = routes_into(movement, np.array(workers, np.int64))
    at, extent = (c[coming.row][:, :ndim] for c in (coming.table.at, coming.table.extent))
    columns = coming.receiver.tolist(), coming.sender.tolist(), _rows(at), _rows(at + extent)
    for receiver, *part in zip(*columns, strict=True):
        found[receiver].append(Part(*part))
    return found


def _rows(numbers: Ints) -> list[tuple[int, ...]]:
    return [tuple(row) for row in numbers.tolist()]


class _Halos:
    """The picture of a movement into a tensor space."""

    def __init__(self, movement: Movement, Y: TensorSpace) -> None:
        self.movement, self.Y = movement, Y
        X = movement.domain
        same = isinstance(X, TensorSpace) and X.global_shape == Y.global_shape
        self.X = X if same and isinstance(X, TensorSpace) else None
        self.dims = drawn_dims(Y)
        self.kinds: set[str] = set()
        self.notes: list[str] = []
        self.drawn = Drawing()
        self.places: dict[tuple[int | None, ...], int] = {}
        """The worker whose block is drawn, by the block's numbers along the drawn dimensions."""
        self.parts: dict[int, list[Part]] = {}

    def picture(self, name: str) -> Picture:
        dims, Y = self.dims, self.Y
        most = _MOST[max(len(dims), 1)]
        some = [_some(len(Y.bounds[d]), most) for d in dims]
        for d, chosen in zip(dims, some, strict=True):
            if None in chosen:
                left = len(Y.bounds[d]) - len(chosen) + 1
                self.notes.append(f"{left:,} more places along dimension {d} are not drawn.")
        for d in range(Y.ndim):
            if d not in dims:
                self.notes.append(f"Dimension {d} is not drawn.")
        grid = Y.partition.grid
        self.places = {
            at: int(holders(Y, grid, dims, [k for k in at if k is not None])[0])
            for at in product(*some)
            if None not in at
        }
        self.parts = parts_of(self.movement, sorted(set(self.places.values())))
        longest = [
            sum(b - a for k in chosen if k is not None for a, b in [Y.bounds[d][k]])
            for d, chosen in zip(dims, some, strict=True)
        ]
        unit = unit_of(longest, _SIDES[max(len(dims), 1)]) if dims else _LEAST
        spans = [
            [_SIDE if k is None else max(unit * _long(Y.bounds[d][k]), _LEAST) for k in chosen]
            for d, chosen in zip(dims, some, strict=True)
        ]
        self.drawn.text(
            MARGIN,
            24,
            f"{name}: who sends what each worker gets",
            size=14,
            weight="bold",
            math=True,
        )
        draw = self._cuboids if len(dims) == 3 else self._rectangles
        y = draw(some, spans, 44.0)
        y = self._legend(y + 8)
        for said in self.notes:
            self.drawn.text(MARGIN, y, said, size=11, opacity=SOFT)
            y += 16
        summary = f"Blocks of {Y.name} on {Y.partition} workers, and who sends which part of them"
        return self.drawn.picture(summary)

    def _rectangles(
        self,
        some: list[list[int | None]],
        spans: list[list[float]],
        top: float,
    ) -> float:
        """Blocks in one or two dimensions; returns where they end."""
        downs = some[0] if len(some) == 2 else [0]
        highs = spans[0] if len(some) == 2 else [_STRIP]
        across, wides = (some[-1], spans[-1]) if some else ([0], [_LEAST])
        y = top
        for row, high in zip(downs, highs, strict=True):
            run = [(row, column)[2 - len(some) :] if some else () for column in across]
            for worker, x, wide in self._run(run, wides, float(MARGIN), _APART, y + high / 2 + 4):
                self._block(worker, self.parts[worker], x, y, wide, high)
            y += high + _APART + _SIDE / 2
        return y

    def _run(
        self,
        run: Sequence[tuple[int | None, ...]],
        wides: Sequence[float],
        x: float,
        apart: float,
        middle: float,
    ) -> Iterator[tuple[int, float, float]]:
        """(worker, left edge, width) of the blocks of a row from `x` on; draws "…", at the height
        `middle`, in place of those that are left out."""
        for at, wide in zip(run, wides, strict=True):
            if at in self.places:
                yield self.places[at], x, wide
            else:
                self.drawn.text(x + wide / 2, middle, "…", anchor="middle", opacity=SOFT)
            x += wide + apart

    def _block(
        self, worker: int, parts: Sequence[Part], x: float, y: float, wide: float, high: float
    ) -> None:
        """A worker's block, its parts, its indices below it."""
        drawn, dims, c = self.drawn, self.dims, colour(worker)
        shape = self.Y.local_shape(worker)
        box = _Flat(x, y, wide, high, [shape[d] for d in dims])
        drawn.rect(x, y, wide, high, fill="currentColor", opacity=0.05)
        for part in self._few(parts, worker):
            frame = box.part([part.start[d] for d in dims], [part.stop[d] for d in dims])
            self._part(worker, part, frame)
        drawn.rect(x, y, wide, high, line=c, thick=1.6, hint=f"worker {worker}, shape {shape}")
        if (own := self._own(worker)) is not None:
            self.kinds.add("own block")
            drawn.rect(*box.part(*own), line="currentColor", thick=1.2, dashes="4 3")
        middle = x + wide / 2, y + high / 2 + 4
        drawn.text(*middle, f"{worker}", anchor="middle", weight="bold", halo=True)
        text = self._ranges(worker)
        if text_width(text, 10) <= wide + _APART - 4:
            drawn.text(x + wide / 2, y + high + 13, text, size=10, anchor="middle", opacity=SOFT)

    def _part(self, worker: int, part: Part, frame: tuple[float, float, float, float]) -> None:
        x, y, wide, high = frame
        if part.sender == worker:
            self.kinds.add("bulk")
            self.drawn.rect(*frame, fill=colour(worker), opacity=0.22)
            return
        self.kinds.add("halo")
        hint = f"from worker {part.sender}"
        line = colour(part.sender)
        self.drawn.rect(*frame, fill=self.drawn.hatch(part.sender), line=line, thick=0.8, hint=hint)
        if text_width(str(part.sender), 10) + 3 <= wide and high >= 13:
            self.drawn.text(
                x + wide / 2,
                y + high / 2 + 4,
                str(part.sender),
                size=10,
                anchor="middle",
                halo=True,
            )

    def _own(self, worker: int) -> tuple[list[int], list[int]] | None:
        """The worker's own block of the domain, as indices in its block of the codomain; None if
        that is no tensor of the same shape, or not beside it."""
        if self.X is None or worker not in self.X.partition:
            return None
        ends = zip(self.X.slices(worker), self.Y.slices(worker), strict=True)
        cut = [(max(a.start, b.start) - b.start, min(a.stop, b.stop) - b.start) for a, b in ends]
        if any(a >= b for a, b in cut):
            return None
        drawn = [cut[d] for d in self.dims]
        return [a for a, _ in drawn], [b for _, b in drawn]

    def _few(self, parts: Sequence[Part], worker: int) -> Sequence[Part]:
        if len(parts) > _PARTS:
            self.notes.append(f"{len(parts) - _PARTS:,} parts of worker {worker} are not drawn.")
        return parts[:_PARTS]

    def _ranges(self, worker: int) -> str:
        slices = self.Y.slices(worker)
        return ", ".join(f"{slices[d].start}:{slices[d].stop}" for d in self.dims)

    def _cuboids(
        self,
        some: list[list[int | None]],
        spans: list[list[float]],
        top: float,
    ) -> float:
        """Blocks in three dimensions: those at one place backwards beside each other."""
        x, bottom = float(MARGIN), top
        for back, deep in zip(some[0], spans[0], strict=True):
            y = top + 16
            if back is None:
                self.drawn.text(x + 8, y + 60, "…", opacity=SOFT)
                x += 40
                continue
            text = f"place {back} along dimension {self.dims[0]}"
            self.drawn.text(x, y - 4, text, size=11, opacity=SOFT)
            rise, apart = deep * SLANT[1], deep * SLANT[0] + _APART * 0.7
            for row, high in zip(some[1], spans[1], strict=True):
                y += rise
                run = [(back, row, column) for column in some[2]]
                for worker, left, wide in self._run(run, spans[2], x, apart, y + high / 2 + 4):
                    box = Oblique(left, y + 4, deep, high, wide)
                    self._cuboid(worker, self.parts[worker], box)
                y += high + _APART
            x, bottom = x + sum(spans[2]) + apart * len(spans[2]) + 20, max(bottom, y)
        return bottom + 8

    def _cuboid(self, worker: int, parts: Sequence[Part], box: Oblique) -> None:
        """A worker's block: of each part what is at the front, at the top and at the right."""
        c, shape = colour(worker), self.Y.local_shape(worker)
        extents = [max(shape[d], 1) for d in self.dims]
        per = [side / n for side, n in zip((box.deep, box.high, box.wide), extents, strict=True)]
        for part in self._few(parts, worker):
            start = [part.start[d] for d in self.dims]
            stop = [part.stop[d] for d in self.dims]
            z, y, x = (a * p for a, p in zip(start, per, strict=True))
            deep, high, wide = ((b - a) * p for a, b, p in zip(start, stop, per, strict=True))
            faces = []
            if start[0] == 0:
                faces.append((0.18, box.front(y, x, high, wide)))
            if start[1] == 0:
                faces.append((0.28, box.top(z, x, deep, wide)))
            if stop[2] == extents[2]:
                faces.append((0.38, box.right(z, y, deep, high)))
            for shade, corners in faces:
                if part.sender == worker:
                    self.kinds.add("bulk")
                    self.drawn.polygon(corners, fill=c, opacity=shade)
                    continue
                self.kinds.add("halo")
                fill, line = self.drawn.hatch(part.sender), colour(part.sender)
                hint = f"worker {worker}: from worker {part.sender}"
                self.drawn.polygon(corners, fill=fill, line=line, thick=0.7, hint=hint)
        sides = (
            box.front(0, 0, box.high, box.wide),
            box.top(0, 0, box.deep, box.wide),
            box.right(0, 0, box.deep, box.high),
        )
        for corners in sides:
            self.drawn.polygon(corners, line=c, thick=1.5)
        x, y = box.at(0, box.high / 2 + 4, box.wide / 2)
        self.drawn.text(x, y, str(worker), anchor="middle", weight="bold", halo=True)

    def _legend(self, y: float) -> float:
        """The legend of the fills that occur; returns where it ends."""
        x = float(MARGIN)
        words = {
            "bulk": "the worker has it (bold: its number)",
            "halo": "another worker sends it (its number, hatch and colour)",
            "own block": "the worker's block before",
        }
        for kind in (k for k in words if k in self.kinds):
            frame = x, y - 10, 20.0, 12.0
            if kind == "bulk":
                self.drawn.rect(*frame, fill=colour(0), opacity=0.22, line=colour(0))
            elif kind == "halo":
                self.drawn.rect(*frame, fill=self.drawn.hatch(1), line=colour(1), thick=0.8)
            else:
                self.drawn.rect(*frame, line="currentColor", thick=1.2, dashes="4 3")
            self.drawn.text(x + 27, y, words[kind], size=11, opacity=SOFT)
            x += 27 + text_width(words[kind], 11) + 20
        return y + 20


class _Flat:
    """A rectangle of elements in one or two dimensions."""

    def __init__(self, x: float, y: float, wide: float, high: float, shape: Sequence[int]) -> None:
        self.x, self.y, self.wide, self.high, self.shape = x, y, wide, high, shape

    def part(self, start: Sequence[int], stop: Sequence[int]) -> tuple[float, float, float, float]:
        """x, y, width and height of a box of elements."""
        x, y, wide, high = self.x, self.y, self.wide, self.high
        if self.shape:
            n = max(self.shape[-1], 1)
            x, wide = x + wide * start[-1] / n, wide * (stop[-1] - start[-1]) / n
        if len(self.shape) == 2:
            n = max(self.shape[0], 1)
            y, high = y + high * start[0] / n, high * (stop[0] - start[0]) / n
        return x, y, wide, high


def _some(many: int, most: int) -> list[int | None]:
    """The numbers from 0; of more than `most`, the first ones, None, and the last."""
    return [*range(many)] if many <= most else [*range(most - 1), None, many - 1]


def _long(cut: tuple[int, int]) -> int:
    return cut[1] - cut[0]
