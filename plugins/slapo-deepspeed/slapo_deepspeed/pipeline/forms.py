"""Forms of a batch: what this rank's stages are sent and send, made once for each form."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from slapo_deepspeed.pipeline.work import Form

if TYPE_CHECKING:
    import torch

    from slapo_core.spec.request import BuildRequest, StagedBatch

__all__ = ["Forms"]

_KEPT = 16


class Forms:
    """Cuts batches, and keeps the forms of micro-batches that came last.

    Args:
        request: from ``build``.
        count: of micro-batches.
        axes: of the batch, as the hook `slapo_partition` says.
        device: where stages compute.
        bare: the ranks along ``pp`` that train nothing.
    """

    def __init__(
        self,
        request: BuildRequest,
        count: int,
        axes: Mapping[str, int | None] | None,
        device: torch.device,
        bare: Collection[int],
    ) -> None:
        mesh = request.schedule.mesh
        assert mesh is not None
        self._request, self._count, self._axes, self._device = request, count, axes, device
        self._bare = bare
        self._rank = mesh.rank("pp")
        self._kept: OrderedDict[tuple[int, bool], Form] = OrderedDict()

    def of(self, batch: Any, *, training: bool) -> tuple[StagedBatch, Form]:
        """The micro-batches of a batch, and their form.

        Raises:
            BuildError: it cannot be cut into micro-batches; the model has other stages for it; or there is no loss.
            TraceError: the model cannot be cut for it.
        """
        cut = self._request.staged(
            batch, self._count, training=training, axes=self._axes, option="gradient_accumulation_steps"
        )
        key = (id(cut.staged), training)
        if key not in self._kept:
            self._kept[key] = Form(
                cut.staged,
                self._request.stage_ranks,
                self._rank,
                self._device,
                training=training,
                bare=self._bare,
            )
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return cut, self._kept[key]

    def close(self) -> None:
        """Let go of everything."""
        self._kept.clear()
