"""Tensors of a distributed model's state, each with this worker's block. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linop.backends import Backend
from linop.errors import ArgumentError, ShapeError
from linop.layers.layer import Layer
from linop.layers.parameters.blocks import blocks
from linop.layers.parameters.draws import with_memory
from linop.layers.parameters.packing import Packing
from linop.spaces.tensor import TensorSpace

MODEL, OPTIMIZER = "model", "optimizer"
"""Top-level keys of a checkpoint that holds an optimizer's state too."""
WRAPPED = "_linop_wrapped"
"""Attribute of wrappers: the name of the submodule whose state theirs is."""


@dataclass
class StateTensor:
    """One tensor of the state, with this worker's block.

    Args:
        key: the tensor's name in the sequential state.
        spaces: by the backend of its workers, that of the global tensor; and of its block here,
            if that is cut over other workers again. Empty if every worker holds the whole.
        block: this worker's; None if it holds none.
        dtype: the same on all workers; None until they have agreed.
        trained: True for a parameter, False for a buffer.
        packing: the order of rows in the global tensor, where it is not the sequential state's.
    """

    key: str
    spaces: Mapping[Backend, TensorSpace]
    block: Tensor | None
    dtype: Any = None
    trained: bool = False
    packing: Packing | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.shape_within(self.spaces)

    def shape_within(self, backends: Iterable[Backend]) -> tuple[int, ...]:
        """The shape of the tensor that groups of workers have together.

        Args:
            backends: of the last ones of the groups, in order.
        """
        spaces = (self.spaces[backend] for backend in backends if backend in self.spaces)
        whole = next(spaces, None)
        if whole is not None:
            return whole.global_shape
        assert self.block is not None
        return tuple(self.block.shape)

    @property
    def pieces(self) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Boxes of the sequential tensor that this worker's block has: slices there, and in the
        block. One, but for parameters of several parts."""
        here = self._here
        if self.packing is not None:
            return self.packing.pieces(here)
        return [(here, tuple(slice(0, s.stop - s.start) for s in here))]

    @property
    def _here(self) -> tuple[slice, ...]:
        """Slices of this worker's block in the global tensor: of a block of a block, composed."""
        found = tuple(slice(0, n) for n in self.shape)
        for backend, space in self.spaces.items():
            inner = space.slices(backend.worker or 0)
            pairs = zip(found, inner, strict=True)
            found = tuple(slice(a.start + b.start, a.start + b.stop) for a, b in pairs)
        return found

    def materialise(self, device: Any) -> None:
        """Allocate memory on a device for a block on the meta device. The tensor stays the same
        object, to which an optimizer or another module may refer."""
        block = self.block
        if block is None or not block.is_meta:
            return
        with_memory(block, device)


def state_tensors(model: Any) -> Iterator[StateTensor]:
    """Tensors of a model's state, with this worker's blocks, in the order of `state_dict`."""
    known = blocks()
    for prefix, module in prefixed_modules(model):
        spaces = module.spaces if isinstance(module, Layer) else {}
        kept = {
            n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set
        }
        for tensors, trained in ((module._parameters, True), (kept, False)):
            for name, tensor in tensors.items():
                if name in spaces or tensor is not None:
                    cut = {block.layer.backend: block.space for block in known.get(id(tensor), ())}
                    if name in spaces:
                        cut = {module.backend: spaces[name]} | cut
                    order = getattr(module, "packings", {}).get(name)
                    yield StateTensor(prefix + name, cut, tensor, None, trained, order)


