"""The names of :mod:`slapo_runtime.correspondence.storage` that plugins also import from here."""

from slapo_runtime.correspondence.storage import (
    LiveTensor as LiveTensor,
    OptimizerStorage as OptimizerStorage,
    Placement as Placement,
    ShardedState as ShardedState,
    ShardSource as ShardSource,
    TensorShard as TensorShard,
    TensorStorage as TensorStorage,
    sharded_over as sharded_over,
)
