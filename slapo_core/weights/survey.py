"""Which tensors the reference model has: names, ties, shapes, and their places in the state dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from slapo_core.errors import WeightsError
from slapo_core.spec.layout import Layout
from slapo_core.tree.index import ModuleIndex, TensorSites, full_name

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Survey", "TensorSpec", "own_tensors", "refuse_lazy", "survey", "survey_model"]


@dataclass(frozen=True)
class TensorSpec:
    """One parameter or buffer of the reference model; tied names are one tensor.

    Args:
        name: its first name in registration order, e.g. ``"transformer.wte.weight"``.
        shape: in elements.
        dtype: its element type.
        is_parameter: False for a buffer.
        keys: its names in the state dict, e.g. ``("transformer.wte.weight", "lm_head.weight")``; empty for a buffer
            that is not persistent.
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
        not_tensors: keys of the state dict that hold something else (a module's ``get_extra_state``).
    """

    specs: Mapping[str, TensorSpec]
    origins: Mapping[str, str]
    keys: Mapping[str, str]
    not_tensors: tuple[str, ...] = ()

    def carried_by(self, layout: Layout) -> TensorSpec | None:
        """The reference tensor that a layout speaks of; None where it speaks of none, or of another shape."""
        origin = self.origins.get(layout.origin)
        if origin is None or self.specs[origin].shape != tuple(layout.shape):
            return None
        return self.specs[origin]


def survey(schedule: Schedule) -> tuple[Survey, dict[str, torch.Tensor]]:
    """Look at the reference model.

    Returns:
        the survey, and its tensors by first name: the reference model's own, not copies.

    Raises:
        SealedError: the originals were dropped.
        WeightsError: a lazy module has not been run yet.
    """
    with schedule.untouched() as model:
        return survey_model(model)


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model with tensors that have no shape yet.

    Raises:
        WeightsError: they are named.
    """
    lazy = [name for name, tensor in model.state_dict(keep_vars=True).items() if is_lazy(tensor)]
    if lazy:
        raise WeightsError(
            f"tensors of lazy modules have no shape yet: {', '.join(lazy)}",
            hint="run the model once on a batch before create_schedule(model), or give the layers their input size",
        )


def survey_model(model: nn.Module) -> tuple[Survey, dict[str, torch.Tensor]]:
    """As :func:`survey`, for a model without a schedule."""
    refuse_lazy(model)
    index = ModuleIndex(model)
    sites = TensorSites(index)
    first: dict[int, str] = {}
    origins: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for path, own_name, tensor, _ in own_tensors(index.modules):
        name = first.setdefault(id(tensor), full_name(path, own_name))
        tensors.setdefault(name, tensor)
    for name, tensor in tensors.items():
        for path, own_name in sites.of(tensor):
            origins.update((full_name(alias, own_name), name) for alias in index.paths_of(path))
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
    return Survey(specs, origins | keys, keys, tuple(not_tensors)), tensors


def _renamed(key: str, value: torch.Tensor, missing: Mapping[str, torch.Tensor]) -> str | None:
    """The tensor that a state-dict hook cloned to another name: the only one of its values; None: none is missing."""
    alike = [name for name, one in missing.items() if one.shape == value.shape and one.dtype == value.dtype]
    same = [name for name in alike if not value.is_meta and torch.equal(missing[name], value)]
    if len(same) == 1:
        return same[0]
    if not missing:
        return None
    raise WeightsError(
        f"a state-dict hook of the model replaces {', '.join(map(repr, sorted(missing)))} by '{key}', and which "
        "tensor '" + key + "' holds cannot be told by its values",
        hint="let the hook rename the tensors of the state dict without cloning or changing them",
    )


def own_tensors(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, torch.Tensor, bool]]:
    """``(module path, own name, tensor, whether it belongs into a state dict)``, parameters before buffers."""
    for path, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield path, name, parameter, True
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield path, name, buffer, name not in module._non_persistent_buffers_set
