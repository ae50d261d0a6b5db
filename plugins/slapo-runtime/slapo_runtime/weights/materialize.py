"""Materialize a scheduled model: read meta tensors from weights, or initialize them."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import WeightsError
from slapo_core.internals import Internals
from slapo_runtime._exchange import exchange_device
from slapo_runtime.correspondence import Correspondence
from slapo_runtime.correspondence.state import ModelState
from slapo_runtime.correspondence.storage import LiveTensor
from slapo_runtime.initialization import Initializer, cannot_initialize
from slapo_runtime.weights.files import MappingSource, SafetensorsSource, Source, check_names, read_tensor
from slapo_runtime.weights.module_state import chosen, own_extra_states, set_extra_states

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Schedule
    from slapo_runtime.correspondence.reference import Survey
    from slapo_runtime.correspondence.storage import Placement


class Materialization:
    """Give the model its values, one tensor after the other; it can be taken back.

    The largest things in memory beside the local shards are one full tensor, or those that a plugin merges into one.
    Of tensors that weights overwrite in place, their former shards are kept on the CPU until :meth:`keep`.

    Args:
        schedule: not sealed.
        source: weights with the reference model's names, for every tensor of its state dict; None initializes what is
            on the meta device.
        device: where the tensors shall be; None leaves real ones where they are and puts the others beside them, or on
            the mesh's device type.
        seed: mixed into the seed of every tensor that is initialized.

    Raises:
        WeightsError: the weights do not fit, or a tensor is unexplained.
    """

    def __init__(
        self, schedule: Schedule, source: Source | None, *, device: torch.device | None = None, seed: int = 0
    ) -> None:
        self.correspondence, self._reference = Correspondence.of(schedule)
        self.correspondence.check()
        self.state = ModelState(self.correspondence)
        self.state.built = {live.name: live.tensor.dtype for live in self.correspondence.live()}
        self.is_complete = False
        self._schedule, self._source, self._device, self._seed = schedule, source, device, seed
        self._names: dict[str, str] = {}
        if source is not None:
            self._source, self._names = fitting(self.correspondence.survey, source, schedule.model)
        self._target = device or _usual_device(schedule, self.correspondence)
        self._edit = Internals(schedule).edit()
        self._overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._extra = chosen(self.correspondence, source.extra, source.label) if source is not None else {}
        self._extra_before: dict[str, Any] = {}
        self._failed: list[str] = []
        self._initializers: dict[str, Initializer] = {}

    @property
    def reference(self) -> dict[str, torch.Tensor]:
        """The reference model's tensors by first name: its own, not copies."""
        return self._reference

    def place(self, placement: Placement) -> None:
        """Let this rank hold the tensors of its pipeline stages only, until it is taken back."""
        Internals(self._schedule).tree.tensors.placement = placement

    def run(self) -> Iterator[LiveTensor]:
        """Materialize the tensors in registration order, and yield each.

        Those that only other ranks hold do not come: a placeholder without memory takes the place of one with values.

        Raises:
            WeightsError: tensors on the meta device cannot be initialized; all of them are named, after the others.
            HookError: a plugin's answer does not fit.
        """
        Internals(self._schedule).tree.tensors.keep_shapes(True)
        if any(self._reference[name].is_meta for name in self._wanted() if name not in self._names):
            with self._schedule.reference() as model:  # before anything is installed
                self._initializers["reference"] = Initializer(model, Internals(self._schedule).hooks, seed=self._seed)
        for live in self.correspondence.live():
            if not live.is_local:
                if not live.tensor.is_meta:
                    self._install(live, torch.empty_like(live.tensor.detach(), device="meta"))
                continue
            value = self._value(live)
            if value is not None:
                yield self._install(live, value)
            elif live.name not in self._failed:
                yield live
        for spec in self.correspondence.dropped():
            whole = self._whole(spec.name)
            if whole is not None:
                self.state.dropped[spec.name] = whole.to("cpu", copy=True)
        self._initializers.clear()
        if self._failed:
            raise cannot_initialize(list(dict.fromkeys(self._failed)))
        if self._extra:
            self._extra_before = own_extra_states(self.correspondence)
            set_extra_states(self.correspondence, self._extra)
        self.is_complete = True

    def take_back(self) -> None:
        """Leave the model as it was before."""
        with torch.no_grad():
            for tensor, before in self._overwritten:
                tensor.copy_(before)
        self._overwritten.clear()
        set_extra_states(self.correspondence, self._extra_before)
        self._edit.rollback()
        Internals(self._schedule).tree.tensors.placement = None
        Internals(self._schedule).tree.tensors.keep_shapes(False)

    def keep(self) -> None:
        """End it; what taking back would need is released."""
        self._overwritten.clear()
        self._reference.clear()
        self._source = None
        self._edit.close()
        self._edit.entries.clear()

    def _wanted(self) -> Iterator[str]:
        """First names of the reference tensors whose values this rank needs."""
        for live in self.correspondence.live():
            if live.is_local:
                yield from live.reference_names
        yield from (spec.name for spec in self.correspondence.dropped())

    # -- one tensor -------------------------------------------------------------------------------------------

    def _value(self, live: LiveTensor) -> torch.Tensor | None:
        """Return the value to install; None if the tensor stays or cannot be initialized."""
        if not live.tensor.is_meta:
            moved = self._device is not None and live.tensor.device != self._device
            if (
                self._source is not None
                and all(name in self._names for name in live.reference_names)
                and live.reference_names
            ):
                shard = self._shard(live)
                assert shard is not None
                if moved:
                    return shard.to(self._device, live.tensor.dtype)
                with torch.no_grad():
                    before = live.tensor.detach().to("cpu", copy=True)  # not twice on the model's device
                    self._overwritten.append((live.tensor, before))
                    live.tensor.copy_(shard)
                return None
            return live.tensor.detach().to(self._device) if moved else None
        shard = self._shard(live)
        return shard.to(self._target, live.tensor.dtype) if shard is not None else None

    def _shard(self, live: LiveTensor) -> torch.Tensor | None:
        """This rank's shard, on the device where it was read or made."""
        mesh, explained = self.correspondence.mesh, live.layout.origin in self.correspondence.survey.origins
        if not live.reference_names:
            whole = self._initialize("scheduled", live.name, tuple(live.layout.shape))
        elif explained:
            name = live.reference_names[0]
            if self._source is not None and name in self._names:
                return self._source.read(self._names[name], live.layout, mesh)
            if self._reference[name].is_meta:
                shard = self._initializers["reference"].shard(name, live.layout, mesh)
                if shard is None:
                    self._failed += [name, live.name]
                return shard
            whole = self._whole(name)
        else:
            parts = {name: self._whole(name) for name in live.reference_names}
            if any(part is None for part in parts.values()):
                self._failed.append(live.name)
                return None
            tensors = {name: part for name, part in parts.items() if part is not None}
            whole = self.correspondence.translations.from_reference(live, tensors)
        if whole is None:
            self._failed.append(live.name)
            return None
        return live.layout.local(whole, mesh)

    def _whole(self, name: str) -> torch.Tensor | None:
        """A reference tensor at its full size; None where no initializer fills it."""
        spec = self.correspondence.survey.specs[name]
        if self._source is not None and name in self._names:
            return read_tensor(self._source, self._names[name], spec)
        reference = self._reference[name]
        if not reference.is_meta:
            return reference.detach()
        whole = self._initialize("reference", name, spec.shape)
        if whole is None:
            self._failed.append(name)
        return whole

    def _initialize(self, which: str, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Initialize a tensor of the reference model, or an added one of the scheduled model."""
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


def _usual_device(schedule: Schedule, correspondence: Correspondence) -> torch.device:
    for live, _ in correspondence.carried():
        if not live.tensor.is_meta:
            return live.tensor.device
    return exchange_device(schedule.mesh) if schedule.mesh is not None else torch.device("cpu")


# -- files in a model's published format ---------------------------------------------------------------------------


def fitting(survey: Survey, source: Source, model: nn.Module) -> tuple[Source, dict[str, str]]:
    """Return the source that has a model's names, and these as :func:`check_names` gives them.

    Files in the format of a model of transformers, whose published names and shapes may be others than those of its
    modules (``save_pretrained`` writes the published ones), are converted by its own ``from_pretrained``: a whole model
    in the memory of this process.

    Raises:
        WeightsError: they do not fit.
    """
    try:
        return source, check_names(survey, source)
    except WeightsError as error:
        if not isinstance(source, SafetensorsSource) or not source.directory.is_dir():
            raise
        if source.buffers:
            raise WeightsError(
                error.message,
                hint=f"{', '.join(map(repr, source.buffers))} were resized or registered by the forward: "
                f"build(sch, ...) without weights, and engine.load('{source.directory}')",
            ) from error
        if not _is_of_transformers(model):
            raise
        converted = _converted(survey, source, model, error)
        return converted, check_names(survey, converted)


def _is_of_transformers(model: nn.Module) -> bool:
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(model).__mro__)


def _converted(survey: Survey, source: SafetensorsSource, model: Any, error: WeightsError) -> Source:
    """Read files by the model's own ``from_pretrained``.

    Raises:
        WeightsError: it does not read all of the model, and no more, from them.
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
        text = f"{error.message}\n{own} does not read them either: {type(cause).__name__}: {cause}"
        raise WeightsError(text, hint=error.hint) from cause
    left = {what: sorted(map(str, info.get(f"{what}_keys", ()))) for what in ("missing", "unexpected", "mismatched")}
    lines = [f"  - {what}: {', '.join(names)}" for what, names in left.items() if names]
    if lines:
        raise WeightsError(
            "\n".join([f"{source.label} do not fit the model, as {own} reads them:", *lines]),
            hint="save them with model.save_pretrained(dir) of the same class and configuration",
        )
    return MappingSource(read.state_dict(), label=f"{source.label}, read by {own},")
