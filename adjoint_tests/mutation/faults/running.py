"""Faults from the plan to messages: planning, verifier, execution, backends."""

from __future__ import annotations

from mutation.fault import Fault

PLANS_FIT = "test_lowering.py::test_plans_of_random_operators_fit_and_cost_what_cost_says"
RUNS = "test_catalogue.py::test_interpretation_matrix_and_threads_agree"
FACTS = ("test_device.py::test_contracts_on_threads",)

PLANNING = (
    Fault(
        "wrong peer",
        "a worker receives from the worker after the one that sends",
        "address",
        "linop.planning.lowering:_movement_steps",
        "Receive(stage, one.peer, one.size)",
        "Receive(stage, one.peer + 1, one.size)",
        (PLANS_FIT,),
    ),
    Fault(
        "read before it came",
        "messages are read without waiting for them",
        "synchronisation",
        "linop.planning.lowering:_movement_steps",
        "(Wait(stage),) if receives else ()",
        "()",
        (PLANS_FIT,),
    ),
    Fault(
        "new memory not cleared",
        "a region that is not set everywhere is not cleared first",
        "omission",
        "linop.planning.lowering:_writes",
        "Make(made, zeroed=many != made.size)",
        "Make(made, zeroed=False)",
        (PLANS_FIT,),
    ),
    Fault(
        "kept where it is read",
        "a call may be in place though it reads what it has overwritten",
        "aliasing",
        "linop.planning.plan:LoweredPlan.in_place",
        "part.region.name == region.name and any(map(part.meets, written))",
        "part.region.name != region.name and any(map(part.meets, written))",
        ("test_plans.py::test_out_may_be_the_argument",),
    ),
    Fault(
        "transforms overwrite arguments",
        "a local map overwrites an array that the stage before kept, not made",
        "aliasing",
        "linop.planning.fusion:_own",
        "[Make(step.target, zeroed=False), copied]",
        "[step]",
        ("test_plan_passes.py::test_transforms_overwrite_arrays_that_the_plan_made",),
    ),
    Fault(
        "results overwrite arguments",
        "of two results that are arguments, in place, the first overwrites the second",
        "aliasing",
        "linop.backends.engine.execution.functions:Functions.text",
        "form == LATE and len(self.passed) > 1",
        "form == LATE and len(self.passed) > 2",
        ("test_plans.py::test_out_may_be_the_argument",),
    ),
    Fault(
        "machine's only term left out",
        "of the terms of a sum, one that is alone on its machine does not cross",
        "omission",
        "linop.planning.hierarchy:_partial_sums",
        "left += terms",
        "left += terms[1:]",
        ("test_hierarchy.py::test_factors_multiply_to_the_movement_and_cross_less",),
    ),
    Fault(
        "partial sums doubled",
        "in each round of a sum between machines the partial sums count twice",
        "coefficient",
        "linop.planning.reduce_scatter_sums:_in_rounds",
        "(box, 1)",
        "(box, 2)",
        ("test_reduce_scatter_sums.py::test_rounds_and_shares_between_machines",),
    ),
    Fault(
        "doubtful roundings kept",
        "exact sums that one transformation leaves in doubt are not summed again",
        "precision",
        "linop.spaces.reproducible_sums:_fully",
        "certain.all()",
        "True",
        ("test_reproducible_sums.py::test_an_exact_sum_is_rounded_once_in_any_order",),
    ),
    Fault(
        "tree from its other end",
        "of an odd number of terms, the first and not the last waits for the next level of a tree",
        "order",
        "linop.planning.reproducible_sums:_Split._tree",
        "terms[k : k + 2]",
        "terms[::-1][k : k + 2]",
        ("test_sums_of_plans.py::test_on_threads",),
    ),
    Fault(
        "replica sent to one holder",
        "of those that hold a replicated region only the first one gets what it is sent",
        "replication",
        "linop.planning.routing:_receivers",
        "first[table.dst[row]] + k",
        "first[table.dst[row]] + 0 * k",
        (PLANS_FIT,),
    ),
)

VERIFIER = (
    Fault(
        "missing receive unnoticed",
        "a message that nobody receives passes the check",
        "blind",
        "linop.planning.verification.correspondence:match_messages",
        "sends.keys() | receives.keys()",
        "receives.keys()",
        ("test_verify.py::test_a_broken_plan_is_rejected",),
    ),
    Fault(
        "transfers counted, not compared",
        "plans pass the proof that have as many transfers as their operator",
        "blind",
        "linop.planning.verification.translation:_Stage._check_transfers",
        "given != expected",
        "len(given) != len(expected)",
        ("test_verify.py::test_plans_that_fit_and_compute_something_else_are_rejected",),
    ),
)

EXECUTION = (
    Fault(
        "start waits",
        "the first half of a call goes on until messages have come",
        "order",
        "linop.backends.engine.execution.program:Program.stops",
        "step.ready is not None and number >= self._joint",
        "step.ready is not None and number >= self._joint and step is None",
        ("test_backends.py::test_start_does_not_wait",),
    ),
    Fault(
        "message overwrites",
        "what comes to be added is put in the place of what is there",
        "overwriting",
        "linop.backends.engine.execution.emitter:Emitter._copy",
        "self._adding if copy.accumulate else self._copying",
        "self._copying",
        (f"{RUNS}[repartition]",),
    ),
    Fault(
        "result in use handed out",
        "memory of an earlier result is used again while somebody has it",
        "aliasing",
        "linop.backends.engine.arrays.lending:Lender.__call__",
        "self._free.pop()",
        "self._free[-1]",
        ("test_plans.py::test_arrays",),
    ),
    Fault(
        "factor lost in a sum",
        "what is multiplied and added is added as it is",
        "coefficient",
        "linop.backends.engine.execution.emitter:Emitter._adding",
        "self._copying(scaled, source, coefficient)",
        "self._copying(scaled, source)",
        (f"{RUNS}[scaled]",),
    ),
)

