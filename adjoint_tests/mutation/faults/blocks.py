"""Faults of operators that are built of blocks, here or by each worker, and of their products."""

from __future__ import annotations

from mutation.fault import Fault

BLOCKS = (
    Fault(
        "Kronecker product transposed",
        "the result of a Kronecker product has the dimensions of its factors exchanged",
        "order",
        "linop.local_operators.kronecker:_product.apply",
        "across(along(np.reshape(x, (a, b))).T).T",
        "across(along(np.reshape(x, (a, b))).T)",
        ("test_blocks.py::test_matrices_of_every_kind_are_blocks",),
    ),
    Fault(
        "stack of copies",
        "the domain of a stack of the workers' own blocks is copies, over which its adjoint does "
        "not sum",
        "replication",
        "linop.local_operators.own_blocks:vstack",
        "(REPLICATED, COPIES)",
        "(COPIES, COPIES)",
        ("test_own_blocks.py::test_stacks_on_threads",),
    ),
    Fault(
        "own blocks unlike",
        "workers stack blocks of different domains",
        "agreement",
        "linop.local_operators.own_blocks:vstack",
        "[piece[1:] for piece in block.inputs] != [piece[1:] for piece in wanted]",
        "False",
        ("test_own_blocks.py::test_mistakes_on_threads",),
    ),
    Fault(
        "block in another row",
        "a block of a block matrix is of the row that its column's number says",
        "address",
        "linop.local_operators.blocks:_assembled",
        "algebra.restricted(codomain, codomains[i]).euclidean_adjoint",
        "algebra.restricted(codomain, codomains[j % len(codomains)]).euclidean_adjoint",
        ("test_blocks.py::test_block_is_scipys",),
    ),
    Fault(
        "another's buffer",
        "the result of a function is taken without a copy though the function keeps it",
        "aliasing",
        "linop.local_operators.borrowing:_own",
        "y if alone and y.flags.writeable else y.copy()",
        "y",
        ("test_borrowing.py::test_nobody_changes_anothers_array",),
    ),
    Fault(
        "parts in another order",
        "the parts of a vector of a direct sum are joined from the last to the first",
        "order",
        "linop.spaces.direct_sums:DirectSumSpace.join",
        "arrays |= {mine.name: vector[r.name] for mine, r in names if r.name in vector}",
        "arrays |= {mine.name: vectors[-1 - k][r.name] for mine, r in names if r.name in vector}",
        ("test_joined_vectors.py",),
    ),
)
