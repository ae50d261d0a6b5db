"""Run a stage: its module, made of its graph, and the guards of each call."""

from __future__ import annotations

import contextvars
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slapo_core import GuardError
from slapo_core.errors import place
from slapo_core.internals import buffers_of, children_of, forwards, parameters_of
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
from slapo_pipeline.private import hooks_of, is_compiled, is_initialized, non_persistent_buffers_of
from slapo_runtime.stages.partition import Stage, StageModule, Tie


class StageSubtree(nn.Module):
    """A container for a module above a cut: holds the submodules and tensors that this stage uses. Never called.

    Its mode is the module's: ``train()`` on one is ``train()`` on the other.

    Args:
        ancestor: the module of the model, above the cut.
    """

    def __init__(self, ancestor: nn.Module) -> None:
        self.__dict__["_ancestor"] = (ancestor,)  # in a tuple: no child
        super().__init__()

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The mode of the module above the cut."""
        ancestor: nn.Module = self.__dict__["_ancestor"][0]
        return ancestor.training

    @training.setter
    def training(self, mode: bool) -> None:
        if is_initialized(self):  # not in nn.Module.__init__
            self.__dict__["_ancestor"][0].training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse the call: the forward is spread over stages."""
        name = type(self.__dict__["_ancestor"][0]).__name__
        raise RuntimeError(f"this {name} lies above a pipeline cut: stages run its forward, and it cannot be called")

    def extra_repr(self) -> str:
        return f"of {type(self.__dict__['_ancestor'][0]).__name__}"


_HINT = "recreate the stages after such a change"


