"""Modes of a recorder: calls of functions of torch, collectives. Casts to narrower numbers and
dropout are left out on the way."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from linop.testing.parallel.recording.tensors import tensors_in

if TYPE_CHECKING:
    from linop.testing.parallel.recording.recorder import Recorder

_DROPOUTS = {
    name for name in dir(torch.nn.functional) if name.endswith("dropout") or "dropout" in name[-9:]
} | {"dropout", "dropout_", "feature_dropout", "alpha_dropout", "native_dropout"}


RANDOM = {
    "bernoulli", "bernoulli_", "rand", "randn", "rand_like", "randn_like", "randint",
    "normal", "normal_", "uniform_", "multinomial", "poisson", "rrelu", "exponential_", "randperm",
    "gumbel_softmax", "random_", "randint_like",
}  # fmt: skip
"""Functions that draw random numbers."""
_HALVES = torch.float16, torch.bfloat16


_NARROW = {torch.float64: (torch.float32, *_HALVES), torch.float32: _HALVES}


_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
"""Methods that cast."""


_QUIET = {
    "backward", "__get__", "__set__", "register_hook", "retain_grad",
    "size", "dim", "numel", "is_floating_point", "is_complex", "stride", "element_size", "__repr__",
    "__len__", "item", "tolist", "__format__", "__hash__", "register_post_accumulate_grad_hook",
    "storage_offset", "untyped_storage", "data_ptr", "is_contiguous", "_version", "__deepcopy__",
    "numpy", "__reduce_ex__", "requires_grad_", "is_same_size", "__bool__", "__int__", "__float__",
    "__index__", "get_device", "is_inference", "_is_view", "type", "nelement", "ndimension", "cpu",
}  # fmt: skip
"""Functions that say something of a tensor, and make none."""


class Functions(TorchFunctionMode):
    """Calls of functions of torch."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__set__" and args:
            if args[1:2] == (None,):
                self._recorder.dropped(args[0])
            elif getattr(func, "__self__", None) is torch.Tensor.grad:
                self._recorder.replaced(args[0])
        if name in _QUIET:
            self._recorder.passes += name == "backward"
            return func(*args, **kwargs)
        args, kwargs = self._without_dropout(name, args, kwargs)
        func, args, kwargs = self._widened(func, name, args, kwargs)
        given = list(tensors_in((args, kwargs)))
        if torch._C._current_graph_task_id() != -1 or _is_distributed(func):
            return func(*args, **kwargs)
        for one in given:  # before it is changed in place
            self._recorder.seen(one)
        result = func(*args, **kwargs)
        if given or any(True for _ in tensors_in(result)):
            self._recorder.called(name, given, result)
        return result

    def _widened(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Without casts of the program to narrower floating-point numbers than those of the
        check."""
        wide = torch.get_default_dtype()

        def is_narrow(value: Any) -> bool:
            return isinstance(value, torch.dtype) and value in _NARROW.get(wide, ())

        narrows = name in _CASTS and _CASTS[name] in _NARROW.get(wide, ())
        if not narrows and not any(map(is_narrow, (*args, *kwargs.values()))):
            return func, args, kwargs
        if _called_by_distributed():
            return func, args, kwargs
        note = f"casts to less than {str(wide).removeprefix('torch.')} were left out"
        if note not in self._recorder.notes:
            self._recorder.notes.append(note)
        if narrows:
            return torch.Tensor.to, (args[0], wide), {}
        args = tuple(wide if is_narrow(one) else one for one in args)
        return func, args, {key: wide if is_narrow(one) else one for key, one in kwargs.items()}

    def _without_dropout(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if name in _DROPOUTS:
            kwargs = {**kwargs}
            if "p" in kwargs:
                kwargs["p"] = 0.0
            elif len(args) > 1:
                args = (args[0], 0.0, *args[2:])
            else:
                kwargs["p"] = 0.0
        elif name == "scaled_dot_product_attention" and kwargs.get("dropout_p"):
            kwargs = {**kwargs, "dropout_p": 0.0}
        elif name == "multi_head_attention_forward":
            kwargs = {**kwargs}
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
            elif len(args) > 10:
                args = (*args[:10], 0.0, *args[11:])
        else:
            return args, kwargs
        note = "dropout was switched off, since a cut model draws other masks"
        if note not in self._recorder.notes:
            self._recorder.notes.append(note)
        return args, kwargs


def _called_by_distributed() -> bool:
    """True inside of torch's own strategies, which count on the dtypes that they ask for."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return False
        if f"torch{os.sep}distributed" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _is_distributed(func: Any) -> bool:
    return str(getattr(func, "__module__", "")).startswith("torch.distributed")


class Moves(TorchDispatchMode):
    """Collectives, however they are called."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._recorder.is_aside:
            return func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._recorder.moved(func, args)
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self._recorder.operation(func, args, kwargs or {}, result)
        return result
