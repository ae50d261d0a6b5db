"""Make the module of a stage of its graph."""

from __future__ import annotations

import contextvars
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slapo_core import GuardError
from slapo_core.internals import forwards
from slapo_core.observers import only_looks, spans_stages
from slapo_graph.flat import (
    FlatGraph,
    GuardViolation,
    State,
    children,
    is_merely_spanned,
    is_merely_traced,
    set_state,
    state,
)
from slapo_pipeline.private import (
    children_of,
    hooks_of,
    is_compiled,
    is_initialized,
    non_persistent_buffers_of,
    tensors_of,
)
from slapo_runtime.stages.partition import Stage, StageModule, Tie


class Holder(nn.Module):
    """Holds what is below, and the parameters and buffers of its own that the stage reads; it is never called.

    Its mode is that of the module that it stands for: ``train()`` on one is ``train()`` on the other.

    Args:
        ancestor: the module of the model.
    """

    def __init__(self, ancestor: nn.Module) -> None:
        self.__dict__["_ancestor"] = (ancestor,)  # in a tuple: no child
        super().__init__()

    @property
    def training(self) -> bool:  # type: ignore[override]
        """Of the module of the model."""
        ancestor: nn.Module = self.__dict__["_ancestor"][0]
        return ancestor.training

    @training.setter
    def training(self, mode: bool) -> None:
        if is_initialized(self):  # and not while it is being made
            self.__dict__["_ancestor"][0].training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: its forward is spread over stages."""
        name = type(self.__dict__["_ancestor"][0]).__name__
        raise RuntimeError(f"this {name} lies above a cut of the pipeline: its stages run it, and it is not called")

    def extra_repr(self) -> str:
        return f"of {type(self.__dict__['_ancestor'][0]).__name__}"


_HINT = "recreate the stages after such a change"


@dataclass(frozen=True)
class Program:
    """Describe a stage's computation by names, for any copy of the model.

    Args:
        code: a function of the stage's module and of what ``sources`` say.
        sources: ``("input", name)``, ``("value", name)``, ``("constant", tensor)``, or ``("grad", None)``.
        inputs: the form of every argument that it reads.
        values: shape and dtype of what it receives.
        makes: shape, dtype, and whether it carries a gradient, of what it gives.
        called: paths of the modules that it calls, in the model's order.
        read: names of the tensors that it reads.
        lists: paths of the lists and dictionaries of modules that code above the cuts may run through.
        last: path of the module after which it was cut; None for the last stage.
        switches: whether it switches gradients or autocast.
        sets_variables: whether it sets context variables.
    """

    code: Callable[..., Any]
    sources: Sequence[tuple[str, Any]]
    inputs: Mapping[str, Any]
    values: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    makes: Mapping[str, tuple[tuple[int, ...], torch.dtype, bool]]
    called: Sequence[str]
    read: Sequence[str]
    lists: Sequence[str]
    last: str | None
    switches: bool
    sets_variables: bool = False


class CutStage(StageModule):
    """See :class:`slapo_runtime.stages.partition.StageModule`.

    What it keeps has an underscore: other names may be those of the model's modules.

    Args:
        index: of the stage.
        flat: the graph of the model that it is a stage of.
        program: what it computes.
    """

    def __init__(self, index: int, flat: FlatGraph, program: Program) -> None:
        self.__dict__["_ancestor"] = (flat.module,)  # in a tuple: no child
        super().__init__()
        self.__dict__.update(_index=index, _flat=flat, _program=program, _own=[], _code=_spanned(flat.module, program))
        for path in program.called:
            self._hold_module(path, flat.module.get_submodule(path))
        for path in program.read:
            self._hold_tensor(path)
        self.__dict__["_checked"] = self._structure()

    # Its mode is the root's, as that of every holder is its module's.
    training = Holder.training

    def _hold_module(self, path: str, module: nn.Module) -> None:
        """Put a module of the model at its path."""
        owner, name = self._owner(path)
        if name not in children_of(owner):
            owner.add_module(name, module)

    def _hold_tensor(self, path: str) -> None:
        """Put a tensor that a module above a cut owns at its path: a parameter, a buffer, or a plain attribute."""
        owner, name = self._owner(path)
        if not isinstance(owner, Holder | CutStage):
            return  # it is in a module that the stage has whole
        ancestor: nn.Module = owner.__dict__["_ancestor"][0]
        self.__dict__["_own"].append((owner, ancestor, name))
        _hold(owner, ancestor, name)

    def _structure(self) -> tuple[Any, ...]:
        """What of the modules must stay as it is."""
        root, flat, program = self.__dict__["_ancestor"][0], self.__dict__["_flat"], self.__dict__["_program"]
        links = []
        for path in (*filter(None, flat.inlined), *program.called):
            owner, _, name = path.rpartition(".")
            links.append((children_of(root.get_submodule(owner)), name, root.get_submodule(path), path))
        modes = [(module, module.training, path) for path, module in flat.inlined.items() if self._has(path)]
        modes += [(root.get_submodule(path), root.get_submodule(path).training, path) for path in program.called]
        containers = map(root.get_submodule, program.lists)
        lists = [
            (each, list(children_of(each).values()), path) for each, path in zip(containers, program.lists, strict=True)
        ]
        return links, modes, list(flat.inlined.items()), lists

    def forward(self, inputs: Mapping[str, Any], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        program: Program = self.__dict__["_program"]
        before = state()
        self._require(before)
        given = [self._given(program, kind, what, inputs, values, before) for kind, what in program.sources]
        try:
            made: dict[str, torch.Tensor]
            if program.sets_variables:
                made = contextvars.copy_context().run(self.__dict__["_code"], self, *given)
            else:
                made = self.__dict__["_code"](self, *given)
        except GuardViolation as error:
            raise self._error(self.__dict__["_flat"].violated(error)) from None
        finally:
            if program.switches:
                set_state(*before)
        for name, (shape, dtype, requires_grad) in program.makes.items():
            tensor = made[name]
            if tensor.shape != shape or tensor.dtype != dtype or (tensor.requires_grad and not requires_grad):
                found = f"{_form(tensor.shape, tensor.dtype)}{' with a gradient' if tensor.requires_grad else ''}"
                wanted = f"{_form(shape, dtype)}{' with a gradient' if requires_grad else ''}"
                raise self._error(GuardError(f"made with '{name}' {wanted}, and this call gave {found}", hint=_HINT))
        return made

    def extra_repr(self) -> str:
        return f"stage {self.__dict__['_index']}"

    # ----------------------------------------------------------------------------------------------------------

    def _given(self, program: Program, kind: str, what: Any, inputs: Any, values: Any, before: Any) -> Any:
        if kind == "input":
            if what not in inputs:
                raise self._error(GuardError(f"made for a batch with '{what}', and this one has none", hint=_HINT))
            problem = difference(inputs[what], program.inputs[what])
            if problem is not None:
                raise self._error(GuardError(f"made for a batch in which '{what}' is {problem}", hint=_HINT))
            return inputs[what]
        if kind == "value":
            tensor, (shape, dtype) = values[what], program.values[what]
            if tensor.shape != shape or tensor.dtype != dtype:
                found = _form(tensor.shape, tensor.dtype)
                raise self._error(
                    GuardError(f"made for '{what}' {_form(shape, dtype)}, and it received {found}", hint=_HINT)
                )
            return tensor
        return before[0] if kind == "grad" else what

    def _require(self, setting: State) -> None:
        links, modes, inlined, lists = self.__dict__["_checked"]
        for table, name, module, path in links:
            if table.get(name) is not module:
                raise self._error(GuardError(f"made before the module at '{path}' was replaced", hint=_HINT))
        for module, there, path in lists:
            if len(children_of(module)) != len(there) or any(map(operator.is_not, children_of(module).values(), there)):
                raise self._error(GuardError(f"made before the modules in '{path}' changed", hint=_HINT))
        for path, module in inlined:
            if is_around(module):
                where = f"'{path}'" if path else "the root"
                problem = f"made before {where}, which lies above a cut, was hooked or got another forward"
                raise self._error(GuardError(problem, hint="do so to modules that lie in one stage"))
        for module, training, path in modes:
            if module.training is not training:
                was, now = ("train", "eval") if training else ("eval", "train")
                where = f"'{path}'" if path else "the model"
                problem = f"made with {where} in {was}() mode, and now it is in {now}() mode"
                raise self._error(GuardError(problem, hint="create stages for each mode"))
        for owner, ancestor, name in self.__dict__["_own"]:
            _hold(owner, ancestor, name)  # it may have been replaced meanwhile: materialized, moved
        try:
            self.__dict__["_flat"].require(setting)
        except GuardError as error:
            raise self._error(error) from None

    def _error(self, error: GuardError) -> GuardError:
        return GuardError(
            f"stage {self.__dict__['_index']} was {error.message}", location=error.location, hint=error.hint
        )

    def _has(self, path: str) -> bool:
        here: Any = self
        for name in path.split(".") if path else ():
            here = children_of(here).get(name) if isinstance(here, nn.Module) else None
        return here is not None

    def _owner(self, path: str) -> tuple[nn.Module, str]:
        *above, name = path.split(".")
        owner: nn.Module = self
        ancestor: nn.Module = self.__dict__["_ancestor"][0]
        for part in above:
            ancestor = children_of(ancestor)[part]  # type: ignore[assignment]
            if part not in children_of(owner):
                owner.add_module(part, Holder(ancestor))
            owner = children_of(owner)[part]  # type: ignore[assignment]
        return owner, name


def _spanned(root: nn.Module, program: Program) -> Callable[..., Any]:
    """Return what a stage computes, within those wrappers of the model's forward that go around stages."""
    code, forward = program.code, root.__dict__.get("forward")
    for wrapper in forward.wrappers if isinstance(forward, forwards.ModuleForward) else ():
        if spans_stages(wrapper):
            code = wrapper.slapo_of_stage(program.last is None)(code)  # type: ignore[attr-defined]
    return code


