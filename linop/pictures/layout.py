"""Layout of a scene: a column for each worker, a row for each level, drawn as one panel.

What is applied first is at the top, or, `upward`, at the bottom: an adjoint drawn so has the rows
of its operator, with the arrows turned round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from linop.pictures.scene import Arrow, Gap, Level, Maps, Regions, Scene, Wire
from linop.pictures.shapes import STRIP, Box, Style, hint, label, ranges, tensor_of
from linop.spaces.exact import shown
from linop.spaces.region import Region, Subset
from linop.svg import SOFT, Drawing, colour, math_width, number, short, text_width

_NUMBERED, _LINED = 15.0, 7.0
"""Pixels: widths of elements from which they have their numbers, and are separated."""
_GUTTER, _LANES, _BETWEEN, _INSIDE = 64.0, 22.0, 14.0, 10.0
"""Pixels: left of the lanes, between lanes, between regions of one, inside at its sides."""
_HEADER, _LABEL, _MAP, _GAP = 22.0, 15.0, 24.0, 18.0
_ARROWS, _COPIES, _WIRES = 72.0, 44.0, 22.0
"""Pixels between two levels: with messages, with copies alone, beside local maps."""
_DENSE = 40
"""Arrows from which messages are thin lines."""
_SYMBOL = 28
"""Longest symbol of a local map, in characters."""


class Panel:
    """A scene, drawn.

    Args:
        drawn: the drawing that it is added to.
        left, top: its corner, in pixels.
        title, more: of it, bold, and beside that.
    """

    def __init__(
        self,
        drawn: Drawing,
        scene: Scene,
        style: Style,
        left: float,
        top: float,
        title: str,
        more: str,
        upward: bool = False,
    ) -> None:
        self.drawn, self.scene, self.style, self.upward = drawn, scene, style, upward
        self.kinds: set[str] = set()
        """Kinds that the legend has to explain."""
        self._boxes: list[dict[tuple[int, str], Box]] = [{} for _ in scene.levels]
        self._maps: list[dict[tuple[int, int], tuple[float, float]]] = [{} for _ in scene.levels]
        self._aligned: dict[tuple[int, int], float] = {}
        self._others: list[tuple[float, float]] = [(0.0, 0.0) for _ in scene.levels]
        drawn.text(left, top + 13, title, size=14, weight="bold", math=True)
        bold = 1.1 * math_width(title, 14)
        drawn.text(left + bold + 14, top + 13, more, opacity=SOFT)
        self._placed(left, top + 26)

    # Placing

    def _placed(self, left: float, top: float) -> None:
        scene, drawn = self.scene, self.drawn
        lanes = self._lanes(left + _GUTTER)
        order = list(range(len(scene.levels)))[:: -1 if self.upward else 1]
        y = top + _HEADER + _LABEL + 4
        tops: dict[int, float] = {}
        for k, at in enumerate(order):
            tops[at] = y
            y += self._height(scene.levels[at])
            if k + 1 < len(order):
                y += self._space(min(at, order[k + 1]), at, order[k + 1])
        bottom = y + _LABEL + 8
        for worker, (x, wide) in lanes.items():
            drawn.rect(x, top, wide, bottom - top, fill="currentColor", opacity=0.045, round=7)
            title = f"worker {worker}" if worker is not None else f"{scene.hidden:,} more"
            drawn.text(x + wide / 2, top + 15, title, anchor="middle", opacity=SOFT)
        for at in order:
            self._level(at, tops[at], lanes, left)
        for at, links in enumerate(scene.links):
            for wire in (link for link in links if isinstance(link, Wire)):
                self._wire(at, wire)
            arrows = [link for link in links if isinstance(link, Arrow)]
            for arrow in sorted(arrows, key=lambda one: one.message):
                self._arrow(at, arrow)
        for at in order:
            self._names(at, above=at != order[-1] or len(order) == 1)
        self.bottom = bottom

    def _lanes(self, left: float) -> dict[int | None, tuple[float, float]]:
        """(x, width) of each worker's lane; of all that are hidden, under None, before the last."""
        lanes: dict[int | None, tuple[float, float]] = {}
        x = left
        for k, worker in enumerate(self.scene.workers):
            if self.scene.hidden and k == max(len(self.scene.workers) - 1, 1):
                lanes[None] = x, 78.0
                x += 78.0 + _LANES
            wide = max((self._width(level, worker) for level in self.scene.levels), default=0.0)
            wide = max(wide, text_width(f"worker {worker}")) + 2 * _INSIDE
            wide = max(wide, self._align(worker, wide))
            lanes[worker] = x, wide
            x += wide + _LANES
        if self.scene.hidden and None not in lanes:
            lanes[None] = x, 78.0
        return lanes

    def _align(self, worker: int, wide: float) -> float:
        """Place the only regions of a worker in its levels, blocks of equal tensors, so that equal
        indices are below each other; returns the width that the lane needs for it, at least
        `wide`; zero if its regions are others."""
        starts: dict[int, tuple[float, float]] = {}
        shapes, labels = set(), list[tuple[float, float]]()
        for at, level in enumerate(self.scene.levels):
            if not isinstance(level, Regions):
                continue
            held = level.held[worker]
            if len(held) != 1 or level.more[worker]:
                return 0.0
            X, dims = tensor_of(level.space, held[0]), self.style.dims[held[0].ndim]
            if X is None or not dims or 0 in held[0].shape:
                return 0.0
            shapes.add((X.ndim, X.global_shape[dims[-1]]))
            start = self.style.unit * ranges(level.space, held[0])[dims[-1]][0]
            starts[at] = start, self.style.size(held[0])[0]
            beyond = text_width(label(level.space, held[0]), 11) - starts[at][1]
            labels.append((start - beyond / 2, start + starts[at][1] + beyond / 2))
        if len(shapes) != 1:
            return 0.0
        first = min(start for start, _ in starts.values())
        last = max(start + size for start, size in starts.values())
        if last - first > 1.5 * max(size for _, size in starts.values()):
            return 0.0
        first = min([first, *(low for low, _ in labels)])
        span = max([last, *(high for _, high in labels)]) - first
        wide = max(wide, span + 2 * _INSIDE)
        for at, (start, _) in starts.items():
            self._aligned[at, worker] = (wide - span) / 2 + start - first
        return wide

    def _width(self, level: Level, worker: int) -> float:
        if isinstance(level, Gap):
            return 0.0
        slots = [wide for wide, _ in self._slots(level, worker)]
        if isinstance(level, Regions) and level.more.get(worker):
            slots.append(28.0)
        return sum(slots) + _BETWEEN * max(len(slots) - 1, 0)

    def _slots(self, level: Regions | Maps, worker: int) -> list[tuple[float, float]]:
        """Width of the slot, and of the box in it, of each region or map of a worker."""
        if isinstance(level, Maps):
            texts = [short(call.map.symbol, _SYMBOL) for call in level.calls.get(worker, ())]
            wide = [max(36.0, math_width(text) + 16) for text in texts]
            return [(w, w) for w in wide]
        found = []
        inner = all(level is not end for end in (self.scene.levels[0], self.scene.levels[-1]))
        for region in level.held.get(worker, ()):
            box = self.style.size(region)[0]
            text = label(level.space, region, inner)
            beside = inner and not self._is_wide(text, box)
            found.append((max(box, text_width(text, 11) * (2 if beside else 1)), box))
        if inner and len(found) > 1:  # no room beside wires for the labels of several
            found = [(max(box, slot / 2), box) for slot, box in found]
        return found

    def _is_wide(self, text: str, wide: float) -> bool:
        """True if a label has room under half of a box, beside the wire in its middle."""
        return text_width(text, 11) <= wide / 2

    def _height(self, level: Level) -> float:
        if isinstance(level, Regions):
            sizes = (self.style.size(r)[1] for held in level.held.values() for r in held)
            return max(sizes, default=STRIP)
        return _MAP if isinstance(level, Maps) else _GAP

    def _space(self, link: int, upper: int, lower: int) -> float:
        """Pixels between two levels."""
        links = self.scene.links[link]
        names = isinstance(self.scene.levels[upper], Regions) and self._is_inner(upper)
        more = _LABEL if names else 0.0
        if not any(isinstance(one, Arrow) for one in links):
            return _WIRES + more
        if any(isinstance(one, Arrow) and one.message for one in links):
            return _ARROWS + 3 * min(len(self.scene.workers), 8) + more
        return _COPIES + more

    def _is_inner(self, at: int) -> bool:
        """True if a level is neither the first nor the last."""
        return 0 < at < len(self.scene.levels) - 1

    # Drawing

    def _level(
        self,
        at: int,
        y: float,
        lanes: dict[int | None, tuple[float, float]],
        left: float,
    ) -> None:
        level = self.scene.levels[at]
        high = self._height(level)
        ends = {0: "domain", len(self.scene.levels) - 1: "codomain"}
        if at in ends:
            self.drawn.text(left, y + high / 2 + 4, ends[at], size=11, opacity=SOFT)
        if None in lanes:
            x, wide = lanes[None]
            self._others[at] = x + wide / 2, y
            if not isinstance(level, Gap):
                self.drawn.text(x + wide / 2, y + high / 2 + 4, "…", anchor="middle", opacity=SOFT)
        if isinstance(level, Gap):
            x, wide = next(iter(lanes.values()), (left + _GUTTER, 0.0))
            self.drawn.text(x + 8, y + 13, level.text, opacity=SOFT)
            return
        for worker in self.scene.workers:
            x, wide = lanes[worker]
            x += (wide - self._width(level, worker)) / 2
            aligned = self._aligned.get((at, worker))
            for k, (slot, box) in enumerate(self._slots(level, worker)):
                corner = x + (slot - box) / 2 if aligned is None else lanes[worker][0] + aligned, y
                if isinstance(level, Maps):
                    self._map(at, worker, k, level, *corner, box)
                else:
                    self._region(at, worker, level.held[worker][k], *corner, high)
                x += slot + _BETWEEN
            if isinstance(level, Regions) and level.more.get(worker):
                self.drawn.text(x, y + high / 2 + 4, f"+{level.more[worker]}", opacity=SOFT)

    def _map(
        self, at: int, worker: int, k: int, level: Maps, x: float, y: float, wide: float
    ) -> None:
        symbol = level.calls[worker][k].map.symbol
        self.kinds.add("map")
        self.drawn.rect(
            x,
            y,
            wide,
            _MAP,
            fill="currentColor",
            opacity=0.1,
            line="currentColor",
            round=11,
            hint=f"local map {symbol} on worker {worker}",
        )
        text = short(symbol, _SYMBOL)
        self.drawn.text(x + wide / 2, y + 16, text, anchor="middle", math=True)
        self._maps[at][worker, k] = x + wide / 2, y

    def _region(
        self, at: int, worker: int, region: Region, x: float, y: float, high: float
    ) -> None:
        level = self.scene.levels[at]
        assert isinstance(level, Regions)
        wide, own = self.style.size(region)
        box = Box(region, self.style.dims[region.ndim], x, y + (high - own) / 2, wide, own)
        self._boxes[at][worker, region.name] = box
        c = colour(worker)
        dashes = "5 3" if region.replicated else ""
        frame = box.x, box.y, box.wide, box.high
        self.drawn.rect(*frame, fill=c, opacity=0.1)
        self._marks(at, worker, box)
        self._cells(box, [a for a, _ in ranges(level.space, region)])
        self.drawn.rect(*frame, line=c, thick=1.5, dashes=dashes, hint=hint(level.space, region))

    def _marks(self, at: int, worker: int, box: Box) -> None:
        """Parts that messages take, tinted, and bring, hatched; by several crosswise."""
        links = self.scene.links
        taken: set[Subset] = set()
        for arrow in links[at] if at < len(links) else ():
            if isinstance(arrow, Arrow) and arrow.message and arrow.sender == worker:
                taken |= {part for part in _parts(arrow, "source") if part.region == box.region}
        for part in sorted(taken, key=lambda one: (one.start, one.stop)):
            self.drawn.rect(*box.part(part), fill=colour(worker), opacity=0.3)
        brought: dict[Subset, set[int | None]] = {}
        for arrow in links[at - 1] if at else ():
            if isinstance(arrow, Arrow) and arrow.message and arrow.receiver == worker:
                for part in _parts(arrow, "target"):
                    if part.region == box.region:
                        brought.setdefault(part, set()).add(arrow.sender)
        for part, senders in brought.items():
            (sender,) = senders if len(senders) == 1 else (None,)
            fill = self.drawn.crossed() if sender is None else self.drawn.hatch(sender)
            self.kinds.add("hatch" if sender is not None else "crossed")
            self.drawn.rect(*box.part(part), fill=fill)

    def _cells(self, box: Box, firsts: Sequence[int]) -> None:
        """Lines between elements, and their numbers along the only dimension."""
        region = box.region
        lines = []
        for d, side in zip(box.dims[::-1], "xy", strict=False):
            n = region.shape[d]
            long = box.wide if side == "x" else box.high
            if not n or long / n < _LINED:
                continue
            for k in range(1, n):
                if side == "x":
                    lines.append(f"M{number(box.x + long * k / n)} {number(box.y)}v{box.high:g}")
                else:
                    lines.append(f"M{number(box.x)} {number(box.y + long * k / n)}h{box.wide:g}")
        if lines:
            self.drawn.path("".join(lines), opacity=0.22, thick=0.8)
        if region.ndim == 1 and region.size and box.wide / region.size >= _NUMBERED:
            step = box.wide / region.size
            for k in range(region.size):
                x = box.x + step * (k + 0.5)
                text = str(firsts[0] + k)
                if text_width(text, 11) <= step - 2:
                    self.drawn.text(
                        x, box.y + 16, text, size=11, anchor="middle", opacity=0.85, halo=True
                    )

    def _names(self, at: int, above: bool) -> None:
        level = self.scene.levels[at]
        if not isinstance(level, Regions):
            return
        for box in self._boxes[at].values():
            y = box.y - 5 if above else box.y + box.high + 13
            x, anchor = box.x + box.wide / 2, "middle"
            text = label(level.space, box.region)
            if self._is_inner(at):  # where no arrow ends, and the wire of a map may be beside it
                text = label(level.space, box.region, inner=True)
                y, anchor = box.y + box.high + 13, "start"
                x = box.x if self._is_wide(text, box.wide) else x + 5
            self.drawn.text(x, y, text, size=11, anchor=anchor, opacity=0.85, halo=True)

    def _wire(self, at: int, wire: Wire) -> None:
        ends = []
        for level, k in ((at, wire.above), (at + 1, wire.below)):
            what = self.scene.levels[level]
            if isinstance(what, Maps):
                x, y = self._maps[level][wire.worker, k]
                ends.append((x, y, _MAP))
            else:
                assert isinstance(what, Regions)
                box = self._boxes[level][wire.worker, what.held[wire.worker][k].name]
                ends.append((box.x + box.wide / 2, box.y, box.high))
        (x0, y0, h0), (x1, y1, h1) = ends
        begin, end = (y0, y1 + h1) if self.upward else (y0 + h0, y1)
        self._curve(x0, begin, x1, end, line="currentColor", thick=1.2, opacity=0.55)
        self.drawn.head(x1, end, "up" if self.upward else "down", "currentColor", 6)

    def _arrow(self, at: int, arrow: Arrow) -> None:
        begin, end = self._end(at, arrow, "source"), self._end(at + 1, arrow, "target")
        if begin is None or end is None:
            return
        way = -1 if self.upward else 1
        (x0, y0), (x1, y1) = begin, end
        told = _told(arrow)
        c = "currentColor" if arrow.sender is None else colour(arrow.sender)
        stop = y1 - way * (13 if arrow.adds else 6)
        if arrow.message:
            self.kinds.add("message")
            dense = sum(map(len, self.scene.links)) > _DENSE
            thick, clear = (1.2, 0.75) if dense else (2.0, 1.0)
            self._curve(x0, y0, x1, stop, line=c, thick=thick, opacity=clear, hint=told)
        else:
            self.kinds.add("copy")
            self._curve(x0, y0, x1, stop, line="currentColor", dashes="3 3", opacity=0.6, hint=told)
        ink = c if arrow.message else "currentColor"
        if arrow.adds:
            self.kinds.add("add")
            self.drawn.plus(x1, y1 - way * 7, ink)
        else:
            clear = 1 if arrow.message else 0.7
            self.drawn.head(x1, y1, "up" if self.upward else "down", ink, 7, clear)
        if text := _factors(arrow):
            x, y = (x0 + x1) / 2, (y0 + y1) / 2
            self.drawn.text(x + 4, y + 4, text, size=11, halo=True, hint=told)
        elif arrow.message and not arrow.transfers:
            x, y = (x0 + 6, y0 + way * 12) if arrow.receiver is None else (x1 + 9, y1 - way * 14)
            text, size = f"{arrow.count:,}", 10
            self.drawn.text(x, y + 4, text, size=size, halo=True, hint=told)

    def _end(self, at: int, arrow: Arrow, side: str) -> tuple[float, float] | None:
        """The end of an arrow; None if that region is not drawn."""
        first = side == "source"
        worker, part = (arrow.sender, arrow.source) if first else (arrow.receiver, arrow.target)
        level = self.scene.levels[at]
        below = first != self.upward
        if worker is None or part is None:
            x, y = self._others[at]
            return x, y + (self._height(level) + 2 if below else -2)
        box = self._boxes[at].get((worker, part.region.name))
        if box is None:
            return None
        x, y, wide, high = box.part(part)
        if len(box.dims) == 2:  # at the edge of the region, not inside of it
            y, high = box.y, box.high
        return x + wide / 2, y + (high + 1 if below else -1)

    def _curve(
        self,
        x0: float,
        y0: float,
        x1: float,
        y1: float,
        *,
        line: str,
        thick: float = 1.2,
        dashes: str = "",
        opacity: float = 1,
        hint: str = "",
    ) -> None:
        bend = (y1 - y0) / 2
        a, b, c, d, e, f = map(number, (x0, y0, y0 + bend, x1, y1 - bend, y1))
        straight = math.isclose(x0, x1, abs_tol=0.5)
        path = f"M{a} {b}L{d} {f}" if straight else f"M{a} {b}C{a} {c} {d} {e} {d} {f}"
        self.drawn.path(path, line=line, thick=thick, dashes=dashes, opacity=opacity, hint=hint)


def _parts(arrow: Arrow, side: str) -> list[Subset]:
    """The boxes of an arrow's transfers at one end, or the one that contains them all."""
    if len(arrow.transfers) == arrow.count:
        return [getattr(transfer, side) for transfer in arrow.transfers]
    whole: Subset | None = getattr(arrow, side)
    return [] if whole is None else [whole]


def _told(arrow: Arrow) -> str:
    """An arrow in words."""
    ends = ["others" if w is None else f"worker {w}" for w in (arrow.sender, arrow.receiver)]
    head = f"{ends[0]} to {ends[1]}" if arrow.message else f"inside {ends[0]}"
    some = "; ".join(map(str, arrow.transfers[:6]))
    more = f"; {arrow.count} transfers in all" if arrow.count > min(len(arrow.transfers), 6) else ""
    return f"{head}: {some or str(arrow.count) + ' transfers'}{more if some else ''}"


def _factors(arrow: Arrow) -> str:
    """Coefficients of an arrow that are not 1."""
    found = {transfer.coefficient for transfer in arrow.transfers}
    if found <= {1}:
        return ""
    return f"× {short(shown(found.pop()), 12)}" if len(found) == 1 else "× …"
