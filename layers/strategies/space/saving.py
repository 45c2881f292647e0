"""Memory of what backward needs: a block that has been extended by halos is in the extended block.

A convolution saves its input, the block with its halos, and what made the block saves it, too, as
ReLU does its result. Both are one memory here: what has been saved of a block is taken from the
inside of the extended one, and so is the block, which stays the tensor that it is in autograd's
graph; its own memory is free.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.saved import Saved, taken, version


class _Saved(Saved):
    """A tensor that backward needs.

    Args:
        tensor: the tensor.
        where: for errors.
        is_parameter: True for a parameter.
        inside: a block that is in the memory of the tensor.
    """

    __slots__ = ("inside", "is_parameter")

    def __init__(
        self, tensor: Tensor, where: str, is_parameter: bool, inside: Tensor | None
    ) -> None:
        self.is_parameter = is_parameter
        self.inside = None if inside is None else inside.detach()
        super().__init__(tensor, where)

    def current(self) -> Any:
        """Versions of the tensor, and of the block in it."""
        return version(self.tensor), 0 if self.inside is None else version(self.inside)


class Saving:
    """Context of a forward whose saved tensors share memory with extended blocks.

    Args:
        parameters: of the module.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {p.data_ptr() for p in parameters if p.numel()}
        self._known: dict[int, list[weakref.ref[_Saved]]] = {}
        self._inside: dict[int, weakref.ref[Tensor]] = {}
        """The block that is in some memory, by that of an extended one."""
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, taken)
        self._before: Saving | None = None

    def __enter__(self) -> Saving:
        self._before, _HERE.saving = _HERE.saving, self
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        _HERE.saving = self._before
        self._known.clear()
        self._inside.clear()

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
            return tensor  # a subclass, which may have no memory of its own
        memory = _memory(tensor)
        known = self._inside.get(memory)
        inside = None if known is None else known()
        if inside is not None and _memory(inside) != memory:
            inside = None
        is_parameter = tensor.data_ptr() in self._parameters
        saved = _Saved(tensor, _WHERE, is_parameter, inside)
        self._known.setdefault(memory, []).append(weakref.ref(saved))
        return saved

    def _of(self, block: Tensor) -> list[_Saved]:
        known = self._known.get(_memory(block), ())
        return [saved for one in known if (saved := one()) is not None]

    def extended(self, block: Tensor, inside: Tensor) -> None:
        """A block, and what has been saved of it, is in the memory of a view with the same values
        from now on; unless others are in its memory, too, which would not see its changes."""
        of_block = self._of(block)
        # A leaf is the user's own. A view has a base.
        if block.is_leaf or block._is_view() or _holders(block) != _ALONE + len(of_block):
            return
        same = block.data_ptr(), block.shape, block.stride(), block.dtype
        inside, moved = inside.detach(), []
        for saved in of_block:
            t = saved.tensor
            if (t.data_ptr(), t.shape, t.stride(), t.dtype) == same:
                moved.append(saved)
        if len(moved) < len(of_block):
            return
        # By its data: another tensor in its place would not have its gradient.
        block.data = inside
        for saved in moved:
            saved.put(block)
        memory = _memory(block)
        self._inside[memory] = weakref.ref(block)
        self._known.setdefault(memory, []).extend(weakref.ref(saved) for saved in moved)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _holders(tensor: Tensor) -> int:
    """The number of tensors that are in the memory of one, its own included."""
    count: Any = torch._C._storage_Use_Count
    return int(count(tensor.untyped_storage()._cdata))


_ALONE = _holders(torch.empty(1))


_WHERE = "a module that is cut in space"


class _Here(threading.local):
    saving: Saving | None = None


_HERE = _Here()


def saving() -> Saving | None:
    """That of the forward that this thread is in."""
    return _HERE.saving
