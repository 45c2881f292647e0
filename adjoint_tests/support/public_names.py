"""The public names of linop, which docstrings' tests and the reference's go over."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

MODULES = (
    "",
    "autograd",
    "backends",
    "fourier",
    "interop",
    "layers",
    "local_operators",
    "loops",
    "networks",
    "pictures",
    "planning",
    "schedules",
    "solvers",
    "solvers.prox",
    "strategies",
    "testing",
    "testing.strategies",
)
TORCH = ("autograd", "layers", "strategies")
"""The modules that import torch."""
HAS_TORCH = find_spec("torch") is not None


def public(modules: Iterable[str] = MODULES) -> Iterator[tuple[str, Any]]:
    """Each public name with its value, those of modules excepted."""
    for name in modules:
        if name in TORCH and not HAS_TORCH:
            continue
        module = importlib.import_module(f"linop.{name}".rstrip("."))
        for own in getattr(module, "__all__", ()):
            if not inspect.ismodule(value := getattr(module, own)):
                yield f"{module.__name__}.{own}", value
