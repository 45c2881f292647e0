"""A linear map under test, between two spaces, with its adjoint, bound to a backend.

A `TestedMap` maps a `Vector` to a `Vector`. Its backend is either one process that holds all
regions, or one worker of an SPMD program, where calls are collective. Vectors are NumPy arrays in
host memory; the functions take and return arrays of the backend. Results of user functions are
validated before use, and a violation is raised as a `Fault`, with the same text on every worker.
Conversion of operators, pairs and matrices is in the other modules of this package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from linop.backends.engine.arrays.arguments import held, held_arrays
from linop.backends.engine.base import Backend
from linop.backends.engine.worker import Worker
from linop.backends.together.transport import Item
from linop.errors import ArgumentError, BackendError
from linop.normal_form.maps import bare_or_dict
from linop.operators.operator import LinearOperator
from linop.spaces.float_formats import limits, machine_epsilon, native
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.spaces.vector import Vector
from linop.testing.report import Worst, element_in, plain_number, shown, workers_text

Function = Callable[[Any], Any]
"""Maps the arrays that a worker holds of one space to those of another: None if it holds no region,
a bare array for one, a dict by region name for several."""


class Fault(Exception):  # a failed check, caught within it
    """An invalid result or a changed argument, found by a check; the same on every worker."""

    def __init__(self, worst: Worst) -> None:
        super().__init__(worst.text)
        self.worst = worst


@dataclass(frozen=True)
class TestedMap:
    """A linear map and its adjoint; `subject.H` is the same pair with the roles exchanged.

    Attributes:
        name: in reports.
        domain, codomain: spaces, whose dtypes may differ.
        forward, adjoint: the two functions; `adjoint` may be None.
        backend: on which they run.
        real: True if the map is linear over the real numbers only; inner products are then compared
            in their real parts.
        exact: True if it does no arithmetic that rounds.
        foreign: True if the functions are not linop's, so that their results are validated.
        flat: True if they are methods of a matrix-like object (matvec, rmatvec), which need not
            return new memory, and may return a wider dtype than declared.
        anonymous: True if region names are generated, since only shapes were given.
        role: "forward" or "adjoint": the role of `forward` in the original pair.
        op: the operator of linop whose map this is, if there is one.
    """

    name: str
    domain: Space
    codomain: Space
    forward: Function
    adjoint: Function | None
    backend: Backend
    real: bool = False
    exact: bool = False
    foreign: bool = False
    flat: bool = False
    anonymous: bool = False
    role: str = "forward"
    op: LinearOperator | None = None
    said: str = ""
    """The numbers that the map was tested on, for the first line of reports, if these are not all
    that it may be given."""
    _last: dict[str, tuple[Array, bytes]] = field(default_factory=dict, repr=False, compare=False)
    """By region, the result of the previous call, and a copy of its bytes."""

    @property
    def shape(self) -> tuple[int, int]:
        """(codomain.size, domain.size)."""
        return self.codomain.size, self.domain.size

    @property
    def H(self) -> TestedMap:
        """The adjoint map.

        Raises:
            ArgumentError: the map has no adjoint function.
        """
        if self.adjoint is None:
            raise ArgumentError(f"{self.name} has no adjoint to check; give one")
        return replace(
            self,
            domain=self.codomain,
            codomain=self.domain,
            forward=self.adjoint,
            adjoint=self.forward,
            role="adjoint" if self.role == "forward" else "forward",
            op=None if self.op is None else self.op.H,
            _last={},
        )

    def __call__(self, x: Vector) -> Vector:
        """Apply the map to a vector. Collective on a backend of one worker.

        Raises:
            Fault: the function changed its argument or its previous result, or its result has the
                wrong regions, array class, shape or dtype, is not finite, shares memory with the
                argument, or differs between the holders of a replicated region.
            BackendError: the function raised on another worker.
        """
        regions = held(self.domain, self.backend.worker)
        kinds = {region.name: self.backend.arrays.of(region.memory) for region in regions}
        given = {name: kind.put(x[name].copy()) for name, kind in kinds.items()}
        raised, arrays, fault = None, {}, None
        try:
            returned = self._arrays(self._called(bare_or_dict(regions, list(given.values()))))
            self._look_at_argument(self._fetched(self.domain, given), x)
            self._look_at_memory(returned, given)
            self._look_at_last(returned)
            arrays = self._fetched(self.codomain, returned)
            self._look_at_numbers(arrays)
        except Fault as found:
            fault = found
        except Exception as error:
            error.add_note(f"raised by the {self.role} function of {self.name}{self._here}")
            if not self.foreign:
                raise  # a plan notifies the other workers itself
            raised = error
        self._agree(raised, fault)
        if self.foreign:
            arrays = {name: array.copy() for name, array in arrays.items()}
            self._compare_copies(arrays)
        return host_vector(self.codomain, arrays, self.backend)

    @property
    def _here(self) -> str:
        worker = self.backend.worker
        return "" if worker is None else f" on worker {worker}"

    def _called(self, given: Any) -> Any:
        mine = held(self.domain, self.backend.worker) or held(self.codomain, self.backend.worker)
        return self.forward(given) if mine or not self.flat else None

    def _arrays(self, result: Any) -> dict[str, Array]:
        """A function's result as arrays of the backend, by region.

        Raises:
            Fault: regions, array classes, shapes or dtypes are wrong.
        """
        regions = held(self.codomain, self.backend.worker)
        if len(regions) == 1 and not isinstance(result, Mapping):
            result = {regions[0].name: result}
        if not regions and (result is None or np.size(result) == 0):
            return {}
        names = [region.name for region in regions]
        if not isinstance(result, Mapping) or sorted(result) != sorted(names):
            what = list(result) if isinstance(result, Mapping) else type(result).__name__
            raise self._fault(f"returned {what}{self._here}; expected arrays for {names}")
        return {region.name: self._array(region, result[region.name]) for region in regions}

    def _array(self, region: Region, array: Any) -> Array:
        """The array of a region, with its class, shape and dtype validated.

        Raises:
            Fault: one of them is wrong.
        """
        dtype, where = self.codomain.dtype, f"for {region.name} ({workers_text(region.workers)})"
        kind = self.backend.arrays.of(region.memory)
        if isinstance(array, np.generic):
            array = kind.taken(array)
        if not isinstance(array, kind.ndarray) or isinstance(array, np.ma.MaskedArray):
            kinds = (f"{k.__module__}.{k.__qualname__}" for k in (type(array), kind.ndarray))
            found, wanted = (name.removeprefix("builtins.") for name in kinds)
            raise self._fault(f"returned {found} {where}; expected a {wanted}")
        if array.shape != region.shape:
            raise self._fault(f"returned shape {array.shape} {where}; expected {region.shape}")
        if self.flat and np.can_cast(array.dtype, dtype, "same_kind"):
            floats = array.dtype.kind in "fc"
            narrow = floats and machine_epsilon(array.dtype) > machine_epsilon(dtype)
            array = array if narrow else array.astype(dtype)
        fits: Array = array
        if fits.dtype != dtype:
            raise self._fault(f"returned dtype {fits.dtype} {where}; expected {dtype}")
        return fits

    def _fetched(self, space: Space, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays of the backend, by region name, copied to host memory if they are elsewhere."""
        kinds = {name: self.backend.arrays.of(space[name].memory) for name in arrays}
        return {name: kinds[name].fetched(array) for name, array in arrays.items()}

    def _look_at_argument(self, given: Mapping[str, Array], x: Vector) -> None:
        """Check that the function did not change its argument."""
        for name, array in given.items():
            changed = np.flatnonzero(array != x[name])
            if changed.size:
                k = int(changed[0])
                was, now = plain_number(x[name].flat[k]), plain_number(array.flat[k])
                raise self._fault(
                    f"changed its argument in place: {{}} was {shown(was)}, is {shown(now)}",
                    (self.domain, name, k),
                )

    def _look_at_memory(self, returned: Mapping[str, Array], given: Mapping[str, Array]) -> None:
        """Check that a user function's results share no memory with its argument."""
        if not self.foreign or self.flat:
            return
        arrays = self.backend.arrays
        for name, array in returned.items():
            shared = [n for n, g in given.items() if arrays.may_share_memory(array, g)]
            if shared:
                raise self._fault(
                    f"returned memory of its argument {shared[0]} as its result {name}"
                    f"{self._here}: a later change of one would change the other"
                )

    def _look_at_last(self, returned: Mapping[str, Array]) -> None:
        """Check that the call did not change the result of the previous one, and keep this one."""
        if self.flat:
            return
        last = {name: array for name, (array, _) in self._last.items()}
        for name, array in self._fetched(self.codomain, last).items():
            if array.tobytes() != self._last[name][1]:
                raise self._fault(
                    f"overwrote the result {name} of its call before{self._here}: a result must be "
                    f"memory of its own"
                )
        now = self._fetched(self.codomain, returned)
        self._last.update({name: (a, now[name].tobytes()) for name, a in returned.items()})

    def _look_at_numbers(self, arrays: Mapping[str, Array]) -> None:
        """Check that all elements of the results are finite."""
        for name, array in arrays.items():
            unfit = np.flatnonzero(~np.isfinite(array))
            if unfit.size:
                k = int(unfit[0])
                raise self._fault(f"gives {array.flat[k]} at {{}}", (self.codomain, name, k))

    def _fault(self, text: str, at: tuple[Space, str, int] | None = None) -> Fault:
        target = None if at is None else element_in(*at)
        return Fault(
            Worst(f"the {self.role} function {text.replace('{}', str(target))}", target=target)
        )

    def _agree(self, raised: Exception | None, fault: Fault | None) -> None:
        """Raise on all workers if one of them found a fault or caught an exception; collective.

        Raises:
            Fault: the fault of the first worker that found one.
            BackendError: the function raised on another worker. On the worker itself the original
                exception is raised.
        """
        target = fault.worst.target if fault else None
        words = repr(raised) if raised else fault.worst.text if fault else ""
        said = (bool(raised), words, target) if words else None
        heard = {w: one for w, one in enumerate(gathered(self.backend, said)) if one}
        if raised is not None:
            raise raised
        for worker, (ended, text, _) in heard.items():
            if ended:
                raise BackendError(
                    f"worker {worker}, in the {self.role} function of {self.name}: {text}"
                )
        for _, text, there in heard.values():
            raise Fault(Worst(text, target=there))

    def _compare_copies(self, arrays: Mapping[str, Array]) -> None:
        """Check that the workers of a replicated region hold the same values, up to rounding."""
        if not isinstance(self.backend, Worker):
            return
        if not any(region.replicated for region in self.codomain.regions):
            return
        sums = {name: _checksum(array) for name, array in arrays.items()}
        said = gathered(self.backend, sums)
        for region in self.codomain.regions:
            first, *others = region.workers
            for worker in others:
                mine, theirs = said[first][region.name], said[worker][region.name]
                coarse = max(self.codomain.dtype, np.dtype(np.float64), key=machine_epsilon)
                exactly = self.codomain.dtype.kind in "iu"
                most = max(mine[0], theirs[0]) * rounding(
                    self.codomain.dtype if exactly else coarse, region.size
                )
                if max(abs(a - b) for a, b in zip(mine[1:], theirs[1:], strict=True)) > most:
                    raise self._fault(
                        f"gives {region.name}, which is replicated, other values on worker "
                        f"{worker} than on worker {first}"
                    )


