"""Recordings that serve copies of the model that they were made of, for as long as one verification lasts."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor

from slapo_core.graph.checks import Checks
from slapo_core.graph.leaves import is_changed, walk
from slapo_core.graph.notes import Notes
from slapo_core.graph.regions import state
from slapo_core.graph.sharing import is_pure, structure
from slapo_core.graph.sizes import constant, hint_of, is_symbolic
from slapo_core.graph.structure import Opaque, children, is_plain, rebuild
from slapo_core.graph.surroundings import Surroundings
from slapo_core.graph.tokens import is_transparent, token
from slapo_core.spec.tracer import Flag, Recorded

__all__ = ["CopiedRecordings", "Kept", "copies_share", "recordings_of_copies"]

_current: contextvars.ContextVar[CopiedRecordings | None] = contextvars.ContextVar("recordings_of_copies", default=None)


@contextlib.contextmanager
def copies_share(recordings: CopiedRecordings) -> Iterator[None]:
    """While this lasts, a model is not recorded again that is proved to be recorded like an earlier one."""
    before = _current.set(recordings)
    try:
        yield
    finally:
        _current.reset(before)


def recordings_of_copies() -> CopiedRecordings | None:
    """Those that are shared here; None where every model is recorded."""
    return _current.get()


@dataclass(frozen=True)
class Kept:
    """A recording, beside the model that it was made of.

    Args:
        recorded: what was recorded.
        notes: what else is known of the run; where copies share it, without the tensors of the model.
        surroundings: the global names that it depends on.
        written: the names of the buffers that the run wrote to.
    """

    recorded: Recorded
    notes: Notes
    surroundings: tuple[Flag, ...]
    written: frozenset[str]

    def on(self, module: nn.Module) -> Kept:
        """The same of another model, with a graph and notes of its own."""
        graph, notes = _copied(self.recorded.graph, self.notes)
        for node in graph.nodes:
            if node.op == "get_attr" and node in notes.values:
                notes.values[node] = _tensor_at(module, str(node.target))
        return replace(self, recorded=replace(self.recorded, graph=graph), notes=notes)


class CopiedRecordings:
    """The recordings of one model and its copies.

    One serves another model if the run that recorded it would have been the same run there, which is proved as for
    traced modules (:class:`~slapo_core.graph.sharing.Pool`): the same classes, structure, modes and parameters' shapes,
    arguments of the same metadata, and every attribute that was read, by modules that stay calls too, has an equal
    value. Beyond that, buffers have the same values, and the global names in the source of all modules are what they
    were. Models with hooks, with forwards of their own on instances, or in which a run looked into a tensor's values
    are recorded each by itself.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[Checks, Kept]]] = {}

    def asked(
        self, module: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any], inlined: Mapping[str, Any]
    ) -> Asked | None:
        """What a recording is looked up by; None if no other model's can be proved to serve.

        Args:
            module: to be recorded.
            forward: takes the module first.
            arguments: by parameter.
            inlined: the modules whose own code is recorded, by path.
        """
        memory: dict[int, int] = {}
        given = tuple((name, _form(value, memory)) for name, value in arguments.items())
        modules = [below for _, below in walk(module)]
        if any(form is None for _, form in given) or any(map(is_changed, modules)):
            return None
        values = _values(modules)
        if values is None:
            return None
        forwards = tuple(getattr(type(below), "forward", None) for below in modules)
        around = (state(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.get_default_device())
        key = (forward, tuple(inlined), given, structure(module), forwards, values, around)
        try:
            hash(key)
        except TypeError:
            return None
        return Asked(self._known.setdefault(key, []), module, forward)


class Asked:
    """One model, of which a recording is looked up, or added.

    Args:
        known: recordings of models of which everything is alike, but perhaps attributes and global names.
        module: the model.
        forward: that is recorded.
    """

    def __init__(self, known: list[tuple[Checks, Kept]], module: nn.Module, forward: Callable[..., Any]) -> None:
        self._known, self._module = known, module
        self._modules = [below for _, below in walk(module)]
        self._names = None if self.find() is not None else Surroundings(forward, self._modules).flags

    def find(self) -> Kept | None:
        """A recording that serves the model."""
        return next((kept for checks, kept in self._known if checks.violated(self._modules) is None), None)

    def add(self, kept: Kept) -> Kept | None:
        """Keep a new recording of the model, if it can be proved to serve others; before anybody changes its graph."""
        recorded, notes = kept.recorded, kept.notes
        assert self._names is not None
        if (
            recorded.read is None
            or notes.value_reads
            or notes.is_real
            or not is_pure(recorded)
            or not _is_of_all(recorded.graph, notes)
        ):
            return None
        index = {path: number for number, (path, _) in enumerate(walk(self._module))}
        checks = Checks((*recorded.read, *kept.surroundings, *self._names), index)  # as it was before the run
        graph, own = _copied(recorded.graph, notes)
        known: dict[int, torch.Tensor] = {}
        own.values = {
            node: None if node.op == "get_attr" else _apart(value, known) for node, value in own.values.items()
        }
        made = replace(kept, recorded=replace(recorded, graph=graph), notes=own)
        self._known.append((checks, made))
        return made


def _form(value: Any, memory: dict[int, int]) -> Any:
    """An argument with all metadata; tensors that are one object, or lie in one memory, do so again."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter):
            return None
        place = (
            memory.setdefault(id(value), len(memory)),
            memory.setdefault(-value.untyped_storage()._cdata, len(memory)),
        )
        size = (value.shape, value.stride(), value.storage_offset())
        return (type(value), *place, *size, value.dtype, value.device, value.requires_grad, value.is_leaf)
    if is_plain(value):
        return (type(value), repr(value))
    if type(value) not in (tuple, list, dict):
        return None
    inner = tuple((key, _form(part, memory)) for _, key, part in children(value) or ())
    return None if any(part is None for _, part in inner) else (type(value), inner)


def _values(modules: list[nn.Module]) -> Any:
    """The values of buffers, of other tensors that are attributes, and of parameters of one element.

    torch computes with tensors of one element even where the run is on tensors without values. And which tensors share
    memory, and what they have as attributes of their own. None if that cannot be compared.
    """
    found: list[Any] = []
    memory: dict[int, int] = {}
    for module in modules:
        own = module.__dict__
        for table in (own["_parameters"], own["_buffers"], own):
            for tensor in table.values():
                if not isinstance(tensor, torch.Tensor):
                    continue
                if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                    return None
                if not is_transparent(tensor.__dict__):
                    return None
                storage = tensor.untyped_storage()._cdata
                found.append((memory.setdefault(storage, len(memory)), tensor.storage_offset(), token(tensor.__dict__)))
                if (tensor.numel() <= 1 or not isinstance(tensor, nn.Parameter)) and not tensor.is_meta:
                    found.append(_digest(tensor))
    return tuple(found)


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).cpu()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).digest()


def _is_of_all(graph: fx.Graph, notes: Notes) -> bool:
    """Whether nothing in a graph and in what is known of the run belongs to one model."""
    nodes = set(graph.nodes)
    return (
        not any(isinstance(node.target, MethodType) or _has_closure(node.target) for node in nodes)
        and all(node in nodes for written in notes.writes.values() for node in written)
        and all(_is_made(notes.values[node]) for node in nodes if node.op != "get_attr" and node in notes.values)
    )


def _has_closure(target: Any) -> bool:
    if not isinstance(target, FunctionType) or target.__closure__ is None:
        return False
    return not (target.__module__ or "").startswith("torch.")


def _is_made(value: Any) -> bool:
    """Whether a value is made of tensors without values, which the run made, and of plain ones."""
    if isinstance(value, torch.Tensor):
        return type(value) is FakeTensor
    if type(value) is Opaque:
        return False
    if is_symbolic(value) or is_plain(value):
        return True
    parts = children(value)
    return parts is not None and all(_is_made(part) for _, _, part in parts)


def _apart(value: Any, known: dict[int, torch.Tensor]) -> Any:
    """A value of a run without what leads back to the model: a history, or the recording that counts with sizes."""
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            known[id(value)] = value.detach().requires_grad_(value.requires_grad)
        return known[id(value)]
    if is_symbolic(value):
        return constant(hint_of(value))
    if is_plain(value):
        return value
    return rebuild(value, [_apart(part, known) for _, _, part in list(children(value) or ())])


def _copied(graph: fx.Graph, notes: Notes) -> tuple[fx.Graph, Notes]:
    made, own = fx.Graph(), Notes()
    at: dict[fx.Node, fx.Node] = {}
    output = made.graph_copy(graph, at)
    last = next(node for node in graph.nodes if node.op == "output")
    at[last] = made.output(output)
    at[last].meta = dict(last.meta)
    own.values = {at[node]: value for node, value in notes.values.items() if node in at}
    own.writes = {at[node]: tuple(at[one] for one in written) for node, written in notes.writes.items() if node in at}
    own.storages = {at[node]: number for node, number in notes.storages.items() if node in at}
    return made, own


def _tensor_at(module: nn.Module, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found
