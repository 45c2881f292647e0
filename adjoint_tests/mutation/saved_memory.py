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
    Fault(
        "nothing leaves",
        "saved tensors are moved out, and kept where they were as well",
        "memory",
        "linop.strategies.memory.window:Piece.settle",
        "result, None, None",
        "result, self.here, None",
        ("test_offload.py::test_bytes_at_each_point",),
    ),
    Fault(
        "too early",
        "a saved tensor is used before the prefetch of it has ended",
        "synchronisation",
        "linop.strategies.memory.window:Piece.bytes",
        "self.settle()",
        "self._check()",
        ("test_offload.py::test_plain_on_a_simulated_device",),
    ),
    Fault(
        "one memory for all versions",
        "a tensor that was changed since it was saved is taken for the one that was saved",
        "aliasing",
        "linop.strategies.memory.window:_Call._packed",
        "(memory._cdata, x._version, begin, end)",
        "(memory._cdata, begin, end)",
        ("test_offload.py::test_versions",),
    ),
    Fault(
        "unseen change",
        "a saved tensor that was changed in place is taken for what it was",
        "blind",
        "linop.strategies.memory.window:Piece._check",
        "self._given._version != self._version",
        "False",
        ("test_offload.py::test_refused",),
    ),
    Fault(
        "one module ahead",
        "the window ends where the current module does, and nothing is fetched ahead",
        "boundary",
        "linop.strategies.memory.window:_Call.needs",
        "module - self._window.ahead - 1",
        "module - 1",
        ("test_offload.py::test_bytes_at_each_point",),
    ),
)
