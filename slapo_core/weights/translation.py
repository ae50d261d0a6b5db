"""Tensors that no layout explains: what a plugin says that they stand for, and the way there and back.

A plugin answers ``slapo_to_reference`` for the tensors that its primitives made. It is asked first with tensors on the
meta device: which tensors of the reference model a tensor stands for is known before any of them has values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import HookError

if TYPE_CHECKING:
    from slapo_core.plugins.manager import HookManager
    from slapo_core.spec.state import LiveTensor
    from slapo_core.tree.tree import Tree
    from slapo_core.weights.survey import Survey, TensorSpec

__all__ = ["Translations"]

_OUT, _IN = "slapo_to_reference", "slapo_from_reference"


@dataclass(frozen=True)
class Translations:
    """Made by :meth:`of`.

    Args:
        tree: the scheduled model.
        hooks: of its schedule.
        stands_for: name of a live tensor -> the tensors of the reference model that it stands for.
    """

    tree: Tree
    hooks: HookManager
    stands_for: Mapping[str, tuple[TensorSpec, ...]]

    @classmethod
    def of(cls, tree: Tree, survey: Survey, hooks: HookManager, lives: Iterable[LiveTensor]) -> Translations:
        """Ask the active plugins about every persistent live tensor that no layout explains.

        Raises:
            HookError: an answer names what the reference model does not have, what another tensor carries, or has
                another shape than the reference tensor.
        """
        lives = list(lives)
        carriers = {live.stands_for[0]: live.name for live in lives if live.stands_for}
        stands_for: dict[str, tuple[TensorSpec, ...]] = {}
        for live in lives:
            if live.stands_for or not live.is_persistent:
                continue
            empty = torch.empty(live.layout.shape, dtype=live.tensor.dtype, device="meta")
            answer = _ask_out(tree, hooks, live, empty)
            if answer is None:
                continue
            label, tensors = answer
            stands_for[live.name] = tuple(
                _checked(survey, carriers, live, label, name, tensor) for name, tensor in tensors.items()
            )
            carriers.update((spec.name, live.name) for spec in stands_for[live.name])
        return cls(tree, hooks, stands_for)

    def to_reference(self, live: LiveTensor, full: torch.Tensor) -> dict[str, torch.Tensor]:
        """The reference tensors, by first name, that the whole tensor ``full`` of ``live`` stands for."""
        expected = {spec.name: spec.shape for spec in self.stands_for[live.name]}
        answer = _ask_out(self.tree, self.hooks, live, full)
        got = {name: tuple(tensor.shape) for name, tensor in answer[1].items()} if answer is not None else {}
        if got != expected:
            raise HookError(
                f"hook {_OUT} answered for '{live.name}' with {got}, but for a meta tensor with {expected}",
                plugin=answer[0] if answer is not None else None,
                hint="the names and shapes of the answer must not depend on values",
            )
        return answer[1] if answer is not None else {}

    def from_reference(self, live: LiveTensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The whole value of ``live`` made of the reference tensors that it stands for.

        Raises:
            HookError: nobody answers, or with another shape.
        """
        node = self.tree.node(live.path)
        answer = self.hooks.single(_IN, node=node, name=live.own_name, tensors=dict(tensors))
        if answer is None:
            raise HookError(
                f"no plugin answers {_IN} for '{live.name}', for which one answers {_OUT}",
                hint="a plugin must give both, one the reverse of the other",
            )
        label, full = answer
        if not isinstance(full, torch.Tensor) or tuple(full.shape) != tuple(live.layout.shape):
            raise HookError(
                f"hook {_IN} of {label} must give a tensor of shape {tuple(live.layout.shape)} for '{live.name}' "
                f"(got {_kind(full)})",
                plugin=label,
            )
        return full.detach()


def _ask_out(
    tree: Tree, hooks: HookManager, live: LiveTensor, full: torch.Tensor
) -> tuple[str, dict[str, torch.Tensor]] | None:
    answer = hooks.single(_OUT, node=tree.node(live.path), name=live.own_name, tensor=full)
    if answer is None:
        return None
    label, tensors = answer
    if not isinstance(tensors, Mapping) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise HookError(
            f"hook {_OUT} of {label} must give a mapping of tensors for '{live.name}' (got {_kind(tensors)})",
            plugin=label,
            hint='return {"encoder.fc.weight": tensor.t()}',
        )
    return label, {name: value.detach() for name, value in tensors.items()}


def _checked(
    survey: Survey, carriers: Mapping[str, str], live: LiveTensor, label: str, name: str, tensor: torch.Tensor
) -> TensorSpec:
    spec = survey.specs.get(name)
    problem = None
    if spec is None:
        first = survey.origins.get(name)
        meant = (
            f"it is tied and goes by its first name, '{first}'" if first else "the reference model has no such tensor"
        )
        problem = f"names '{name}': {meant}"
    elif not spec.keys:
        problem = f"names '{name}', a buffer that is in no state dict"
    elif name in carriers:
        problem = f"names '{name}', which '{carriers[name]}' carries"
    elif tuple(tensor.shape) != spec.shape:
        problem = f"gives '{name}' the shape {tuple(tensor.shape)}, not {spec.shape}"
    if problem is not None or spec is None:
        raise HookError(f"the answer of hook {_OUT} of {label} for '{live.name}' {problem}", plugin=label)
    return spec


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
