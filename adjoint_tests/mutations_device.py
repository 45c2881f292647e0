"""Faults in how work on a device is ordered."""

from __future__ import annotations

from mutations import Fault

DEVICE = (
    Fault(
        "last stream not followed",
        "a run on another stream does not come after the last one",
        "backends/device.py",
        "stream.wait_event(event)\n                last[0]",
        "last[0]",
        ("test_device.py::test_facts_on_threads",),
    ),
    Fault(
        "device message not awaited",
        "the receiver's stream does not wait for a message of threads",
        "backends/device.py",
        "stream.wait_event(message.ready)",
        "pass",
        ("test_device.py::test_facts_on_threads",),
    ),
    Fault(
        "result looked at too early",
        "what is brought to main memory is read before the device has written it",
        "backends/device.py",
        "self.module.asnumpy(array)",
        "array.get(blocking=False)",
        ("test_device.py::test_checks_on_threads",),
    ),
    Fault(
        "device message not kept",
        "a message's memory is given back before it was read",
        "backends/device.py",
        "self._kept.append((self.mark(), message.array))",
        "pass",
        ("test_device.py::test_facts_on_threads",),
    ),
    Fault(
        "finished on another stream",
        "a run that was started on a stream goes on on another",
        "backends/execute.py",
        "with self._where:  # its",
        "with nullcontext():  # its",
        ("test_device.py::test_facts_on_threads",),
    ),
    Fault(
        "packed memory not awaited",
        "MPI is given the device's memory before it is packed",
        "backends/staging.py",
        'f"{name(self._device.mark)}().synchronize()"',
        'f"{name(self._device.mark)}()"',
        ("test_device.py::test_facts_under_mpi",),
    ),
    Fault(
        "copy down not awaited",
        "a staged message is sent before it was copied down",
        "backends/staging.py",
        '[f"{name(packed)}[{k}].synchronize()", line]',
        "[line]",
        ("test_device.py::test_facts_under_mpi",),
    ),
    Fault(
        "pinned buffer still read",
        "a staged message is received where the last one is still read",
        "backends/staging.py",
        "                read.pop().synchronize()\n\n        def land",
        "                read.pop()\n\n        def land",
        ("test_device.py::test_facts_under_mpi",),
    ),
    Fault(
        "pinned buffer given back",
        "a plan that is gone does not wait until its messages were copied up",
        "backends/staging.py",
        "weakref.finalize(self, _read, self._pinned).atexit = False",
        "pass",
        ("test_device.py::test_facts_under_mpi",),
    ),
)
