"""Cases of halo exchanges beside hand-written ones: one message a face, one dimension after the
other, which includes corners; packed where a face is not contiguous."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

import linop
from benchmarks.harness.sides import Rival
from benchmarks.harness.task import MIB, RAW
from benchmarks.movement.cases import Case, case, held
from linop import LinearOperator, Partition, TensorSpace
from linop.spaces.scalars import Array


class Face(NamedTuple):
    """Exchange with one neighbour along one dimension; `edge` and `halo` are views of the extended
    block."""

    peer: int
    tags: tuple[int, int]
    """Tags of messages sent and received."""
    edge: Array
    """Sent forward, added to by the adjoint."""
    halo: Array
    """Received forward, sent by the adjoint."""
    edge_buffer: Array
    halo_buffer: Array
    """Message buffers for edge and halo; the view itself if it is contiguous."""
    sums: Array
    """Receive buffer of the adjoint, which is added to the edge."""


class RawHalo:
    """A halo exchange of width `widths[d]` on an extended block `ext`, and its adjoint."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        widths: tuple[int, ...],
        dtype: np.dtype,
    ) -> None:
        self.comm = comm.Create_cart(grid)  # row-major, as in linop
        near = [self.comm.Shift(d, 1) for d in range(len(grid))]
        pads = [
            tuple(0 if peer == MPI.PROC_NULL else w for peer in peers)
            for peers, w in zip(near, widths, strict=True)
        ]
        self.ext = np.zeros([n + a + b for n, (a, b) in zip(block, pads, strict=True)], dtype)
        inside = [slice(a, a + n) for n, (a, _) in zip(block, pads, strict=True)]
        self.bulk = self.ext[tuple(inside)]
        self.out = np.empty(block, dtype)
        self.faces: list[list[Face]] = []
        for d, (peers, w) in enumerate(zip(near, widths, strict=True)):
            a, b = inside[d].start, inside[d].stop
            slabs = [(slice(a, a + w), slice(0, a)), (slice(b - w, b), slice(b, None))]
            whole = [slice(None)] * d
            self.faces.append(
                [
                    self._face(
                        peer,
                        (2 * d + side, 2 * d + 1 - side),
                        *[self.ext[(*whole, slab, *inside[d + 1 :])] for slab in slabs[side]],
                    )
                    for side, peer in enumerate(peers)
                    if peer != MPI.PROC_NULL and w
                ]
            )

    @staticmethod
    def _face(peer: int, tags: tuple[int, int], edge: Array, halo: Array) -> Face:
        whole, part = (
            v if v.flags.c_contiguous else np.empty(v.shape, v.dtype) for v in (edge, halo)
        )
        return Face(peer, tags, edge, halo, whole, part, np.empty(edge.shape, edge.dtype))

    def exchange(self) -> Array:
        """Fill the halos of `ext`."""
        comm = self.comm
        for faces in self.faces:
            requests = [comm.Irecv(f.halo_buffer, f.peer, f.tags[1]) for f in faces]
            for f in faces:
                if f.edge_buffer is not f.edge:
                    np.copyto(f.edge_buffer, f.edge)
                requests.append(comm.Isend(f.edge_buffer, f.peer, f.tags[0]))
            MPI.Request.Waitall(requests)
            for f in faces:
                if f.halo_buffer is not f.halo:
                    np.copyto(f.halo, f.halo_buffer)
        return self.ext

    def fold(self, clear: bool = False) -> Array:
        """Add the halos of `ext` to their owners' edges; with `clear`, zero the halos then."""
        comm = self.comm
        for faces in reversed(self.faces):
            requests = [comm.Irecv(f.sums, f.peer, f.tags[1]) for f in faces]
            for f in faces:
                if f.halo_buffer is not f.halo:
                    np.copyto(f.halo_buffer, f.halo)
                requests.append(comm.Isend(f.halo_buffer, f.peer, f.tags[0]))
            MPI.Request.Waitall(requests)
            for f in faces:
                np.add(f.edge, f.sums, out=f.edge)
                if clear:
                    f.halo.fill(0)
        return self.ext

    def forward(self, x: Array) -> Array:
        """Exchange out of place, as linop's: from a block to the extended block."""
        np.copyto(self.bulk, x)
        return self.exchange()

    def adjoint(self, y: Array) -> Array:
        """Adjoint out of place: from an extended block, which is not changed, to the block."""
        np.copyto(self.ext, y)
        self.fold()
        np.copyto(self.out, self.bulk)
        return self.out


def _halo(comm: MPI.Intracomm, size: int, ndim: int) -> Case:
    """Halos of width 1 around blocks of `size` bytes, nearly cubic, with powers of two as sides."""
    grid = tuple(MPI.Compute_dims(comm.size, [0] * ndim))
    block, left = [], size // 4
    for d in range(ndim, 0, -1):
        block.append(2 ** round(math.log2(left) / d))
        left //= block[-1]
    return _case(comm, grid, tuple(block), (1,) * ndim)


def _case(
    comm: MPI.Intracomm, grid: tuple[int, ...], block: tuple[int, ...], widths: tuple[int, ...]
) -> Case:
    op = _operator(grid, block, widths)
    x, y = held(op, comm.rank)
    raw = RawHalo(comm, grid, block, widths, x.dtype)
    return Case(
        op, x, y, {RAW: Rival(lambda: raw.forward(x))}, {RAW: Rival(lambda: raw.adjoint(y))}
    )


def _operator(
    grid: tuple[int, ...],
    block: tuple[int, ...],
    widths: tuple[int, ...],
    in_place: bool = False,
) -> LinearOperator:
    shape = tuple(p * n for p, n in zip(grid, block, strict=True))
    X = TensorSpace(shape, Partition(grid), np.float32)
    kernel = [2 * w + 1 for w in widths]
    return linop.halo_exchange(X, kernel, padding=widths, in_place=in_place)


@case("halo 1-D, 8-byte messages", (8,))
def halo_1d(comm: MPI.Intracomm, size: int) -> Case:
    return _case(comm, (comm.size,), (16,), (size // 4,))


@case("halo 2-D")
def halo_2d(comm: MPI.Intracomm, size: int) -> Case:
    return _halo(comm, size, 2)


@case("halo 3-D")
def halo_3d(comm: MPI.Intracomm, size: int) -> Case:
    return _halo(comm, size, 3)


@case("two-column halo", (16 * MIB,))
def two_columns(comm: MPI.Intracomm, size: int) -> Case:
    """Blocks of 2048×2048 side by side, kernel 5 along the rows; the bulk is copied too."""
    side = math.isqrt(size // 4)
    return _case(comm, (1, comm.size), (side, side), (0, 2))


@case("two-column halo, in place", (16 * MIB,))
def two_columns_in_place(comm: MPI.Intracomm, size: int) -> Case:
    """As `two_columns`, from extended blocks to extended blocks: raw MPI copies the halos alone."""
    side = math.isqrt(size // 4)
    grid, block, widths = (1, comm.size), (side, side), (0, 2)
    op = _operator(grid, block, widths, in_place=True)
    x, y = held(op, comm.rank)
    there, back = (RawHalo(comm, grid, block, widths, x.dtype) for _ in range(2))
    np.copyto(there.ext, x)
    np.copyto(back.ext, y)
    return Case(
        op,
        x,
        y,
        {RAW: Rival(there.exchange)},
        {RAW: Rival(partial(back.fold, clear=True))},
        in_place=True,
    )
