"""Forms of a batch: what a rank's stages are sent and send, made once for each form."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from slapo_core.spec.stage_work import Form

if TYPE_CHECKING:
    from slapo_core.spec.request import BuildRequest, StagedBatch, StagedModel

__all__ = ["Forms"]

_KEPT = 16

F = TypeVar("F", bound=Form)


class Forms(Generic[F]):
    """Cuts batches, and keeps the forms of micro-batches that came last.

    Args:
        request: from ``build``.
        count: of micro-batches.
        axes: of the batch, as the hook `slapo_partition` says.
        option: of the runtime that gives the count, for messages.
        make: the form of stages, for training or not.
        prepare: as for :meth:`slapo_core.spec.request.BuildRequest.staged`.
    """

    def __init__(
        self,
        request: BuildRequest,
        count: int,
        axes: Mapping[str, int | None] | None,
        option: str,
        make: Callable[[StagedModel, bool], F],
        prepare: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        self._request, self._count, self._axes, self._option, self._make = request, count, axes, option, make
        self._prepare = prepare
        self._kept: OrderedDict[tuple[int, bool], F] = OrderedDict()

    def of(self, batch: Any, *, training: bool) -> tuple[StagedBatch, F]:
        """The micro-batches of a batch, and their form.

        Raises:
            BuildError: it cannot be cut into micro-batches; the model has other stages for it; or there is no loss.
            TraceError: the model cannot be cut for it.
        """
        cut = self._request.staged(
            batch, self._count, training=training, axes=self._axes, option=self._option, prepare=self._prepare
        )
        key = (id(cut.staged), training)
        if key not in self._kept:
            self._kept[key] = self._make(cut.staged, training)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return cut, self._kept[key]

    def close(self) -> None:
        """Let go of everything."""
        self._kept.clear()
