"""Faults of parallel training: tensor-parallel modules."""

from __future__ import annotations

from mutation.fault import Fault

EXACT = ("test_tensor_parallel.py::test_exact_on_threads",)
MODELS = ("test_tensor_parallel.py::test_language_models_on_threads",)
REFUSED = ("test_tensor_parallel.py::test_refused",)

TENSOR_PARALLEL = (
    Fault(
        "copies of copies",
        "independent copies that are to stay are summed",
        "replication",
        "linop.strategies.tensor.layouts:between",
        "along(X, ()) if ends == (COPIES, COPIES) else ()",
        "()",
        MODELS,
    ),
    Fault(
        "norm of a part",
        "the parameters of a norm on a split sequence get the gradient of this worker's part",
        "local",
        "linop.strategies.tensor.sequence:SequenceNorm._parameters_by_E",
        "embed(torch.stack([getattr(self, name) for name in names]))",
        "torch.stack([getattr(self, name) for name in names])",
        MODELS,
    ),
    Fault(
        "heads in pieces",
        "features are cut within heads",
        "boundary",
        "linop.strategies.tensor.styles:_sizes",
        "[k * (n // heads) for k in balanced(heads, axis.size)]",
        "balanced(n, axis.size)",
        MODELS,
    ),
    Fault(
        "groups of one worker",
        "keys and values that workers share get the gradient of this worker's queries",
        "local",
        "linop.strategies.tensor.linear:SharedColwiseLinear.bind",
        "embed(torch.cat(own, 1))",
        "torch.cat(own, 1)",
        ("test_tensor_parallel.py::test_shared_groups_on_threads",),
    ),
    Fault(
        "rows of the first",
        "words are looked up from the table's begin on every worker",
        "address",
        "linop.strategies.tensor.embedding:ParallelEmbedding.bind",
        "x[here] - rows.start",
        "x[here] % len(self.weight)",
        MODELS,
    ),
    Fault(
        "sums without their tops",
        "exponentials beside the largest logits of blocks are added as if beside one",
        "coefficient",
        "linop.strategies.tensor.cross_entropy:CrossEntropyLoss.bind",
        "(sums * (top - most).exp()).sum(0)",
        "sums.sum(0)",
        MODELS,
    ),
    Fault(
        "parameters of plain modules",
        "a module that is not in the plan may compute with a split tensor",
        "blind",
        "linop.strategies.tensor.types:Types._check_gradients",
        "[x for x in whole if isinstance(x, torch.nn.Parameter)]",
        "[]",
        REFUSED,
    ),
    Fault(
        "along the cut",
        "a function along the dimension that is split sees this worker's part",
        "blind",
        "linop.strategies.tensor.following.along:dims_of",
        "(given % max(ndim, 1),)",
        "()",
        ("test_split_functions.py::test_right_or_refused_on_threads",),
    ),
    Fault(
        "numbers of the block",
        "random numbers of a split tensor are those of its place in the block",
        "address",
        "linop.strategies.tensor.drawing.functions:_Numbers.bits",
        "sum(cut.sizes[: cut.index])",
        "0",
        ("test_split_functions.py::test_draws_on_threads",),
    ),
    Fault(
        "parameters in functions",
        "a function may compute with a cut weight, or a part of a parameter and a split tensor",
        "blind",
        "linop.strategies.tensor.types:Types.mark_parameters",
        "net.modules()",
        "()",
        REFUSED,
    ),
    Fault(
        "entropy beside 0",
        "logits are compared by their distance from 0, where large ones have no digits left",
        "coefficient",
        "linop.strategies.tensor.cross_entropy:CrossEntropyLoss.bind",
        "logarithm - (right.sum(0) - most)",
        "logarithm + most - right.sum(0)",
        ("test_tensor_parallel.py::test_entropies_of_large_logits_on_threads",),
    ),
    Fault(
        "order of a Sequential",
        "layouts along a Sequential are not compared before its call",
        "blind",
        "linop.strategies.tensor.chains:_differ",
        "one is not other",
        "False",
        REFUSED,
    ),
    Fault(
        "first values",
        "a worker's net may have other values",
        "agreement",
        "linop.strategies.tensor.parallelize:_compare",
        "one.get(name) != other.get(name)",
        "False",
        ("test_tensor_parallel.py::test_refused_of_workers",),
    ),
)
