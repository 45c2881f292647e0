"""Modes of a recorder: calls of functions of torch, collectives. Casts to narrower numbers and
dropout are left out on the way."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from linop.testing.parallel.recording.collectives import NAMESPACES, is_functional
from linop.testing.parallel.recording.tensors import WRAPPERS, is_fake, tensors_in

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


class Changes(TorchFunctionMode):
    """Leaves out dropout, and casts to less than torch's default dtype.

    Attributes:
        notes: sentences about what was left out.
    """

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self.notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, args, kwargs = self.changed(func, args, kwargs or {})
        return func(*args, **kwargs)

    def changed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """A call as it is made."""
        name = getattr(func, "__name__", str(func))
        return self._widened(func, name, *self._without_dropout(name, args, kwargs))

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
        if note not in self.notes:
            self.notes.append(note)
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
        if note not in self.notes:
            self.notes.append(note)
        return args, kwargs


class Functions(Changes):
    """Calls of functions of torch."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.notes)
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
        func, args, kwargs = self.changed(func, args, kwargs)
        given = list(tensors_in((args, kwargs)))
        if torch._C._current_graph_task_id() != -1 or _is_distributed(func):
            return func(*args, **kwargs)
        if any(map(is_fake, given)):
            return func(*args, **kwargs)
        for one in given:  # before it is changed in place
            self._recorder.seen(one)
        result = func(*args, **kwargs)
        if given or any(not is_fake(one) for one in tensors_in(result)):
            self._recorder.called(name, given, result)
        return result


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


_AUTOGRAD = "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"


def _within_autograd(func: Any) -> Any:
    """Context in which an operator that has no backward of its own is differentiated as it is
    outside of a dispatch mode: by what it calls. So autograd takes a functional broadcast for the
    copy that it makes first."""
    plain = func.namespace in ("aten", "c10d") or not torch.is_grad_enabled()
    if plain or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Autograd"):
        return nullcontext()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)


class Moves(TorchDispatchMode):
    """Collectives, however they are called, those too that DTensors need for an operation."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._passed_on: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wrapped = any(issubclass(one, WRAPPERS) for one in types)
        if func._schema.name.endswith("::wait_tensor") and not wrapped:
            result = func(*args, **kwargs)
            self._recorder.waited(args[0])
            return result
        if self._recorder.is_aside:
            return func(*args, **kwargs)
        if wrapped:
            return self._of_wrappers(func, args, kwargs)
        if func.namespace not in NAMESPACES:
            with _within_autograd(func):
                result = func(*args, **kwargs)
            self._recorder.operation(func, args, kwargs, result)
            return result
        if not is_functional(func):
            self._recorder.moved(func, args, kwargs, None)
            return func(*args, **kwargs)
        with _within_autograd(func):
            result = func(*args, **kwargs)
        self._recorder.moved(func, args, kwargs, result)
        return result

    def _of_wrappers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation of DTensors, whose own operations on local tensors are looked at, too: it is
        called again within this mode, which leaves it to them then."""
        if self._passed_on is func:
            self._passed_on = None
            return NotImplemented
        self._passed_on = func
        try:
            with self, self._recorder.operating(func):
                return func(*args, **kwargs)
        finally:
            self._passed_on = None
