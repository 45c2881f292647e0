"""`check_parallel`: a parallel torch program beside its sequential twin."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from linop.errors import ArgumentError, MissingExtraError
from linop.testing.parallel.faults import forward
from linop.testing.parallel.faults.context import Context, base, overall, program_groups
from linop.testing.parallel.faults.diagnosis import OF_ITS, diagnosed
from linop.testing.parallel.faults.ways import used_whole
from linop.testing.parallel.faults.words import factor_text, of_module
from linop.testing.parallel.findings import Finding, ParallelReport, Place, Verdict, groups_text
from linop.testing.parallel.pairs.proofs import Pair, pairs
from linop.testing.parallel.recording.programs import Program
from linop.testing.parallel.recording.records import Declared, Probe, Record
from linop.testing.parallel.repeated import Records, in_job, in_new_processes
from linop.testing.parallel.twins.locations import Locations
from linop.testing.parallel.twins.parameters import (
    Compared,
    buffers,
    compared,
    loss,
    norms,
    tolerances,
)
from linop.testing.parallel.twins.relations import Kind, Relation, Scale

SECONDS = 120.0


def check_parallel(
    model: Callable[[Any], Any] | str | os.PathLike[str] | Program,
    twin: Callable[[], Any] | None = None,
    batch: Callable[[], Any] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    workers: int | None = None,
    mine: Callable[[Any, int, int], Any] | None = None,
    step: Callable[[Any, Any], Any] | None = None,
    shard: Callable[[str, Any, int, int], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    dtype: str = "float64",
    seconds: float = SECONDS,
) -> ParallelReport | None:
    """Compare one step of a parallel model with that of its sequential twin, and say what differs,
    why, and where.

    The loss, all gradients, buffers, and the parameters after a step of an optimizer are compared.
    Nothing of linop has to be in the program: modules on `torch.distributed`, DDP, FSDP2, DTensor,
    functions with a backward of their own, messages between stages of a pipeline are looked at as
    they are.

    Args:
        model: ``model(twin)`` returns this rank's part of the parallel model, with the twin's
            values in tensors of its own. Or the path of a file that has all of these functions,
            ``FILE.py`` or ``FILE.py:NAME``, which new processes run; or a
            `linop.testing.parallel.programs.Program`, whose functions forks of this process call.
        twin: ``twin()`` returns the sequential model, the same on every rank.
        batch: ``batch()`` returns the whole batch, a tuple of the input and the target.
        loss: ``loss(output, target)`` returns a scalar tensor.
        workers: the number of ranks; by default the file's ``WORLD``, or 2. In a job that is
            running (`torch.distributed` is initialized, or torchrun has started this process) it is
            the job's, and each rank calls this function.
        mine: ``mine(batch, rank, world)`` returns a rank's part of the batch; None for all of it.
        step: ``step(model, mine)`` runs forward and backward, with everything that the program does
            to gradients, and returns the loss of the whole batch; None for
            ``loss(model(input), target).backward()``.
        shard: ``shard(name, value, rank, world)`` returns a rank's part of a parameter. None if it
            is to be found from the values, or DTensors say it.
        optimizer: ``optimizer(parameters)`` returns an optimizer; None for SGD.
        dtype: torch's name of the dtype in which both run.
        seconds: the longest time. In a job that is running, a rank that takes longer, or that waits
            for one that has failed, writes its stacks to stderr, and ends.

    Returns:
        A report, true if nothing differs; None on ranks other than 0 of a job that was running.

    Raises:
        ArgumentError: a function is missing, or returns something else. BackendError: the program
            fails, or does not end in time; with the stacks of all ranks. MissingExtraError: torch
            is not installed.

    Example:
        Each rank has its rows, and nobody sums the gradients::

            def twin():
                torch.manual_seed(0)
                return torch.nn.Linear(3, 1)

            def batch():
                return torch.arange(12.0).view(4, 3), torch.zeros(4, 1)

            def mine(batch, rank, world):
                return [x.chunk(world)[rank] for x in batch]

            squares = torch.nn.MSELoss(reduction="sum")
            report = linop.testing.check_parallel(copy.deepcopy, twin, batch, squares, mine=mine)
            bool(report)  # False
            report.findings[0].operator  # 'all-reduce of its gradient over ranks 0, 1'
    """
    forks = "torch" not in sys.modules
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise MissingExtraError(
            "check_parallel needs torch: pip install 'linop-algebra[torch]'"
        ) from None
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ArgumentError(f"dtype: {dtype!r} given, one of torch's such as 'float64' expected")
    program = _program(model, twin, batch, loss, mine, step, shard, optimizer)
    name = program if isinstance(program, str) else getattr(model, "__qualname__", "program")
    running = dist.is_available() and dist.is_initialized()
    if not running and {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        running = True

    def judge(found: Records, took: float) -> tuple[ParallelReport, list[Probe]]:
        return reported(name, *found, seconds=took)

    if running:
        return in_job(judge, program, kind, seconds)
    number = workers or _world(program) or 2
    return in_new_processes(judge, program, number, dtype, seconds, forks)


def assert_parallel(*args: Any, **keywords: Any) -> None:
    """`check_parallel`, as an assertion: arguments are the same.

    Raises:
        AssertionError: the program does something else than its twin, with the report.

    Example:
        A test of pytest, of a file with the functions of `check_parallel`::

            def test_my_model():
                linop.testing.assert_parallel("my_model.py", workers=2)
    """
    found = check_parallel(*args, **keywords)
    if found is not None and not found:
        raise AssertionError(str(found))


def _program(model: Any, *functions: Any) -> Program | str:
    names = ("twin", "batch", "loss", "mine", "step", "shard", "optimizer")
    given = dict(zip(names, functions, strict=True))
    if isinstance(model, str | os.PathLike | Program):
        if extra := [name for name, one in given.items() if one is not None]:
            raise ArgumentError(f"{extra} given beside a file, which has its own functions")
        return model if isinstance(model, Program) else str(model)
    for name, one in {"model": model, **given}.items():
        if not callable(one) and (one is not None or name in ("model", "twin", "batch", "loss")):
            raise ArgumentError(f"{name}: {type(one).__name__} given, a function expected")
    return Program(model=model, **given)


def _world(program: Program | str) -> int | None:
    if isinstance(program, Program):
        return program.world
    from linop.testing.parallel.recording.programs import world_of

    return world_of(program)


def report(
    name: str, ranks: Sequence[Record], twin: Record, seconds: float = 0.0
) -> ParallelReport:
    """The report of recorded steps.

    Args:
        ranks: of all ranks, in order.
    """
    return reported(name, ranks, twin, seconds)[0]


def reported(
    name: str, ranks: Sequence[Record], twin: Record, seconds: float = 0.0
) -> tuple[ParallelReport, list[Probe]]:
    """The report of recorded steps; and functions that are to be looked at alone when the steps are
    repeated, for a report that is sure of them.

    Args:
        ranks: of all ranks, in order.
    """
    groups, names = program_groups(ranks)
    allowed = tolerances(ranks, twin)
    found = compared(ranks, twin, allowed, groups)
    equal_loss, loss_text = loss(ranks, twin, allowed)
    wrong = [one for one in found if one.gradient.kind is not Kind.EQUAL]
    other_buffers, kept = buffers(ranks, twin, allowed)
    findings: list[Finding] = []
    if unlike_copies := _replicated_by_name(ranks, allowed.values):
        ranks[0].unsynchronized += unlike_copies
    locations = Locations(ranks, twin, allowed.values, allowed.gradients, groups)
    proven, broken, suspect = pairs(locations)
    right = [one for one in found if one.gradient.kind is Kind.EQUAL]
    by_rank = {one.rank: one for one in ranks}
    correct = tuple(one.name for one in right if not _is_zero(one, allowed.gradients.least))
    about = *base(right), overall(found), correct, norms(found)
    context = Context(by_rank, twin, locations, names, broken, suspect, *about)
    whole = used_whole(context, wrong)
    proven = [one.as_otherwise() if one in whole else one for one in proven]
    context.broken = {at: one for at, one in broken.items() if one not in whole}
    unlike = tuple(one.name for one in wrong)
    differ = tuple(one.name for one in found if not one.value)
    if differ:
        findings.append(_of_other_values(context, differ, unlike))
    elif not equal_loss:
        findings.append(forward.origin(context, unlike))
    elif wrong:
        findings += diagnosed(context, wrong)
    findings += _of_values(found, wrong)
    findings += [_of_buffer(context, name) for name in other_buffers if equal_loss]
    verdicts = {one.name: _verdict(one, context, findings) for one in found}
    notes = list(dict.fromkeys(note for record in (*ranks, twin) for note in record.notes))
    if kept:
        notes.append(f"the parallel model does not update the buffers {', '.join(kept)}")
    named = any("placements" in one.operator for one in findings)
    notes += [f"this DTensor is declared replicated, and its ranks hold other values: {one}"
              for one in unlike_copies if not named]  # fmt: skip
    if hidden := _hidden(findings):
        notes.append(
            f"what lies between the faults above and {', '.join(hidden)} cannot be judged, since "
            f"the gradients that come from there are wrong already: check again when those faults "
            f"are mended"
        )
    if zero := [one.name for one in right if _is_zero(one, allowed.gradients.least)]:
        notes.append(
            f"the gradients of {', '.join(zero)} are zero in this step, so faults in them do not "
            f"show; where that is since a weight is zero, as a LoRA's second one, start from others"
        )
    passed = equal_loss and not wrong and not other_buffers and not findings
    known = {(one.line, one.name) for one in proven if one.proven is False}
    made = ParallelReport(
        name,
        len(ranks),
        passed,
        loss_text,
        equal_loss,
        verdicts,
        tuple(findings),
        tuple(other_buffers),
        allowed.text,
        pairs=tuple(_beside(one, equal_loss and not wrong, findings, known) for one in proven),
        notes=tuple(notes),
        seconds=seconds,
    )
    return made, context.wanted


def _replicated_by_name(ranks: Sequence[Record], scale: Scale) -> list[str]:
    """Lines that declare tensors to be replicated of which the ranks hold other values."""
    found: dict[str, None] = {}
    held: dict[tuple[object, ...], Declared] = {}
    for record in ranks:
        seen: Counter[str] = Counter()
        for one in record.declared:
            seen[one.line] += 1
            first = held.setdefault((one.line, seen[one.line], one.at), one)
            if one.value is not None and first.value is not None:
                if not scale.near(one.value, first.value):
                    found[one.line] = None
    return list(found)


def _hidden(findings: Sequence[Finding]) -> list[str]:
    """Parameters whose gradients are wrong by a fault on the way to them, behind which another one
    would not show: numbers do not say that there is only one."""
    return [
        name
        for one in findings
        for name in one.parameters
        if one.kind in (Kind.OTHER, Kind.SHARD) and name not in one.unlike
        if one.operator and OF_ITS not in one.operator and not one.origin
    ]


def _is_zero(one: Compared, least: float) -> bool:
    """True if the twin's gradient is zero but for rounding."""
    return all(np.abs(each).max(initial=0.0) <= least for each in one.expected.values())


