"""The hooks: the few questions that slapo asks every active plugin.

A distribution declares modules of hook functions (entry-point group ``slapo.v1.hooks``)::

    from slapo_core import Fact, Problem, hookimpl

    @hookimpl
    def slapo_doctor():
        yield Fact("network", "eth0, 25 Gbit/s")
        yield Problem("nccl was not found", hint="pip install nvidia-nccl-cu12")

Its hooks are active in a schedule only when the distribution is *named* there: one of its primitives was applied, its
dialect is the target, or it is listed in ``create_schedule(..., plugins=[...])``. A function may take any subset of
the arguments below, by name. All active plugins are asked, and the order has no meaning. A first-result hook has at
most one answer, None being no answer: two are an error. A function with ``@hookimpl(trylast=True)`` is a default: it is
asked only if no other plugin answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch

    from slapo_core.primitive import Primitive, Suggestion, Violation
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.tree.node import Node

__all__ = ["PROJECT", "Fact", "Problem", "hookimpl", "hookspec"]


@dataclass(frozen=True)
class Fact:
    """A fact about the environment.

    Args:
        what: e.g. ``"nccl"``.
        value: e.g. ``"2.27.5"``.
    """

    what: str
    value: str


@dataclass(frozen=True)
class Problem:
    """A problem of the environment.

    Args:
        message: what, with where it was found; e.g. ``"nccl was not found"``.
        hint: the command or edit that fixes it, e.g. ``"pip install nvidia-nccl-cu12"``; None where there is none.
    """

    message: str
    hint: str | None = None


PROJECT = "slapo"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def slapo_preconditions(node: Node, primitive: Primitive) -> Iterable[Violation] | None:
    """Called when a primitive of any distribution is about to be applied, after its own preconditions.

    First result: no; the violations of all plugins are collected.

    Args:
        node: where it is to be applied; must not be changed.
        primitive: the primitive to apply.

    Returns:
        every reason to refuse it; nothing or None if there is none.
    """


@hookspec(firstresult=True)
def slapo_initialize(path: str, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """Called when ``build`` or ``verify`` needs values of a meta tensor without weights.

    The model's own initialization runs only where no plugin answers.

    First result: yes; two active plugins that answer for the same tensor are an error.

    Args:
        path: the module that owns it, e.g. ``"encoder.layer.0.output.dense"``: in the reference model, or, for a tensor
            that a step added, in the scheduled one.
        name: its name there, e.g. ``"weight"``.
        shape: its full shape, before any sharding.
        dtype: its element type.

    Returns:
        the full tensor, of that shape and type, the same on every rank (torch's generator has the same seed on all);
        None to leave it to others.
    """


@hookspec(firstresult=True)
def slapo_to_reference(node: Node, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Called when a tensor without an explaining layout enters a state dict, or is compared by ``verify``.

    A layout explains a shard of one reference tensor. For anything else, such as a transposed weight or several
    matrices merged into one, a primitive records ``Layout("", shape)`` with the tensor (``""``: no reference tensor
    lies so), and its plugin answers here and in `slapo_from_reference`.

    It is asked with tensors on the meta device too, to learn the names, and by ``verify`` with gradients, so the answer
    must be a linear function of the tensor, and its names and shapes must not depend on values.

    First result: yes; plugins answer for the tensors that their own primitives made, and two answers for the same
    tensor are an error.

    Args:
        node: the module that owns the tensor now.
        name: its name there, e.g. ``"qkv_weight"``.
        tensor: the full tensor, already gathered over the mesh.

    Returns:
        its reference tensors, by full name (of a tied one, the first), in their full
        shapes; None if it is not this plugin's.
    """


@hookspec(firstresult=True)
def slapo_from_reference(node: Node, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Called when weights of the reference model are loaded: the reverse of `slapo_to_reference`.

    Asked by ``build`` and ``load_state_dict``, for the tensors for which `slapo_to_reference` was answered.

    First result: yes; plugins answer for the tensors that their own primitives made, and two answers for the same
    tensor are an error.

    Args:
        node: the module that owns the tensor now.
        name: its name there, e.g. ``"qkv_weight"``.
        tensors: its reference tensors, by the names that `slapo_to_reference` gave.

    Returns:
        the full tensor to load, before it is sharded over the mesh; None if it is not this plugin's.
    """


@hookspec(firstresult=True)
def slapo_gather_output(node: Node, output: Any) -> Any | None:
    """Called when ``verify`` compares outputs, to turn a rank's output into the reference model's.

    First result: yes; plugins answer for outputs that their own primitives left sharded, and two answers are an
    error.

    Args:
        node: the root of the scheduled model.
        output: of the scheduled model on this rank.

    Returns:
        the full output, the same on every rank; None if it needs nothing of this plugin.
    """


@hookspec
def slapo_check(schedule: Schedule) -> Iterable[Violation] | None:
    """Called when ``build`` starts, and when ``verify`` has found a difference: is the schedule incomplete?

    ``build`` refuses the schedule with every answer, and ``verify`` names them beside the difference. A plugin
    answers for what its own primitives left open, e.g. an unreduced partial sum, and only where the schedule
    certainly trains another model: anything that only a run can show is left to ``verify``.

    First result: no; the violations of all plugins are collected.

    Args:
        schedule: with all steps applied; must not be changed. On every rank, and whatever the sizes of the mesh, the
            answer must be the same.

    Returns:
        everything that is missing, each with the step that asks for it and the call to add; nothing or None if the
        schedule is complete.
    """


@hookspec
def slapo_suggest(
    schedule: Schedule, gradients: Sequence[str], splits: Mapping[str, tuple[int, ...]]
) -> Iterable[Suggestion] | None:
    """Called when ``verify`` has found a difference, or an exception: which changes may correct the schedule?

    ``verify`` tries the answers on copies, and reports only changes that make the schedule agree. So they may be
    guesses, but each costs a run of the model: give the likely ones first, and none that `slapo_preconditions` refuses.

    First result: no; the suggestions of all plugins are collected.

    Args:
        schedule: with all steps applied; must not be changed. On every rank the answer must be the same.
        gradients: the parameters whose gradients differ, by name, where the outputs agree; empty where they do not.
        splits: paths of modules whose output the reference model splits along its features (``split``, ``chunk``, a
            ``view`` by 2 or 3), with the sizes in elements, e.g. ``{"attn.qkv": (64, 16, 16)}``.

    Returns:
        changes of this plugin's own steps, and steps to add; nothing or None if there is nothing to try.
    """


@hookspec
def slapo_doctor() -> Iterable[Fact | Problem] | None:
    """Called when ``slapo doctor --ask PLUGIN`` examines this environment.

    First result: no.

    Returns:
        facts about the environment, and problems, each with the command that fixes it; nothing or None for none.
    """
