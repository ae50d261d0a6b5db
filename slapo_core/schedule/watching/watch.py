"""`Watch`: what a live model carries so that plain tools around it cannot train, save or load it wrongly in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from slapo_core.schedule.watching.first_forward import FirstForward
from slapo_core.schedule.watching.pieces import Pieces
from slapo_core.schedule.watching.placed_hook import PlacedHook
from slapo_core.schedule.watching.plain_state_dicts import PlainStateDicts
from slapo_core.schedule.watching.stale_optimizers import note_exchange
from slapo_core.tree.journal import AddHook, Entry, WrapForward

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core.schedule.transaction import Step
    from slapo_core.spec.mesh import Mesh

__all__ = ["Watch"]


class Watch:
    """Told of every step that comes into force or goes; its hooks are on the root only while the model is split.

    Args:
        model: the root.
        mesh: of the schedule.
        check: called in the first training forward: refuses a schedule or model that trains wrongly, and gives the
            tensors that the ranks of ``tp`` hold alike.
    """

    def __init__(self, model: nn.Module, mesh: Mesh | None, check: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._model, self._mesh = model, mesh
        self._pieces = Pieces(mesh)
        self._splits = self._wraps = 0  # edits in force that split a tensor, and that change what the root is given
        self._gathers = 0  # steps in force that put tensors of several ranks together
        self._forward = FirstForward(self._pieces, mesh, model, self.hand_over, check)
        dicts = PlainStateDicts(model, self._pieces)
        self._for_good = (
            PlacedHook(model, ("_state_dict_pre_hooks",), lambda: model.register_state_dict_pre_hook(dicts.going_out)),
            PlacedHook(
                model,
                ("_load_state_dict_pre_hooks",),
                lambda: model.register_load_state_dict_pre_hook(dicts.coming_in),
            ),
        )
        self._for_once = self._first_forward()  # None when the next training forward is not looked at

    def came(self, step: Step, *, again: bool = False) -> None:
        """A step is in force; ``again`` after a ``with`` block without it."""
        self._gathers += _gathers(step)
        for entry in step.entries:
            note_exchange(self._model, entry, undone=False)
            self._wraps += self._is_around_root(entry)
            if self._pieces.note(entry):
                self._splits += 1
                if self._for_once is None and not again:
                    self._for_once = self._first_forward()
        self._put_hooks()

    def went(self, step: Step) -> None:
        """A step was undone."""
        self._gathers -= _gathers(step)
        for entry in step.entries:
            note_exchange(self._model, entry, undone=True)
            self._wraps -= self._is_around_root(entry)
            self._splits -= self._pieces.note(entry, undone=True)
        self._put_hooks()

    def hand_over(self) -> None:
        """The first training forward was looked at, or a runtime takes the model and looks after its ranks itself."""
        if self._for_once is not None:
            self._for_once.take()
        self._for_once = None

    def _put_hooks(self) -> None:
        self._forward.may_be_given_parts = self._wraps > 0 or self._gathers > 0
        for hook in (*self._for_good, *([self._for_once] if self._for_once is not None else [])):
            if self._splits:
                hook.put()
            else:
                hook.take()

    def _first_forward(self) -> PlacedHook | None:
        if self._mesh is None or self._mesh.device_mesh is None:  # dry: there is nobody to compare with
            return None
        model, hook = self._model, self._forward
        return PlacedHook(
            model,
            ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
            lambda: model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True),
        )

    def _is_around_root(self, entry: Entry) -> bool:
        """Whether an edit may change what the root is called with."""
        if isinstance(entry, AddHook) and entry.kind != "forward_pre":
            return False
        return isinstance(entry, (AddHook, WrapForward)) and entry.module is self._model and entry.active


def _gathers(step: Step) -> bool:
    """Whether a step names the collective that puts together what each rank holds: the first may be of the inputs."""
    return "all_gather" in [value for value in step.record.primitive.arguments().values() if isinstance(value, str)]
