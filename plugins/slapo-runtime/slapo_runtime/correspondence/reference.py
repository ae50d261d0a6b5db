"""The tensors of the reference model, and their translations by plugins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from slapo_core.errors import HookError, WeightsError
from slapo_core.internals import buffers_of, module_index, parameters_of
from slapo_core.layout import Layout
from slapo_runtime.private import non_persistent_buffers_of

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.internals import HookManager, Tree
    from slapo_runtime.correspondence.storage import LiveTensor


@dataclass(frozen=True)
class TensorSpec:
    """One parameter or buffer of the reference model; tied names are one tensor.

    Args:
        name: its first name in registration order, e.g. ``"transformer.wte.weight"``.
        shape: in elements.
        dtype: its element type.
        is_parameter: False for a buffer.
        keys: its names in the state dict, e.g. ``("transformer.wte.weight", "lm_head.weight")``; empty for a
            non-persistent buffer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Survey:
    """The tensors of the reference model.

    Args:
        specs: first name -> tensor, in registration order.
        origins: every name, tied ones included -> first name.
        keys: the keys of the reference model's ``state_dict()``, in its order, each with the first name of its tensor.
        not_tensors: keys of the state dict for other objects (a module's ``get_extra_state``).
        modules: the identities of the reference model's modules.
        order: all keys of the state dict.
        buffers: that a forward resized or registered since, with their present shape and type.
    """

    specs: Mapping[str, TensorSpec]
    origins: Mapping[str, str]
    keys: Mapping[str, str]
    not_tensors: tuple[str, ...] = ()
    modules: frozenset[int] = frozenset()
    order: tuple[str, ...] = ()
    buffers: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)

    def carried_by(self, layout: Layout) -> TensorSpec | None:
        """Return a layout's reference tensor; None if none has its shape."""
        origin = self.origins.get(layout.origin)
        if origin is None or self.specs[origin].shape != tuple(layout.shape):
            return None
        return self.specs[origin]


