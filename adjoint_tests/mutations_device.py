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
        'return [f"{name(marks)}[0].synchronize()"]',
        "return []",
        ("test_device.py::test_facts_under_mpi",),
    ),
    Fault(
        "pinned buffer still read",
        "a staged message is received where the last one is still read",
        "backends/staging.py",
        'f"{self.code.name(_done)}({self.code.name(read)})"',
        'f"{self.code.name(read)}.clear()"',
        ("test_device.py::test_facts_under_mpi",),
    ),
    Fault(
        "boxes that meet added at once",
        "a kernel of several moves adds to the same element twice",
        "backends/fusing.py",
        "            self._close()\n        key",
        "            pass\n        key",
        ("test_device.py::test_operators_on_threads",),
    ),
    Fault(
        "boxes moved too late",
        "a step that reads what gathered moves write comes before them",
        "backends/execute.py",
        "self._steps += self._moving.gathered()\n        self._steps.append",
        "self._steps.append",
        ("test_device.py::test_facts_on_threads",),
    ),
    Fault(
        "small messages copied apart",
        "the part of a message in a shared pinned buffer begins where another does",
        "backends/staging.py",
        "cut(pinned, begin, view.shape)",
        "cut(pinned, 0, view.shape)",
        ("test_device.py::test_facts_under_mpi",),
    ),
    Fault(
        "copies to main memory not awaited",
        "a message from main memory is sent before what was copied there has come",
        "backends/messages.py",
        "            self.settle()\n",
        "            pass\n",
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
