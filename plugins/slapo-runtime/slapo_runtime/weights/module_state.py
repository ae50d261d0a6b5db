"""Module state outside of the survey: ``get_extra_state``, and changed buffers.

The survey of the reference model is updated for such buffers before each use. Extra state is saved in a state dict
under torch's key, and in the description of a checkpoint.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import io
import itertools
import pickle
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import WeightsError, warn_user
from slapo_core.internals import buffers_of, module_index, parameters_of
from slapo_runtime.correspondence.reference import TensorSpec, own_tensors
from slapo_runtime.private import tree_map_only
from slapo_runtime.ranks.world import gather_along

if TYPE_CHECKING:
    from torch import nn

    from slapo_runtime.correspondence import Correspondence

_SUFFIX = "_extra_state"

Buffers = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of buffers, by full name."""


# -- buffers ------------------------------------------------------------------------------------------------------


def follow_buffers(correspondence: Correspondence) -> None:
    """Update a survey for buffers that forwards resized or registered: a collective over ``pp``.

    Raises:
        WeightsError: a sharded buffer has a new shape, for which there is no layout.
    """
    survey, placement, mesh = correspondence.survey, correspondence.placement, correspondence.mesh
    found = dict(_changed_buffers(correspondence))
    holders: dict[str, tuple[int, ...]] = {}
    if placement is not None and mesh is not None:
        by_rank = gather_along(mesh, "pp", found)
        for rank, theirs in enumerate(by_rank):
            for name, one in theirs.items():
                found.setdefault(name, one)
                holders[name] = (*holders.get(name, ()), rank)
    if not found:
        return
    specs, keys, origins = dict(survey.specs), dict(survey.keys), dict(survey.origins)
    index = correspondence.tree.index
    for name, (shape, dtype) in found.items():
        if name in origins:
            specs[origins[name]] = dataclasses.replace(specs[origins[name]], shape=shape, dtype=dtype)
            continue
        path, _, own_name = name.rpartition(".")
        names = tuple(module_index.full_name(alias, own_name) for alias in index.paths_of(path))
        specs[name] = TensorSpec(name, shape, dtype, False, names)
        keys.update(dict.fromkeys(names, name))
        origins.update(dict.fromkeys(names, name))
    buffers = {**survey.buffers, **found}
    correspondence.survey = dataclasses.replace(survey, specs=specs, keys=keys, origins=origins, buffers=buffers)
    if placement is not None:
        reference = {origins[name]: ranks for name, ranks in holders.items()}
        correspondence.tree.tensors.placement = dataclasses.replace(
            placement, reference={**reference, **placement.reference}
        )


def _changed_buffers(correspondence: Correspondence) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Yield the persistent buffers that differ from the survey, or are missing in it."""
    survey, tree = correspondence.survey, correspondence.tree
    for path, own_name, tensor, is_persistent in own_tensors(tree.index.modules):
        module = tree.index.modules[path]
        if not is_persistent or own_name in parameters_of(module) or tree.tensors.is_known(tensor):
            continue
        if tensor.is_meta and correspondence.placement is not None:  # another rank runs the module
            continue
        name, shape = module_index.full_name(path, own_name), tuple(tensor.shape)
        tree.tensors.layout(tensor, name)  # adopts a tensor of the former shape
        origin = survey.origins.get(name)
        if origin is None and id(module) in survey.modules:
            yield name, (shape, tensor.dtype)
        elif origin is not None and not survey.specs[origin].is_parameter and not tree.tensors.is_known(tensor):
            former, mesh = tree.former_tensor(name), tree.mesh
            layout = tree.tensors.layout(former, name) if former is not None else None
            if layout is not None and mesh is not None and any(mesh.size(dim) > 1 for dim, _ in layout.shards()):
                raise WeightsError(
                    f"the buffer '{name}' is sharded, but the forward gave it another shape, {shape}: its layout is "
                    "unknown",
                    path=path,
                    hint="leave the buffer unsharded: shard the parameters only",
                )
            if survey.specs[origin].shape != shape or survey.specs[origin].dtype != tensor.dtype:
                yield name, (shape, tensor.dtype)


@contextlib.contextmanager
def resized(correspondence: Correspondence, wanted: Mapping[str, tuple[list[int], str]]) -> Iterator[None]:
    """Resize buffers to a checkpoint's shapes; restore them after an error.

    Args:
        correspondence: of the model.
        wanted: shape and type by full name, from :func:`as_json`.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    survey, placement = correspondence.survey, correspondence.placement
    modules = correspondence.tree.index.modules
    for name, (shape, dtype) in wanted.items():
        path, _, own_name = name.rpartition(".")
        if path not in modules or own_name in parameters_of(modules[path]):
            continue
        table = buffers_of(modules[path])
        held = table.get(own_name, _ABSENT)
        tensor = held if isinstance(held, torch.Tensor) else next(_tensors(modules[path]), None)
        if tensor is not None and tensor.is_meta:  # of another pipeline rank
            continue
        if tensor is None or tensor is not held or (list(tensor.shape), str(tensor.dtype)) != (list(shape), dtype):
            before.append((table, own_name, held))
            device = (tensor if tensor is not None else next(_tensors(correspondence.tree.root))).device
            own_type = getattr(torch, dtype.removeprefix("torch."))
            table[own_name] = torch.zeros(tuple(shape), dtype=own_type, device=device)
    try:
        follow_buffers(correspondence)
        yield
    except BaseException:
        for table, own_name, held in before:
            table[own_name] = held
            if held is _ABSENT:
                del table[own_name]
        correspondence.survey, correspondence.tree.tensors.placement = survey, placement
        raise


