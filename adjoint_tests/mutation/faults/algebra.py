"""Faults of spaces, the normal form and operators."""

from __future__ import annotations

from mutation.fault import Fault

RULES = "test_catalogue.py::test_rules_and_transposition_agree"
RUNS = "test_catalogue.py::test_interpretation_matrix_and_threads_agree"

SPACES = (
    Fault(
        "touching boxes overlap",
        "boxes that lie side by side are said to share an element",
        "boundary",
        "linop.spaces.region:Subset.meets",
        "max(a, c) < min(b, d)",
        "max(a, c) <= min(b, d)",
        ("test_spaces.py::test_overlaps_and_contains_are_set_relations",),
    ),
    Fault(
        "replicas counted each",
        "the inner product counts a replicated region as often as it is held",
        "replication",
        "linop.spaces.space:Space.partial_inners",
        "partial.get(worker, 0) + product",
        "partial.get(worker, 0) + product * len(region.workers)",
        ("test_spaces.py::test_the_inner_product_is_the_space_s",),
    ),
    Fault(
        "inner product of the wrong side",
        "the inner product is conjugate-linear in its second argument",
        "conjugation",
        "linop.spaces.inner_products:dot",
        "np.vdot(x, y).item()",
        "np.vdot(y, x).item()",
        ("test_spaces.py::test_the_inner_product_is_the_space_s",),
    ),
)

NORMAL_FORM = (
    Fault(
        "coefficients overflow",
        "products of coefficients are of 64 bits, whatever they are",
        "precision",
        "linop.normal_form.columns:products",
        "_ints(a, b) and _bound(a) * _bound(b) < _LARGE",
        "_ints(a, b)",
        ("test_exact_coefficients.py::test_what_rounding_once_proved_is_not_proven",),
    ),
    Fault(
        "intersection off by one",
        "boxes that meet in one element are taken for disjoint",
        "boundary",
        "linop.normal_form.boxes:join",
        "extent > 0",
        "extent > 1",
        ("test_movement.py::test_dimensions_on_the_way_leave_no_trace",),
    ),
    Fault(
        "transposition forgets conjugation",
        "the transposed table has the same complex coefficients",
        "conjugation",
        "linop.normal_form.transfer_table:swap",
        "conjugates(t.coef)",
        "t.coef",
        (f"{RULES}[scaled]",),
    ),
    Fault(
        "transposed stages not reversed",
        "the adjoint of stages has its movements in the same order",
        "order",
        "linop.normal_form.stages:Stages.adjoint",
        "reversed(self.movements)",
        "self.movements",
        (f"{RULES}[dense_matrix]",),
    ),
    Fault(
        "law without the zeros",
        "an allocation after a deallocation is simplified to nothing, not to a clear",
        "omission",
        "linop.operators.laws:_allocate_deallocate",
        "CLEARED",
        "NEITHER",
        ("test_memory_operators.py::test_laws",),
    ),
)

OPERATORS = (
    Fault(
        "add twice",
        "the matrix of an add has its block twice",
        "coefficient",
        "linop.normal_form.primitives:Add.delta",
        "((self.target, self.source, 1),)",
        "((self.target, self.source, 1),) * 2",
        ("test_memory_operators.py::test_matrices_are_the_papers",),
    ),
    Fault(
        "copy clears too much",
        "a copy in place clears the whole region, not the part that it copies to",
        "address",
        "linop.operators.memory:_allocate_or_clear",
        "clear(space, target)",
        "clear(space, target.region)",
        ("test_memory_operators.py::test_adjoint_laws_in_place",),
    ),
    Fault(
        "adjoint composition not reversed",
        "the adjoint of a product has the factors' adjoints in the same order",
        "order",
        "linop.operators.expressions:Composition._adjoint",
        "reversed(self.parts)",
        "self.parts",
        (f"{RULES}[random_composition]",),
    ),
    Fault(
        "sum keeps its last term",
        "a sum that is interpreted overwrites where it should add",
        "overwriting",
        "linop.operators.flow:_accumulate",
        "total[name] += array",
        "total[name] = array",
        (f"{RUNS}[sum_of_operators]",),
    ),
    Fault(
        "shared term loses its multiple",
        "a node that is used several times is applied once, and added without the multiples",
        "precision",
        "linop.operators.flow:Flow._together",
        "Demand(*ends, one.scalar, one.rank)",
        "Demand(*ends, 1, one.rank)",
        ("test_graphs.py::test_a_graph_is_its_matrix_forward_adjoint_and_in_stages",),
    ),
    Fault(
        "blocks keep their names between stages",
        "regions between the stages of two blocks of a direct sum have one name",
        "address",
        "linop.normal_form.stages:Stages.direct_sum",
        'block._deepened(depth)._renamed(f"{{}}⟨{k}⟩".format)',
        'block._renamed(f"{{}}⟨{k}⟩".format)._deepened(depth)',
        ("test_graphs.py::test_blocks_may_have_any_names_inside",),
    ),
    Fault(
        "replicated treated as copies",
        "an all-gather makes independent copies where one replicated tensor is wanted",
        "replication",
        "linop.operators.collectives:all_gather",
        "into if k in axes else axis",
        "COPIES if k in axes else axis",
        ("test_proofs.py::test_gathering_into_copies_and_into_one_replicated_tensor",),
    ),
    Fault(
        "ring's last step missing",
        "the rounds of a ring end one step early",
        "omission",
        "linop.operators.ring:ring_all_reduce",
        "range(len(rings[0]) - 1)",
        "range(len(rings[0]) - 2)",
        ("test_proofs.py::test_ring_all_reduce_is_broadcast_of_sum_reduce",),
    ),
    Fault(
        "right halo one short",
        "the last input that a worker's outputs need is left out",
        "boundary",
        "linop.operators.halo:Kernel.reach",
        "start + (last - 1 - first) * self.stride + self.dilation * (self.size - 1) + 1",
        "start + (last - 1 - first) * self.stride + self.dilation * (self.size - 1)",
        ("test_halo.py::test_geometry_is_what_the_outputs_touch",),
    ),
)
