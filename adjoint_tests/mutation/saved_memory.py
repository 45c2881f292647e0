"""Faults of what is computed again in backward."""

from __future__ import annotations

from mutation.fault import Fault

SAVED_MEMORY = (
    Fault(
        "another mask",
        "random numbers are drawn anew when a reversible block is computed again",
        "synchronisation",
        "linop.strategies.memory.reversible:_Frame._again",
        "state = self._states[part]",
        "state = None",
        ("test_saved_memory.py::test_reversible_is_the_net_that_stores",),
    ),
    Fault(
        "outputs of all",
        "every reversible block keeps its outputs",
        "memory",
        "linop.strategies.memory.reversible:_Frame.close",
        "(weakref.ref(before), self, None)",
        "(None, None, before._outputs)",
        ("test_saved_memory.py::test_reversible_keeps_one_pair",),
    ),
    Fault(
        "swapped halves",
        "what a reversible block rebuilds of the one before is taken in the order of its inputs",
        "address",
        "linop.strategies.memory.reversible:_Frame._rebuild",
        "(x2, x1) if self._swapped else (x1, x2)",
        "(x1, x2)",
        ("test_saved_memory.py::test_reversible_in_other_chains",),
    ),
    Fault(
        "one half twice",
        "a pair that is one output twice is taken for both outputs",
        "blind",
        "linop.strategies.memory.reversible:_Frame.close",
        "first != second",
        "True",
        ("test_saved_memory.py::test_reversible_in_other_chains",),
    ),
    Fault(
        "changed outputs",
        "inputs are rebuilt from outputs that were changed",
        "blind",
        "linop.strategies.memory.reversible:_Frame._check",
        "tuple(y._version for y in self._outputs) != self._versions",
        "False",
        ("test_saved_memory.py::test_refused",),
    ),
    Fault(
        "messages again",
        "results of operators are not kept, and a recomputation sends what was sent",
        "agreement",
        "linop.strategies.memory.reversible:_Frame.recorded",
        "self._contexts[part][0]",
        "nullcontext()",
        ("test_saved_memory.py::test_messages_on_threads",),
    ),
)
