"""The name of a layer in its network, as ``LeNet.features.3 (Conv2d)``, for errors. Modules do not
store it: it is read from the module calls on the stack when an error or a plan needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

_CALL = torch.nn.Module._call_impl.__code__


def path_of(layer: Any, frame: FrameType | None = None) -> str:
    """Dotted path of a layer from the outermost module on the call stack, and its class; the class
    alone, if no other module calls it.

    Args:
        frame: a frame inside of the layer's call; by default, the current one.
    """
    path, holder, name = "", None, type(layer).__name__
    calling = _calling(inspect.currentframe() if frame is None else frame)
    for module in [*reversed(list(calling)), layer]:
        if module is holder:
            continue
        step = None if holder is None else _name_in(holder, module)
        path = type(module).__name__ if step is None else f"{path}.{step}"
        holder = module
    return path if path == name else f"{path} ({name})"


def _calling(frame: FrameType | None) -> Iterator[Any]:
    """The modules whose calls are on the stack, the innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def _name_in(holder: Any, module: Any) -> str | None:
    for name, child in holder.named_modules():
        if child is module:
            return str(name)
    return None
