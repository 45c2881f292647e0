"""Faults of parallel training: pipelines."""

from __future__ import annotations

from mutation.fault import Fault

EXACT = ("test_pipelines.py::test_synchronous_on_threads",)
DELAYED = ("test_pipelines.py::test_delayed_on_threads",)
MODEL = ("test_pipelines.py::test_model_on_threads",)

STRATEGIES = (
    Fault(
        "stash overwritten",
        "an update writes to the memory of a version that a backward is still to read",
        "overwriting",
        "linop.strategies.pipelines.stage:Stage.renew",
        "p.detach().clone()",
        "p.detach()",
        DELAYED,
    ),
    Fault(
        "newest version",
        "a forward reads the newest parameters, whichever the schedule names",
        "order",
        "linop.strategies.pipelines.stage:Stage.forward",
        "self._updates if version is None else version",
        "self._updates",
        DELAYED,
    ),
    Fault(
        "gradient of one consumer",
        "of a value that several stages use, the gradient of the last one alone goes back",
        "overwriting",
        "linop.strategies.pipelines.execution:Step._run_backward",
        "gradients[k] + one if k in gradients else one",
        "one",
        EXACT,
    ),
    Fault(
        "share of the largest micro-batch",
        "the mean of every micro-batch has the same share in that of the batch",
        "coefficient",
        "linop.strategies.pipelines.pipeline:Pipeline._shares",
        "sizes[m] / n",
        "1 / len(group)",
        EXACT,
    ),
    Fault(
        "halves of tied leaves",
        "the weight half of a backward starts at every node, also if two lead to one leaf",
        "replication",
        "linop.strategies.pipelines.halves:parts",
        "not chosen or len(set(every)) < len(every)",
        "not chosen",
        EXACT,
    ),
    Fault(
        "norm of one stage",
        "gradients are clipped by the norm of those of this worker's stages",
        "local",
        "linop.strategies.pipelines.gradient_norm:GradientNorm.clip",
        "self._sum(terms.reshape(-1)).reshape(2, -1)",
        "(self._sum(terms.reshape(-1)), terms)[1]",
        MODEL,
    ),
    Fault(
        "norm of a stage from each of its workers",
        "the norm of a stage on several workers counts once for each of them",
        "replication",
        "linop.strategies.pipelines.gradient_norm:GradientNorm._norms",
        "norms and not part.worker",
        "norms",
        ("test_cut_pipelines.py::test_training_on_threads",),
    ),
    Fault(
        "tied gradients added again",
        "the sum over holders of tied weights contains the gradients of earlier steps",
        "aliasing",
        "linop.strategies.pipelines.tied_weights:TiedWeights.begin",
        "p.grad = None",
        "p.grad = p.grad",
        MODEL,
    ),
    Fault(
        "kept output",
        "the output of a stage is kept, beside the graph, until its backward",
        "memory",
        "linop.strategies.pipelines.stage:Stage.forward",
        "_Saved(inputs, edges, weights)",
        "_Saved(inputs, edges, weights, (list(outputs.values()), ()))",
        ("test_pipelines.py::test_outputs_are_not_kept",),
    ),
    Fault(
        "slots of the other end",
        "a message is received in the order in which all micro-batches come, of other sizes too",
        "address",
        "linop.strategies.pipelines.execution:receives",
        "id(lane)",
        "forward",
        EXACT,
    ),
    Fault(
        "shared generator",
        "forwards with dropout draw from the generator as it is, and a second one draws anew",
        "order",
        "linop.strategies.pipelines.random_numbers:RandomNumbers.draws",
        "self._draws.get(training, True)",
        "False",
        ("test_unusual_stages.py::test_dropout",),
    ),
    Fault(
        "inputs in the order of use",
        "a stage of an exported model takes its inputs in another order than its edges come",
        "address",
        "linop.strategies.pipelines.exported:stages_of",
        "sorted(inputs, reverse=True)",
        "list(inputs)",
        ("test_cut_models.py::test_exported",),
    ),
)