MESSAGES = (
    Fault(
        "parts packed over each other",
        "all parts of a message are packed at its beginning",
        "address",
        "linop.backends.engine.roads.packing:Packing._filled",
        "offset += source.size",
        "offset += 0 * source.size",
        (f"{RUNS}[random_movement]", f"{RUNS}[scaled]"),
    ),
    Fault(
        "codes are not compared",
        "a control message that somebody else has written to the store is taken for a worker's",
        "blind",
        "linop.backends.torchrun.signed_store:SignedStore.opened",
        "not hmac.compare_digest(code, self._code(name, data))",
        "False",
        ("test_store_channel.py::test_what_somebody_else_does_is_an_error_on_both",),
    ),
    Fault(
        "last message first",
        "a mailbox of threads gives the last message first",
        "order",
        "linop.backends.threads.group:Group.take",
        "box.popleft()",
        "box.pop()",
        ("test_plans.py::test_a_plan",),
    ),
    Fault(
        "one tag for all plans",
        "messages of different plans have one tag under MPI",
        "address",
        "linop.backends.mpi.transport:Ranks._tag",
        "OWN + tag % self._tags",
        "OWN",
        ("test_mpi_plans.py::test_a_plan",),
    ),
)

WINDOWS = (
    Fault(
        "shared window's next turn",
        "in shared memory, the sender writes to the buffer after the one that is read",
        "synchronisation",
        "linop.backends.mpi.shared_memory.windows:Windows._until_ready",
        "RUN % turns if turns else signals.flag(k + 1)",
        "(RUN + 1) % turns if turns else signals.flag(k + 1)",
        ("test_mpi_plans.py::test_arrays",),
    ),
    Fault(
        "window without pages",
        "shared memory is not populated when it is made",
        "memory",
        "linop.backends.mpi.shared_memory.pool:_mapped",
        "os.posix_fallocate(file, offset, length)",
        "None",
        ("test_mpi_memory.py::test_windows_have_their_pages_from_the_start",),
    ),
    Fault(
        "buffer free a run too early",
        "in shared memory, a buffer is said to be read a run before it is",
        "synchronisation",
        "linop.backends.mpi.shared_memory.windows:Windows.end",
        "self._ready(self._turns)",
        "self._ready(self._turns + 1)",
        ("test_proven_programs.py::test_programs_of_ranks_are_proven",),
    ),
)

COLLECTIVES = (
    Fault(
        "root by its number",
        "the root of a collective of MPI is a worker's number, not its place in the group",
        "address",
        "linop.backends.mpi.collectives:Arguments.root",
        "self.found.group.index(self.found.root or 0)",
        "self.found.root or 0",
        ("test_patterns.py::test_mpi_collectives_of_some_ranks",),
    ),
    Fault(
        "counts of one's own",
        "a reduce-scatter of MPI is told that all members get as much as the first",
        "local",
        "linop.backends.mpi.collectives:_reduce_scatter",
        "x.found.count(w)",
        "x.found.counts[0]",
        ("test_patterns.py::test_mpi_collectives_of_some_ranks",),
    ),
)

DEVICE = (
    Fault(
        "device message not awaited",
        "the receiver's stream does not wait for a message of threads",
        "synchronisation",
        "linop.backends.threads.device_messages:MailboxMessages._take",
        "stream.wait_event(message.ready)",
        "None",
        FACTS,
    ),
    Fault(
        "device message not kept",
        "a message's memory is given back before it was read",
        "aliasing",
        "linop.backends.threads.device_messages:MailboxMessages._let_go",
        "self._streams.hold([(self._streams.mark(), read)])",
        "None",
        FACTS,
    ),
    Fault(
        "all regions on the device",
        "a region in main memory is an array of the device",
        "memory",
        "linop.backends.device.device_arrays:DeviceArrays.of",
        'self.host if memory == "host" else self',
        "self",
        FACTS,
    ),
)

AGREEMENT = (
    Fault(
        "products of other vectors",
        "inner products of different vectors are added",
        "agreement",
        "linop.backends.engine.worker:Worker._sums",
        "asked.key",
        "0",
        ("test_sums_of_vectors.py::test_only_the_same_are_added",),
    ),
    Fault(
        "threads in any order",
        "what one thread gathers is taken for what another one of its worker waits for",
        "agreement",
        "linop.backends.together.matching:Matching.add",
        "came.setdefault(label, deque())",
        "came.setdefault((label[0], 0), deque())",
        ("test_sums_of_vectors.py::test_threads_of_a_rank",),
    ),
    Fault(
        "different operators compiled",
        "workers that built different operators are not told",
        "agreement",
        "linop.backends.engine.compile_agreement:check_agreement",
        "[one.digest for one in said]",
        "[said[0].digest for one in said]",
        ("test_launch.py",),
    ),
    Fault(
        "deadlock a point too early",
        "who waits for what a worker has just sent is said to wait for ever",
        "boundary",
        "linop.backends.together.deadlock:is_deadlock",
        "states[peer].reached(wait.key) >= wait.needs",
        "states[peer].reached(wait.key) > wait.needs",
        ("test_deadlock.py::test_what_is_a_deadlock",),
    ),
    Fault(
        "a stuck rank not asked",
        "a rank that reaches its limit does not ask the others' watchdogs where they are",
        "omission",
        "linop.backends.mpi.waits:MPIWaits._limit_error",
        "self._ask()",
        "None",
        ("test_watchdog.py::test_a_rank_that_is_stuck_says_where",),
    ),
)
