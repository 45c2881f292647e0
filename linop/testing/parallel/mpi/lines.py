"""Lines of a checked program, found from inside of its calls. No torch here."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

import numpy as np

_HIDDEN = tuple(
    str(path)
    for place in (
        Path(__file__).parents[3],
        Path(np.__file__).parent,
        Path(sysconfig.get_paths()["stdlib"]),
    )
    for path in dict.fromkeys((place, place.resolve()))
)


def line_of_program() -> str:
    """The innermost line that is neither linop's, NumPy's nor Python's, ``file:line``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(("<", *_HIDDEN)):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
