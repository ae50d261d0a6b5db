"""Materialize a scheduled model: read its tensors from weights, or initialize them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import mmap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import WeightsError
from slapo_core.internals import Internals, parameters_of
from slapo_runtime.correspondence import Correspondence
from slapo_runtime.correspondence.storage import LiveTensor
from slapo_runtime.initialization import Initializer, cannot_initialize
from slapo_runtime.ranks.exchange import exchange_device
from slapo_runtime.weights.module_state import chosen, own_extra_states, set_extra_states
from slapo_runtime.weights.sources import MappingSource, SafetensorsSource, WeightsSource, check_names, read_tensor
from slapo_runtime.weights.state import ModelState

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_runtime.correspondence.reference import Survey
    from slapo_runtime.correspondence.storage import Placement, Window


class Materialization:
    """Give the model its values, one tensor after the other; it can be undone.

    The peak memory beside the local shards is one full tensor, or the full tensors that a plugin merges into one. The
    former shards of tensors that weights overwrite in place are kept on the CPU until :meth:`keep`; a model on the meta
    device has none.

    Args:
        schedule: not sealed.
        source: weights with the reference model's names, for every tensor of its state dict; None initializes tensors
            on the meta device.
        device: of the tensors; None keeps the device of real tensors, and puts the others on the same, or on the mesh's
            device type.
        seed: mixed into the seed of every initialized tensor.

    Raises:
        WeightsError: the weights do not fit, or a tensor is unexplained.
    """

    def __init__(
        self, schedule: Schedule, source: WeightsSource | None, *, device: torch.device | None = None, seed: int = 0
    ) -> None:
        self.correspondence, self._reference = Correspondence.of(schedule)
        self.correspondence.check()
        self.state = ModelState(self.correspondence)
        self.state.built = {live.name: live.tensor.dtype for live in self.correspondence.live()}
        self._has_run = False
        self._windows: dict[int, tuple[Window, torch.Tensor]] = {}  # with their values, by parameter
        self._schedule, self._source, self._device, self._seed = schedule, source, device, seed
        self._names: dict[str, str] = {}
        if source is not None:
            self._source, self._names = fitting(self.correspondence.survey, source, schedule.model)
        self.device = device or _usual_device(schedule, self.correspondence)
        self._edit = Internals(schedule).edit()
        self._overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._cast: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []  # with their gradients
        self._extra = chosen(self.correspondence, source.extra, source.label) if source is not None else {}
        self._extra_before: dict[str, Any] = {}
        self._failed: list[str] = []
        self._initializers: dict[str, Initializer] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all tensors have their values."""
        return self._has_run and not self._windows

    @property
    def reference(self) -> dict[str, torch.Tensor]:
        """The reference model's tensors by first name: its own, not copies."""
        return self._reference

    def place(self, placement: Placement) -> None:
        """Limit this rank to the tensors of its pipeline stages, until :meth:`take_back`."""
        Internals(self._schedule).tree.tensors.placement = placement

    def run(
        self,
        windows: Callable[[LiveTensor], Window] | None = None,
        dtype: Callable[[LiveTensor], torch.dtype | None] | None = None,
    ) -> Iterator[LiveTensor]:
        """Materialize the tensors in registration order, and yield each.

        Tensors of other ranks alone are left out, and replaced by placeholders without memory.

        Args:
            windows: gives the wanted window of a parameter's local shape. Parameters on the meta device then have no
                memory until :meth:`fill_windows`.
            dtype: gives the type of a parameter, into which values are read or cast; None: its own.

        Raises:
            WeightsError: tensors on the meta device cannot be initialized; with all of them, after the others.
            HookError: a plugin's answer is invalid.
        """
        Internals(self._schedule).tree.tensors.keep_shapes(True)
        if any(self._reference[name].is_meta for name in self._wanted() if name not in self._names):
            with self._schedule.reference() as model:  # before anything is installed
                self._initializers["reference"] = Initializer(model, Internals(self._schedule).hooks, seed=self._seed)
        for live in self.correspondence.live():
            wanted = (dtype(live) if dtype is not None and live.is_parameter else None) or live.tensor.dtype
            if not live.is_local:
                if not live.tensor.is_meta or live.tensor.dtype != wanted:
                    self._install(live, torch.empty_like(live.tensor.detach(), device="meta", dtype=wanted))
                continue
            if windows is not None and live.is_parameter and live.tensor.is_meta and live.tensor.dim():
                window = windows(live)
                value = self._value(live, wanted, window)
                if value is not None:
                    empty = torch.zeros((), dtype=value.dtype, device=value.device).expand(live.tensor.shape)
                    live = self._install(live, empty)
                    self._windows[id(live.tensor)] = (window, value)
                    yield live
                continue
            if not live.tensor.is_meta:
                self._cast_in_place(live.tensor, wanted)
            value = self._value(live, wanted)
            if value is not None:
                yield self._install(live, value)
            elif live.name not in self._failed:
                yield live
        for spec in self.correspondence.dropped():
            full = self._full(spec.name)
            if full is not None:
                self.state.dropped[spec.name] = full.to("cpu", copy=True)
        self._initializers.clear()
        if self._failed:
            raise cannot_initialize(list(dict.fromkeys(self._failed)))
        if self._extra:
            self._extra_before = own_extra_states(self.correspondence)
            set_extra_states(self.correspondence, self._extra)
        self._has_run = True

    def fill_windows(self, module: nn.Module) -> None:
        """Give a module's parameters without memory their full memory, with the values of their windows."""
        filled: dict[int, nn.Parameter] = {}
        for table in map(parameters_of, module.modules()):
            for name, parameter in table.items():
                found = self._windows.pop(id(parameter), None)
                if parameter is not None and found is not None:
                    window, value = found
                    full = _empty(tuple(parameter.shape), parameter.dtype, value.device)
                    window.of(full).copy_(value)
                    filled[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
                    filled[id(parameter)].__dict__.update(parameter.__dict__)
                table[name] = filled.get(id(parameter), parameter)

    def _cast_in_place(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        if tensor.dtype != dtype:
            self._cast.append((tensor, tensor.data, tensor.grad))
            tensor.grad = None
            tensor.data = tensor.data.to(dtype)

    def take_back(self) -> None:
        """Restore the model."""
        with torch.no_grad():
            for tensor, before in self._overwritten:
                tensor.copy_(before)
        self._overwritten.clear()
        for tensor, data, gradient in self._cast:
            tensor.data = data
            tensor.grad = gradient
        self._cast.clear()
        set_extra_states(self.correspondence, self._extra_before)
        self._edit.rollback()
        Internals(self._schedule).tree.tensors.placement = None
        Internals(self._schedule).tree.tensors.keep_shapes(False)

    def keep(self) -> None:
        """Keep the values, and release the memory for :meth:`take_back`."""
        self._overwritten.clear()
        self._cast.clear()
        self._reference.clear()
        self._source = None
        self._edit.close()
        self._edit.entries.clear()

    def _wanted(self) -> Iterator[str]:
        """Yield the first names of the reference tensors that this rank needs."""
        for live in self.correspondence.live():
            if live.is_local:
                yield from live.reference_names
        yield from (spec.name for spec in self.correspondence.dropped())

    # -- one tensor -------------------------------------------------------------------------------------------

    def _value(self, live: LiveTensor, dtype: torch.dtype, window: Window | None = None) -> torch.Tensor | None:
        """Return the value to install, or its window; None if the tensor stays or cannot be initialized."""
        if not live.tensor.is_meta:
            moved = self._device is not None and live.tensor.device != self._device
            if (
                self._source is not None
                and all(name in self._names for name in live.reference_names)
                and live.reference_names
            ):
                shard = self._shard(live, dtype)
                assert shard is not None
                if moved:
                    return shard.to(self._device, dtype)
                with torch.no_grad():
                    before = live.tensor.detach().to("cpu", copy=True)  # not twice on the model's device
                    self._overwritten.append((live.tensor, before))
                    live.tensor.copy_(shard)
                return None
            return live.tensor.detach().to(self._device) if moved else None
        shard = self._shard(live, dtype, window)
        return shard.to(self.device, dtype) if shard is not None else None

    def _shard(self, live: LiveTensor, dtype: torch.dtype, window: Window | None = None) -> torch.Tensor | None:
        """Return this rank's shard, or its window, on its original device."""
        mesh, name = self.correspondence.mesh, live.reference_names[0] if live.reference_names else ""
        explained = live.layout.origin in self.correspondence.survey.origins
        if explained and self._source is not None and name in self._names:
            return self._source.read_as(self._names[name], live.layout, mesh, dtype, window=window)
        if name and explained and self._reference[name].is_meta:
            shard = self._initializers["reference"].shard(name, live.layout, mesh)
            if shard is None:
                self._failed += [name, live.name]
        else:
            full = self._merged(live) if not explained or not name else self._full(name)
            if full is None:
                self._failed.append(live.name)
            shard = live.layout.local(full, mesh) if full is not None else None
        return shard if shard is None or window is None else window.of(shard).clone()

    def _merged(self, live: LiveTensor) -> torch.Tensor | None:
        """Return the full value of a tensor that a step added, or that a plugin translates; None if it is unknown."""
        if not live.reference_names:
            return self._initialize("scheduled", live.name, tuple(live.layout.shape))
        parts = {name: self._full(name) for name in live.reference_names}
        tensors = {name: part for name, part in parts.items() if part is not None}
        if len(tensors) < len(parts):
            return None
        return self.correspondence.translations.from_reference(live, tensors)

    def _full(self, name: str) -> torch.Tensor | None:
        """Return a full reference tensor; None without an initializer."""
        spec = self.correspondence.survey.specs[name]
        if self._source is not None and name in self._names:
            return read_tensor(self._source, self._names[name], spec)
        reference = self._reference[name]
        if not reference.is_meta:
            return reference.detach()
        full = self._initialize("reference", name, spec.shape)
        if full is None:
            self._failed.append(name)
        return full

    def _initialize(self, which: str, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Initialize a reference tensor, or an added tensor of the scheduled model."""
        if which not in self._initializers:
            self._initializers[which] = Initializer(
                self._schedule.model, Internals(self._schedule).hooks, seed=self._seed, is_reference=False
            )
        return self._initializers[which].value(name, shape)

    def _install(self, live: LiveTensor, value: torch.Tensor) -> LiveTensor:
        node = Internals(self._schedule).node(live.path)
        if live.is_parameter:
            self._edit.set_parameter(node, live.own_name, value)
            tensor: torch.Tensor = node.parameters[live.own_name]
        else:
            self._edit.set_buffer(node, live.own_name, value)
            tensor = node.buffers[live.own_name]
        return dataclasses.replace(live, tensor=tensor)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor; on the CPU, pages that nothing is written to take no memory, before and after."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)  # an allocator would keep written pages


def _usual_device(schedule: Schedule, correspondence: Correspondence) -> torch.device:
    for live, _ in correspondence.carried():
        if not live.tensor.is_meta:
            return live.tensor.device
    return exchange_device(schedule.mesh) if schedule.mesh is not None else torch.device("cpu")


# -- files in a model's published format ---------------------------------------------------------------------------


def fitting(survey: Survey, source: WeightsSource, model: nn.Module) -> tuple[WeightsSource, dict[str, str]]:
    """Return the source with a model's names, and the names from :func:`check_names`.

    Files of a transformers model may have published names and shapes that differ from its modules', as written by
    ``save_pretrained``: its own ``from_pretrained`` converts them, with an entire model in the memory of this process.

    Raises:
        WeightsError: they do not fit.
    """
    try:
        return source, check_names(survey, source)
    except WeightsError as error:
        if source.buffers:
            raise WeightsError(
                error.message,
                hint=f"the forward resized or registered {', '.join(map(repr, source.buffers))}: build(sch, ...) "
                f"without weights, and engine.load('{source.directory}')",
            ) from error
        if not isinstance(source, SafetensorsSource) or not source.directory.is_dir() or not _is_of_transformers(model):
            raise
        converted = _converted(survey, source, model, error)
        return converted, check_names(survey, converted)


def _is_of_transformers(model: nn.Module) -> bool:
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(model).__mro__)


def _converted(survey: Survey, source: SafetensorsSource, model: Any, error: WeightsError) -> WeightsSource:
    """Read files by the model's own ``from_pretrained``.

    Raises:
        WeightsError: the files lack tensors of the model, or have further ones.
    """
    kind = type(model)
    types = [spec.dtype for spec in survey.specs.values() if spec.is_parameter and spec.dtype.is_floating_point]
    dtype = functools.reduce(torch.promote_types, types) if types else torch.float32
    own = f"{kind.__name__}.from_pretrained()"
    try:
        with torch.random.fork_rng(devices=[]):
            read, info = kind.from_pretrained(
                source.directory, config=copy.deepcopy(model.config), dtype=dtype, output_loading_info=True
            )
    except Exception as cause:
        text = f"{error.message}\n{own} cannot read them, either: {type(cause).__name__}: {cause}"
        raise WeightsError(text, hint=error.hint) from cause
    left = {what: sorted(map(str, info.get(f"{what}_keys", ()))) for what in ("missing", "unexpected", "mismatched")}
    lines = [f"  - {what}: {', '.join(names)}" for what, names in left.items() if names]
    if lines:
        raise WeightsError(
            "\n".join([f"{source.label} do not fit the model, as {own} reads them:", *lines]),
            hint="save them by model.save_pretrained(dir) of a model with the same class and configuration",
        )
    return MappingSource(read.state_dict(), label=f"{source.label}, read by {own},")