def only_whole(dtype: np.dtype[Any]) -> str:
    """The words for reports that only whole numbers were given to functions which a user wrote:
    these are no evidence for floats. Empty for floating dtypes."""
    return f", on whole numbers of {dtype} alone" if dtype.kind in "iu" else ""


def host_vector(space: Space, arrays: Any, backend: Backend) -> Vector:
    """A vector of the regions that a backend's worker holds, in host memory also on a device
    backend; its inner products sum over all workers."""
    return Vector(space, held_arrays(space, backend.worker, arrays), backend.shared(space))


def gathered(backend: Backend, item: Item) -> list[Item]:
    """All-gather of a control message, as a list by worker; collective. On a backend that holds all
    workers, a list of the item alone."""
    if not isinstance(backend, Worker):
        return [item]
    return backend.transport.gather_all(item)


def exponents(dtype: np.dtype[Any]) -> tuple[int, int]:
    """(lowest, highest) exponent of two of the range in which numbers have full precision; (0, 0)
    for integers."""
    if dtype.kind in "iu":
        return 0, 0
    return int(limits(dtype).minexp), int(limits(dtype).maxexp)


def rounding(dtype: np.dtype[Any], terms: int) -> float:
    """A bound of the relative error of a sum of `terms` rounded terms of random sign: 16 machine
    epsilons times the square root of their number."""
    return 16 * machine_epsilon(dtype) * math.sqrt(max(1, terms))


def widened(array: Array) -> Array:
    """Numbers in the dtype in which errors are measured: float64, or one that is as wide as theirs
    (complex, long double)."""
    kinds = {"c": np.complex128, "f": np.float64}
    wide = kinds.get(array.dtype.kind)
    if wide is None or not native(array.dtype):
        return array.astype(np.float64)
    return array.astype(np.result_type(array.dtype, wide), copy=False)


def _checksum(array: Array) -> list[float]:
    """[bound of the projection's modulus, real part, imaginary part] of a random projection of an
    array; the same projection on every worker."""
    weights = np.random.default_rng(0).standard_normal(array.shape)
    wide = widened(array)
    total = complex(np.vdot(weights, wide))
    return [float(np.linalg.norm(weights) * np.linalg.norm(wide)), total.real, total.imag]
