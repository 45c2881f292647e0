"""Offloading: moves between the kinds of memory of a worker, such as device and host memory.

The paper's model of memory includes auxiliary memories (section 2), so a move between two of them
is a composition of memory operators like any other, and its adjoint, the prefetch, is derived.
"""

from __future__ import annotations

from linop.errors import expect
from linop.normal_form.movement import Movement
from linop.normal_form.transfer_table import IdentityTable
from linop.operators.algebra import identity
from linop.operators.named_movement import NamedMovement, out_of_place
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.space import Space


@records_origin
def offload(space: Space, memory: str = "host") -> LinearOperator:
    """M_memory: space -> space.in_memory(memory), moves every region to another kind of memory of
    the workers that hold it. Its adjoint, ``.H``, moves all of them back: the prefetch. It sends no
    messages.

    Args:
        space: the domain; regions may be replicated. The identity on regions in that memory.
        memory: one of `linop.spaces.region.MEMORIES`.

    Raises:
        ArgumentError: `space` is no space, or the memory is unknown.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(2))
        >>> A = linop.offload(X, "host")
        >>> A.codomain.regions[0].memory
        'host'
        >>> (A.H @ A).equals(linop.identity(X))
        True
    """
    target = expect("offload", space, Space).in_memory(memory)
    if target == space:
        return identity(space)
    given = Movement(space, target, IdentityTable(space.numbering.shapes))
    pairs = list(zip(space.regions, target.regions, strict=True))
    return NamedMovement("M", memory, given, lambda: out_of_place(space, target, pairs))
