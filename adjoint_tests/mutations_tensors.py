"""Faults in the floor of tensors: partitions, collectives, halos, padding, local maps."""

from __future__ import annotations

from mutations import Fault

COLLECTIVES, LOCAL = "test_collectives.py", "test_local.py"
GEOMETRY = "test_halo.py::test_geometry_is_what_the_outputs_touch"
HALO = "test_halo.py::test_everyone_gets_what_its_outputs_need"
PADDING = "test_layers_resample.py::test_padding_on_threads"
RUNS = "test_three_ways.py::test_interpretation_matrix_and_threads_agree"
RING = "test_proofs.py::test_ring_all_reduce_is_broadcast_of_sum_reduce"

TENSORS = (
    # Partitions and tensor spaces
    Fault(
        "longer blocks last",
        "of balanced blocks the last ones are longer, not the first",
        "linop/partition.py",
        "(k < n % parts)",
        "(parts - k <= n % parts)",
        ("test_partition.py",),
    ),
    Fault(
        "coordinates by columns",
        "the coordinates of a worker are found as if the first ran fastest",
        "linop/partition.py",
        """        for n in reversed(self.shape):
            rest, k = divmod(rest, n)
            at.append(k)
        return tuple(reversed(at))
""",
        """        for n in self.shape:
            rest, k = divmod(rest, n)
            at.append(k)
        return tuple(at)
""",
        ("test_partition.py",),
    ),
    Fault(
        "transposed shape alone",
        "a transposed grid has the shape turned round, and the workers where they were",
        "linop/partition.py",
        "return Partition.of_grid(self.grid.T)",
        "return Partition(self.shape[::-1], self.workers)",
        ("test_partition.py",),
    ),
    Fault(
        "holes go unnoticed",
        "gather gives zeros where no block has an element",
        "linop/tensor.py",
        "if not seen.all():",
        "if not seen.any():",
        ("test_partition.py",),
    ),
    # Collectives
    Fault(
        "replicated treated as copies",
        "an all-gather makes independent copies where one replicated tensor is wanted",
        "linop/collectives.py",
        "roles = [into if k in axes else axis",
        "roles = [COPIES if k in axes else axis",
        ("test_proofs.py::test_gathering_into_copies_and_into_one_replicated_tensor",),
    ),
    Fault(
        "gather to the wrong root",
        "the tensor is gathered on worker 0, whoever wants it",
        "linop/collectives.py",
        "Partition((1,) * X.ndim, [worker])",
        "Partition((1,) * X.ndim, [0])",
        (f"{COLLECTIVES}::test_scatter_and_gather",),
    ),
    Fault(
        "wrong worker matched",
        "a broadcast to a transposed grid matches the grid as it was",
        "linop/collectives.py",
        "_grid_axis(Y, k, transpose_dest))",
        "_grid_axis(Y, k, False))",
        (COLLECTIVES,),
    ),
    Fault(
        "sum of the first copy",
        "of copies that are to be summed the first one alone counts",
        "linop/matching.py",
        "_coordinates(0 * every, every)",
        "_coordinates(0 * every[:1], every[:1])",
        (COLLECTIVES,),
    ),
    Fault(
        "broadcast skips a worker",
        "the last worker of a line gets nothing of a broadcast",
        "linop/matching.py",
        "_coordinates(every, 0 * every)",
        "_coordinates(every[: len(every) - 1 or 1], 0 * every[: len(every) - 1 or 1])",
        (COLLECTIVES,),
    ),
    Fault(
        "ring's chunk off by one",
        "workers of a ring pass on the chunk beside the one that they have summed",
        "linop/collectives.py",
        "c = (k + copies - step) % len(ring)",
        "c = (k + copies - step * (1 + copies)) % len(ring)",
        (RING,),
    ),
    Fault(
        "ring's last step missing",
        "the rounds of a ring end one step early",
        "linop/collectives.py",
        "for step in range(len(rings[0]) - 1):",
        "for step in range(len(rings[0]) - 2):",
        (RING,),
    ),
    Fault(
        "shift the other way",
        "blocks go to lower coordinates",
        "linop/collectives.py",
        "came_from = [k - steps if periodic",
        "came_from = [k + steps if periodic",
        (COLLECTIVES,),
    ),
    Fault(
        "shift over the end",
        "a block that leaves an open grid comes in at its other end",
        "linop/collectives.py",
        "if periodic or 0 <= k - steps < n else",
        "if periodic or -1 <= k - steps < n else",
        (COLLECTIVES,),
    ),
    Fault(
        "copies mixed up",
        "blocks are exchanged between independent copies, too",
        "linop/matching.py",
        "return along(X, split)",
        "return []",
        ("test_three_ways.py::test_rules_and_transposition_agree[halo_exchange]",),
    ),
    # Halo
    Fault(
        "right halo one short",
        "the last input that a worker's outputs need is left out",
        "linop/halo.py",
        "(last - 1 - first) * self.stride + self.dilation * (self.size - 1) + 1",
        "(last - 1 - first) * self.stride + self.dilation * (self.size - 1)",
        (GEOMETRY,),
    ),
    Fault(
        "left halo one short",
        "the first input that a worker's outputs need is left out",
        "linop/halo.py",
        "start, stop = min(max(low, 0), n), max(min(high, n), 0)",
        "start, stop = min(max(low + 1, 0), n), max(min(high, n), 0)",
        (GEOMETRY,),
    ),
    Fault(
        "stride ignored",
        "the first input of a worker's outputs is found as if the stride were 1",
        "linop/halo.py",
        "start = first * self.stride - self.padding",
        "start = first - self.padding",
        (GEOMETRY,),
    ),
    Fault(
        "dilation ignored",
        "the reach of a kernel is its size, however it is dilated",
        "linop/halo.py",
        "(last - 1 - first) * self.stride + self.dilation * (self.size - 1) + 1",
        "(last - 1 - first) * self.stride + self.size",
        (GEOMETRY,),
    ),
    Fault(
        "neighbours alone",
        "a halo comes from adjacent workers, however far it reaches",
        "linop/halo.py",
        "if j != k and low < high:",
        "if abs(j - k) == 1 and low < high:",
        (HALO,),
    ),
    Fault(
        "corners missing",
        "the exchange of a dimension sends the bulk, without the halos that have come before",
        "linop/halo.py",
        "bounds = self.needed[d] if d < dim else self.X.bounds[d]",
        "bounds = self.X.bounds[d]",
        ("test_halo.py::test_corners_arrive_by_way_of_neighbours",),
    ),
    Fault(
        "packed, then cleared",
        "the buffers of a halo exchange are cleared after they are packed",
        "linop/halo.py",
        'yield Named("K", f"S{dim}", clears(space, buffers))\n'
        '        yield Named("C", f"P{dim}", copies(space, [m[0] for m in messages], sends))',
        'yield Named("C", f"P{dim}", copies(space, [m[0] for m in messages], sends))\n'
        '        yield Named("K", f"S{dim}", clears(space, buffers))',
        (HALO,),
    ),
    # Padding
    Fault(
        "reflection with the edge",
        "a reflected edge begins with the outermost element, as NumPy's symmetric one does",
        "linop/padding.py",
        "Segment(-k, k, 1) for k in range(1, before + 1)",
        "Segment(-k, k - 1, 1) for k in range(1, before + 1)",
        (PADDING,),
    ),
    Fault(
        "circular edge off by one",
        "the left edge of a circular padding ends one element before the tensor's end",
        "linop/padding.py",
        "Segment(-before, last - before, before)",
        "Segment(-before, max(last - before - 1, 0), before)",
        (PADDING,),
    ),
    # Local maps
    Fault(
        "matrix adjoint not conjugated",
        "the adjoint of a complex matrix is its transpose",
        "linop/local.py",
        "adjoint = A.conj().T",
        "adjoint = A.T",
        (f"{LOCAL}::test_matrices",),
    ),
    Fault(
        "matrix adjoint not transposed",
        "the adjoint of a square matrix is its conjugate",
        "linop/local.py",
        "adjoint = A.conj().T",
        "adjoint = A.conj() if A.shape[0] == A.shape[1] else A.conj().T",
        (f"{LOCAL}::test_matrices", f"{RUNS}[dense_matrix]"),
    ),
    Fault(
        "diagonal adjoint not conjugated",
        "the adjoint multiplies by the same complex diagonal",
        "linop/local.py",
        "lambda y: here.conj() * y",
        "lambda y: here * y",
        (f"{LOCAL}::test_diagonals",),
    ),
    Fault(
        "transform scaled one way",
        "the adjoint of the orthonormal Fourier transform is scaled by its length",
        "linop/local.py",
        'transforms.ifftn(y, norm="ortho")',
        "transforms.ifftn(y)",
        (f"{LOCAL}::test_fourier_transforms",),
    ),
    Fault(
        "restriction in order",
        "a restriction to indices gives them in increasing order",
        "linop/local.py",
        "(values, (np.arange(index.size), index))",
        "(values, (np.arange(index.size), np.sort(index)))",
        (f"{LOCAL}::test_restrictions_to_indices",),
    ),
    Fault(
        "kernel adjoint not conjugated",
        "the adjoint of a convolution has the same complex kernel",
        "linop/sliding.py",
        'convolve(spaced, np.conj(self.kernel), "full")',
        'convolve(spaced, self.kernel, "full")',
        (f"{LOCAL}::test_convolutions",),
    ),
    Fault(
        "kernel padded right",
        "the adjoint of a convolution takes the padding of the left side for none",
        "linop/sliding.py",
        "result: Array = whole[self.inside].astype(y.dtype)",
        "result: Array = whole[tuple(slice(0, n) for n in self.shape)].astype(y.dtype)",
        (f"{LOCAL}::test_convolutions",),
    ),
)
