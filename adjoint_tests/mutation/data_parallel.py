"""Faults of parallel training: copies and shards of parameters."""

from __future__ import annotations

from mutation.fault import Fault

COPIES = ("test_data_parallel.py::test_one_process_on_threads",)
USES = ("test_data_parallel.py::test_on_threads",)
SHARDS = ("test_fully_shard.py::test_data_parallel_on_threads",)
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
        "linop.strategies.data.data_parallel:DataParallel.forward",
        "self._spread < self._reducer.reductions",
        "False",
        COPIES,
    ),
    Fault(
        "shards gathered into one tensor",
        "the gradient of a shard is a slice of this worker's gradient",
        "replication",
        "linop.strategies.data.unit:Unit.__init__",
        "all_gather(member.space)",
        "all_gather(member.space, into=__import__('linop').REPLICATED)",
        SHARDS,
    ),
    Fault(
        "whole parameters kept",
        "the graph keeps whole parameters until backward",
        "memory",
        "linop.strategies.data.unit:_packed",
        "_Saved(call, k, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())",
        "tensor",
        MEMORY,
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
