"""The call of a plan that nearly every call is, as one function: one array that fits, one result,
nobody who records or interrupts.

Everything else it leaves to `linop.backends.base.BoundPlan`, by returning `MISSED`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from linop.backends.arrays import Arrays
from linop.backends.base import IN_PLACE, MISSED, NEW, BoundPlan, Quick
from linop.backends.code import Code
from linop.backends.execute import Program
from linop.backends.transport import Transport
from linop.scalars import Array


def quick_call(
    plan: BoundPlan,
    program: Program,
    how: int,
    transport: Transport,
    tag: int,
    listen: Callable[[], None] | None,
    fail: Callable[[BaseException], None],
) -> Quick:
    """What calls a bound plan.

    Args:
        how: `NEW`, `OUT` or `IN_PLACE`.
        tag: what the transport is told to be busy with.
        listen: is called where there may be an alarm; None where there are no others.
        fail: is called where a run ends halfway.
    """
    inputs, outputs = program.plan.inputs, program.plan.outputs
    if len(inputs) > 1 or len(outputs) > 1 or (how != NEW and not outputs):
        return _miss
    if any(program.arrays.of(region.memory) is not program.arrays for region in inputs + outputs):
        return _miss
    same = bool(inputs) and inputs[0].name == outputs[0].name if outputs else False
    if how == IN_PLACE and not (same and program.plan.in_place and program.takes_out):
        return _miss
    name = program.code.name
    dtype = name(program.plan.dtype)

    def unfit(array: str, shape: tuple[int, ...]) -> str:
        wrong = f"type({array}) is not ndarray or {array}.shape != {name(shape)}"
        return f"{wrong} or ({array}.dtype is not {dtype} and {array}.dtype != {dtype})"

    wrong = unfit("x", inputs[0].shape) if inputs else "x is not None"
    if how != NEW:
        plain = program.arrays.plain
        wrong += f" or {unfit('out', outputs[0].shape)} or not out.flags.{plain}"
        if inputs and how != IN_PLACE:
            wrong += f" or {name(program.arrays.module.may_share_memory)}(x, out)"
    lines, result = _run(program, how)
    counters, clock = name(plan.counters), name(time.perf_counter)
    text = [
        f"if {wrong} or {name(plan.backend)}.tracing is not None: return {name(MISSED)}",
        f"if not {name(plan.lock.acquire)}(False): return {name(MISSED)}",
        "try:",
        *([f"    if {name(transport.alarmed)}(): {name(listen)}()"] if listen else []),
        f"    {name(transport)}.busy = {tag}",
        f"    begun = {clock}()",
        "    try:",
        *(f"        {line}" for line in lines or ["pass"]),
        "    except BaseException as error:",
        f"        {name(fail)}(error)",
        "        raise",
        f"    {counters}.calls += 1",
        f"    {counters}.seconds += {clock}() - begun",
        f"    return {result}",
        f"finally: {name(plan.lock.release)}()",
    ]
    return program.code.function(["x", "out"], text)


def _run(program: Program, how: int) -> tuple[list[str], str]:
    """The lines of a run, and its result."""
    name = program.code.name
    given = how != NEW or not program.small
    in_place = [region.name for region in program.plan.outputs] if how == IN_PLACE else []
    lines, results = program.lines(given, in_place)
    before = [f"{cell.name} = x" for cell in program.inputs]
    for cell in program.open if given else ():
        if how != NEW and program.takes_out:
            before.append(f"{cell.name} = out")
        else:
            before.append(f"({cell.name},) = {name(program.result_memory)}(None)")
    result = results[0] if results else "None"
    if how != NEW:
        there = program.open and program.takes_out
        if not there and not (how == IN_PLACE and program.kept):
            lines = [*lines, f"out[...] = {result}"]
        return [*before, *lines], "out"
    if not program.plain:
        own = f"{result} is not x and {result}.base is None and {name(_references)}({result}) <= "
        result = (
            f"{result} if {own}{_ALONE} else {name(partial(_own, program.arrays))}({result}, x)"
        )
    elif given and not program.takes_out:
        result = f"{result} if {name(program.handed_out)}({result}) else {result}.copy()"
    return [*before, *lines], result


_references: Callable[[Any], int] = getattr(sys, "getrefcount", lambda array: 0)
_counting = Code()
_ALONE = _counting.function([], ["c = empty(1)", f"return {_counting.name(_references)}(c)"])()
"""References to an array that only a run has, as its text sees it."""


def _own(arrays: Arrays, array: Array, x: Array | None) -> Array:
    """A local map's array, which it may have kept, or which may be a view: or a copy of it."""
    if array.base is None or (x is not None and arrays.may_share_memory(array, x)):
        return array.copy()
    return array


def _miss(x: Any, out: Any) -> Any:
    """For plans whose calls are never so simple."""
    del x, out
    return MISSED