def is_around(module: nn.Module) -> bool:
    """Return whether a module has hooks, another forward, or a compiled one."""
    if is_compiled(module):
        return True
    if "forward" in module.__dict__ and not is_merely_traced(module) and not is_merely_spanned(module):
        return True
    return not all(only_looks(hook) for hooks in hooks_of(module) if hooks for hook in hooks.values())


def _hold(owner: nn.Module, ancestor: nn.Module, name: str) -> None:
    for own, tensors in zip(tensors_of(owner), tensors_of(ancestor), strict=True):
        if name in tensors:
            own[name] = tensors[name]
            if name in non_persistent_buffers_of(ancestor):
                non_persistent_buffers_of(owner).add(name)
            return
    owner.__dict__[name] = getattr(ancestor, name)


def _form(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"of shape {tuple(shape)} and {dtype}"


def form(value: Any) -> Any:
    """What of ``value`` stages are made for: shapes, types, texts, what is true, false or None; not numbers."""
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, tuple(value.shape), value.dtype)
    cls = type(value)
    if cls in (int, float):
        return (cls,)
    if value is None or cls in (bool, str):
        return (cls, value)
    parts = children(value)
    return (cls,) if parts is None else (cls, tuple((key, form(part)) for _, key, part in parts))


def difference(value: Any, expected: Any) -> str | None:
    """What another form ``value`` should have, for a message; None if it has it."""
    if isinstance(value, torch.Tensor) and expected[0] is torch.Tensor:
        if value.shape == expected[1] and value.dtype == expected[2]:
            return None
        here = f"{tuple(value.shape)} and {value.dtype}"
        return f"a tensor of shape {expected[1]} and {expected[2]}, and this one has {here}"
    found = form(value)
    if found == expected:
        return None
    return f"{_described(expected)}, and in this one it is {_described(found)}"


def _described(value: Any) -> str:
    if value[0] is torch.Tensor:
        return f"a tensor of shape {value[1]}"
    return f"a {value[0].__name__}" if len(value) == 1 or isinstance(value[1], tuple) else repr(value[1])


def ties_of(stages: Sequence[Stage], root: nn.Module) -> tuple[Tie, ...]:
    """The parameters that more than one of the stages holds, in the model's order.

    Args:
        stages: all of them.
        root: the scheduled model.
    """
    users: dict[int, list[int]] = {}
    for stage in stages:
        for parameter in stage.module.parameters():
            users.setdefault(id(parameter), []).append(stage.index)
    return tuple(
        Tie(name, tuple(users[id(parameter)]))
        for name, parameter in root.named_parameters()
        if len(users.get(id(parameter), ())) > 1
    )
