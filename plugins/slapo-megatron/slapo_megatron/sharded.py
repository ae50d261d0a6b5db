"""Save and load checkpoints in Megatron's format: each rank its shards, by ``dist_checkpointing``.

Imports Megatron: import it in functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slapo_core import BuildError, WeightsError

if TYPE_CHECKING:
    from slapo_runtime.context import BuildContext
    from slapo_runtime.correspondence.storage import ShardedState, TensorShard


_OURS = "slapo"  # key in Megatron's file of values that are not tensors


class ShardedDirectory:
    """A sharded checkpoint.

    Args:
        directory: of the checkpoint, on a disk that all ranks share.
        context: of the build.
    """

    def __init__(self, directory: Path, context: BuildContext) -> None:
        self._path, self._context = directory, context
        self._tensors: Mapping[str, TensorStorageMetadata] = {}

    @property
    def label(self) -> str:
        return f"the sharded checkpoint '{self._path}'"

    def write(self, state: ShardedState) -> None:
        """Write to a new or empty directory: a collective.

        Raises:
            BuildError: the directory is not empty.
        """
        import torch.distributed as dist

        with self._context.together(f"writing {self.label}"):
            if dist.get_rank() == 0:
                self._path.mkdir(parents=True, exist_ok=True)
                if any(self._path.iterdir()):
                    raise BuildError(
                        f"'{self._path}' is not empty: Megatron would mix its files with another checkpoint's",
                        hint="engine.save_sharded('a new directory')",
                    )
        about = {_OURS: json.dumps(state.description)}
        dist_checkpointing.save({**_sharded(state.own), **about}, str(self._path))

    def describe(self) -> dict[str, Any]:
        """Read the saved extra values and the names of the tensors: not a collective.

        Raises:
            WeightsError: it is not a checkpoint of this format.
        """
        try:
            description = dist_checkpointing.load_common_state_dict(str(self._path))[_OURS]
            stored = FileSystemReader(self._path).read_metadata().state_dict_metadata
        except (KeyError, OSError, dist_checkpointing.core.CheckpointingException) as error:
            raise WeightsError(
                f"'{self._path}' is not a checkpoint written by engine.save_sharded(): {error}",
                hint="engine.load(directory) reads what engine.save(directory) wrote",
            ) from error
        self._tensors = {key: value for key, value in stored.items() if isinstance(value, TensorStorageMetadata)}
        return dict(json.loads(description))

    # -- as slapo_runtime.correspondence.storage.ShardSource ----------------------------------------------------

    def like(self, kind: str, name: str) -> torch.Tensor:
        found = self._tensors[_key(kind, name)]
        return torch.empty(found.size, dtype=found.properties.dtype, device="meta")

    def read(self, wanted: Sequence[TensorShard]) -> None:
        dist_checkpointing.load(_sharded(wanted), str(self._path), validate_access_integrity=False)


def _sharded(shards: Sequence[TensorShard]) -> dict[str, Any]:
    """Convert to Megatron's format; blocks of any size, without a regular grid."""
    return {
        f"shard {number}": ShardedTensor(
            _key(shard.kind, shard.name),
            shard.value,
            shard.value.dtype,
            tuple(shard.value.shape),
            shard.shape,
            shard.offset,
            axis_fragmentations=None,
        )
        for number, shard in enumerate(shards)
    }


def _key(kind: str, name: str) -> str:
    """Return Megatron's names: weights by the model's names, optimizer states with a prefix."""
    if kind == "weight":
        return name
    if kind == "added":
        return f"added.{name}"
    parameter, _, key = name.rpartition("::")
    return f"optimizer.state.{key}.{parameter}"
