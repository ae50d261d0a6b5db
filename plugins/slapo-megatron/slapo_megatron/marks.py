"""Mark parameters for Megatron: shards, and copies that another rank counts.

Megatron's norm of all gradients counts marked parameters on every rank along ``tp``, and all others on the first rank.
Without marks the norm silently leaves out other ranks' shards, or counts ties twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError

if TYPE_CHECKING:
    import torch

    from slapo_runtime.context import BuildContext
    from slapo_runtime.correspondence.storage import LiveTensor


_OF_MEGATRON = ("main_grad", "grad_added_to_main_grad", "main_param", "main_param_sharded")
"""Attributes that Megatron's wrapper and optimizers set on parameters."""


class Marks:
    """Set marks on parameters, and restore the attributes that parameters had before.

    Args:
        parameters: each with its marks.
    """

    def __init__(self, parameters: list[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        self._before: list[tuple[torch.Tensor, dict[str, Any]]] = []
        for tensor, wanted in parameters:
            names = (*wanted, *_OF_MEGATRON)
            self._before.append((tensor, {name: vars(tensor).get(name, _ABSENT) for name in names}))
            for name, value in wanted.items():
                setattr(tensor, name, value)

    def take_back(self) -> None:
        """Restore the parameters' own attributes, and delete Megatron's."""
        for tensor, attributes in self._before:
            for name, value in attributes.items():
                if value is not _ABSENT:
                    setattr(tensor, name, value)
                elif name in vars(tensor):
                    delattr(tensor, name)
        self._before.clear()

    @contextlib.contextmanager
    def taken_back_if_it_fails(self) -> Iterator[None]:
        """Remove the marks if the block fails."""
        try:
            yield
        except BaseException:
            self.take_back()
            raise


_ABSENT = object()


def mark(context: BuildContext) -> Marks:
    """Mark every parameter by its layout; unsharded ones keep marks of the user, e.g. of Megatron's layers.

    Args:
        context: of the build; every tensor is materialized.

    Raises:
        BuildError: a parameter is sharded over another mesh dimension than ``tp``, or ranks share only parts of their
            shards; nothing is marked.
    """
    here = [live for live in context.state.tensors() if live.is_parameter and live.is_local]
    for live in here:
        _refuse_split(context, live)
    return Marks([(live.tensor, {**_as_shard(context, live), **_as_copy(context, live)}) for live in here])


def _refuse_split(context: BuildContext, live: LiveTensor) -> None:
    mesh = context.schedule.mesh
    for mesh_dim, axis in live.layout.shards():
        if mesh_dim != "tp" and mesh is not None and mesh.size(mesh_dim) > 1:
            raise BuildError(
                f"'{live.name}' is split on axis {axis} over mesh_dim '{mesh_dim}', and Megatron's "
                "DistributedDataParallel would average the gradients of its shards like replicas' gradients",
                hint='split it over "tp"',
            )
    if live.layout.parts(mesh):
        raise BuildError(
            f"ranks share only parts of their shards of '{live.name}' ({live.layout}), and Megatron's norm of all "
            "gradients counts a shard in full or not at all",
            hint="a tp size up to the number of KV heads, the torch target, or separate projections",
        )


def _as_shard(context: BuildContext, live: LiveTensor) -> dict[str, Any]:
    """Return the marks of a shard over ``tp``; the stride is the number of matrices packed on that axis.

    Of a shard that several ranks hold, the first one is marked: Megatron's norm counts unmarked ones on rank 0 only.
    """
    mesh, layout = context.schedule.mesh, live.layout
    split = [axis for mesh_dim, axis in layout.shards() if mesh_dim == "tp"]
    if not split or mesh is None or mesh.size("tp") == 1 or layout.holders(mesh, "tp")[0] != mesh.rank("tp"):
        given = vars(live.tensor)
        ours = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
        return {name: given.get(name, value) for name, value in ours.items()}
    sizes = dict(layout.packing).get(split[0], ())
    stride = len(sizes) if sizes and len(set(sizes)) == 1 else 1
    return {"tensor_model_parallel": True, "partition_dim": split[0], "partition_stride": stride}


def _as_copy(context: BuildContext, live: LiveTensor) -> dict[str, Any]:
    """Return the marks of a parameter tied over stages: only its first rank counts it in the norm.

    ``shared_embedding`` gives it a bucket of its own, so that the distributed optimizer partitions all copies equally.
    """
    mesh, placement = context.schedule.mesh, context.placement
    holders = placement.holders(live) if placement is not None else ()
    if mesh is None or len(holders) < 2:
        return {}
    return {"shared": mesh.rank("pp") != holders[0], "shared_embedding": True}
