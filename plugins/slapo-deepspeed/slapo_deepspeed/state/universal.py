"""Describe the shards of parameters for DeepSpeed's conversion to universal checkpoints.

Without it the conversion concatenates shards along their first axis, whatever the schedule did, and a checkpoint of a
pipeline is refused.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_core.layout import Layout, Mesh
    from slapo_runtime.context import BuildContext


_PARTIAL = "it is a partial sum over the ranks, which no place in a whole tensor explains"
_PADDED = "its vocabulary is padded, by shard(pad=True), to this mesh; slapo's engine.save() writes it without padding"


def describe(engine: Any, context: BuildContext) -> None:
    """Hang the description on what DeepSpeed saves: a collective over ``pp``.

    Args:
        engine: DeepSpeed's.
        context: of the build.
    """
    from deepspeed.checkpoint import constants
    from deepspeed.checkpoint.affine import AFFINE_MAP_FORMAT_VERSION

    mesh = context.schedule.mesh
    version = {constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    maps: dict[str, dict[str, Any]] = {}
    unknown: dict[str, str] = {}
    for live in context.state.tensors():
        name = engine.param_names.get(live.tensor)
        if name is None or mesh is None or mesh.size("tp") == 1:
            continue
        pattern = f"^{re.escape(name)}$"
        conversion: dict[str, Any] = {}
        if live.layout.partials() or live.layout.padding:
            unknown[pattern] = conversion["unsupported_reason"] = _PARTIAL if live.layout.partials() else _PADDED
        else:
            maps[pattern] = conversion["affine_map"] = _map_of(live.layout, mesh)
        setattr(live.tensor, constants.DS_AUTOTP_UC_META, {"conversion": conversion, **version})
    for theirs in _of_all_stages((maps, unknown), mesh):
        maps.update(theirs[0])
        unknown.update(theirs[1])
    info: dict[str, Any] = dict(version)
    if maps:
        info[constants.AFFINE_MAP] = {
            constants.AFFINE_MAP_VERSION: AFFINE_MAP_FORMAT_VERSION,
            constants.AFFINE_MAP_PARAMS: maps,
        }
    if unknown:
        info[constants.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS] = unknown
    setattr(engine.module, constants.UNIVERSAL_CHECKPOINT_INFO, info)


def forget(engine: Any) -> None:
    """Take the description off the model again."""
    from deepspeed.checkpoint import constants

    vars(engine.module).pop(constants.UNIVERSAL_CHECKPOINT_INFO, None)
    for parameter in engine.param_names:
        vars(parameter).pop(constants.DS_AUTOTP_UC_META, None)


@dataclass(frozen=True)
class _At:
    """The mesh, seen from another place along ``tp``."""

    mesh: Mesh
    place: int

    def size(self, mesh_dim: str) -> int:
        return self.mesh.size(mesh_dim)

    def rank(self, mesh_dim: str) -> int:
        return self.place if mesh_dim == "tp" else self.mesh.rank(mesh_dim)


def _map_of(layout: Layout, mesh: Mesh) -> dict[str, Any]:
    """Locate the shards of all ranks along ``tp`` in the full tensor, as DeepSpeed saves it."""
    from deepspeed.checkpoint.affine import ParamAffineMap

    is_split = any(mesh_dim == "tp" for mesh_dim, _ in layout.shards())
    everywhere = list(range(mesh.size("tp")))
    shapes, shards = {}, {}
    for place in everywhere:
        segments = layout.segments(_At(mesh, place))  # type: ignore[arg-type]
        shapes[place] = [sum(length for _, length in ranges) for ranges in segments]
        holders = [place] if is_split else everywhere
        shards[place] = [_shard(block, layout.shape, shapes[place], holders) for block in _blocks(segments)]
    found = ParamAffineMap(layout.shape, shapes, shards)
    found.validate()
    described: dict[str, Any] = found.to_dict()
    return described


_Block = Sequence[
    tuple[int, int, int]
]  # for each axis: offset in the shard, offset in the full tensor, number of elements


def _blocks(segments: Sequence[Sequence[tuple[int, int]]]) -> list[_Block]:
    axes = []
    for ranges in segments:
        lengths = [length for _, length in ranges]
        axes.append([(sum(lengths[:number]), start, length) for number, (start, length) in enumerate(ranges)])
    return list(itertools.product(*axes))


def _shard(block: _Block, whole: Sequence[int], shape: Sequence[int], holders: Sequence[int]) -> Any:
    from deepspeed.checkpoint.affine import AffinePiece

    outer, inner = _strides(whole), _strides(shape)
    return AffinePiece(
        shape=[length for _, _, length in block],
        source_offset=sum(start * stride for (_, start, _), stride in zip(block, outer, strict=True)),
        source_strides=outer,
        dest_offset=sum(at * stride for (at, _, _), stride in zip(block, inner, strict=True)),
        dest_strides=inner,
        locations=holders,
    )


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _of_all_stages(own: Any, mesh: Mesh | None) -> list[Any]:
    if mesh is None or mesh.size("pp") == 1:
        return [own]
    import torch.distributed as dist

    found: list[Any] = [None] * mesh.size("pp")
    dist.all_gather_object(found, own, group=mesh.group("pp"))
    return found
