"""Read and write the model's tensors under DeepSpeed: main weights and forward values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from slapo_deepspeed.state.flat_layout import partition_of, shape_of
from slapo_runtime.flat_shards import gathered, is_rounding

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_deepspeed.state.flat_layout import Places
    from slapo_runtime.flat_shards import Place
    from slapo_runtime.storage import LiveTensor


class DeepSpeedTensors:
    """The implementation of :class:`slapo_runtime.storage.TensorStorage`.

    Main weights are read and written in ZeRO's partitions or apart from the model; the model's parameters follow.

    Args:
        places: of the engine.
        mesh: of the schedule; None for one process.
        device: that the mesh's groups send from.
    """

    def __init__(self, places: Places, mesh: Mesh | None, device: torch.device) -> None:
        self._places, self._mesh, self._device = places, mesh, device
        self._rank = mesh.rank("dp") if mesh is not None else 0

    @property
    def are_parts(self) -> bool:
        """Whether replicas hold parts of some parameter."""
        return self._mesh is not None and self._mesh.size("dp") > 1 and self._places.are_parts

    def partitioned(self, live: LiveTensor) -> tuple[str, ...]:
        if self._mesh is None or self._mesh.size("dp") == 1:
            return ()
        is_part = self._places.are_parts if self._place(live) is not None else hasattr(live.tensor, "ds_tensor")
        return ("dp",) if is_part else ()

    def dtype(self, live: LiveTensor) -> torch.dtype:
        place = self._place(live)
        return live.tensor.dtype if place is None else place.flat.dtype

    def read(self, live: LiveTensor) -> torch.Tensor:
        place = self._place(live)
        if place is not None:
            return self._whole(live, place.of(place.flat), place.offset)
        part = partition_of(live.tensor, self._rank)
        return live.tensor.detach() if part is None else self._whole(live, *part)

    def loading(self, live: LiveTensor, value: torch.Tensor) -> Callable[[], None]:
        place, part = self._place(live), partition_of(live.tensor, self._rank)
        whole = value if part is None or _is_whole(live.tensor) else None
        master = None if place is None else place.part(value).clone()
        own = None if part is None else value.reshape(-1).narrow(0, part[1], part[0].numel()).clone()

        def write() -> None:
            with torch.no_grad():
                if place is not None and master is not None:
                    place.of(place.flat).copy_(master)
                if part is not None and own is not None:
                    part[0].copy_(own)
                if whole is not None:
                    live.tensor.data.copy_(whole)

        return write

    def working(self, live: LiveTensor) -> torch.Tensor | None:
        if hasattr(live.tensor, "ds_tensor"):
            return live.tensor.detach() if _is_whole(live.tensor) else None
        return None if self._place(live) is None else live.tensor.detach()

    def is_current(self, live: LiveTensor) -> bool:
        place, part = self._place(live), partition_of(live.tensor, self._rank)
        if part is not None:
            is_trained = place is None or is_rounding(part[0], place.of(place.flat))
            offset, length = part[1], part[0].numel()
            if not _is_whole(live.tensor):
                return is_trained
            return is_trained and is_rounding(live.tensor.detach().reshape(-1).narrow(0, offset, length), part[0])
        return place is None or is_rounding(place.part(live.tensor), place.of(place.flat))

    def _place(self, live: LiveTensor) -> Place | None:
        return self._places.by_parameter.get(id(live.tensor))

    def _whole(self, live: LiveTensor, shard: torch.Tensor, offset: int) -> torch.Tensor:
        groups = [self._mesh.group("dp")] if self._mesh is not None and self.partitioned(live) else []
        return gathered(shard, offset, shape_of(live.tensor), groups, device=self._device)


def _is_whole(parameter: Any) -> bool:
    """Whether ZeRO-3 holds the full parameter now, as it keeps small ones between steps."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return bool(parameter.ds_status == ZeroParamStatus.AVAILABLE)
