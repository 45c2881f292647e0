"""Faults about the memory that a region lives in."""

from __future__ import annotations

from mutations import Fault

TESTS = ("test_memories.py",)

MEMORIES = (
    Fault(
        "memory left out of the signature",
        "workers that build regions in different memories agree",
        "linop/region.py",
        """memory = "" if self.memory == "default" else f", memory={self.memory!r}\"""",
        """memory = \"\"""",
        TESTS,
    ),
    Fault(
        "memory left out of a tensor's equality",
        "tensor spaces in different memories are equal",
        "linop/tensor.py",
        "            self.memory,\n        )\n\n    @cached_property\n    def digest",
        "        )\n\n    @cached_property\n    def digest",
        TESTS,
    ),
    Fault(
        "in_memory does nothing",
        "a space in another memory has its regions where they were",
        "linop/space.py",
        "Region.checked(r.name, r.shape, r.workers, memory)",
        "Region.checked(r.name, r.shape, r.workers, r.memory)",
        TESTS,
    ),
    Fault(
        "memory lost with the name",
        "regions that are named anew, in sums and direct sums, are in the default memory",
        "linop/stages.py",
        "r.shape, r.workers, r.memory)",
        "r.shape, r.workers)",
        TESTS,
    ),
    Fault(
        "kept in another memory",
        "a region that moves to another memory whole is passed on without a copy",
        "linop/lowering.py",
        "source.whole and target.whole and source.memory == target.memory",
        "source.whole and target.whole",
        TESTS,
    ),
    Fault(
        "in place in another memory",
        "a result may be the argument's array though its region is in another memory",
        "linop/plan.py",
        "given[region.name] == (region.shape, region.memory)",
        "given[region.name][0] == region.shape",
        TESTS,
    ),
    Fault(
        "stays in another memory",
        "a copy to the same place of another memory is taken for none, and left out in place",
        "linop/plan.py",
        "return isinstance(self.source, Subset) and self.source.memory != self.target.memory",
        "return False",
        TESTS,
    ),
    Fault(
        "sums across memories",
        "a copy from another memory and a sum are one step",
        "backends/stage.py",
        "return put.coefficient == 1 and not put.crosses",
        "return put.coefficient == 1",
        TESTS,
    ),
    Fault(
        "a sum in another memory",
        "a sum is made in the result that it is copied to, though that is in another memory",
        "backends/execute.py",
        "if put.crosses or not (alone",
        "if not (alone",
        TESTS,
    ),
    Fault(
        "shares in the default memory",
        "the shares of a large sum are not in the memory that it goes to",
        "linop/shares.py",
        "extent, worker, memory))",
        "extent, worker))",
        TESTS,
    ),
    Fault(
        "tensors lose their memory",
        "the same tensor on another partition is in the default memory",
        "linop/tensor.py",
        "            memory=self.memory,\n        )\n\n    @property\n    def copied",
        "        )\n\n    @property\n    def copied",
        TESTS,
    ),
    Fault(
        "copies between memories not counted",
        "the cost leaves out what goes from one memory to another",
        "linop/simulate.py",
        "movement.codomain.memories[dst] != movement.domain.memories[src]",
        "movement.codomain.memories[dst] < 0",
        TESTS,
    ),
)
