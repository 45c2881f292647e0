"""Faults in the tools that are to find faults: the checks, the strategies, what runs examples."""

from __future__ import annotations

from mutations import Fault

WRONG = "test_checks.py::test_what_is_wrong_is_named"
RIGHT = "test_checks.py::test_what_is_right_passes"
ENTRY = "test_checks.py::test_any_wrong_entry_is_named"
THREADS = "test_checks.py::test_a_fault_of_one_thread_is_reported_by_all"
CODE = "test_strategies.py::test_operators_print_as_code_and_pickle"
SETTLED = "test_spmd.py::test_what_all_ranks_say_is_passed_on"
FOUND = "test_spmd.py::test_a_fault_is_found_shrunk_and_named"

TESTING = (
    # Checks
    Fault(
        "everything passes",
        "no error is too large for the dot-product test",
        "linop/testing/trials.py",
        "        passed = worst is None\n",
        "        passed = True\n",
        (WRONG,),
    ),
    Fault(
        "adjoint compared with itself",
        "both inner products are taken with the adjoint",
        "linop/testing/trials.py",
        "inner(F, forward, y), inner(F, x, backward)",
        "inner(F, x, backward), inner(F, x, backward)",
        (WRONG,),
    ),
    Fault(
        "given adjoint ignored",
        "a check of another adjoint checks the operator's own",
        "linop/testing/trials.py",
        "    if given is None:\n        return F.H\n",
        "    if True:\n        return F.H\n",
        ("test_helpers.py::test_check_adjoint_finds_wrong_adjoints",),
    ),
    Fault(
        "exact numbers that round",
        "the exact test takes numbers that are not whole",
        "linop/testing/localise.py",
        "unfit = (wide != np.rint(wide)) | (np.abs(wide) > most)",
        "unfit = np.abs(wide) > most",
        ("test_checks.py::test_exact_dot_products_want_exact_numbers",),
    ),
    Fault(
        "transpose without conjugation",
        "the matrix of the adjoint is compared with the transpose",
        "linop/testing/matrices.py",
        "wanted = forward.conj().T",
        "wanted = forward.T",
        (RIGHT,),
    ),
    Fault(
        "results are not kept",
        "a call may overwrite the result of the one before",
        "linop/testing/subject.py",
        "if array.tobytes() != self._last[name][1]:",
        "if False:",
        ("test_check_limits.py::test_a_result_that_the_next_call_overwrites",),
    ),
    Fault(
        "one scale for a matrix",
        "entries are compared relative to the largest of all",
        "linop/testing/matrices.py",
        "np.maximum(size.max(axis=0), size.max(axis=1, keepdims=True))",
        "np.full(size.shape, size.max())",
        ("test_check_limits.py::test_an_entry_far_below_the_largest_has_its_own_scale",),
    ),
    Fault(
        "integers that do not wrap",
        "inner products of integers are compared as whole numbers, not modulo 2**bits",
        "linop/testing/localise.py",
        '    if any(dtype.kind not in "iu" for dtype in dtypes):\n',
        "    if True:\n",
        ("test_check_limits.py::test_integers_that_wrap_are_right",),
    ),
    Fault(
        "zeros are drawn",
        "random vectors of integers hold zeros, which test nothing",
        "linop/testing/trials.py",
        "if n % 2 or (even and n)]",
        "]",
        ("test_check_limits.py::test_an_entry_that_is_off_by_one_in_integers",),
    ),
    Fault(
        "only odd numbers",
        "whole numbers of random vectors are always odd",
        "linop/testing/trials.py",
        "even = seed // 2 % 3 == nth + 1",
        "even = False",
        ("test_check_limits.py::test_entries_that_are_off_by_half_the_range_of_integers",),
    ),
    Fault(
        "linear at one sign",
        "linearity is not tried with the other sign",
        "linop/testing/trials.py",
        "        found.append(_opposite(F, x, once))\n",
        "        pass\n",
        ("test_check_limits.py::test_absolute_values_of_one_element_are_not_linear",),
    ),
    Fault(
        "linear without scaling",
        "linearity is checked of sums alone",
        "linop/testing/trials.py",
        "    a = random_scalar(F, seed)\n",
        "    a = 1\n",
        (WRONG,),
    ),
    Fault(
        "inverse from one side",
        "of an inverse only F(inverse(y)) is compared, or only inverse(F(x))",
        "linop/testing/trials.py",
        "    return max(ways, key=lambda way: way[0])\n",
        "    return ways[1]\n",
        (WRONG,),
    ),
    Fault(
        "wrong half",
        "a wrong entry is looked for in the half that has the smaller gap",
        "linop/testing/localise.py",
        "if left >= right else",
        "if left < right else",
        (ENTRY,),
    ),
    Fault(
        "largest of its own",
        "every worker reports the largest difference that it has itself",
        "linop/testing/localise.py",
        "for said in gathered(backend, json.dumps(best)))",
        "for said in [json.dumps(best)])",
        (THREADS,),
    ),
    # Code, strategies
    Fault(
        "adjoint printed as the operator",
        "the code of an adjoint makes the operator",
        "linop/testing/code.py",
        'return f"{code(op._h)}.H"',
        'return f"{code(op._h)}"',
        (CODE,),
    ),
    Fault(
        "arguments of others",
        "operators keep the arrays that they were given, which their owner may change",
        "linop/calls.py",
        "        return value.copy()\n",
        "        return value\n",
        ("test_strategies.py::test_what_an_array_holds_later_is_not_in_the_operator",),
    ),
    # Ranks
    Fault(
        "first rank speaks for all",
        "an example has passed if it passed on rank 0",
        "linop/testing/outcome.py",
        "kinds = {self._kind(rank) for rank in range(self.ranks)}",
        "kinds = {self._kind(0)}",
        (SETTLED,),
    ),
    Fault(
        "dead ranks are used again",
        "a job goes on although one of its ranks has died",
        "linop/testing/outcome.py",
        "return self.complete and all(a is not None and a.usable for a in self.answers.values())",
        "return all(a is None or a.usable for a in self.answers.values())",
        ("test_mpi_jobs.py::test_a_job_that_has_lost_a_rank_is_not_used_again",),
    ),
    Fault(
        "no watch",
        "an example may take as long as it likes",
        "linop/testing/jobs.py",
        "watch = self.watch if watch is None else watch",
        "watch = 10.0",
        (f"{FOUND}[loops_in_python]",),
    ),
)
