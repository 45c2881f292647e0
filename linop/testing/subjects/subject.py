"""What a check applies: a linear map between spaces and its adjoint, where they run.

A `Subject` is called with a `Vector` and gives one. Where it runs is a backend: one process that
holds all regions, or one worker of a program, in which every worker makes the same calls. The
vectors are NumPy's, in main memory; the function is given the backend's arrays, and gives them.
What a foreign function returns is looked at before it is used: a `Fault` says what is wrong with
it, on every worker in the same words.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from linop.backends.base import Backend, held, held_arrays
from linop.backends.worker import Worker
from linop.errors import ArgumentError, BackendError
from linop.normal_form.maps import bare_or_dict
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space, Vector
from linop.testing.report import Worst, element_in, shown, workers_text

Function = Callable[[Any], Any]
"""Gets and returns what a worker holds: None, the bare array of its region, or a dict by name."""


class Fault(Exception):  # a finding, which never leaves a check
    """What is wrong with a result or an argument; the same on every worker."""

    def __init__(self, worst: Worst) -> None:
        super().__init__(worst.text)
        self.worst = worst


@dataclass(frozen=True)
class Subject:
    """A linear map and its adjoint; `subject.H` is the same the other way round.

    Attributes:
        name: in reports.
        domain, codomain: their dtypes may differ.
        forward, adjoint: the two functions.
        backend: where they run.
        real: whether it is linear over real numbers only: then the inner product is the real part.
        exact: whether nothing in it rounds.
        foreign: whether the functions are not linop's, and may do anything.
        flat: whether they are those of a matrix-like object of one process, which promises neither
            memory of its own nor a dtype as narrow as it says.
        anonymous: whether its regions' names are only made up, since shapes alone were given.
        role: which of the two `forward` is.
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
    _last: dict[str, tuple[Array, bytes]] = field(default_factory=dict, repr=False, compare=False)
    """By region: the result of the call before, and the bytes that were in it."""

    @property
    def shape(self) -> tuple[int, int]:
        """(codomain.size, domain.size)."""
        return self.codomain.size, self.domain.size

    @property
    def H(self) -> Subject:
        """The adjoint.

        Raises:
            ArgumentError: none was given.
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
            _last={},
        )

    def __call__(self, x: Vector) -> Vector:
        """The map applied to a vector. Collective where the backend is one worker's.

        Raises:
            Fault: the function changed its argument, or its result does not fit.
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
                raise  # a plan tells the others itself
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
        """What the function returned, by region, where it is."""
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
        """The array of a region, of the right kind, shape and dtype."""
        dtype, where = self.codomain.dtype, f"for {region.name} ({workers_text(region.workers)})"
        kind = self.backend.arrays.of(region.memory)
        if isinstance(array, np.generic):
            array = kind.taken(array)
        if not isinstance(array, kind.ndarray):
            kinds = (f"{k.__module__}.{k.__qualname__}" for k in (type(array), kind.ndarray))
            found, wanted = (name.removeprefix("builtins.") for name in kinds)
            raise self._fault(f"returned {found} {where}; expected a {wanted}")
        if array.shape != region.shape:
            raise self._fault(f"returned shape {array.shape} {where}; expected {region.shape}")
        if self.flat and np.can_cast(array.dtype, dtype, "same_kind"):
            narrow = array.dtype.kind in "fc" and epsilon(array.dtype) > epsilon(dtype)
            array = array if narrow else array.astype(dtype)
        fits: Array = array
        if fits.dtype != dtype:
            raise self._fault(f"returned dtype {fits.dtype} {where}; expected {dtype}")
        return fits

    def _fetched(self, space: Space, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays of regions, in main memory."""
        kinds = {name: self.backend.arrays.of(space[name].memory) for name in arrays}
        return {name: kinds[name].fetched(array) for name, array in arrays.items()}

    def _look_at_argument(self, given: Mapping[str, Array], x: Vector) -> None:
        """That it is as it was."""
        for name, array in given.items():
            changed = np.flatnonzero(array != x[name])
            if changed.size:
                k = int(changed[0])
                was, now = x[name].flat[k].item(), array.flat[k].item()
                raise self._fault(
                    f"changed its argument in place: {{}} was {shown(was)}, is {shown(now)}",
                    (self.domain, name, k),
                )

    def _look_at_memory(self, returned: Mapping[str, Array], given: Mapping[str, Array]) -> None:
        """That results are their own."""
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
        """That the result of the call before is as it was: it is its caller's."""
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
        """That results are finite."""
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
        """Raise on all workers what any of them found, the first one's; collective."""
        target = fault and fault.worst.target
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
        """That all holders of a replicated region have the same in it, but for rounding."""
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
                most = max(mine[0], theirs[0]) * rounding(self.codomain.dtype, region.size)
                if max(abs(a - b) for a, b in zip(mine[1:], theirs[1:], strict=True)) > most:
                    raise self._fault(
                        f"gives {region.name}, which is replicated, other values on worker "
                        f"{worker} than on worker {first}"
                    )


def host_vector(space: Space, arrays: Any, backend: Backend) -> Vector:
    """A vector of the regions that a backend's worker holds, in main memory, whatever the backend's
    own arrays are; its inner products sum over all workers."""
    return Vector(space, held_arrays(space, backend.worker, arrays), backend.total(space))


def gathered(backend: Backend, item: Any) -> list[Any]:
    """Everybody's item, by worker; collective. Of one process, its own."""
    if not isinstance(backend, Worker):
        return [item]
    return [pickle.loads(data) for data in backend.transport.gather_all(pickle.dumps(item))]


def epsilon(dtype: np.dtype[Any]) -> float:
    """The distance of 1 from the next number: 0 where numbers are whole."""
    if dtype.kind in "iu":
        return 0.0
    return float(np.finfo(dtype).eps) if dtype.kind in "fc" else 2.0**-7  # V is bfloat16


def exponents(dtype: np.dtype[Any]) -> tuple[int, int]:
    """The powers of two at the ends of the range in which numbers have full precision; (0, 0) where
    they are whole."""
    if dtype.kind in "iu":
        return 0, 0
    info = np.finfo(dtype if dtype.kind in "fc" else np.float32)  # bfloat16 has its range
    return int(info.minexp), int(info.maxexp)


def rounding(dtype: np.dtype[Any], terms: int) -> float:
    """The relative error of a sum of so many terms of random sign, each rounded: about their
    root in units of the last place; sixteen times that is allowed."""
    return 16 * epsilon(dtype) * math.sqrt(max(1, terms))


def _checksum(array: Array) -> list[float]:
    """A bound for its size, then a random projection, as real numbers."""
    weights = np.random.default_rng(0).standard_normal(array.shape)
    wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    total = complex(np.vdot(weights, wide))
    return [float(np.linalg.norm(weights) * np.linalg.norm(wide)), total.real, total.imag]
