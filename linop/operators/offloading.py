"""From one kind of memory to another: what is kept in host memory until the device needs it again.

The paper's model of memory includes auxiliary memories (section 2); a copy between two of them is a
copy like any other. So this is a composition of the memory operators, and its adjoint is derived.
"""

from __future__ import annotations

from linop.errors import expect
from linop.normal_form.movement import Movement
from linop.normal_form.rows import Same
from linop.operators.algebra import Known, identity
from linop.operators.collectives import out_of_place
from linop.operators.operator import LinearOperator
from linop.provenance import remembered
from linop.spaces.space import Space


@remembered
def offload(space: Space, memory: str = "host") -> LinearOperator:
    """M_memory: space -> space.in_memory(memory), every region moved to another memory of the
    workers that hold it. Its adjoint, ``.H``, brings all of it back: the prefetch. No messages.

    Args:
        space: of any regions, replicated ones included; those in that memory already stay.
        memory: one of `linop.spaces.region.MEMORIES`.

    Raises:
        ArgumentError: this is no space, or there is no such memory.
    """
    target = expect("offload", space, Space).in_memory(memory)
    if target == space:
        return identity(space)
    known = Movement(space, target, Same(space.shapes))
    pairs = list(zip(space.regions, target.regions, strict=True))
    return Known("M", memory, known, lambda: out_of_place(space, target, pairs))