@dataclass(frozen=True)
class StageProgram:
    """Describe a stage's computation by names, for any copy of the model.

    Args:
        code: a function of the stage's module and one argument per source.
        sources: ``("input", name)``, ``("value", name)``, ``("constant", tensor)``, or ``("grad", None)``.
        inputs: the signature of every model argument that the stage reads.
        values: shape and dtype of every received value.
        makes: shape, dtype and ``requires_grad`` of every value that the stage makes.
        called: paths of the called modules, in the model's order.
        read: names of the tensors read above the cuts.
        lists: paths of the ModuleLists and ModuleDicts that code above the cuts may iterate.
        last: path of the module after which the stage ends; None for the last stage.
        switches: whether the stage switches gradients or autocast.
        sets_variables: whether the stage sets context variables.
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
    """Compute one stage; see :class:`slapo_runtime.stages.partition.StageModule`.

    Its own attributes begin with an underscore, so that no name of the model's modules is taken.

    Args:
        index: of the stage, from 0.
        flat: the flat graph of the model.
        program: the stage's computation.
    """

    def __init__(self, index: int, flat: FlatGraph, program: StageProgram) -> None:
        self.__dict__["_ancestor"] = (flat.module,)  # in a tuple: no child
        super().__init__()
        self.__dict__.update(_index=index, _flat=flat, _program=program, _own=[], _code=_spanned(flat.module, program))
        for path in program.called:
            self._hold_module(path, flat.module.get_submodule(path))
        for path in program.read:
            self._hold_tensor(path)
        self.__dict__["_checked"] = self._structure()

    # Its mode is the root's, as every subtree's mode is its module's.
    training = StageSubtree.training

    def _hold_module(self, path: str, module: nn.Module) -> None:
        """Add a module of the model at its path."""
        owner, name = self._owner(path)
        if name not in children_of(owner):
            owner.add_module(name, module)

    def _hold_tensor(self, path: str) -> None:
        """Add a parameter, buffer or plain tensor of a module above a cut at its path."""
        owner, name = self._owner(path)
        if not isinstance(owner, StageSubtree | CutStage):
            return  # inside a module of this stage
        ancestor: nn.Module = owner.__dict__["_ancestor"][0]
        self.__dict__["_own"].append((owner, ancestor, name))
        _hold(owner, ancestor, name)

    def _structure(self) -> tuple[Any, ...]:
        """Return the parts of the model that every call compares: links, modes, inlined modules and lists."""
        root, flat, program = self.__dict__["_ancestor"][0], self.__dict__["_flat"], self.__dict__["_program"]
        links = []
        for path in (*filter(None, flat.inlined), *program.called):
            owner, _, name = path.rpartition(".")
            links.append((children_of(root.get_submodule(owner)), name, root.get_submodule(path), path))
        modes = [(module, module.training, path) for path, module in flat.inlined.items() if self._has(path)]
        modes += [(root.get_submodule(path), root.get_submodule(path).training, path) for path in program.called]
        tables = [(children_of(root.get_submodule(path)), path) for path in program.lists]
        lists = [(table, list(table.values()), path) for table, path in tables]
        return links, modes, list(flat.inlined.items()), lists

    def forward(self, inputs: Mapping[str, Any], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        program: StageProgram = self.__dict__["_program"]
        before = state()
        self._require(before)
        arguments = [self._argument(program, kind, what, inputs, values, before) for kind, what in program.sources]
        try:
            made: dict[str, torch.Tensor]
            if program.sets_variables:
                made = contextvars.copy_context().run(self.__dict__["_code"], self, *arguments)
            else:
                made = self.__dict__["_code"](self, *arguments)
        except GuardViolation as error:
            raise self._error(_of_stage(self.__dict__["_flat"].violated(error))) from None
        finally:
            if program.switches:
                set_state(*before)
        for name, (shape, dtype, requires_grad) in program.makes.items():
            tensor = made[name]
            if tensor.shape != shape or tensor.dtype != dtype or (tensor.requires_grad and not requires_grad):
                found = f"{_tensor(tensor.shape, tensor.dtype)}{' with a gradient' if tensor.requires_grad else ''}"
                wanted = f"{_tensor(shape, dtype)}{' with a gradient' if requires_grad else ''}"
                problem = f"was built for an output '{name}' {wanted}; this call made it {found}"
                raise self._error(GuardError(problem, hint=_HINT))
        return made

    def extra_repr(self) -> str:
        return f"stage {self.__dict__['_index']}"

    # ----------------------------------------------------------------------------------------------------------

    def _argument(self, program: StageProgram, kind: str, what: Any, inputs: Any, values: Any, before: Any) -> Any:
        if kind == "input":
            if what not in inputs:
                problem = f"was built for inputs ({', '.join(program.inputs)}); this batch lacks '{what}'"
                raise self._error(GuardError(problem, hint=_HINT))
            difference = signature_difference(inputs[what], program.inputs[what])
            if difference is not None:
                raise self._error(GuardError(f"was built for a batch in which '{what}' is {difference}", hint=_HINT))
            return inputs[what]
        if kind == "value":
            tensor, (shape, dtype) = values[what], program.values[what]
            if tensor.shape != shape or tensor.dtype != dtype:
                found = _tensor(tensor.shape, tensor.dtype)
                problem = f"was built for a received '{what}' {_tensor(shape, dtype)}; it received one {found}"
                raise self._error(GuardError(problem, hint=_HINT))
            return tensor
        return before[0] if kind == "grad" else what

    def _require(self, setting: State) -> None:
        links, modes, inlined, lists = self.__dict__["_checked"]
        for table, name, module, path in links:
            if table.get(name) is not module:
                raise self._error(GuardError(f"was built before the module at '{path}' was replaced", hint=_HINT))
        for table, there, path in lists:
            if len(table) != len(there) or any(map(operator.is_not, table.values(), there)):
                raise self._error(GuardError(f"was built before the modules in '{path}' changed", hint=_HINT))
        for path, module in inlined:
            if is_around(module):
                where = place(path)
                problem = f"was built before {where}, which lies above a cut, got a hook or another forward"
                raise self._error(GuardError(problem, hint="hook or wrap modules inside one stage"))
        for module, training, path in modes:
            if module.training is not training:
                was, now = ("train", "eval") if training else ("eval", "train")
                where = f"'{path}'" if path else "the model"
                problem = f"was built with {where} in {was}() mode; it is in {now}() mode now"
                raise self._error(GuardError(problem, hint="create stages for each mode"))
        for owner, ancestor, name in self.__dict__["_own"]:
            _hold(owner, ancestor, name)  # it may have been replaced meanwhile: materialized, moved
        try:
            self.__dict__["_flat"].require(setting)
        except GuardError as error:
            raise self._error(_of_stage(error)) from None

    def _error(self, error: GuardError) -> GuardError:
        return GuardError(f"stage {self.__dict__['_index']} {error.message}", location=error.location, hint=error.hint)

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
                owner.add_module(part, StageSubtree(ancestor))
            owner = children_of(owner)[part]  # type: ignore[assignment]
        return owner, name


def _of_stage(error: GuardError) -> GuardError:
    """Return an error of the flat graph as one of a stage: both were made at once."""
    return GuardError(f"was {error.message}", location=error.location, hint=error.hint)


def _spanned(root: nn.Module, program: StageProgram) -> Callable[..., Any]:
    """Return a stage's code inside the wrappers of the model's forward that apply to stages."""
    code, forward = program.code, root.__dict__.get("forward")
    for wrapper in forward.wrappers if isinstance(forward, forwards.ModuleForward) else ():
        if spans_stages(wrapper):
            code = wrapper.slapo_of_stage(program.last is None)(code)  # type: ignore[attr-defined]
    return code


def is_around(module: nn.Module) -> bool:
    """Return whether a module has hooks, a wrapped or replaced forward, or is compiled."""
    if is_compiled(module):
        return True
    if "forward" in module.__dict__ and not is_merely_traced(module) and not is_merely_spanned(module):
        return True
    return not all(only_looks(hook) for hooks in hooks_of(module) if hooks for hook in hooks.values())


def _hold(owner: nn.Module, ancestor: nn.Module, name: str) -> None:
    for table_of in (parameters_of, buffers_of):
        tensors: dict[str, Any] = table_of(ancestor)
        if name in tensors:
            table_of(owner)[name] = tensors[name]
            if name in non_persistent_buffers_of(ancestor):
                non_persistent_buffers_of(owner).add(name)
            return
    owner.__dict__[name] = getattr(ancestor, name)


def _tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"of shape {tuple(shape)} and {dtype}"


def signature(value: Any) -> Any:
    """Return an argument's signature: shapes, dtypes, types, strings, bools and None; numbers by type only."""
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, tuple(value.shape), value.dtype)
    cls = type(value)
    if cls in (int, float):
        return (cls,)
    if value is None or cls in (bool, str):
        return (cls, value)
    parts = children(value)
    return (cls,) if parts is None else (cls, tuple((key, signature(part)) for _, key, part in parts))


def signature_difference(value: Any, expected: Any) -> str | None:
    """Return how a value differs from its signature, for a message; None if it does not."""
    if isinstance(value, torch.Tensor) and expected[0] is torch.Tensor:
        if value.shape == expected[1] and value.dtype == expected[2]:
            return None
        return f"a tensor {_tensor(expected[1], expected[2])}; got one {_tensor(value.shape, value.dtype)}"
    found = signature(value)
    if found == expected:
        return None
    return f"{_described(expected)}; got {_described(found)}"


def _described(value: Any) -> str:
    if value[0] is torch.Tensor:
        return f"a tensor of shape {value[1]}"
    return f"a {value[0].__name__}" if len(value) == 1 or isinstance(value[1], tuple) else repr(value[1])


def ties_of(stages: Sequence[Stage], root: nn.Module) -> tuple[Tie, ...]:
    """Return the parameters that several stages hold, in the model's order.

    Args:
        stages: of the model, all.
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
