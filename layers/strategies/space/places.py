"""Places in a user's model, for errors and warnings."""

from __future__ import annotations

import inspect
import os
from types import FrameType

import torch

from linop import errors
from linop.layers.agreement.naming import _calling, path_of

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (
        os.path.dirname(errors.__file__),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    )
)


def line() -> str:
    """``file.py:12`` of the innermost line of the stack that is neither torch's nor linop's."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_TORCH) and not os.path.realpath(name).startswith(_OWN):
            if not name.startswith("<"):
                return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def place() -> str:
    """``Net.block.1 (Conv2d), model.py:12: ``; empty outside of modules."""
    module = next(_calling(inspect.currentframe()), None)
    where = [path_of(module)] if module is not None else []
    at = line()
    return ", ".join([*where, *([at] if at else [])]) + ": " if where or at else ""
