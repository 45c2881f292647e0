"""Calls of modules that are interrupted: torch calls hooks of ``always_call=True`` after errors,
but not after Ctrl-C, SystemExit and others that are no errors. What hooks have begun, such as
another attention, or whole parameters in the place of shards, would last for the rest of a program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.nn import Module


class _End(NamedTuple):
    """Something that a hook begins at a call, and another one ends."""

    count: Callable[[Any], int]
    leave: Callable[[Any], object]


class Ended:
    """A module's ``_call_impl``, by which torch calls forward and hooks. What hooks have begun is
    ended after it, in any case.

    An attribute of the module, which is copied and pickled with it: a class of its own in the place
    of the module's would be another type.
    """

    def __init__(self, module: Module) -> None:
        self._module, self.ends = module, list[_End]()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        module: Any = self._module
        before = [end.count(module) for end in self.ends]
        try:
            return type(module)._call_impl(module, *inputs, **named)
        except Exception:
            raise  # torch has called the hooks
        except BaseException:
            for end, count in [*zip(self.ends, before, strict=True)][::-1]:
                while end.count(module) > count:
                    end.leave(module)
            raise


def end_if_interrupted(
    module: Module, count: Callable[[Any], int], leave: Callable[[Any], object]
) -> None:
    """Have what hooks begin at calls of a module ended if a call is interrupted; those of later
    calls of this function first.

    Args:
        count: of the module: how much has begun, and is not ended.
        leave: of the module: ends what has begun last. A hook does so otherwise.
    """
    own = vars(module)
    if not isinstance(own.get("_call_impl"), Ended):
        own["_call_impl"] = Ended(module)
    own["_call_impl"].ends.append(_End(count, leave))


def drop_ends(module: Module, ours: Callable[[Any], bool]) -> None:
    """Forget some of the ends of a module's calls.

    Args:
        ours: True of a function `leave` of one that is to be forgotten.
    """
    known = vars(module).get("_call_impl")
    if isinstance(known, Ended):
        known.ends = [end for end in known.ends if not ours(end.leave)]
        if not known.ends:
            del vars(module)["_call_impl"]
