"""Attributes of ours on parameters, which are not saved with them: a file of a module is as plain
as the module was."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

_PREFIX = "_linop_"


def mark(parameter: Any, **values: Any) -> None:
    """Set attributes of a parameter, without ``_linop_``; pickling leaves them out."""
    for name, value in values.items():
        setattr(parameter, _PREFIX + name, value)
    # torch asks a parameter itself what is to be pickled beside its values.
    parameter.__getstate__ = partial(_others, weakref.ref(parameter))


def _others(known: Any) -> dict[str, Any]:
    parameter = known()
    items = {} if parameter is None else parameter.__dict__
    return {k: v for k, v in items.items() if not k.startswith((_PREFIX, "__getstate__"))}
