"""Memory of what backward needs: a block that has been extended by halos is in the extended block.

A convolution saves its input, the block with its halos, and what made the block saves it, too, as
ReLU does its result. Both are one memory here: what has been saved of a block is taken from the
inside of the extended one, and the block's own memory is free.

Autograd does not notice that a tensor was changed in place after it was saved, where tensors are
saved by hooks. So changes are noted here: those that rules make, and those of parameters.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class _Saved:
    """A tensor that backward needs.

    Args:
        tensor: the tensor.
        parameter: the parameter whose memory it is.
    """

    __slots__ = ("__weakref__", "changed", "parameter", "tensor", "version")

    def __init__(self, tensor: Tensor, parameter: Tensor | None) -> None:
        self.tensor, self.parameter, self.changed = tensor, parameter, False
        self.version = 0 if parameter is None else parameter._version

    def taken(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed after it was saved, as autograd's own.
        """
        p = self.parameter
        if self.changed or (p is not None and p._version != self.version):
            what = "a parameter" if p is not None else "a tensor"
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {what} of shape {tuple(self.tensor.shape)}, in a module that "
                f"is cut in space; run backward before it is changed, or change a copy"
            )
        return self.tensor


class Saving:
    """Context of a forward whose saved tensors share memory with extended blocks.

    Args:
        parameters: of the module.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {p.data_ptr(): p for p in parameters if p.numel()}
        self._known: dict[int, list[weakref.ref[_Saved]]] = {}
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._before: Saving | None = None
        self._last: tuple[Tensor, Tensor] | None = None

    def __enter__(self) -> Saving:
        self._before, _HERE.saving = _HERE.saving, self
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        _HERE.saving = self._before
        self._known.clear()
        self._last = None

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
            return tensor  # a subclass, which may have no memory of its own
        saved = _Saved(tensor, self._parameters.get(tensor.data_ptr()))
        self._known.setdefault(_memory(tensor), []).append(weakref.ref(saved))
        return saved

    def _of(self, block: Tensor) -> list[_Saved]:
        known = self._known.get(_memory(block), ())
        return [saved for one in known if (saved := one()) is not None]

    def extended(self, block: Tensor, inside: Tensor) -> None:
        """A saved block is taken from a view with the same values from now on."""
        self._last = block, inside
        inside, moved = inside.detach(), []
        for saved in self._of(block):
            t = saved.tensor
            same = t.data_ptr(), t.shape, t.stride(), t.dtype
            if same == (block.data_ptr(), block.shape, block.stride(), block.dtype):
                saved.tensor = inside
                moved.append(saved)
        left = [weakref.ref(one) for one in self._of(block) if one not in moved]
        self._known[_memory(block)] = left

    def inside_of(self, block: Tensor) -> Tensor | None:
        """The view that may stand for a block which was extended last; asked for once."""
        last, self._last = self._last, None
        # A leaf has its gradient, and nothing has saved it.
        return last[1] if last is not None and last[0] is block and not block.is_leaf else None

    def changes(self, block: Any) -> None:
        """A block is changed in place."""
        for saved in self._of(block):
            saved.changed = True


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unpack(saved: Any) -> Tensor:
    return saved.taken() if isinstance(saved, _Saved) else saved


class _Here(threading.local):
    saving: Saving | None = None


_HERE = _Here()


def saving() -> Saving | None:
    """That of the forward that this thread is in."""
    return _HERE.saving