def survey(schedule: Schedule) -> tuple[Survey, dict[str, torch.Tensor]]:
    """Survey the tensors of the reference model.

    Returns:
        the survey, and its tensors by first name: the reference model's own, not copies.

    Raises:
        SealedError: the originals were dropped.
        WeightsError: the model has an uninitialized lazy module.
    """
    with schedule.reference() as model:
        return survey_model(model)


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model with tensors without a shape.

    Raises:
        WeightsError: with their names.
    """
    lazy = [name for name, tensor in model.state_dict(keep_vars=True).items() if is_lazy(tensor)]
    if lazy:
        raise WeightsError(
            f"tensors of lazy modules have no shape yet: {', '.join(lazy)}",
            hint="run the model once on a batch before create_schedule(model), or give the layers their input size",
        )


def survey_model(model: nn.Module) -> tuple[Survey, dict[str, torch.Tensor]]:
    """Survey the tensors of a model without a schedule."""
    refuse_lazy(model)
    index = module_index.ModuleIndex(model)
    sites = module_index.TensorSites(index)
    first: dict[int, str] = {}
    origins: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for path, own_name, tensor, _ in own_tensors(index.modules):
        name = first.setdefault(id(tensor), module_index.full_name(path, own_name))
        tensors.setdefault(name, tensor)
    for name, tensor in tensors.items():
        for path, own_name in sites.of(tensor):
            origins.update((module_index.full_name(alias, own_name), name) for alias in index.paths_of(path))
    state = model.state_dict(keep_vars=True)
    found = {key: first.get(id(value)) or origins.get(key) for key, value in state.items()}
    missing = {first[id(tensor)] for *_, tensor, persistent in own_tensors(index.modules) if persistent}
    missing.difference_update(origin for origin in found.values() if origin is not None)
    for key, value in state.items() if missing else ():
        if found[key] is None and isinstance(value, torch.Tensor) and not key.endswith("_extra_state"):
            found[key] = _renamed(key, value, {name: tensors[name] for name in missing})
            missing.discard(found[key] or "")
    keys = {key: origin for key, origin in found.items() if origin is not None}
    not_tensors = [key for key, origin in found.items() if origin is None]
    by_origin: dict[str, list[str]] = {}
    for key, origin in keys.items():
        by_origin.setdefault(origin, []).append(key)
    specs = {
        name: TensorSpec(
            name,
            tuple(tensor.shape),
            tensor.dtype,
            isinstance(tensor, nn.Parameter),
            tuple(by_origin.get(name, ())),
        )
        for name, tensor in tensors.items()
    }
    modules = frozenset(map(id, index.modules.values()))
    return Survey(specs, origins | keys, keys, tuple(not_tensors), modules, tuple(state)), tensors


def _renamed(key: str, value: torch.Tensor, missing: Mapping[str, torch.Tensor]) -> str | None:
    """Find the tensor that a state-dict hook cloned under another name, by its values."""
    alike = [name for name, one in missing.items() if one.shape == value.shape and one.dtype == value.dtype]
    same = [name for name in alike if not value.is_meta and torch.equal(missing[name], value)]
    if len(same) == 1:
        return same[0]
    if not missing:
        return None
    raise WeightsError(
        f"a state-dict hook of the model replaces {', '.join(map(repr, sorted(missing)))} by '{key}', whose values "
        "do not identify its tensor",
        hint="let the hook rename the tensors of the state dict without cloning or changing them",
    )


def own_tensors(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, torch.Tensor, bool]]:
    """Yield ``(module path, own name, tensor, whether it is persistent)``, parameters before buffers."""
    for path, module in modules.items():
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                yield path, name, parameter, True
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                yield path, name, buffer, name not in non_persistent_buffers_of(module)


_OUT, _IN = "slapo_to_reference", "slapo_from_reference"


@dataclass(frozen=True)
class Translations:
    """The plugins' translations of live tensors to reference tensors, from :meth:`of`.

    Args:
        tree: the scheduled model.
        hooks: of its schedule.
        reference_specs: name of a live tensor -> its reference tensors.
    """

    tree: Tree
    hooks: HookManager
    reference_specs: Mapping[str, tuple[TensorSpec, ...]]

    @classmethod
    def of(cls, tree: Tree, survey: Survey, hooks: HookManager, lives: Iterable[LiveTensor]) -> Translations:
        """Ask the active plugins about every persistent live tensor without a reference layout.

        Raises:
            HookError: an answer has unknown names, names of another live tensor, or wrong shapes.
        """
        lives = list(lives)
        carriers = {live.reference_names[0]: live.name for live in lives if live.reference_names}
        specs_of: dict[str, tuple[TensorSpec, ...]] = {}
        for live in lives:
            if live.reference_names or not live.is_persistent:
                continue
            empty = torch.empty(live.layout.shape, dtype=live.tensor.dtype, device="meta")
            answer = _ask_out(tree, hooks, live, empty)
            if answer is None:
                continue
            label, tensors = answer
            specs_of[live.name] = tuple(
                _checked(survey, carriers, live, label, name, tensor) for name, tensor in tensors.items()
            )
            carriers.update((spec.name, live.name) for spec in specs_of[live.name])
        return cls(tree, hooks, specs_of)

    def to_reference(self, live: LiveTensor, full: torch.Tensor) -> dict[str, torch.Tensor]:
        """Translate the full tensor of ``live`` to its reference tensors, by first name."""
        expected = {spec.name: spec.shape for spec in self.reference_specs[live.name]}
        answer = _ask_out(self.tree, self.hooks, live, full)
        got = {name: tuple(tensor.shape) for name, tensor in answer[1].items()} if answer is not None else {}
        if got != expected:
            raise HookError(
                f"hook {_OUT} answered for '{live.name}' with {got}, but for a meta tensor with {expected}",
                plugin=answer[0] if answer is not None else None,
                hint="make the names and shapes of the answer independent of values",
            )
        return answer[1] if answer is not None else {}

    def from_reference(self, live: LiveTensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Translate reference tensors to the full tensor of ``live``.

        Raises:
            HookError: no plugin answers, or one gives a wrong shape.
        """
        node = self.tree.node(live.path)
        answer = self.hooks.single(_IN, node=node, name=live.own_name, tensors=dict(tensors))
        if answer is None:
            raise HookError(
                f"no plugin answers {_IN} for '{live.name}', but one answers {_OUT}",
                hint=f"implement both {_OUT} and its reverse, {_IN}",
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
        meant = f"it is tied and must be named '{first}'" if first else "the reference model has no such tensor"
        problem = f"names '{name}': {meant}"
    elif not spec.keys:
        problem = f"names '{name}', a non-persistent buffer"
    elif name in carriers:
        problem = f"names '{name}', which corresponds to '{carriers[name]}'"
    elif tuple(tensor.shape) != spec.shape:
        problem = f"gives '{name}' the shape {tuple(tensor.shape)}, not {spec.shape}"
    if problem is not None or spec is None:
        raise HookError(f"the answer of hook {_OUT} of {label} for '{live.name}' {problem}", plugin=label)
    return spec


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
