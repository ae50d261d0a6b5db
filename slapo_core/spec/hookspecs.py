"""The hooks: the few questions that slapo asks every active plugin.

A distribution declares one module of hook functions (entry-point group ``slapo.v1.hooks``)::

    from slapo_core import hookimpl

    @hookimpl
    def slapo_doctor():
        yield "nccl not found: pip install nvidia-nccl-cu12"

Its hooks are active in a schedule only when the distribution is *named* there: one of its primitives was applied, its
dialect is the target, or it is listed in ``create_schedule(..., plugins=[...])``. A function may take any subset of
the arguments below, by name. The order in which plugins are called has no meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pluggy
    import torch

    from slapo_core.spec.node import Node
    from slapo_core.spec.primitive import Primitive
    from slapo_core.spec.record import Record
    from slapo_core.spec.violation import Violation

    hookimpl: pluggy.HookimplMarker

__all__ = ["FIRST_RESULT", "HOOKS", "PREFIX", "PROJECT", "hookimpl", "hookspec"]

PROJECT = "slapo"
PREFIX = "slapo_"

HOOKS: dict[str, Callable[..., Any]] = {}
"""Every hook by name; filled by the decorator below while this module is imported, constant afterwards."""

FIRST_RESULT: set[str] = set()
"""Hooks that at most one active plugin may answer."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def hookspec(*, first_result: bool = False) -> Callable[[_Function], _Function]:
    """Declare a hook.

    Args:
        first_result: whether at most one active plugin may answer with something other than None.
    """

    def declare(function: _Function) -> _Function:
        HOOKS[function.__name__] = function
        if first_result:
            FIRST_RESULT.add(function.__name__)
        return function

    return declare


def __getattr__(name: str) -> Any:
    if name == "hookimpl":  # made on demand, so that reading the specifications does not import pluggy
        return _hookimpl()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _hookimpl() -> pluggy.HookimplMarker:
    import pluggy

    return pluggy.HookimplMarker(PROJECT)


@hookspec()
def slapo_preconditions(node: Node, primitive: Primitive) -> Iterable[Violation] | None:
    """Called when a primitive, of whatever distribution, is about to be applied, after its own preconditions.

    First result: no; the violations of all plugins are collected.

    Args:
        node: where it is to be applied; must not be changed.
        primitive: what is to be applied.

    Returns:
        every reason to refuse it; nothing or None if there is none.
    """


@hookspec()
def slapo_applied(node: Node, record: Record) -> None:
    """Called when a primitive was applied and its postconditions hold; an exception here takes it back.

    First result: no.

    Args:
        node: where it was applied.
        record: what is about to be added to ``sch.records``.

    Returns:
        nothing; the schedule must not be changed here.
    """


@hookspec()
def slapo_rolled_back(node: Node, primitive: Primitive, error: BaseException) -> None:
    """Called when a primitive failed and the model is as it was before.

    First result: no. An exception raised here becomes a warning: the original error is what the user must see.

    Args:
        node: where it was to be applied.
        primitive: what failed.
        error: why.

    Returns:
        nothing.
    """


@hookspec(first_result=True)
def slapo_materialize(path: str, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """Called when a tensor on the meta device needs values that no weights give: by ``build``, and by ``verify``.

    The model's own initialisation runs only where no plugin answers.

    First result: yes; two active plugins that answer for the same tensor are an error.

    Args:
        path: the module that owns it, e.g. ``"encoder.layer.0.output.dense"``: in the untouched model, or, for a tensor
            that a step added, in the scheduled one.
        name: its name there, e.g. ``"weight"``.
        shape: its whole shape, before any sharding.
        dtype: its element type.

    Returns:
        the whole tensor, of that shape and type, the same on every rank (torch's generator is seeded alike on all);
        None to leave it to others.
    """


@hookspec()
def slapo_to_reference(node: Node, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Called when a state dict leaves, and when ``verify`` compares, for each tensor that no layout explains.

    A layout explains a piece of one untouched tensor. For anything else, such as a transposed weight or several
    matrices merged into one, a primitive records ``Layout("", shape)`` with the tensor (``""``: no untouched tensor
    lies so), and its plugin answers here and in `slapo_from_reference`.

    It is asked with tensors on the meta device too, to learn the names, and by ``verify`` with gradients, so the answer
    must be a linear function of the tensor, and its names and shapes must not depend on values.

    First result: no; plugins answer for the tensors that their own primitives made. Two answers for the same tensor
    are an error.

    Args:
        node: the module that owns the tensor now.
        name: its name there, e.g. ``"qkv_weight"``.
        tensor: its whole value, already gathered over the mesh.

    Returns:
        the tensors of the untouched model that it stands for, by full name (of a tied one, the first), in their full
        shapes; None if it is not this plugin's.
    """


@hookspec()
def slapo_from_reference(node: Node, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Called when weights of the untouched model come in: the reverse of `slapo_to_reference`.

    Asked by ``build`` and ``load_state_dict``, for the tensors for which `slapo_to_reference` was answered.

    First result: no; plugins answer for the tensors that their own primitives made. Two answers for the same tensor
    are an error.

    Args:
        node: the module that owns the tensor now.
        name: its name there, e.g. ``"qkv_weight"``.
        tensors: the tensors of the untouched model that it stands for, by the names that `slapo_to_reference` gave.

    Returns:
        the whole value to load, before it is cut for the mesh; None if it is not this plugin's.
    """


@hookspec()
def slapo_gather_output(node: Node, output: Any) -> Any | None:
    """Called when ``verify`` compares outputs, to make of a rank's output the one that the untouched model gives.

    First result: no; plugins answer for outputs that their own primitives left in pieces. Two answers are an error.

    Args:
        node: the root of the scheduled model.
        output: what it gave on this rank.

    Returns:
        the whole output, the same on every rank; None if it needs nothing of this plugin.
    """


@hookspec(first_result=True)
def slapo_partition(schedule: Any) -> Any | None:
    """Called when a dialect needs the model as pipeline stages.

    slapo-core itself never asks: a dialect that runs pipelines does, by ``schedule.hooks.call("slapo_partition", ...)``
    with the arguments below.

    First result: yes; two active plugins that answer are an error.

    Args:
        schedule: the schedule, with its split points recorded.

    Returns:
        the stages in order; None to leave it to others.
    """


@hookspec(first_result=True)
def slapo_liveness(stages: Any) -> Any | None:
    """Called when a dialect needs to know which tensors pass from stage to stage.

    slapo-core itself never asks: a dialect that runs pipelines does, by ``schedule.hooks.call("slapo_liveness", ...)``
    with the arguments below.

    First result: yes; two active plugins that answer are an error.

    Args:
        stages: what `slapo_partition` returned.

    Returns:
        for each boundary between stages, the tensors alive there; None to leave it to others.
    """


@hookspec()
def slapo_doctor() -> Iterable[str] | None:
    """Called when ``slapo doctor --ask PLUGIN`` looks for what is wrong with this environment.

    First result: no.

    Returns:
        one line for each problem, with the command that mends it; nothing or None if all is well.
    """
