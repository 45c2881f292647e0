"""Tensors as arrays, and lines of the program that is looked at."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from linop.testing.parallel.libraries import folders

DISTRIBUTED: tuple[type, ...] = ()
"""Classes of tensors that have their elements on several ranks."""
PENDING: tuple[type, ...] = ()
"""Classes of tensors that wait for a collective before they are used."""
if dist.is_available():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    DISTRIBUTED, PENDING = (DTensor,), (AsyncCollectiveTensor,)
WRAPPERS = DISTRIBUTED + PENDING
"""Classes of tensors whose elements are those of another one within."""

LARGEST = 2**22
"""Elements of the largest tensor of which a copy is kept."""


_STEPS = str(Path(__file__).with_name("steps.py"))
_HIDDEN = folders("torch")


def numbers(tensor: torch.Tensor) -> np.ndarray | None:
    """A copy of a tensor as an array, bfloat16 as float32; None if it is too large, or has no
    memory of its own."""
    if tensor.numel() > LARGEST or tensor.is_meta or is_fake(tensor):
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    own = local(tensor.detach())
    if own.layout != torch.strided:
        own = own.to_dense()
    if own.dtype.is_floating_point and own.dtype.itemsize < 4:
        own = own.float()
    # A copy first: torch never resizes memory that NumPy has seen, as FSDP wants to.
    return own.resolve_conj().resolve_neg().clone().cpu().numpy()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: of a DTensor its local tensor."""
    own = getattr(tensor, "_local_tensor", None)
    return tensor if own is None else own


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that has the elements of this rank."""
    own = local(tensor)
    return own.elem if isinstance(own, PENDING) else own  # type: ignore[attr-defined]


def users_line() -> tuple[str, str]:
    """The innermost line that is neither linop's, torch's nor Python's, ``file:line``, and its
    text; empty if the step itself, which is ours, has called torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _STEPS:
        name = frame.f_code.co_filename
        if not name.startswith(("<", *_HIDDEN)) and name not in _OWN:
            text = linecache.getline(name, frame.f_lineno).strip()
            return f"{Path(name).name}:{frame.f_lineno}", text
        frame = frame.f_back
    return "", ""


def ends_a_collective() -> bool:
    """True for an operation of torch's own at the end of a collective: called from inside of
    `torch.distributed`, or by a line that waits."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("linop.", "torch._")):
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            return module.startswith("torch.distributed") or "wait(" in line
        frame = frame.f_back
    return False


_OWN: set[str] = set()
"""Files whose lines are not the program's."""


def own_file(path: str) -> None:
    """Lines of this file are not the program's."""
    _OWN.add(path)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """As many elements as a tensor has, one after the other in its memory from its first on: what
    gloo moves; of a contiguous tensor its own."""
    if not is_plain(tensor) or tensor.is_contiguous():
        return tensor
    first, n = tensor.storage_offset(), tensor.numel()
    if first + n > tensor.untyped_storage().nbytes() // max(tensor.element_size(), 1):
        return tensor
    return torch.as_strided(tensor.detach(), (n,), (1,), first)


def has_gaps(tensor: torch.Tensor) -> bool:
    """True if elements of a tensor are not side by side in memory, as those of every second column
    are not."""
    if not is_plain(tensor) or not tensor.numel():
        return False
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return span != tensor.numel()


def is_fake(tensor: torch.Tensor) -> bool:
    """True for tensors that have no elements, by which torch's pipelines learn the shapes of what
    stages send."""
    return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


def is_plain(tensor: torch.Tensor) -> bool:
    """True for tensors that have their elements in memory of this process, by strides."""
    if tensor.layout != torch.strided or tensor.is_meta or type(tensor) in WRAPPERS:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def apart(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor whose elements are memory of their own, and so can be told apart: a copy of one that
    is expanded, as the gradient of a sum is."""
    if tensor is None or tensor.layout != torch.strided or tensor.is_meta:
        return tensor
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or type(tensor) is not torch.Tensor:
        return tensor
    is_expanded = any(
        n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.clone(memory_format=torch.contiguous_format) if is_expanded else tensor


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the elements of a tensor, and their number."""
    own = memory(tensor)
    if own.is_meta or own.layout != torch.strided or not own.numel():
        return 0, own.numel()
    if torch._C._functorch.is_functorch_wrapped_tensor(own):
        return 0, own.numel()
    return own.data_ptr(), own.numel()


def address_of(tensor: torch.Tensor) -> int:
    """The address of the memory that the elements of a tensor are in; 0 if it has none of its
    own."""
    own = memory(tensor)
    if own.is_meta or own.layout != torch.strided or not own.numel():
        return 0
    if torch._C._functorch.is_functorch_wrapped_tensor(own):
        return 0
    return own.untyped_storage().data_ptr()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of numbers in arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)
