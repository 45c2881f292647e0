"""Runs of a stage by which torch's pipelines learn the shapes that others send: they compute with
arbitrary numbers, and are no part of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

_NAMES = "_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference"


@contextmanager
def rehearsals(aside: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Context in which these runs are aside.

    Args:
        aside: returns a context of work that is not recorded.
    """
    with ExitStack() as stack:
        for kind in _stages():
            for name in _NAMES:
                if name in vars(kind):
                    plain = vars(kind)[name]
                    setattr(kind, name, _aside(plain, aside))
                    stack.callback(setattr, kind, name, plain)
        yield


def _stages() -> tuple[type, ...]:
    try:
        from torch.distributed.pipelining.stage import PipelineStage
    except ImportError:
        return ()
    return PipelineStage.__mro__[:-1]


def _aside(
    plain: Callable[..., Any], aside: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        with aside():
            return plain(*args, **kwargs)

    return method