def prefixed_modules(model: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Modules of a model, each under all its names, with the prefix of its tensors in the state of
    the single-process model: that has no wrappers, such as `linop.strategies.DataParallel`."""
    yield prefix, model
    inner = getattr(model, WRAPPED, None)
    for name, child in model._modules.items():
        if child is not None:
            yield from prefixed_modules(child, prefix if name == inner else f"{prefix}{name}.")


def keyed_parameters(model: Any) -> dict[str, Tensor]:
    """Parameters by their keys in the state of the single-process model; tied ones have several."""
    return {
        prefix + name: p
        for prefix, module in prefixed_modules(model)
        for name, p in module._parameters.items()
        if p is not None
    }


def unwrapped(module: Any) -> Any:
    """The module of the single-process model that a wrapper has; another module itself."""
    while inner := getattr(module, WRAPPED, None):
        module = getattr(module, inner)
    return module


def beside_tensors(model: Any) -> list[str]:
    """Names of what changes a model's ``state_dict`` and is no tensor: extra states, and hooks or
    methods that rename or replace its values."""
    found = []
    for prefix, module in prefixed_modules(model):
        kind = type(module)
        does = {
            "get_extra_state": [kind.get_extra_state],
            "_save_to_state_dict": [kind._save_to_state_dict],
            "a hook on state_dict": module._state_dict_hooks.values(),
        }
        name = prefix.removesuffix(".") or "the model"
        found += [
            f"{what} of {name} ({kind.__qualname__})"
            for what, functions in does.items()
            if any(map(_is_foreign, functions))
        ]
    return found


def _is_foreign(function: Any) -> bool:
    """True of a function that is neither torch's own nor linop's."""
    where = getattr(function, "__module__", None) or ""
    return where != "torch.nn.modules.module" and not where.startswith("linop.")


def lost_on_meta(model: Any) -> list[str]:
    """Names of non-persistent buffers on the meta device, which no state can fill."""
    return [
        prefix + name
        for prefix, module in prefixed_modules(model)
        for name, tensor in module._buffers.items()
        if name in module._non_persistent_buffers_set and tensor is not None and tensor.is_meta
    ]


def fit(what: str, items: Sequence[StateTensor], shapes: Mapping[str, Any]) -> None:
    """Check that a state has the names of the items, no others, and their shapes.

    Args:
        what: name of the function, for errors.
        shapes: of the state, by name; the name of its type for a value that is no tensor, which
            is not checked.

    Raises:
        ArgumentError: names are missing or unexpected. ShapeError: a shape differs.
    """
    wanted = {item.key: item.shape for item in items}
    missing = [key for key in wanted if key not in shapes]
    unexpected = [key for key in shapes if key not in wanted]
    if missing or unexpected:
        raise ArgumentError(
            f"{what}: the state does not fit the model: missing {missing}, unexpected {unexpected}"
        )
    for key, shape in wanted.items():
        if not isinstance(shapes[key], str) and tuple(shapes[key]) != shape:
            raise ShapeError(
                f"{what}: {key!r} has shape {tuple(shapes[key])} in the state; {shape} expected"
            )


def check_kinds(what: str, items: Sequence[StateTensor], dtypes: Mapping[str, Any]) -> None:
    """Check that the numbers of a state are of kinds that the items hold.

    Args:
        dtypes: of the state, by name.

    Raises:
        ArgumentError: numbers are complex, or fractions, and the item's dtype has none.
    """
    for item in items:
        given, wanted = dtypes[item.key], item.dtype
        if wanted is not None and not torch.can_cast(given, wanted):
            raise ArgumentError(
                f"{what}: {item.key!r} is of {given} in the state, and of {wanted} in the model, "
                f"which does not hold such numbers; give a state, or a model, of the other dtype"
            )


def check_range(what: str, key: str, given: Tensor, dtype: torch.dtype | None) -> None:
    """Check that the numbers of a state are in the range of an item's dtype. Floats may be rounded,
    to zero if the dtype has none that are as small.

    Args:
        dtype: of the item; None if it takes any.

    Raises:
        ArgumentError: a number would become another, or infinite.
    """
    if dtype in (None, given.dtype):
        return
    if given.is_floating_point() and given.itemsize == 1:
        given = given.float()  # torch does not index shorter ones
    there = given.to(dtype)
    there = there.real if there.is_complex() and not given.is_complex() else there
    # As float64, since torch has no functions of short dtypes; in which it rounds whole numbers.
    before, after = _as_float64(given), _as_float64(there)
    if given.is_floating_point() or given.is_complex():
        assert dtype is not None
        limits = torch.finfo(dtype)
        error = torch.where(before == after, 0.0, (after - before).abs())  # inf - inf is NaN
        tiny = (before != 0) & (error <= limits.smallest_normal)
        lost = ~((error <= limits.eps * before.abs()) | tiny) & ~(before.isnan() & after.isnan())
        lost |= before.isinf() != after.isinf()
        lost = lost.any(-1) if given.is_complex() else lost
    else:
        lost = (there.to(given.dtype) != given) | ((before < 0) != (after < 0)) | after.isinf()
    if bool(lost.any()):
        raise ArgumentError(
            f"{what}: {key!r} has {given[lost][0].item()} in the state, beyond the range of the "
            f"model's {dtype}; give a state, or a model, of the other dtype"
        )


def _as_float64(tensor: Tensor) -> Tensor:
    """A tensor's numbers, complex ones as pairs."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64)
