"""Faults of what workers agree on at a layer's call, and of the board by which ranks of one machine
do."""

from __future__ import annotations

from mutation.fault import Fault

CALLS = (
    Fault(
        "one line for all exchanges",
        "a rank writes its next numbers over those that another one has not read",
        "overwriting",
        "linop.backends.mpi.shared_memory.board:Board.sum",
        "_EVEN if turn % 2 == 0 else 0",
        "0",
        ("test_mpi_board.py::test_sums_are_right_whoever_is_late",),
    ),
    Fault(
        "told before it is written",
        "a rank says that its numbers are there before they are",
        "order",
        "linop.backends.mpi.shared_memory.board:Board.sum",
        "mine[k], mine[k + _CODE] = number, code",
        "mine[k + _TURN], mine[k], mine[k + _CODE] = turn, number, code",
        ("test_mpi_board.py::test_who_reads_sees_all_or_nothing",),
    ),
    Fault(
        "exchanges go on after an error",
        "after an error of all, each rank counts on from where it was",
        "synchronisation",
        "linop.backends.mpi.shared_memory.board:Board._next",
        "max(self._turn, self._channel.epoch << _BITS) + 1",
        "self._turn + 1",
        ("test_mpi_board.py::test_a_rank_that_does_not_come_is_told_and_what_follows_is_right",),
    ),
    Fault(
        "digest of nobody",
        "workers that exchange their arguments are taken for those that keep them",
        "agreement",
        "linop.layers.agreement.input_agreement:InputAgreement.code",
        "repr((self._backend.worker, call))",
        "repr(call)",
        ("test_layers_disagreements.py::test_contracts_on_threads",),
    ),
    Fault(
        "a known call is enough",
        "a worker that knows the sum of a call asks nobody, while another one has forgotten it",
        "agreement",
        "linop.layers.layer:Layer._function",
        "call is last",
        "True",
        ("test_layers_disagreements.py::test_contracts_on_threads",),
    ),
    Fault(
        "nothing is a view",
        "a result without a block is a view, which autograd forbids to change in place",
        "aliasing",
        "linop.backends.autograd.functions:_ran",
        "results[0].new_empty(call[2])",
        "results[0].reshape(call[2])",
        ("test_layers.py::test_on_threads[2-results_may_be_changed_in_place]",),
    ),
)
