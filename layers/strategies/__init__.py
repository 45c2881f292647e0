"""Parallel training as schedules and operators (`linop.strategies`): meshes of workers,
pipelines of torch modules, and tensor-parallel ones."""

import linop.backends.autograd  # first: without torch it says what to install
from linop.strategies.checking.check import check
from linop.strategies.checking.diagnosis import GradientError
from linop.strategies.context.context_parallel import ContextParallel
from linop.strategies.data.batch_norm import sync_batch_norm
from linop.strategies.data.batches import equal_batches
from linop.strategies.data.data_parallel import DataParallel
from linop.strategies.data.loading import Parts, loader
from linop.strategies.data.sharded.fully_shard import (
    full_state_dict,
    fully_shard,
    load_full_state_dict,
)
from linop.strategies.data.sharded.unsharded import unsharded
from linop.strategies.data.sharded_optimizer import ShardedOptimizer
from linop.strategies.data.virtual_shards import VirtualShards
from linop.strategies.data.whole_module import full_module
from linop.strategies.experts.expert_parallel import ExpertParallel
from linop.strategies.memory.checkpointed import checkpoint
from linop.strategies.memory.estimate import Memory, estimate
from linop.strategies.memory.offloaded import offload
from linop.strategies.memory.reversible import Reversible
from linop.strategies.mesh import Axis, Mesh
from linop.strategies.pipelines.pipeline import Pipeline
from linop.strategies.pipelines.splitting import split
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.spatial import Spatial, spatial
from linop.strategies.tensor.modules.cross_entropy import CrossEntropyLoss
from linop.strategies.tensor.parallelize import parallelize_module
from linop.strategies.tensor.styles.cut import AttentionParallel, ColwiseParallel, RowwiseParallel
from linop.strategies.tensor.styles.kept import (
    LocalAttributes,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    SequenceParallel,
)
from linop.strategies.tensor.styles.model_plans import tp_plan

__all__ = [
    "AttentionParallel",
    "Axis",
    "ColwiseParallel",
    "ContextParallel",
    "CrossEntropyLoss",
    "CutTensor",
    "DataParallel",
    "ExpertParallel",
    "GradientError",
    "LocalAttributes",
    "Memory",
    "Mesh",
    "Parts",
    "Pipeline",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Reversible",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardedOptimizer",
    "Spatial",
    "VirtualShards",
    "check",
    "checkpoint",
    "equal_batches",
    "estimate",
    "full_module",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
    "loader",
    "offload",
    "parallelize_module",
    "spatial",
    "split",
    "sync_batch_norm",
    "tp_plan",
    "unsharded",
]

del linop  # not a public name
