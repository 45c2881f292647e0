"""The arguments that a layer was constructed with, and the values that several workers hold: in
words and digests that workers compare.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from linop.errors import BackendError
from linop.spaces.tensor import TensorSpace

Said = Mapping[str, str]
"""A worker's values, by name."""


def recorded(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor whose arguments the object keeps, by name: those of the outermost of linop's
    constructors, of a class and its bases."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        if "_arguments" not in self.__dict__:
            try:
                given = signature.bind(self, *args, **kwargs)
            except TypeError:
                pass  # the constructor says what is wrong
            else:
                given.apply_defaults()
                self.__dict__["_arguments"] = dict(list(given.arguments.items())[1:])
        init(self, *args, **kwargs)

    return constructor


def arguments_of(layer: Any) -> Said:
    """The arguments in words, with the values that attributes of their names have now. Devices are
    left out, which may be each worker's own."""
    given = layer.__dict__.get("_arguments", {})
    now = {name: layer.__dict__.get(name, value) for name, value in given.items()}
    return {name: _words(value) for name, value in now.items() if name != "device"}


def _words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}, {digest(value)[:8]}…"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_words, value))})"
    if callable(value) or " at 0x" in repr(value):  # the address is each worker's own
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value)


def digest(tensor: Any) -> str:
    """Of the bits of a tensor: NaN is equal to itself. Empty for one that has no values."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return ""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data).hexdigest()[:32]


def compare_arguments(where: str, said: Sequence[Said]) -> None:
    """See that all workers constructed a layer with the same arguments.

    Raises:
        BackendError: they did not; on every worker.
    """
    for worker, theirs in enumerate(said):
        if theirs == said[0]:
            continue
        for name in dict.fromkeys([*said[0], *theirs]):
            first, other = (one.get(name, "nothing") for one in (said[0], theirs))
            if first != other:
                raise BackendError(
                    f"{where}: constructed with {name}={first} on worker 0 and {name}={other} on "
                    f"worker {worker}; the same arguments expected on every worker"
                )


def compare_values(
    where: str, what: str, holders: Iterable[Sequence[int]], said: Sequence[Said]
) -> None:
    """See that workers that hold the same piece of a tensor have the same values.

    Args:
        what: the tensor's name in `said`, where its digest is.
        holders: the workers of each piece.

    Raises:
        BackendError: they have not; on every worker.
    """
    for group in holders:
        known = [w for w in group if said[w].get(what)]
        for w in known[1:]:
            if said[w][what] != said[known[0]][what]:
                raise BackendError(
                    f"{where}: {what} differs between workers {known[0]} and {w}, which hold the "
                    f"same piece of it; the same values expected"
                )


def holders_of(space: TensorSpace) -> Iterator[Sequence[int]]:
    """The workers of each piece that several hold."""
    for region in space.regions:
        if len(region.workers) > 1:
            yield region.workers
