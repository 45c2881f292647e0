"""Layouts of tensors over a grid of workers: which dimension each grid axis cuts, and where.

A layout is the global description of a tensor, the same on all workers; rules compute with layouts
alone, so that all workers decide the same without a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from linop.spaces.decomposition import COPIES, REPLICATED, Axis, Bounds, even

Segments = tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...]
"""For some dimensions, runs (target index, source index, length) of an index map."""


@dataclass(frozen=True)
class Layout:
    """A tensor over a grid.

    Args:
        shape: of the whole tensor.
        axes: for each grid axis the dimension that it cuts, `linop.REPLICATED` or `linop.COPIES`.
        bounds: for each dimension the global (start, stop) of its blocks; one where it is not cut.
    """

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    bounds: tuple[Bounds, ...]

    @property
    def is_whole(self) -> bool:
        """True if every worker has all of the tensor."""
        return all(axis is REPLICATED for axis in self.axes)

    @property
    def cut(self) -> tuple[int, ...]:
        """The dimensions that are cut."""
        return tuple(d for d in self.axes if isinstance(d, int))

    def axis_of(self, d: int) -> int | None:
        """The grid axis that cuts a dimension."""
        return self.axes.index(d) if d in self.axes else None

    def changed(
        self,
        shape: Sequence[int] | None = None,
        axes: Sequence[Axis] | None = None,
        bounds: Mapping[int, Bounds] | None = None,
    ) -> Layout:
        """The layout with another shape, whose new extents are not cut; other axes; other bounds
        of some dimensions."""
        whole = self.shape if shape is None else tuple(shape)
        roles = self.axes if axes is None else tuple(axes)
        cuts = tuple(
            (bounds or {}).get(d, self.bounds[d] if d in roles else ((0, n),))
            for d, n in enumerate(whole)
        )
        return Layout(whole, roles, cuts)

    def moved_dims(self, places: Mapping[int, int], shape: Sequence[int]) -> Layout:
        """The layout of a tensor whose dimension d is now `places[d]`; those that are in no place
        are not cut any more."""
        axes = tuple(
            places.get(axis, REPLICATED) if isinstance(axis, int) else axis for axis in self.axes
        )
        bounds: list[Bounds] = [((0, n),) for n in shape]
        for axis in self.cut:
            if axis in places:
                bounds[places[axis]] = self.bounds[axis]
        return Layout(tuple(shape), axes, tuple(bounds))


def whole(shape: Iterable[int], grid_axes: int) -> Layout:
    """The layout of a tensor that every worker has."""
    extents = tuple(shape)
    return Layout(extents, (REPLICATED,) * grid_axes, tuple(((0, n),) for n in extents))


def in_words(layout: Layout) -> str:
    """Text for errors."""
    cuts = [f"dimension {d} into {len(layout.bounds[d])}" for d in layout.cut]
    return f"{layout.shape}, cut in {' and '.join(cuts)}" if cuts else f"{layout.shape}, whole"


__all__ = ["COPIES", "REPLICATED", "Axis", "Bounds", "Layout", "Segments", "even", "in_words"]
