"""Faults of the upper floors: torch's graph, layers, checkpoints, the tools that find faults."""

from __future__ import annotations

from mutation.fault import Fault

AUTOGRAD = (
    Fault(
        "backward is forward",
        "the gradient is the operator's, and not its adjoint's, result",
        "order",
        "linop.backends.autograd.functions:_Rules.backward",
        "ctx.bridge.adjoint",
        "ctx.bridge",
        ("test_autograd.py::test_on_threads",),
    ),
    Fault(
        "tangent dropped",
        "in forward mode the tangents of all but the first region are zero",
        "omission",
        "linop.backends.autograd.functions:_Rules.jvp",
        "z if t is None else t",
        "z if t is None or t is not tangents[3] else t",
        ("test_autograd.py::test_derivatives_of_several_regions",),
    ),
)

LAYERS = (
    Fault(
        "bias on every column",
        "the bias of a linear layer is held, and added, by all workers of a row of the grid",
        "replication",
        "linop.layers.linear:Linear.__init__",
        "TensorSpace((out_features,), P_W[:, 0])",
        "TensorSpace((out_features,), P_W, axes=[0, COPIES])",
        ("test_layers.py::test_linear_on_threads",),
    ),
    Fault(
        "count of one block",
        "the mean of a batch is divided by the number of this worker's elements",
        "local",
        "linop.layers.moments:Sums.__init__",
        "prod(X.global_shape[d] for d in dims)",
        "max(1, prod((X.local_shape(layer.worker) if layer.worker in X.partition else "
        "X.global_shape)[d] for d in dims))",
        ("test_layers_norm.py::test_norms_on_threads",),
    ),
    Fault(
        "mask by local index",
        "which elements are dropped depends on where they stand in their block",
        "local",
        "linop.layers.dropout:random_bits",
        "torch.arange(part.start, part.stop, device=seed.device)",
        "torch.arange(part.stop - part.start, device=seed.device)",
        ("test_layers_dropout.py::test_masks_on_threads",),
    ),
    Fault(
        "steps skipped alone",
        "a worker skips a step where its own gradients are infinite",
        "agreement",
        "linop.layers.parameters.scaling:GradScaler._unscale_grads_",
        'agreement_of(program_backend()).sum(infinite, "unscale gradients")',
        "infinite",
        ("test_layers_torch_functions.py::test_on_threads",),
    ),
)

CHECKPOINTS = (
    Fault(
        "shards at the origin",
        "all blocks of a tensor are saved as its first",
        "address",
        "linop.layers.state.sharded_save:_Shard.chunk",
        "s.start or 0",
        "0",
        ("test_state.py::test_training_resumes_on_threads",),
    ),
    Fault(
        "a damaged file is loaded",
        "the digest of a file is not compared",
        "blind",
        "linop.layers.state.files:check_sealed",
        "digest_of(View(file, 0, start), check_time).encode() != said[len(_SEAL):]",
        "False",
        ("test_checkpoints.py::test_every_bit_of_a_weight_is_checked",),
    ),
    Fault(
        "any number of bytes is read",
        "the bytes that a load reads are counted, and not limited",
        "blind",
        "linop.layers.state.limits:Limits.take",
        "self._read > self._most",
        "False",
        ("test_hostile_checkpoints.py::test_limits_are_settings",),
    ),
    Fault(
        "a secret becomes public",
        "a file that is replaced gets the mode of a new one",
        "omission",
        "linop.layers.state.files:_take_after",
        "stat.S_IMODE(before.st_mode)",
        "0o644",
        ("test_replaced_files.py::test_links_are_followed_and_owner_and_mode_are_kept",),
    ),
)

TESTING = (
    Fault(
        "zero times NaN",
        "a dense matrix multiplies its zeros by NaN and infinity",
        "omission",
        "linop.local_operators.flat:_dense_product",
        "np.isfinite(x).all()",
        "True",
        ("test_local_rule.py::test_zeros_multiply_nothing",),
    ),
    Fault(
        "rounding twice",
        "numbers go to bfloat16 through the nearest number of float32",
        "precision",
        "linop.spaces.float_formats:_odd",
        "np.where(between, np.nextafter(near, toward), near)",
        "near",
        ("test_float_formats.py::test_rounding_is_done_once",),
    ),
    Fault(
        "guessed whole numbers",
        "an operator is checked in the dtype that SciPy guessed alone",
        "blind",
        "linop.local_operators.scipy_operators:_is_guess",
        "any(_guess(function, size) == op.dtype for function, size in sides)",
        "False",
        ("test_checks_of_dtypes.py::test_operators_without_a_dtype_are_checked_on_floats",),
    ),
    Fault(
        "small integers",
        "the vectors of checks hold integers from -9 to 9 alone, which nothing saturates",
        "blind",
        "linop.testing.drawing:random_vector",
        "bits_of(F, space)",
        "0",
        ("test_checks_of_dtypes.py::test_integers_that_lose_their_high_or_low_digits",),
    ),
    Fault(
        "cancelled rounding",
        "equals says False where what cancels is larger than what is left",
        "precision",
        "linop.normal_form.entries:_beyond_rounding",
        "bool((sizes > np.asarray(bound).ravel()).any())",
        "True",
        ("test_equals_rounding.py::test_rounding_is_not_decided_whatever_cancels",),
    ),
    Fault(
        "everything passes",
        "no error is too large for the dot-product test",
        "blind",
        "linop.testing.trials:Check.report",
        "worst is None",
        "True",
        ("test_checks.py::test_what_is_wrong_is_named",),
    ),
    Fault(
        "transpose without conjugation",
        "the matrix of the adjoint is compared with the transpose",
        "conjugation",
        "linop.testing.matrices:worst_of_matrices",
        "forward.conj().T",
        "forward.T",
        ("test_checks.py::test_what_is_right_passes",),
    ),
    Fault(
        "first rank speaks for all",
        "an example has passed if it passed on rank 0",
        "agreement",
        "linop.testing.workers.outcome:Outcome.alike",
        "range(self.ranks)",
        "[0]",
        ("test_spmd.py::test_what_all_ranks_say_is_passed_on",),
    ),
    Fault(
        "no watch",
        "an example may take as long as it likes",
        "synchronisation",
        "linop.testing.workers.jobs:PersistentJob.ask",
        "self.watch if watch is None else watch",
        "10.0",
        ("test_spmd.py::test_a_fault_is_found_shrunk_and_named[loops_in_python]",),
    ),
)
