"""Faults of parallel training: copies and shards of parameters."""

from __future__ import annotations

from mutation.fault import Fault

COPIES = ("test_data_parallel.py::test_one_process_on_threads",)
USES = ("test_data_parallel.py::test_on_threads",)
SHARDS = ("test_fully_shard.py::test_data_parallel_on_threads",)
GRAPHS = ("test_sharded_graphs.py::test_on_threads",)
AHEAD = ("test_sharded_graphs.py::test_prefetch_on_threads",)
NESTED = ("test_nested_blocks.py::test_on_threads",)
BESIDE = ("test_check.py::test_pipelines_side_by_side",)
MEMORY = ("test_fully_shard.py::test_on_threads",)

DATA_PARALLEL = (
    Fault(
        "mean of means",
        "gradients are divided by the number of workers, unless asked not to",
        "coefficient",
        "linop.strategies.data.data_parallel:DataParallel.__init__",
        'total / self.workers if reduction == "mean" else total',
        "total / self.workers",
        ("test_complaints.py::test_complaint",),
    ),
    Fault(
        "gradients that replace",
        "gradients of a backward take the place of those of earlier ones",
        "overwriting",
        "linop.strategies.data.reducer:Reducer._give",
        "one if before is None else before + one",
        "one",
        USES,
    ),
    Fault(
        "gradients of nobody",
        "a parameter that no worker uses gets a gradient of zeros",
        "local",
        "linop.strategies.data.reducer:Reducer._fill",
        "float(own is not None)",
        "1.0",
        USES,
    ),
    Fault(
        "a server that keeps its updates",
        "updates of the server's parameters are not broadcast",
        "omission",
        "linop.strategies.data.data_parallel:DataParallel._before_forward",
        "self._spread < self._reducer.reductions",
        "False",
        COPIES,
    ),
    Fault(
        "a block of a block that is the whole's",
        "slices of a shard of a tensor-parallel block are taken for those of the whole",
        "address",
        "linop.layers.state.state_tensors:StateTensor.here",
        "slice(a.start + b.start, a.start + b.stop)",
        "slice(b.start, b.stop)",
        NESTED,
    ),
    Fault(
        "copies that count",
        "shards of a plain module count in norms on each tensor-parallel worker",
        "replication",
        "linop.layers.parameters.clipping:_norms",
        "all(backend in cut for backend in groups.backends)",
        "cut",
        NESTED,
    ),
    Fault(
        "probes that gather",
        "stages of pipelines side by side wait for each other while their shapes are found",
        "order",
        "linop.strategies.data.unit:Unit._called",
        'getattr(_LOCAL, "shapes_only", False)',
        "False",
        BESIDE,
    ),
    Fault(
        "shards gathered into one tensor",
        "the gradient of a shard is a slice of this worker's gradient",
        "replication",
        "linop.strategies.data.unit:gathering",
        "all_gather(space)",
        "all_gather(space, into=__import__('linop').REPLICATED)",
        SHARDS,
    ),
    Fault(
        "whole parameters kept",
        "the graph keeps whole parameters until backward",
        "memory",
        "linop.strategies.data.calls:Call._packed",
        "_Saved(self, k, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())",
        "tensor",
        MEMORY,
    ),
    Fault(
        "activations kept",
        "activations inside of a unit do not pass the hooks of a checkpoint around it",
        "memory",
        "linop.strategies.data.calls:Call._packed",
        "tensor if outer is None else _Outer(outer[1], outer[0](tensor))",
        "tensor",
        GRAPHS,
    ),
    Fault(
        "stale parameters",
        "parameters that were gathered ahead are used after an update",
        "order",
        "linop.strategies.data.unit:Unit._take",
        "self._ahead != self.versions()",
        "False",
        AHEAD,
    ),
    Fault(
        "a norm over all workers",
        "of shards with replicas the norm of gradients counts each replica",
        "replication",
        "linop.layers.parameters.clipping:clip_grad_norm_",
        "groups_of(every.values(), program_backend())",
        "Groups([program_backend()])",
        GRAPHS,
    ),
    Fault(
        "a step of unsummed gradients",
        "a sharded optimizer steps with gradients that are this worker's alone",
        "blind",
        "linop.strategies.data.sharded_optimizer:ShardedOptimizer.step",
        "any(reducer.unsummed for reducer in self._reducers)",
        "False",
        GRAPHS,
    ),
    Fault(
        "a worker that leaves early",
        "a worker without batches does not wait for those that have some",
        "agreement",
        "linop.strategies.data.data_parallel:DataParallel.joined",
        "agreement.sum(batch is not None)",
        "batch is not None",
        USES,
    ),
    Fault(
        "a recomputation's own parameters",
        "a checkpoint's recomputation gathers parameters of its own",
        "memory",
        "linop.strategies.data.unit:Unit._computed_again",
        "call is not None and call.versions == versions",
        "False",
        GRAPHS,
    ),
    Fault(
        "an axis across the grid",
        "the group of a mesh's axis is that of the others",
        "address",
        "linop.strategies.mesh:Mesh._axis",
        "k in numbers",
        "k not in numbers",
        ("test_meshes.py::test_mesh_on_threads",),
    ),
)