def _beside(
    pair: Pair, right: bool, findings: Sequence[Finding], known: set[tuple[str, str]]
) -> Pair:
    """A pair in a report: what numbers say of the program goes first.

    Args:
        right: the loss and all gradients are the twin's.
        known: lines and names of pairs that are not adjoint, which explain findings there.
    """
    if right and pair.proven is False:
        if pair.otherwise:
            return pair.as_otherwise()
        return pair.undecided("it is right by numbers, between other spaces than these")
    if pair.proven and pair.unless and not right:
        return pair.undecided(pair.unless)
    words = [f"{one.operator} {one.explanation}" for one in findings if one.place.line == pair.line]
    words = [] if (pair.line, pair.name) in known else words
    if pair.proven and any(pair.name in text or "too many" in text for text in words):
        return pair.undecided(
            "adjoint between these spaces, and the program uses it between others"
        )
    return pair


def _of_other_values(context: Context, differ: tuple[str, ...], wrong: tuple[str, ...]) -> Finding:
    """Parameters that differ from the twin's before the step."""
    others = [name for name in wrong if name not in differ]
    follow = f" The gradients of {', '.join(others)} differ, too, and follow from that."
    return Finding(
        Kind.OTHER,
        "",
        differ,
        of_module(context, differ[0]),
        "",
        "They differ before the step: model(twin) has not given them the twin's values."
        + follow * bool(others),
    )


