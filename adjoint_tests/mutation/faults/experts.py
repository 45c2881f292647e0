"""Faults of experts: their operator, the exchange of rows, and what sums gradients of experts."""

from __future__ import annotations

from mutation.fault import Fault

OPERATOR = ("test_experts_operators.py::test_dispatch_is_its_matrix",)
FACTORS = ("test_layers_experts.py::test_three_factors_are_the_operator",)
THREADS = ("test_layers_experts.py::test_on_threads",)
NETS = ("test_expert_parallel.py::test_on_threads",)

EXPERTS = (
    Fault(
        "second choices of early tokens",
        "slots of experts are given token after token, not choice after choice",
        "order",
        "linop.operators.experts:Routing.slots",
        "self.indices.T.reshape(-1)",
        "self.indices.reshape(-1)",
        OPERATOR,
    ),
    Fault(
        "slots of one expert fewer",
        "an expert takes one token less than its capacity",
        "boundary",
        "linop.operators.experts:Routing.slots",
        "ranks < self.capacity",
        "ranks < self.capacity - 1",
        OPERATOR,
    ),
    Fault(
        "rows in the order of workers",
        "rows that arrive are taken worker after worker, and given to experts in their order",
        "order",
        "linop.layers.experts.slots:slots_of",
        "mine.T.reshape(-1)",
        "mine.reshape(-1)",
        FACTORS,
    ),
    Fault(
        "capacity of each worker",
        "an expert's slots are counted for each worker's tokens alone",
        "local",
        "linop.layers.experts.slots:_before",
        "earlier + np.cumsum(counts, 0) - counts",
        "earlier + 0 * counts",
        FACTORS,
    ),
    Fault(
        "dropped ones get another's row",
        "tokens that are dropped get what the first row of the buffer is",
        "omission",
        "linop.layers.experts.exchange:Exchange._run",
        "slots.dropped is not None",
        "False",
        THREADS,
    ),
    Fault(
        "choices of one worker",
        "the load of experts in the router's loss is that of this worker's tokens",
        "local",
        "linop.layers.experts.exchange:Exchange._run",
        "counts.sum((0, 1))",
        "counts[self._index].sum(0)",
        THREADS,
    ),
    Fault(
        "no rows, no way back",
        "a worker whose experts have no tokens takes no part in the others' backward",
        "omission",
        "linop.layers.experts.exchange:tied",
        "add_dependency(y, rows, *(part * part for part in parts))",
        "y",
        THREADS,
    ),
    Fault(
        "experts taken for copies",
        "data parallelism over the axis of experts takes the blocks for copies of one",
        "replication",
        "linop.strategies.data.replicas:summed_already",
        "found.add(name)",
        "found.discard(name)",
        NETS,
    ),
)
