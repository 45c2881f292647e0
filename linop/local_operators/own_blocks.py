"""Blocks that the workers of an SPMD program build for themselves, as one operator.

All workers hold the same expression, so each knows the blocks of the others by their symbols and
spaces, which are exchanged once; a stand-in takes the place of the map itself, which its worker
alone applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from linop.errors import ArgumentError, BackendError, SpaceError
from linop.local_operators.relabelling import as_map, relabelled
from linop.normal_form.maps import Function, LocalMap
from linop.operators.algebra import DirectSum, direct_sum
from linop.operators.collectives import repartition
from linop.operators.expressions import Local, compose
from linop.operators.operator import LinearOperator
from linop.spaces.array_modules import Namespace
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.spaces.partition import Partition
from linop.spaces.region import Region
from linop.spaces.scalars import numeric_dtype
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace


class Piece(NamedTuple):
    """A region of a block, without its worker."""

    name: str
    shape: tuple[int, ...]
    memory: str


class Block(NamedTuple):
    """Facts about a worker's block that all workers know."""

    symbol: str
    dtype: str
    portable: bool
    """True if the block takes arrays of other modules than NumPy's."""
    inputs: tuple[Piece, ...]
    outputs: tuple[Piece, ...]


Blocks = Mapping[int, Block]
"""The blocks of all workers that have one, by worker, in order."""


def is_spmd(backend: Any) -> bool:
    """True for the backend of one worker; False for None, and for one with all workers here.

    Raises:
        ArgumentError: it is no backend.
    """
    if backend is not None and not hasattr(backend, "compile"):
        raise ArgumentError(f"backend: expected a backend of a program, given {backend!r}")
    return backend is not None and backend.worker is not None


def here(op: LinearOperator, worker: int) -> LinearOperator:
    """An operator inside one worker's memory as one of this worker, whichever it is of; regions
    named ``x@worker`` are called ``x``, as they are to get that mark.

    Raises:
        ArgumentError: it is of several workers.
    """
    sides = op.domain, op.codomain
    if len({r.workers for side in sides for r in side}) != 1 or len(op.stages.workers) != 1:
        raise ArgumentError(
            f"each worker's own block is an operator inside one worker's memory; given "
            f"{op!r}, {op.domain} -> {op.codomain}. Move data by operators before and after it"
        )
    return Local(relabelled(as_map(op), *(_at(side, worker) for side in sides)))


def _at(space: Space, worker: int) -> Space:
    names = [region.name.removesuffix(f"@{worker}") for region in space]
    if len(set(names)) < len(names):
        names = [region.name for region in space]
    regions = zip(names, space, strict=True)
    return Space([Region(name, r.shape, worker, r.memory) for name, r in regions], space.dtype)


def block_diag(build: Callable[[], LinearOperator], many: int, backend: Any) -> LinearOperator:
    """The block-diagonal operator of every worker's own block; collective.

    Args:
        build: makes this worker's block, of blocks that are `here`.
        many: the number of operators that it is made of; without any, the worker has no block.
    """
    own, blocks = _exchanged("block_diag", build, many, backend)
    domain = _side(blocks, [block.inputs for block in blocks.values()])
    codomain = _side(blocks, [block.outputs for block in blocks.values()])
    return _diagonal(own, blocks, domain, codomain, backend.worker)


def vstack(build: Callable[[], LinearOperator], many: int, backend: Any) -> LinearOperator:
    """The block column of every worker's own block, from a replicated domain; collective. Arguments
    are those of `block_diag`."""
    own, blocks = _exchanged("vstack or hstack", build, many, backend)
    first = next(iter(blocks))
    wanted = blocks[first].inputs
    for worker, block in blocks.items():
        if [piece[1:] for piece in block.inputs] != [piece[1:] for piece in wanted]:
            raise SpaceError(
                f"vstack or hstack: the blocks have a common domain (codomain) of equal shapes; "
                f"worker {first} has {_text(wanted)}, worker {worker} {_text(block.inputs)}"
            )
    grid, dtype = Partition((len(blocks),), blocks), numeric_dtype(blocks[first].dtype)
    copied = []
    for name, shape, memory in wanted:
        shared, copies = (
            TensorSpace(shape, grid, dtype, (role,), name, memory=memory)
            for role in (REPLICATED, COPIES)
        )
        copied.append(repartition(shared, copies))
    spread = direct_sum(*copied)
    codomain = _side(blocks, [block.outputs for block in blocks.values()])
    alike = {w: block._replace(inputs=wanted) for w, block in blocks.items()}
    return compose(_diagonal(own, alike, spread.codomain, codomain, backend.worker), spread)