def as_json(buffers: Buffers) -> dict[str, tuple[list[int], str]]:
    """Return buffers for the description of a checkpoint."""
    return {name: (list(shape), str(dtype)) for name, (shape, dtype) in buffers.items()}


_ABSENT = object()


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


# -- get_extra_state ----------------------------------------------------------------------------------------------


def is_extra(key: str) -> bool:
    """Return whether a key of a state dict is of ``get_extra_state``."""
    return key.rpartition(".")[2] == _SUFFIX


def extra_states(correspondence: Correspondence, *, compare: bool) -> dict[str, Any]:
    """Return the modules' extra state by key, with tensors on the CPU.

    A collective over ``pp``: the rank that runs a module gives its state.

    Args:
        correspondence: of the model.
        compare: warn if it differs along ``tp``, where the first rank's is saved: a collective over ``tp``.
    """
    found = own_extra_states(correspondence)
    mesh, keys = correspondence.mesh, list(filter(is_extra, correspondence.survey.not_tensors))
    if mesh is None or not keys:
        return found
    if correspondence.placement is not None:
        by_rank = gather_along(mesh, "pp", found)
        found = {key: value for theirs in reversed(by_rank) for key, value in theirs.items()}
    if compare and mesh.size("tp") > 1:
        by_rank = gather_along(
            mesh, "tp", {key: hashlib.sha256(_bytes(value)).digest() for key, value in found.items()}
        )
        differing = [key for key in by_rank[0] if len({theirs[key] for theirs in by_rank}) > 1]
        if differing:
            warn_user(
                f"get_extra_state() differs between the ranks of 'tp', and the first rank's is saved: "
                f"{', '.join(differing)}",
            )
    return {key: found[key] for key in keys if key in found}


def own_extra_states(correspondence: Correspondence) -> dict[str, Any]:
    """Return :func:`extra_states` of the modules that this rank runs: no collective."""
    found = {key: module.get_extra_state() for key, module in _modules(correspondence)}
    copied: dict[str, Any] = tree_map_only(torch.Tensor, lambda one: one.detach().to("cpu", copy=True), found)
    return copied


def _modules(correspondence: Correspondence) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of this rank with extra state, by its key."""
    placement, mesh = correspondence.placement, correspondence.mesh
    for key in filter(is_extra, correspondence.survey.not_tensors):
        path = key.removesuffix(_SUFFIX).removesuffix(".")
        module = correspondence.tree.index.modules.get(path)
        if module is None or not _has_extra(module):
            continue
        if placement is None or mesh is None or mesh.rank("pp") in placement.modules.get(path, (0,)):
            yield key, module


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def set_extra_states(correspondence: Correspondence, states: Mapping[str, Any]) -> None:
    """Load the :func:`extra_states` into the modules."""
    for key, value in states.items():
        path = key.removesuffix(_SUFFIX).removesuffix(".")
        module = correspondence.tree.index.modules.get(path)
        if module is not None and _has_extra(module):
            module.set_extra_state(value)


def chosen(correspondence: Correspondence, states: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return the modules' states from a source; a warning names the missing ones."""
    own = [key for key, _ in _modules(correspondence)]
    lacking = [key for key in own if key not in states]
    if lacking:
        warn_user(
            f"{label} lack the extra state of these modules, which keep their own: {', '.join(lacking)}",
        )
    return {key: states[key] for key in own if key in states}


def packed(states: Mapping[str, Any]) -> dict[str, str]:
    """Encode states for the description of a checkpoint; a warning names unsupported ones."""
    found, left_out = {}, []
    for key, value in states.items():
        content = _bytes(value)
        try:
            torch.load(io.BytesIO(content), weights_only=True)
        except pickle.UnpicklingError:
            left_out.append(f"{key} ({type(value).__name__})")
            continue
        found[key] = base64.b64encode(content).decode()
    if left_out:
        warn_user(
            "extra state that torch.load(weights_only=True) does not read is not in the checkpoint: "
            f"{', '.join(left_out)}; return tensors, numbers, strings and containers of them from get_extra_state(), "
            "or register the class by torch.serialization.add_safe_globals",
        )
    return found


def unpacked(states: Mapping[str, str]) -> dict[str, Any]:
    """Decode :func:`packed` states."""
    return {
        key: torch.load(io.BytesIO(base64.b64decode(content)), weights_only=True) for key, content in states.items()
    }


def _bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