def _of_values(found: Sequence[Compared], wrong: Sequence[Compared]) -> list[Finding]:
    """Parameters that differ from the twin's after the step though their gradients do not."""
    after = tuple(one.name for one in found if one.value and not one.after and one not in wrong)
    if not after:
        return []
    moved = any(p.moved for one in found if one.name in after for p in one.held.values())
    why = ": step() has changed them already. Leave that to optimizer()" if moved else ""
    return [
        Finding(
            Kind.OTHER,
            "",
            after,
            Place(),
            "",
            f"Their gradients are the twin's, and they differ after the optimizer's step{why}.",
        )
    ]


def _of_buffer(context: Context, name: str) -> Finding:
    """A buffer that differs after the step."""
    used: list[tuple[str, str]] = []
    after = []
    for record in context.ranks.values():
        held = record.parameters.get(name)
        after += [] if held is None else [held.after]
        numbers = {one.number for one in record.tensors if one.parameter == name}
        used += [(c.line, c.text) for c in record.calls if numbers.intersection(c.inputs)]
    apart = any(not context.locations.values.near(one, after[0]) for one in after[1:])
    line, text = used[-1] if used else ("", "")
    place = Place(name.rpartition(".")[0], line, text)
    why = (
        "Ranks have other values of this buffer: each updates it from its own elements."
        if apart
        else "The ranks update this buffer alike, and not as the twin does."
    )
    kind = Kind.STATISTICS if apart else Kind.OTHER
    operator = "all-reduce of what it is updated from" if apart else ""
    return Finding(kind, "", (), place, operator, why, name)


def _verdict(one: Compared, context: Context, findings: Sequence[Finding]) -> Verdict:
    for finding in findings:
        if one.name in finding.parameters:
            return finding.unlike.get(one.name, Verdict(finding.kind, finding.detail))
    relation: Relation = one.gradient
    if relation.kind is Kind.EQUAL:
        return Verdict(Kind.EQUAL)
    if relation.kind is Kind.FACTOR:
        return Verdict(Kind.FACTOR, factor_text(relation.factor))
    text = groups_text(relation.groups, context.names) if relation.groups else ""
    return Verdict(relation.kind, text)