def _exchanged(
    what: str, build: Callable[[], LinearOperator], many: int, backend: Any
) -> tuple[LocalMap | None, Blocks]:
    """This worker's block, and what is known of all. Collective.

    Raises:
        LinopError: a worker could not build its block, or there is none, or dtypes differ; on every
            worker.
    """

    def work() -> tuple[LocalMap | None, Block | None]:
        if not many:
            return None, None
        own = as_map(build())
        return own, _known(own)

    own, said = backend.together(work, what)
    blocks = {worker: block for worker, block in enumerate(said) if block is not None}
    if not blocks:
        raise ArgumentError(f"{what}: no worker has a block; expected at least one")
    dtypes = {worker: block.dtype for worker, block in blocks.items()}
    if len(set(dtypes.values())) > 1:
        each = ", ".join(f"worker {worker} {dtype}" for worker, dtype in dtypes.items())
        raise SpaceError(f"{what}: the blocks of all workers have one dtype; given {each}")
    return own, blocks


def _known(own: LocalMap) -> Block:
    sides = (
        tuple(Piece(region.name, region.shape, region.memory) for region in space)
        for space in (own.domain, own.codomain)
    )
    return Block(own.symbol, own.domain.dtype.name, own.port is not None, *sides)


def _diagonal(
    own: LocalMap | None, blocks: Blocks, domain: Space, codomain: Space, me: int
) -> LinearOperator:
    """The direct sum of all blocks: of this worker's own, and of stand-ins."""
    placed = []
    for worker, block in blocks.items():
        ends = Space(domain.on(worker), domain.dtype), Space(codomain.on(worker), domain.dtype)
        if worker == me:
            assert own is not None
            placed.append(Local(relabelled(own, *ends)))
        else:
            placed.append(Local(_stand_in(block, worker, *ends)))
    return DirectSum(placed, domain, codomain)


def _side(blocks: Blocks, pieces: Sequence[tuple[Piece, ...]]) -> Space:
    """The direct sum of all workers' regions: a `TensorSpace` if each has one, and they are blocks
    of a tensor along its first dimension. Names are the first worker's, where this has as many."""
    dtype = numeric_dtype(next(iter(blocks.values())).dtype)
    name, shape, memory = pieces[0][0] if pieces[0] else Piece("x", (), "default")
    if shape and all(len(own) == 1 for own in pieces):
        if all(own[0].shape[1:] == shape[1:] and own[0].memory == memory for own in pieces):
            lengths = [own[0].shape[0] if own[0].shape else 0 for own in pieces]
            grid = Partition((len(blocks),), blocks)
            whole = (sum(lengths), *shape[1:])
            return TensorSpace(whole, grid, dtype, name=name, sizes={0: lengths}, memory=memory)
    return Space(
        [
            Region(f"{piece.name}@{worker}", piece.shape, worker, piece.memory)
            for worker, own in zip(blocks, pieces, strict=True)
            for piece in own
        ],
        dtype,
    )


def _text(pieces: Sequence[Piece]) -> str:
    return ", ".join(f"{name}{list(shape)}" for name, shape, _ in pieces) or "no region"


class _Elsewhere:
    """The functions of a block of another worker."""

    def __init__(self, symbol: str, worker: int) -> None:
        self.symbol, self.worker = symbol, worker

    def __call__(self, x: Any) -> Any:
        raise BackendError(
            f"block {self.symbol} is known to worker {self.worker} alone, which built it; here "
            f"are its spaces, not its values. Compile the operator on the backend that it was made "
            f"with, and call the plan on every worker"
        )

    def port(self, namespace: Namespace) -> tuple[Function, Function]:
        return self, self


def _stand_in(block: Block, worker: int, domain: Space, codomain: Space) -> LocalMap:
    """The map of another worker's block, which cannot be applied here."""
    there = _Elsewhere(block.symbol, worker)
    port = there.port if block.portable else None
    return LocalMap(domain, codomain, there, there, block.symbol, port=port)
