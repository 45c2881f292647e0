"""The report of a comparison of a parallel program with its twin: data, text and JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from linop.testing.parallel.twins.relations import Groups, Kind


@dataclass(frozen=True)
class Place:
    """A place in the user's program.

    Attributes:
        module: path of a module; empty for the model itself, or outside of it.
        line: ``file:line``; empty if it is not known.
        text: that line.
        also: other lines that have to do with it.
    """

    module: str = ""
    line: str = ""
    text: str = ""
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.line}: {self.text}" if self.line else ""
        module = f"module {self.module}" if self.module else ""
        parts = [module, where, *(f"and {one}" for one in self.also)]
        return ", ".join(filter(None, parts)) or "not known"

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "also": list(self.also)}


@dataclass(frozen=True)
class Verdict:
    """The relation of one parameter's gradient to the twin's."""

    kind: Kind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}{': ' if self.detail else ''}{self.detail}"

    def as_dict(self) -> dict[str, str]:
        return {"kind": str(self.kind), "detail": self.detail}


@dataclass(frozen=True)
class Finding:
    """One fault, and all parameters that it makes wrong.

    Attributes:
        origin: the parameter or tensor at which forward passes part; empty if they do not.
        operator: the operator that is missing, or too many.
        explanation: a sentence or two.
        unlike: the verdicts of parameters that it makes wrong in another way than the first.
    """

    kind: Kind
    detail: str
    parameters: tuple[str, ...]
    place: Place
    operator: str
    explanation: str
    origin: str = ""
    unlike: dict[str, Verdict] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        head = Verdict(self.kind, self.detail)
        named = ", ".join(self.parameters) or self.origin
        lines = [named, f"    {head}", *(f"    {n}: {one}" for n, one in self.unlike.items())]
        lines += [f"    where:    {self.place}"]
        if self.origin:
            lines.append(f"    origin:   {self.origin}")
        if self.operator:
            lines.append(f"    operator: {self.operator}")
        return "\n".join([*lines, f"    {self.explanation}"])

    def as_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "kind": str(self.kind),
            "parameters": list(self.parameters),
            "place": self.place.as_dict(),
            "unlike": {name: one.as_dict() for name, one in self.unlike.items()},
        }


@dataclass(frozen=True)
class ParallelReport:
    """The result of `check_parallel`. True if the program does what its twin does.

    Attributes:
        passed: the verdict.
        loss: how the losses are related.
        loss_is_equal: True if that of the parallel program is the twin's.
        parameters: by name.
        findings: faults; of each the parameters that it makes wrong.
        buffers: buffers whose values differ after the step.
        tolerance: the error that is taken for rounding.
        pairs: forward and backward movements, the inferred spaces between which they move data, and
            whether they are an operator and its adjoint there.
        notes: what was changed or left out.

    Example:
        What differs, and where, of a file with the functions of `check_parallel`::

            report = linop.testing.check_parallel("my_model.py", workers=2)
            if not report:
                for finding in report.findings:
                    print(finding.parameters, finding.kind, finding.place, finding.operator)
    """

    program: str
    workers: int
    passed: bool
    loss: str
    loss_is_equal: bool
    parameters: dict[str, Verdict]
    findings: tuple[Finding, ...] = ()
    buffers: tuple[str, ...] = ()
    tolerance: str = ""
    pairs: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        wrong = [name for name, one in self.parameters.items() if one.kind is not Kind.EQUAL]
        lines = [
            f"{self.program} on {self.workers} ranks: "
            + (
                f"equal to its twin in the loss and {len(self.parameters)} gradients"
                if self.passed
                else f"DIFFERS from its twin in {len(wrong)} of {len(self.parameters)} gradients"
                + ("" if self.loss_is_equal else ", and in the loss")
                + (f", and in buffers {', '.join(self.buffers)}" if self.buffers else "")
            ),
            f"  loss:      {self.loss}",
            f"  tolerance: {self.tolerance}",
        ]
        lines += [_indented(f"{k}. {one}") for k, one in enumerate(self.findings, 1)]
        if self.pairs:
            lines += ["  movements and their adjoints:", *(f"    {one}" for one in self.pairs)]
        return "\n".join([*lines, *(f"  note: {one}" for one in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        """The report as data for JSON."""
        return {
            **vars(self),
            "parameters": {name: one.as_dict() for name, one in self.parameters.items()},
            "findings": [one.as_dict() for one in self.findings],
            "buffers": list(self.buffers),
            "pairs": [one.as_dict() for one in self.pairs],
            "notes": list(self.notes),
        }


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def ranks_text(ranks: tuple[int, ...]) -> str:
    """``rank 1``, or ``ranks 0, 1``."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def groups_text(groups: Groups, names: dict[Groups, str]) -> str:
    """``ranks 0, 1`` of one group, ``ranks 0, 2 and 1, 3`` of several; with the name of the axis of
    the mesh, if they have one."""
    each = " and ".join(", ".join(map(str, group)) for group in groups)
    name = names.get(tuple(sorted(groups)), "")
    return f"ranks {each}" + (f" (axis {name!r} of the mesh)" if name else "")
