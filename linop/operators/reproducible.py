"""An operator that computes its sums in a given way: `reproducible`."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from linop.errors import ArgumentError
from linop.normal_form.movement import Movement
from linop.normal_form.space_tables import box_of, number_of
from linop.normal_form.stages import Stages
from linop.operators.operator import Arrays, LinearOperator
from linop.planning.reproducible_sums import reproducible as rewritten
from linop.provenance import records_origin
from linop.spaces.exact import rounded
from linop.spaces.reproducible_sums import KINDS
from linop.spaces.vector import Vector


class Reproducible(LinearOperator[Any, Any]):
    """The same linear map as another operator, whose sums are local maps
    (`linop.planning.reproducible_sums`); so are those of its adjoint."""

    def __init__(self, operand: LinearOperator, sums: str) -> None:
        super().__init__(operand.domain, operand.codomain)
        self.operand = operand
        self.sums = sums
        self.loose = operand.loose

    def _adjoint(self) -> LinearOperator:
        return reproducible(self.operand.euclidean_adjoint, self.sums)

    def _conj(self) -> LinearOperator:
        return reproducible(self.operand.conj(), self.sums)

    def _interpret(self, arrays: Arrays) -> Arrays:
        return interpreted(self.stages, arrays)

    def _stages(self) -> Stages:
        return rewritten(self.operand.stages, self.sums)

    def symbol(self, latex: bool = False) -> str:
        return self.operand.symbol(latex)


@records_origin
def reproducible(op: LinearOperator, sums: str) -> LinearOperator:
    """The same linear map, whose sums, and those of its adjoint, do not depend on the order in
    which terms arrive. On every backend, and called in one process, it has the same bits.

    Args:
        op: an operator without time loops.
        sums: "exact": each is the exact sum, rounded once, of float16 to float64 and complex
            numbers. "tree": in a binary tree over the terms in the order of their workers. "fixed":
            the operator itself, whose sums are formed one after the other in that order.

    Raises:
        ArgumentError: `sums` is another word, or the operator has time loops. The normal form, and
            so `compile`, raises DTypeError for exact sums of other dtypes.
    """
    check_sums(sums)
    if isinstance(op, Reproducible):
        if op.sums == sums:
            return op
        op = op.operand
    if sums == "fixed":
        return op
    if op.loops:
        refuse_loops(op, sums)
    made: LinearOperator = op.kept.setdefault(("sums", sums), Reproducible(op, sums))
    return made


def refuse_loops(op: LinearOperator, sums: str) -> NoReturn:
    """Raise an ArgumentError: an operator with time loops has the sums of its backend."""
    check_sums(sums)
    raise ArgumentError(
        f"sums={sums!r}: an operator without time loops expected, given {op!r}; take a backend "
        f"with this option, which has it for each step"
    )


def check_sums(sums: object) -> None:
    """Check the name of a way to add.

    Raises:
        ArgumentError: there is none of this name.
    """
    if sums not in ("fixed", *KINDS):
        names = ", ".join(("fixed", *KINDS[:-1]))
        raise ArgumentError(f"sums: {names} or {KINDS[-1]} expected, given {sums!r}")


def interpreted(stages: Stages, arrays: Arrays) -> Arrays:
    """Apply stages to the arrays of all regions of their domain, by name.

    Returns:
        The arrays of all regions of the codomain, by name.
    """
    whole = stages.spread
    for k, movement in enumerate(whole.movements):
        made = movement.codomain.zeros()
        _move(movement, arrays, made)
        arrays = dict(made.arrays)
        for call in whole.layers[k] if k < len(whole.layers) else ():
            results = call.map([arrays.pop(name) for name in call.inputs])
            arrays |= zip(call.outputs, results, strict=True)
    return arrays


def _move(movement: Movement, arrays: Arrays, made: Vector) -> None:
    """Write what a movement brings over zeros: set what is written first, and add the rest."""
    t, dtype = movement.table, movement.codomain.dtype
    written = {region.name: np.zeros(region.shape, bool) for region in movement.codomain}
    for row in range(len(t)):
        extent = t.extent[row]
        source = box_of(movement.domain.numbering.at(int(t.src[row])), t.of[row], extent)
        target = box_of(movement.codomain.numbering.at(int(t.dst[row])), t.at[row], extent)
        term = arrays[source.region.name][source.index]
        into, there = (one[target.region.name][target.index] for one in (made.arrays, written))
        with np.errstate(all="ignore"):
            if t.coef[row] != 1:
                term = np.multiply(term, rounded(number_of(t.coef[row]), dtype))
            into[...] = np.where(there, into + term, term)
        there[...] = True
