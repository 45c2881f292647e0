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

from linop.testing.parallel.libraries import folders

LARGEST = 2**22
"""Elements of the largest tensor of which a copy is kept."""


_STEPS = str(Path(__file__).with_name("steps.py"))
_HIDDEN = folders("torch")


def numbers(tensor: torch.Tensor) -> np.ndarray | None:
    """A copy of a tensor as an array, bfloat16 as float32; None if it is too large, or has no
    memory of its own."""
    if tensor.numel() > LARGEST or tensor.is_meta:
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


_OWN: set[str] = set()
"""Files whose lines are not the program's."""


def own_file(path: str) -> None:
    """Lines of this file are not the program's."""
    _OWN.add(path)


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the elements of a tensor, and their number."""
    own = local(tensor)
    if own.is_meta or own.layout != torch.strided or not own.numel():
        return 0, own.numel()
    if torch._C._functorch.is_functorch_wrapped_tensor(own):
        return 0, own.numel()
    return own.data_ptr(), own.numel()


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
