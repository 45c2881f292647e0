"""Debug mode's warning where a plain module is applied to a block, and its result differs from the
block of its result on the global tensor.

Results of layers are plain tensors. They are tracked by identity, through pointwise modules too,
but not through functions (`torch.relu`, a sum of two).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.loss import _Loss
from torch.utils.weak import WeakTensorKeyDictionary

from linop.layers.agreement.naming import path_of

_POINTWISE = (
    *(torch.nn.Identity, torch.nn.ReLU, torch.nn.ReLU6, torch.nn.LeakyReLU, torch.nn.ELU),
    *(torch.nn.SELU, torch.nn.CELU, torch.nn.GELU, torch.nn.SiLU, torch.nn.Mish, torch.nn.Sigmoid),
    *(torch.nn.LogSigmoid, torch.nn.Tanh, torch.nn.Tanhshrink, torch.nn.Softplus),
    *(torch.nn.Softsign, torch.nn.Hardtanh, torch.nn.Hardsigmoid, torch.nn.Hardswish),
    *(torch.nn.Hardshrink, torch.nn.Softshrink, torch.nn.Threshold),
)
_ALONG = (torch.nn.Softmax, torch.nn.LogSoftmax, torch.nn.Softmin, torch.nn.GLU)
"""Modules that compute along one dimension."""
_CUT: Any = WeakTensorKeyDictionary()
_INSTALLING = threading.Lock()
_hooks: list[Any] = []


def watch_modules() -> None:
    """Install hooks on the calls of all modules; once in a process."""
    with _INSTALLING:
        if not _hooks:
            module = torch.nn.modules.module
            _hooks.append(module.register_module_forward_pre_hook(_before))
            _hooks.append(module.register_module_forward_hook(_after))


def mark_block(tensor: Any, cut: Collection[int]) -> None:
    """Record a tensor as a block.

    Args:
        cut: the dimensions that are split; if empty, nothing is recorded.
    """
    if cut:
        with _INSTALLING:
            _CUT[tensor] = frozenset(cut)


def _cut_of(args: Any) -> frozenset[int]:
    if torch.compiler.is_compiling():  # its tensors have no identity
        return frozenset()
    tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
    return frozenset() if tensor is None else _CUT.get(tensor, frozenset())


def _before(module: Any, args: Any) -> None:
    cut = _cut_of(args)
    words = _wrong(module, cut, args[0].ndim) if cut and not module._modules else ""
    if words:
        warnings.warn(
            f"{path_of(module)}: given a block of a tensor that is cut in dimensions "
            f"{sorted(cut)}, {words}; use a layer of linop.layers, or gather the tensor first",
            stacklevel=3,
        )


def _after(module: Any, args: Any, result: Any) -> None:
    cut = _cut_of(args)
    if cut and isinstance(module, _POINTWISE) and isinstance(result, torch.Tensor):
        mark_block(result, cut)


def _wrong(module: Any, cut: frozenset[int], ndim: int) -> str:
    """Description of how a childless module's result on a block differs from the block of its
    result on the global tensor; empty if it does not, as far as is known."""
    kind = type(module)
    if module._parameters and any(p is not None for p in module._parameters.values()):
        return "and its parameters' gradients are of this block alone" if _is_plain(kind) else ""
    if isinstance(module, _POINTWISE) or not _is_plain(kind):
        return ""
    if isinstance(module, torch.nn.Flatten):
        merged = range(module.start_dim % ndim + 1, module.end_dim % ndim + 1)
        bad = cut.intersection(merged)
        return f"it merges dimensions {sorted(bad)} of the block into others" if bad else ""
    if isinstance(module, _ALONG):
        along = module.dim is None or module.dim % ndim in cut
        return "it computes along one of them" if along else ""
    if cut != {0} or isinstance(module, _BatchNorm | _Loss):
        return "it computes with the elements of this block alone"
    return ""


def _is_plain(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.")
