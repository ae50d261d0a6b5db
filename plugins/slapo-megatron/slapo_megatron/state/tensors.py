"""Read and write the model's tensors under Megatron: main weights and forward values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_runtime.flat_shards import gathered, is_rounding

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_megatron.state.flat_layout import Held, Places
    from slapo_runtime.storage import LiveTensor


class MegatronTensors:
    """The implementation of :class:`slapo_runtime.storage.TensorStorage`.

    Main parameters are read and written where Megatron's optimizers have them; the parameters of the model follow.

    Args:
        places: of the engine.
        mesh: of the schedule; None for one process.
        device: that Megatron's groups send from.
    """

    def __init__(self, places: Places, mesh: Mesh | None, device: torch.device) -> None:
        self._places, self._mesh, self._device = places, mesh, device
        self._follows = True

    def end(self) -> None:
        """Stop following the main weights: Megatron may not have sent the last step's changes."""
        self._follows = False

    def partitioned(self, live: LiveTensor) -> tuple[str, ...]:
        return shared_dims(self._held(live), self._mesh)

    def dtype(self, live: LiveTensor) -> torch.dtype:
        held = self._held(live)
        return live.tensor.dtype if held is None else held.dtype

    def read(self, live: LiveTensor) -> torch.Tensor:
        held = self._held(live)
        if held is None:
            return live.tensor.detach()
        shape, place = tuple(live.tensor.shape), held.place
        if not held.is_part:
            assert place is not None
            return place.of(place.flat).view(shape)
        shard = torch.empty(0, dtype=held.dtype) if place is None else place.of(place.flat)
        offset = place.offset if place is not None else 0
        return gathered(shard, offset, shape, self._places.shared, device=self._device)

    def loading(self, live: LiveTensor, value: torch.Tensor) -> Callable[[], None]:
        held = self._held(live)
        place = held.place if held is not None and held.is_copy else None
        part = None if place is None else place.part(value).clone()

        def write() -> None:
            with torch.no_grad():
                live.tensor.data.copy_(value)
                if place is not None and part is not None:
                    place.of(place.flat).copy_(part)

        return write

    def working(self, live: LiveTensor) -> torch.Tensor | None:
        held = self._held(live)
        return live.tensor.detach() if self._follows and held is not None and held.is_copy else None

    def is_current(self, live: LiveTensor) -> bool:
        held = self._held(live)
        if not self._follows or held is None or held.place is None or not held.is_copy:
            return True
        return is_rounding(held.place.part(live.tensor), held.place.of(held.place.flat))

    def _held(self, live: LiveTensor) -> Held | None:
        return self._places.held.get(id(live.tensor))


def shared_dims(held: Held | None, mesh: Mesh | None) -> tuple[str, ...]:
    """The mesh dimensions along which ranks hold parts of a parameter: those of replicas, as Megatron counts them."""
    if held is None or not held.is_part or mesh is None:
        return ()
    return ("dp",) if mesh.size("dp") > 1 else ()


def merge_across_ranks(own: dict[int, Any], groups: Sequence[Any]) -> dict[int, Any]:
    """Merge dictionaries over the ranks of groups; the first rank with an entry counts."""
    found = own
    for group in groups:
        import torch.distributed as dist

        by_rank: list[dict[int, Any]] = [{}] * group.size()
        dist.all_gather_object(by_rank, found, group=group)
        found = {}
        for theirs in by_rank:
            for number, value in theirs.items():
                found.setdefault(number, value)
    return found
