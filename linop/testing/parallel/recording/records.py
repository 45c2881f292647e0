"""Records of one step of a program on one rank: its tensors with their gradients, the calls that
made them, its collectives, its parameters. Data, which ranks send to who compares them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

FORWARD, BACKWARD, AFTER = "forward", "backward", "after"
"""Phases: before, inside and behind (between) backward passes."""
ZERO, UNKNOWN = 0, -1
"""Numbers of elements that are zero, and of those that are no linear function of arguments."""


@dataclass
class Tensor:
    """A tensor of a forward pass, as it was when a call took it or made it.

    Attributes:
        number: its position in the record.
        value: a copy; None if it was too large to keep.
        gradient: that of the loss with respect to it, summed over backward passes; None if none
            arrived.
        differentiable: True if it requires a gradient.
        parameter: the name of the parameter or buffer that it is; empty for others.
        sources: tensors that it was computed from by what no call recorded shows: views, and
            `torch.autograd.Function`s that were bound before the recording.
        dtype: torch's name of its dtype.
    """

    number: int
    value: np.ndarray | None
    differentiable: bool
    parameter: str
    dtype: str
    gradient: np.ndarray | None = None
    sources: tuple[int, ...] = ()


@dataclass
class Placed:
    """The placements of a call between plain tensors and DTensors, each as it is written in a
    program, for each dimension of the mesh.

    Attributes:
        before: of the argument; None if it is a plain tensor.
        after: of the result; None if it is a plain tensor.
        gradient: what the program gives as ``grad_placements``; None if it leaves that to DTensor.
        axes: ranks along each dimension of the mesh, through this rank.
        arrived: of the gradient of the result, if that is a DTensor; None if none came.
    """

    before: tuple[str, ...] | None
    after: tuple[str, ...] | None
    gradient: tuple[str, ...] | None
    axes: list[tuple[int, ...]]
    arrived: tuple[str, ...] | None = None


@dataclass
class Call:
    """A call of a function of torch, or of an `torch.autograd.Function`.

    Attributes:
        number: its position in the record.
        name: the function's.
        module: the path of the innermost module whose forward made the call; empty for the model.
        kind: the class of that module.
        line: the innermost line of the program that is not torch's, ``file:line``.
        text: that line.
        inputs, outputs: numbers of tensors.
        custom: True for an `autograd.Function`.
        inside: the number of the `autograd.Function` whose forward it belongs to; -1 if none.
        phase: `FORWARD`, `BACKWARD` or `AFTER`.
        backward_of: in a backward pass, the call of the `autograd.Function` whose backward makes
            this one; -1 if none.
        placed: of a function of DTensor, the placements; None of others.
    """

    number: int
    name: str
    module: str
    kind: str
    line: str
    text: str
    inputs: list[int]
    outputs: list[int]
    custom: bool = False
    inside: int = -1
    phase: str = FORWARD
    backward_of: int = -1
    placed: Placed | None = None


@dataclass
class Collective:
    """A collective or a message of `torch.distributed`.

    Attributes:
        name: in MPI's words, such as ``all_reduce``; torch's where there is none.
        ranks: the global ranks of its group, in the order of the group.
        reduction: ``sum``, ``avg``, ``max``, …; empty if it does not reduce.
        peer: the global rank of the root, of the source or the target; -1 if there is none.
        sent, received: shapes of this rank's arguments and results.
        splits: the elements of the first dimension to and from each rank, of an all-to-all.
        value: a copy of what this rank contributes, flat.
        line, text: as of a `Call`.
        phase, inside, backward_of: as of a `Call`.
        parameter: the name of the parameter whose gradient is reduced in place; else empty.
        of: parameters of whose gradients it moves elements, in a larger tensor such as a bucket.
        dtype: torch's name of its dtype.
        group: the axis of the mesh that its group is; empty if it is none.
        tag: of a message.
        within: the operation of DTensors that needs it, and whose backward accounts for it; empty
            for others.
        functional: True if its result is in memory of its own, and its argument stays as it is.
    """

    number: int
    name: str
    ranks: tuple[int, ...]
    reduction: str
    peer: int
    sent: list[tuple[int, ...]]
    received: list[tuple[int, ...]]
    splits: tuple[list[int], list[int]] | None
    value: np.ndarray | None
    line: str
    text: str
    phase: str
    inside: int
    backward_of: int
    parameter: str
    dtype: str
    group: str
    tag: int = 0
    within: str = ""
    functional: bool = False
    of: tuple[str, ...] = ()


@dataclass
class Parameter:
    """A parameter or buffer, and what one step does to it.

    Attributes:
        value: before the step.
        gradients: after each backward pass, as the pass left them, before anything else changed
            them; of parameters that are no DTensors.
        gradient: after the step; None if there is none.
        after: the value after one step of the optimizer.
        expected: of the twin, cut as the parameter is: (value, gradient, after); None where the cut
            is to be inferred.
        buffer: True for a buffer.
        trained: True if it requires a gradient.
        line: the line of the program that last changed the gradient in place, after a backward
            pass.
        changes: all lines that changed or replaced it then, in order.
        passed: all lines of functions and collectives that its elements went through then, in
            order, as those of a bucket do.
        scaled: those of them that multiply or divide.
        tied: the first name of the parameter, if this is another one.
        moved: True if the step itself, without an optimizer of ours, has changed the value.
        held: of a DTensor, the positions of the elements that this rank has, flat; else None.
    """

    name: str
    value: np.ndarray
    gradients: list[np.ndarray]
    gradient: np.ndarray | None
    after: np.ndarray
    buffer: bool
    trained: bool
    dtype: str
    expected: tuple[np.ndarray, np.ndarray | None, np.ndarray] | None = None
    line: str = ""
    changes: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    scaled: tuple[str, ...] = ()
    tied: str = ""
    moved: bool = False
    held: np.ndarray | None = None


@dataclass
class Moved:
    """A collective inside of a function.

    Attributes:
        number: of the `Collective`.
        given, made: numbers of elements of its arguments and results, flat, one array for each
            tensor.
    """

    number: int
    given: list[np.ndarray]
    made: list[np.ndarray]


@dataclass
class Lifted:
    """The movement of a function's forward or backward on one rank.

    Attributes:
        call: the number of the function's call.
        backward: True for the backward.
        given, made: numbers of elements of arguments and results, shaped; arguments that are no
            floating-point tensors have empty arrays.
        sums: triples of result, argument and coefficient, as three arrays.
        unknown: the name of an operation that is not linear; empty if there is none.
        values, results: the numbers of arguments and results, if operations may have been missed:
            the matrix must make the one of the other. Else empty.
        overwritten: positions of arguments that the function has changed, unknown to torch.
    """

    call: int
    backward: bool
    given: list[np.ndarray] = field(default_factory=list)
    made: list[np.ndarray] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    sums: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    unknown: str = ""
    values: list[np.ndarray] = field(default_factory=list)
    results: list[np.ndarray] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)


@dataclass
class Declared:
    """A DTensor that the program declares to be replicated over dimensions of a mesh.

    Attributes:
        line: ``file:line: text``.
        at: the ranks that are said to hold copies.
        value: this rank's; None if it was too large to keep.
    """

    line: str
    at: tuple[int, ...]
    value: np.ndarray | None


@dataclass
class Probe:
    """A call of an `autograd.Function` that is to be looked at alone, when the step is repeated.

    Attributes:
        rank: on which rank; -1 for the twin's.
        name, module, line: as of a `Call`.
        occurrence: 1 for the first such call, 2 for the second.
    """

    rank: int
    name: str
    module: str
    line: str
    occurrence: int


@dataclass
class Probed:
    """Result about the function of a call, run alone.

    Attributes:
        name, module, line, occurrence: as of a `Probe`.
        where: the line of the program at which its backward begins, ``file:line``.
        right: True if the backward is the adjoint of the derivative of the forward, at the
            arguments that it had; False if it is not; None if that is not clear.
        exact: True if it is linear, and compared exactly.
        text: a counterexample, or why it is not clear.
    """

    name: str
    module: str
    line: str
    occurrence: int
    where: str
    right: bool | None
    exact: bool
    text: str


@dataclass
class Record:
    """One step of a program on one rank.

    Attributes:
        loss: its value.
        notes: what was changed in the program so that it can be compared.
        modules: paths of modules, and their classes.
        unsynchronized: lines of the program that keep data parallelism from summing gradients.
        divided: those that say by which number, or by which function, it sums them.
        lifted: of `autograd.Function`s with collectives, `Lifted`.
        declared: DTensors that the program declares to be replicated.
        axes: of the meshes of parameters that are DTensors, the ranks along each axis through this
            rank, and its name.
        probed: functions that were looked at alone.
    """

    rank: int
    loss: float
    tensors: list[Tensor]
    calls: list[Call]
    collectives: list[Collective]
    parameters: dict[str, Parameter]
    notes: list[str] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    lifted: list[Lifted] = field(default_factory=list)
    unsynchronized: list[str] = field(default_factory=list)
    divided: list[str] = field(default_factory=list)
    declared: list[Declared] = field(default_factory=list)
    axes: dict[tuple[int, ...], str] = field(default_factory=dict)
    probed: list[Probed] = field(default_factory=list)
