"""A pair of functions ``forward(x, comm)`` and ``adjoint(y, comm)`` of a file, bound to the ranks
of an MPI job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from linop.errors import ArgumentError
from linop.testing.parallel.mpi import interception
from linop.testing.parallel.mpi.array_shadows import ArrayShadows
from linop.testing.parallel.mpi.arrays import plain, tracked, tracking
from linop.testing.parallel.mpi.lines import line_of_program
from linop.testing.parallel.mpi.words import Seen
from linop.testing.parallel.recording import programs
from linop.testing.parallel.recording.records import Collective, Lifted

OWN, REPLICATED = "copies", "replicated"
Side = tuple[tuple[int, ...] | None, np.dtype[Any]]
"""The shape of a rank's array, None if it has none, and its dtype."""


@dataclass(frozen=True)
class Parts:
    """The functions of a file; see `linop.testing.parallel.mpi.check_mpi`."""

    forward: Callable[[Any, Any], Any]
    adjoint: Callable[[Any, Any], Any]
    domain: Callable[[int, int], Any]
    codomain: Callable[[int, int], Any]
    forms: tuple[str | None, str | None]


def pair_of(target: str) -> Parts | None:
    """The pair of functions of a file; None if it has none.

    Raises:
        ArgumentError: a function is missing, or a form is unknown. Exceptions of the file.
    """
    path, name = programs.parsed(target)
    if b"adjoint" not in path.read_bytes():
        return None
    found: Any = programs.imported(path)
    if name:
        found = getattr(found, name, None)
        if found is None:
            raise ArgumentError(f"{path}: no {name!r} in this file")
        found = found() if isinstance(found, type) else found
    if not (callable(getattr(found, "forward", None)) and hasattr(found, "adjoint")):
        return None
    functions: dict[str, Any] = {
        one: getattr(found, one, None) for one in ("adjoint", "domain", "codomain")
    }
    if missing := [one for one, function in functions.items() if not callable(function)]:
        raise ArgumentError(
            f"{target}: no function {', '.join(missing)}; a pair needs forward(x, comm), "
            f"adjoint(y, comm), domain(rank, world) and codomain(rank, world)"
        )
    forms = getattr(found, "DOMAIN", None), getattr(found, "CODOMAIN", None)
    for what, form in zip(("DOMAIN", "CODOMAIN"), forms, strict=True):
        if form not in (None, OWN, REPLICATED):
            raise ArgumentError(
                f"{target}: {what} is {form!r}, {OWN!r} or {REPLICATED!r} expected: one vector on "
                f"each rank, or copies of one vector"
            )
    return Parts(found.forward, found.adjoint, found.domain, found.codomain, forms)


def side_of(value: Any, what: str) -> Side:
    """The side that a file describes by a shape, a shape and a dtype, or an array.

    Raises:
        ArgumentError: it is none of these.
    """
    kind = np.dtype(np.float64)
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype
    if isinstance(value, tuple | list) and len(value) == 2 and not isinstance(value[1], int):
        try:
            value, kind = value[0], np.dtype(value[1])
        except TypeError:
            pass
    if value is None:
        return None, kind
    if isinstance(value, int | np.integer):
        return (int(value),), kind
    if isinstance(value, tuple | list) and all(isinstance(n, int | np.integer) for n in value):
        return tuple(int(n) for n in value), kind
    raise ArgumentError(
        f"{what} returned {value!r}; the shape of this rank's array expected (None if it has "
        f"none), or (shape, dtype), or an array that is like it"
    )


class Fault(Exception):
    """A function that does what no linear map does; the same on all ranks."""


