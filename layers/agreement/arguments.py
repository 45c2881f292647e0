"""Constructor arguments of layers, and replicated values, as texts and digests for workers to
compare. Nothing is sent here.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from linop.errors import BackendError
from linop.layers.parameters.blocks import plain
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

Said = Mapping[str, str]
"""A worker's texts or digests, by name."""


def recorded(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor, so that the object keeps its arguments by name; where constructors call
    those of base classes, the outermost one's. When that ends, it calls what is `_unfinished` of
    the object, if there is something."""
    signature, once = inspect.signature(init), "partitions_once"

    @functools.wraps(init)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > 1 and isinstance(args[1], Partition) and getattr(type(self), once):
            args, kwargs = _in_this_order(type(self), args, kwargs)
        outermost = "_constructing" not in self.__dict__
        self.__dict__["_constructing"] = True
        if "_arguments" not in self.__dict__:
            try:
                given = signature.bind(self, *args, **kwargs)
            except TypeError:
                pass  # the constructor says what is wrong
            else:
                given.apply_defaults()
                self.__dict__["_arguments"] = dict(list(given.arguments.items())[1:])
        init(self, *args, **kwargs)
        if outermost:
            del self.__dict__["_constructing"]
            finish = self.__dict__.pop("_unfinished", None)
            if finish is not None:
                finish()

    return constructor


def _in_this_order(kind: Any, args: Sequence[Any], kwargs: Said) -> tuple[Any, dict[str, Any]]:
    """Arguments of a call with several partitions first, as calls are now: one partition, torch's
    arguments, and other partitions by name. It warns, and shows the new call."""
    count = next((k for k, x in enumerate(args) if not isinstance(x, Partition)), len(args))
    placed = dict(zip(kind.partitions_once, args[1:count], strict=False))
    kept = args[0], *args[count:]
    new = {**kwargs, **placed}
    texts = [*map(repr, kept), *(f"{name}={value!r}" for name, value in new.items())]
    warnings.warn(
        f"{kind.__name__}: partitions after the first one are given by name now; write "
        f"{kind.__name__}({', '.join(texts)})",
        DeprecationWarning,
        stacklevel=3,
    )
    return kept, new


def arguments_of(layer: Any) -> Said:
    """A layer's constructor arguments as texts, by name; of an attribute with the same name, its
    current value. Devices are left out: they may differ between workers."""
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
    """SHA-256 of a tensor's bits, 32 hexadecimal digits; NaN equals itself. Empty for tensors on
    the meta device, or of a layout other than strided."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return ""
    x = plain(tensor).cpu().resolve_conj().resolve_neg().contiguous()
    data = x.reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data).hexdigest()[:32]


def compare_arguments(where: str, said: Sequence[Said]) -> None:
    """Check that all workers constructed a layer with the same arguments.

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


def compare_values(where: str, spaces: Mapping[str, TensorSpace], said: Sequence[Said]) -> None:
    """Check by digests that workers that hold the same block of a tensor have equal values.

    Args:
        where: name of the layer, for errors.
        spaces: of the tensors, by name; of one without a space every worker holds the whole.
        said: digests of each worker, by name.

    Raises:
        BackendError: they differ; on every worker.
    """
    for what in dict.fromkeys(name for digests in said for name in digests):
        everybody: list[Sequence[int]] = [range(len(said))]
        space = spaces.get(what)
        for holders in everybody if space is None else [r.workers for r in space.regions]:
            known = [w for w in holders if said[w].get(what)]
            for w in known[1:]:
                if said[w][what] != said[known[0]][what]:
                    raise BackendError(
                        f"{where}: {what} differs between workers {known[0]} and {w}, which hold "
                        f"the same piece of it; the same values expected"
                    )
