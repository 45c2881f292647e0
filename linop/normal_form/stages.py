"""The normal form of every operator: alternating stages M_k L_k ··· L_1 M_0 of movements M and
layers L of local maps.

A pure data movement is a single movement stage. A local map is a layer between the movement of its
arguments and that of its results. Movements and layers leave regions that are in none of their
spaces as they are: these are carried, and listed nowhere. The algebra (composition, sum, scalar
multiple, direct sum, adjoint) is closed over stages; they are the input of lowering
(`linop.planning.lowering`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import scipy

from linop.caching import cached_property
from linop.errors import ArgumentError, UndecidableError
from linop.normal_form import entries
from linop.normal_form.boxes import Table
from linop.normal_form.maps import Call, Layer, LocalMap, by_worker, layer_blocks, layer_matrix
from linop.normal_form.movement import Movement
from linop.normal_form.transfer_table import digest_of
from linop.provenance import Keeper
from linop.spaces.exact import Exact
from linop.spaces.region import Region
from linop.spaces.scalars import Scalar, sparse_dtype
from linop.spaces.space import Space


@dataclass(frozen=True, eq=False)
class Stages(Keeper):
    """M_k L_k ··· L_1 M_0, first applied first: ``len(movements) == len(layers) + 1``.

    Attributes:
        movements: each is a direct sum with the identity on the regions that it carries. The first
            carries none of the domain, and the last none of the codomain.
        layers: likewise.
    """

    movements: tuple[Movement, ...]
    layers: tuple[Layer, ...] = ()

    @property
    def domain(self) -> Space:
        return self.movements[0].domain

    @property
    def codomain(self) -> Space:
        return self.movements[-1].codomain

    @property
    def pure(self) -> bool:
        """True if this is a single movement, without local maps."""
        return not any(self.layers) and len(self.movements) == 1

    @property
    def merged(self) -> Movement | None:
        """The map as a single movement, the product of all; None if there are local maps."""
        if any(self.layers):
            return None
        product = self.movements[0]
        for movement in self.spread.movements[1:]:
            product = movement @ product
        return product

    @cached_property
    def carried(self) -> tuple[int, ...]:
        """The number of regions that each movement carries."""
        there, found = len(self.domain), []
        for movement, layer in zip(self.movements, (*self.layers, ()), strict=True):
            found.append(there - len(movement.domain))
            there = found[-1] + len(movement.codomain)
            there += sum(len(call.outputs) - len(call.inputs) for call in layer)
        return tuple(found)

    @property
    def spread(self) -> Stages:
        """The same map, with movements that carry no region: their spaces list all that are there.
        Its size is that of the stages times the number of regions kept between them."""
        if not any(self.carried):
            return self
        there = {region.name: region for region in self.domain}
        movements: list[Movement] = []
        for k, movement in enumerate(self.movements):
            rest = [region for name, region in there.items() if name not in movement.domain]
            movements.append(movement.beside(rest))
            there = {region.name: region for region in (*rest, *movement.codomain)}
            for call in self.layers[k] if k < len(self.layers) else ():
                for name in call.inputs:
                    del there[name]
                there |= {name: self.result(k, name) for name in call.outputs}
        return Stages(tuple(movements), self.layers)

    def result(self, layer: int, name: str) -> Region:
        """A region that a layer makes, which is listed by the next movement that reads it."""
        later = (self.movements[k].domain for k in range(layer + 1, len(self.movements)))
        return next(domain[name] for domain in later if name in domain)

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(call for layer in self.layers for call in layer)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """Every worker that holds a region in any stage, sorted."""
        factors = [factor for movement in self.movements for factor in movement.factored()]
        spaces = [s for m in factors for s in (m.domain, m.codomain)]
        return tuple(sorted(set().union(*(space.workers for space in spaces))))

    @cached_property
    def calls_by_worker(self) -> tuple[dict[int, Layer], ...]:
        """The calls of each layer, by worker.

        Raises:
            BackendError: a local map spans several workers.
        """
        return tuple(by_worker(layer) for layer in self.layers)

    @staticmethod
    def of_map(local: LocalMap) -> Stages:
        """A local map as one layer between two identities."""
        names = (tuple(r.name for r in side.regions) for side in (local.domain, local.codomain))
        movements = tuple(Movement.between(s, s) for s in (local.domain, local.codomain))
        return Stages(movements, ((Call(local, *names),),))

    def scale(self, scalar: Scalar | Exact) -> Stages:
        return Stages((*self.movements[:-1], self.movements[-1].scale(scalar)), self.layers)

    def adjoint(self) -> Stages:
        """The adjoint by transposition of the normal form, without the operators' adjoint rules."""
        return Stages(
            tuple(m.adjoint() for m in reversed(self.movements)),
            tuple(tuple(call.adjoint for call in layer) for layer in reversed(self.layers)),
        )

    @staticmethod
    def direct_sum(blocks: Sequence[Stages], domain: Space, codomain: Space) -> Stages:
        """The block-diagonal operator, stage by stage; short blocks are padded with identities."""
        depth = max((len(block.layers) for block in blocks), default=0)
        padded = [
            block._deepened(depth).renamed(f"{{}}⟨{k}⟩".format) for k, block in enumerate(blocks)
        ]
        movements = []
        for i in range(depth + 1):
            blocks_at = [block.movements[i] for block in padded]
            first = domain if i == 0 else _union([m.domain for m in blocks_at], domain)
            last = codomain if i == depth else _union([m.codomain for m in blocks_at], domain)
            movements.append(Movement.direct_sum(blocks_at, first, last))
        layers = [tuple(c for block in padded for c in block.layers[i]) for i in range(depth)]
        return Stages(tuple(movements), tuple(layers))

    def _deepened(self, depth: int) -> Stages:
        """The stages with identities after them; before a movement that has more results than
        arguments, so that fewer elements, and no zeros, pass the layers of other blocks."""
        more = depth - len(self.layers)
        early = not self.layers and self.domain.size < self.codomain.size
        side = self.domain if early else self.codomain
        still = (Movement.between(side, side),) * more
        movements = still + self.movements if early else self.movements + still
        return Stages(movements, self.layers + ((),) * more)

    def renamed(self, rename: Callable[[str], str]) -> Stages:
        """The stages with regions renamed, all but those of domain and codomain."""
        last = len(self.movements) - 1
        movements = []
        for i, m in enumerate(self.movements):
            domain = m.domain if i == 0 else _rename(m.domain, rename)
            codomain = m.codomain if i == last else _rename(m.codomain, rename)
            movements.append(Movement(domain, codomain, m.transfers))
        layers = tuple(
            tuple(
                Call(c.map, tuple(map(rename, c.inputs)), tuple(map(rename, c.outputs)))
                for c in layer
            )
            for layer in self.layers
        )
        return Stages(tuple(movements), layers)

    def same_as(self, other: Stages) -> bool:
        """True if movements and layers are equal one by one: sufficient for equality of the
        operators, not necessary."""
        return (
            len(self.movements) == len(other.movements)
            and self.layers == other.layers
            and all(a == b for a, b in zip(self.movements, other.movements, strict=True))
        )

    def equals(self, other: Stages) -> bool:
        """True if both are the same linear map: decided exactly, for all vectors.

        Raises:
            UndecidableError: a local map's matrix is unknown, or the difference may be rounding.
        """
        if self.same_as(other):
            return True
        here, there = self.merged, other.merged
        if here is not None and there is not None:
            return here == there
        calls = (*self.calls, *other.calls)
        unknown = sorted({c.map.symbol for c in calls if c.map.matrix is None})
        if unknown:
            raise UndecidableError(
                f"equals: cannot decide; the matrix of {', '.join(unknown)} is not known. Compare "
                f"to_matrix() of both, which applies them to unit vectors"
            )
        into = Stages((Movement.between(self.domain, other.domain),))
        out = Stages((Movement.between(other.codomain, self.codomain),))
        shape = self.codomain.size, self.domain.size

        def aligned(nudge: entries.Nudge) -> list[Table]:
            return [factor for side in (into, other, out) for factor in side._factors(nudge)]

        return entries.same(self._factors, aligned, shape, self.domain.dtype)

    def _factors(self, nudge: entries.Nudge) -> list[Table]:
        """The exact matrices of movements and layers, entry by entry, first applied first
        (`linop.normal_form.entries`); `nudge` changes the entries of layers."""
        movements = self.spread.movements
        factors = [entries.of(*movements[0].entries())]
        for i, layer in enumerate(self.layers):
            before, after = movements[i].codomain, movements[i + 1].domain
            blocks = layer_blocks(before, after, layer)
            factors.append(entries.beside(entries.of_sparse(*block, nudge) for block in blocks))
            factors.append(entries.of(*movements[i + 1].entries()))
        return factors

    def to_matrix(self) -> scipy.sparse.csr_array:
        """The sparse matrix, (codomain.size, domain.size); integers modulo 2^bits."""
        wide = sparse_dtype(self.domain.dtype)
        if not self.pure and wide.kind not in "iu":
            wide = np.result_type(wide, np.float64)
        movements = self.spread.movements
        matrix = movements[0].to_matrix(wide)
        for i, layer in enumerate(self.layers):
            before, after = movements[i].codomain, movements[i + 1].domain
            local = layer_matrix(before, after, layer, wide)
            matrix = movements[i + 1].to_matrix(wide) @ local @ matrix
        return scipy.sparse.csr_array(matrix)

    @cached_property
    def fingerprint(self) -> bytes:
        """A digest by which workers verify that they built the same operator. Of local maps it
        covers symbols and region names, not values, which may be known to their worker only."""
        return digest_of(*(m.fingerprint for m in self.movements), *self._layers_text)

    @cached_property
    def digest(self) -> bytes:
        """As `fingerprint`, but of the operator's construction, computed without its transfers.
        Equal digests mean equal fingerprints; the converse does not hold."""
        return digest_of(*(m.digest for m in self.movements), *self._layers_text)

    @property
    def _layers_text(self) -> list[str]:
        return [repr([(c.map.symbol, c.inputs, c.outputs) for c in layer]) for layer in self.layers]


@runtime_checkable
class HasStages(Protocol):
    """Protocol of objects with a normal form, as every operator."""

    @property
    def stages(self) -> Stages:
        """Its normal form."""


def stages_given(what: str, op: object) -> Stages:
    """The normal form of an operator that a user gave.

    Raises:
        ArgumentError: it is none, such as the result of one; the message opens with `what`.
    """
    if not isinstance(op, HasStages):
        raise ArgumentError(f"{what}: expected an operator, given {op!r}")
    return op.stages


def _rename(space: Space, rename: Callable[[str], str]) -> Space:
    renamed = (Region.checked(rename(r.name), r.shape, r.workers, r.memory) for r in space.regions)
    return Space(renamed, space.dtype)


def _union(spaces: Sequence[Space], like: Space) -> Space:
    return Space((region for space in spaces for region in space.regions), like.dtype)