class Pair:
    """A pair bound to the ranks of a job.

    Attributes:
        sides: domain and codomain, by rank.
        seen: the calls of forward and adjoint on this rank.
    """

    def __init__(self, parts: Parts, comm: Any) -> None:
        self.parts, self.comm, self.plain = parts, comm, interception.plain_world().Dup()
        rank, world = comm.Get_rank(), comm.Get_size()
        self.rank, self.world = rank, world
        own = [
            side_of(function(rank, world), f"{what}({rank}, {world})")
            for function, what in ((parts.domain, "domain"), (parts.codomain, "codomain"))
        ]
        self.sides: list[list[Side]] = [self.plain.allgather(one) for one in own]
        self.seen: list[list[Seen]] = [[], []]

    def sizes(self, side: int) -> list[int]:
        return [0 if shape is None else int(np.prod(shape)) for shape, _ in self.sides[side]]

    def is_complex(self, side: int) -> bool:
        return any(kind.kind == "c" for _, kind in self.sides[side])

    @property
    def mixed(self) -> bool:
        """True if one side is complex and the other real: the maps are linear over the real numbers
        alone, and inner products are compared in their real parts."""
        return self.is_complex(0) != self.is_complex(1)

    @property
    def transpose(self) -> str:
        """The word for what the adjoint has to be of the forward."""
        return "conjugate transpose" if self.is_complex(0) and self.is_complex(1) else "transpose"

    def apply(
        self, side: int, vector: np.ndarray, call: Callable[[Any, Any, Any], Any] | None = None
    ) -> np.ndarray:
        """A function of a vector of all ranks, as one of all ranks; side 0 is the forward.

        Args:
            call: calls the function with its two arguments; by default as it is.

        Raises:
            ArgumentError, Fault: on all ranks, what a function returns or does on one of them.
        """
        function = (self.parts.forward, self.parts.adjoint)[side]
        ends = np.cumsum([0, *self.sizes(side)])
        mine = vector[ends[self.rank] : ends[self.rank + 1]]
        shape, kind = self.sides[side][self.rank]
        given = None if shape is None else mine.reshape(shape).astype(kind)
        before = None if given is None else given.copy()
        if call is None:
            result = function(given, self.comm)
        else:
            result = call(function, given, self.comm)
        flat: np.ndarray = np.zeros(0)
        strange = self._unexpected(side, result)
        fault = "" if strange else self._fault(side, given, before, result)
        if not strange and not fault and self.sides[1 - side][self.rank][0] is not None:
            values = np.asarray(result)
            wide = np.complex128 if values.dtype.kind == "c" else np.float64
            flat = values.ravel().astype(wide)
        said: list[tuple[str, str, np.ndarray]] = self.plain.allgather((strange, fault, flat))
        name = ("forward", "adjoint")[side]
        for rank, (strange, fault, _) in enumerate(said):
            if strange:
                raise ArgumentError(f"{name}() on rank {rank} {strange}")
            if fault:
                raise Fault(f"rank {rank}: {name}() {fault}")
        return np.concatenate([each for *_, each in said])

    def hear(self, side: int, vector: np.ndarray) -> None:
        """Apply a function to a vector, and keep what it calls in ``seen``."""

        def listener(event: interception.Event) -> None:
            sent, got = (
                tuple(len(one.positions) for one in each) for each in (event.given, event.made)
            )
            about = event.name, event.ranks, event.peer, event.reduction
            self.seen[side].append(Seen(*about, sent, got, line_of_program()))

        def call(function: Any, given: Any, comm: Any) -> Any:
            with interception.listened(listener):
                return function(given, comm)

        self.apply(side, vector, call)

    def follow(
        self, side: int, vector: np.ndarray
    ) -> tuple[np.ndarray, dict[int, tuple[Lifted, list[Collective]]]]:
        """A function of a vector of all ranks; and by rank what it did to the elements of its
        arrays, and its collectives."""
        heard: list[Collective] = []
        followed: list[ArrayShadows] = []

        def listener(event: interception.Event) -> None:
            for shadows in followed:
                shadows.moved(len(heard), event.given, event.made)
            heard.append(
                Collective(
                    len(heard), event.name, event.ranks, event.reduction, event.peer, [], [],
                    event.splits, None, line_of_program(), "", "", -1, -1, "", event.dtype, "",
                    event.tag,
                )
            )  # fmt: skip

        def call(function: Any, given: Any, comm: Any) -> Any:
            followed.append(ArrayShadows(0, side == 1, [] if given is None else [given]))
            with tracking(lambda: followed), interception.listened(listener):
                result = function(tracked(given), comm)
            is_wanted = self.sides[1 - side][self.rank][0] is not None
            followed[0].finished([result] if is_wanted else [])
            return plain(result)

        found = self.apply(side, vector, call)
        everyone = self.plain.allgather((followed[0].lifted, heard))
        return found, dict(enumerate(everyone))

    def _unexpected(self, side: int, result: Any) -> str:
        """A result that is no array of the expected kind, in words; empty if it is one."""
        shape, kind = self.sides[1 - side][self.rank]
        if shape is None:
            return ""
        if not isinstance(result, np.ndarray | np.generic) or np.shape(result) != shape:
            found = f"shape {np.shape(result)}" if isinstance(result, np.ndarray) else repr(result)
            return f"returns {found}; an array of shape {shape} expected"
        given = np.asarray(result).dtype
        if given.kind not in "iufc" or (given.kind == "c") > (kind.kind == "c"):
            return f"returns {given}; {kind} expected"
        return ""

    def _fault(self, side: int, given: Any, before: Any, result: Any) -> str:
        """A call that is none of a linear map, in words; empty if it may be one."""
        if given is not None and not np.array_equal(given, before):
            at = tuple(int(k) for k in np.argwhere(given != before)[0])
            return (
                f"changes its argument: element {list(at)} was {before[at]:g} and is {given[at]:g} "
                f"after it. Reduce into another array, or a copy"
            )
        expected = self.sides[1 - side][self.rank][0] is not None
        finite = not expected or bool(np.isfinite(result).all())
        return "" if finite else "returns numbers that are not finite"

    def matrix(self, side: int) -> np.ndarray:
        """The matrix of a function on the arrays of all ranks.

        Raises:
            Fault: it is not linear.
        """
        count = sum(self.sizes(side))
        columns = [self.apply(side, one) for one in np.eye(count)]
        height = sum(self.sizes(1 - side))
        found = np.array(columns).T if columns else np.zeros((height, 0))
        random = np.random.default_rng(0)
        numbers = random.integers(-9, 10, count).astype(float)
        if self.is_complex(side) and not self.mixed:
            numbers = numbers + 1j * random.integers(-9, 10, count)
        gap = np.abs(self.apply(side, numbers) - found @ numbers)
        if (gap > 1e-9 * (1 + np.abs(found) @ np.abs(numbers))).any():
            name = ("forward", "adjoint")[side]
            raise Fault(f"{name}() is not linear, or gives another result for the same argument")
        return found

    def element(self, side: int, flat: int) -> str:
        """An element by its index and rank."""
        letter = "xy"[side]
        for rank, ((shape, _), size) in enumerate(
            zip(self.sides[side], self.sizes(side), strict=True)
        ):
            if flat < size and shape is not None:
                index = ", ".join(str(int(k)) for k in np.unravel_index(flat, shape))
                return f"{letter}[{index}] of rank {rank}"
            flat -= size
        raise IndexError(flat)
