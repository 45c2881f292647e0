"""Lines of a checked program, found from inside of its calls. No torch here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from linop.testing.parallel.libraries import folders

_HIDDEN = folders("numpy")


def line_of_program() -> str:
    """The innermost line that is neither linop's, NumPy's nor Python's, ``file:line``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(("<", *_HIDDEN)):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
