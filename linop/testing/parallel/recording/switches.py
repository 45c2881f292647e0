"""Lines by which a program keeps data parallelism from summing gradients, or says by which number
it divides them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from linop.testing.parallel.recording.tensors import users_line


@contextmanager
def switches(
    unsynchronized: Callable[[str], None], divided: Callable[[str], None]
) -> Iterator[None]:
    """Context in which these lines are recorded, ``file:line: text``."""
    with ExitStack() as stack:
        for kind, name in _methods():
            plain = getattr(kind, name)
            if name in _DIVIDING:
                setattr(kind, name, _always_noticed(plain, divided))
            else:
                setattr(kind, name, _noticed(plain, name, unsynchronized))
            stack.callback(setattr, kind, name, plain)
        yield


_DIVIDING = {"set_gradient_divide_factor", "set_reduce_scatter_divide_factor",
             "set_all_reduce_hook", "register_comm_hook"}  # fmt: skip


def _methods() -> list[tuple[Any, str]]:
    """Classes and methods by which programs say how data parallelism sums."""
    ddp = torch.nn.parallel.DistributedDataParallel
    found: list[tuple[Any, str]] = [(ddp, "no_sync"), (ddp, "register_comm_hook")]
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        return found
    names = ("set_requires_gradient_sync", "set_is_last_backward", "set_requires_all_reduce",
             *sorted(_DIVIDING - {"register_comm_hook"}))  # fmt: skip
    return found + [(FSDPModule, name) for name in names if hasattr(FSDPModule, name)]


def _always_noticed(plain: Callable[..., Any], add: Callable[[str], None]) -> Callable[..., Any]:
    """A method that records the line that calls it."""

    def method(module: Any, *args: Any, **kwargs: Any) -> Any:
        add(": ".join(users_line()))
        return plain(module, *args, **kwargs)

    return method


def _noticed(
    plain: Callable[..., Any], name: str, add: Callable[[str], None]
) -> Callable[..., Any]:
    """A method that records the line that calls it, if that keeps gradients from being summed."""

    def method(module: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "no_sync" or not (args[0] if args else next(iter(kwargs.values()), True)):
            add(": ".join(users_line()))
        return plain(module, *args, **kwargs)

    return method
