"""The packages of other people's models: which are missing, and the import of torchvision.

torchvision's wheel from PyPI does not load its C++ operators beside the CPU build of torch, and
then fails to describe two of them. Nothing here uses these: they are declared, not defined.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

PACKAGES = "torch", "transformers", "timm", "torchvision"
_DECLARED: list[Any] = []
"""torch forgets the operators of a library that is collected."""


def missing() -> str:
    """Why models cannot be built; empty if they can."""
    absent = [name for name in PACKAGES if find_spec(name) is None]
    return (
        f"not installed: {', '.join(absent)}; pip install 'linop-algebra[models]'" if absent else ""
    )


def torchvision() -> Any:
    """The package, with its operators declared if its own cannot be loaded."""
    import torch

    try:
        return importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        _DECLARED.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in "nms", "qnms":
            _DECLARED[0].define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        return importlib.import_module("torchvision")


def versions() -> str:
    """Of all packages, for tables."""
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in PACKAGES)
