"""The correspondence of live tensors to reference tensors, for weights, checkpoints, ``verify`` and dialects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slapo_core.errors import WeightsError
from slapo_core.internals import Internals, journal, module_index, parameters_of
from slapo_runtime.correspondence.reference import Survey, TensorSpec, Translations, own_tensors, survey
from slapo_runtime.correspondence.storage import LiveTensor, Placement

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core import Schedule
    from slapo_core.internals import HookManager, Tree
    from slapo_core.layout import Mesh


@dataclass(frozen=True)
class Unexplained:
    """A live or reference tensor without a counterpart.

    Args:
        name: its full name in the scheduled model, or its first name in the reference model.
        message: the problem.
        hint: the missing layout or declaration of its primitive.
    """

    name: str
    message: str
    hint: str


@dataclass
class Correspondence:
    """Map live tensors to reference tensors; it remains valid after the schedule is sealed.

    Args:
        tree: the scheduled model, with the layouts of its steps.
        survey: the tensors of the reference model.
        hooks: of the schedule, for translations by plugins.
    """

    tree: Tree
    survey: Survey
    hooks: HookManager
    other_function: tuple[str, ...] = ()
    """Steps after which the reference model computes another function with the same values."""
    _translations: Translations | None = field(default=None, repr=False)

    @classmethod
    def of(cls, schedule: Schedule) -> tuple[Correspondence, dict[str, torch.Tensor]]:
        """Make an unsealed schedule's correspondence; return reference tensors by first name, too.

        Raises:
            SealedError: the originals were dropped.
            WeightsError: the model has an uninitialized lazy module, or was changed outside of the schedule.
            HookError: a plugin's answer about a tensor is invalid.
        """
        Internals(schedule).tree.tensors.check_unchanged()
        surveyed, reference = survey(schedule)
        found = cls(Internals(schedule).tree, surveyed, Internals(schedule).hooks)
        found.other_function = tuple(found._other_function(schedule))
        return found, reference

    @property
    def mesh(self) -> Mesh | None:
        return self.tree.mesh

    @property
    def placement(self) -> Placement | None:
        """The placement of tensors on pipeline ranks; None without a pipeline."""
        return self.tree.tensors.placement

    @property
    def is_spread(self) -> bool:
        """Whether gathering some tensor needs other ranks."""
        mesh = self.mesh
        if mesh is None:
            return False
        dims = {mesh_dim for live in self._lives() for mesh_dim, _ in live.layout.shards()}
        dims.update(mesh_dim for live in self._lives() for mesh_dim in live.layout.partials())
        if self.placement is not None:
            dims.add("pp")
        return any(mesh.size(mesh_dim) > 1 for mesh_dim in dims)

    @property
    def translations(self) -> Translations:
        """The plugins' translations of tensors without a layout, cached."""
        if self._translations is None:
            self._translations = Translations.of(self.tree, self.survey, self.hooks, self._lives())
        return self._translations

    def live(self) -> tuple[LiveTensor, ...]:
        """Return the present tensors of the scheduled model, each once, in registration order."""
        translated = self.translations.reference_specs
        return tuple(
            live
            if live.name not in translated
            else dataclasses.replace(live, reference_names=tuple(spec.name for spec in translated[live.name]))
            for live in self._lives()
        )

    def carried(self) -> Iterator[tuple[LiveTensor, TensorSpec]]:
        """Yield each live tensor with a reference layout, and its reference tensor."""
        for live in self._lives():
            if live.reference_names:
                yield live, self.survey.specs[live.reference_names[0]]

    def translated(self) -> list[tuple[LiveTensor, tuple[TensorSpec, ...]]]:
        """List the live tensors that a plugin translates, with their reference tensors."""
        specs = self.translations.reference_specs
        return [(live, specs[live.name]) for live in self._lives() if live.name in specs]

    def added(self) -> list[LiveTensor]:
        """List persistent live tensors without a reference tensor."""
        return [
            live for live in self.live() if live.is_persistent and not live.reference_names and self._is_placed(live)
        ]

    def dropped(self) -> list[TensorSpec]:
        """List the tensors of the state dict that a step dropped."""
        gone = self._missing()
        return [spec for spec in gone if spec.name in self.tree.tensors.dropped]

    def holders_of(self, spec: TensorSpec) -> dict[str, tuple[int, ...]]:
        """Return the ranks along ``pp`` that hold a reference tensor, if not all: ``{"pp": (0, 3)}``."""
        return self._some(self.placement.reference.get(spec.name, ()) if self.placement is not None else ())

    def holders(self, live: LiveTensor) -> dict[str, tuple[int, ...]]:
        """Return :meth:`holders_of` of a live tensor."""
        if self.placement is None:
            return {}
        assert self.mesh is not None
        return self._some(self.placement.holders(live) or (self.mesh.rank("pp"),))

    def _some(self, ranks: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        everywhere = self.mesh is None or len(ranks) == self.mesh.size("pp")
        return {"pp": ranks} if ranks and not everywhere else {}

    def _is_placed(self, live: LiveTensor) -> bool:
        """Return whether the placement has the tensor, unlike tensors added after the build."""
        return self.placement is None or bool(self.placement.holders(live))

    def unexplained(self) -> list[Unexplained]:
        """List live tensors without a known reference tensor, and reference tensors without a successor."""
        found = [_no_layout(live, self.survey) for live in self.live() if self._is_unexplained(live)]
        unknown = {live.name for live in self.live() if not self.tree.tensors.is_known(live.tensor)}
        lost = [spec for spec in self._missing() if spec.name not in self.tree.tensors.dropped]
        return found or [_put_in(spec) if spec.name in unknown else _lost(spec) for spec in lost]

    def check(self) -> None:
        """Refuse a model with unexplained tensors.

        Raises:
            WeightsError: with all of them.
        """
        found = self.unexplained()
        if found:
            lines = [item.message for item in found]
            raise WeightsError("\n".join(lines), path=found[0].name.rpartition(".")[0], hint=found[0].hint)

    def by_name(self, model: nn.Module) -> dict[str, LiveTensor]:
        """Map all names of the scheduled ``model`` to their live tensors."""
        by_object = {id(live.tensor): live for live in self.live()}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {name: by_object[id(tensor)] for name, tensor in named if id(tensor) in by_object}

    def _other_function(self, schedule: Schedule) -> Iterator[str]:
        given_up = {spec.name for spec in self.dropped() if spec.is_parameter}
        for record, entry in Internals(schedule).entries():
            dropped = sorted(given_up.intersection(getattr(entry, "dropped", ())))
            promise = record.primitive.equivalence
            if dropped:
                yield f"{record} dropped {' and '.join(dropped)} (saved as before the step)"
            elif isinstance(entry, journal.ReplaceModule) and promise.rtol >= _ANOTHER_FUNCTION:
                yield f"{record}, {promise}: {entry.describe()}"

    def _is_unexplained(self, live: LiveTensor) -> bool:
        if tuple(live.tensor.shape) != live.layout.local_shape(self.mesh):
            return bool(live.layout.origin) or bool(live.layout.placements)
        return live.is_persistent and not live.reference_names and live.layout.origin in self.survey.origins

    def _missing(self) -> list[TensorSpec]:
        present = {name for live in self.live() for name in live.reference_names}
        return [spec for spec in self.survey.specs.values() if spec.keys and spec.name not in present]

    def _lives(self) -> list[LiveTensor]:
        found: dict[int, LiveTensor] = {}
        table = self.tree.tensors
        for path, own_name, tensor, persistent in own_tensors(self.tree.index.modules):
            if id(tensor) in found:
                continue
            name = module_index.full_name(path, own_name)
            layout = table.layout(tensor, name)
            if name in self.survey.buffers and (tensor.is_meta or not table.is_known(tensor)):  # made by the forward
                origin = self.survey.origins[name]
                layout = dataclasses.replace(layout, origin=origin, shape=self.survey.specs[origin].shape)
            spec = self.survey.carried_by(layout)
            is_parameter = own_name in parameters_of(self.tree.index.modules[path])
            reference_names = (spec.name,) if spec is not None else ()
            found[id(tensor)] = LiveTensor(path, own_name, tensor, layout, is_parameter, persistent, reference_names)
        if self.placement is None or self.mesh is None:
            return list(found.values())
        return [self._here(live, self.placement, self.mesh.rank("pp")) for live in found.values()]

    @staticmethod
    def _here(live: LiveTensor, placement: Placement, rank: int) -> LiveTensor:
        ranks = placement.holders(live)
        return dataclasses.replace(live, is_local=False) if ranks and rank not in ranks else live


_ANOTHER_FUNCTION = 0.1
"""An rtol from which a replaced module is another function, and not a kernel that rounds otherwise."""


def _no_layout(live: LiveTensor, survey: Survey) -> Unexplained:
    shape = tuple(live.tensor.shape)
    origin = survey.origins.get(live.layout.origin, live.layout.origin)
    spec = survey.specs.get(origin)
    full = spec.shape if spec is not None else live.layout.shape
    return Unexplained(
        live.name,
        f"'{live.name}' of shape {shape} replaces '{origin}' {full} of the reference model without a layout",
        f'its primitive must record the layout: edit.set_parameter(node, "{live.own_name}", value, '
        f'layout=Layout("", {shape})), and its plugin answer slapo_to_reference and slapo_from_reference',
    )


def _put_in(spec: TensorSpec) -> Unexplained:
    return Unexplained(
        spec.name,
        f"'{spec.name}' {spec.shape} was added to the model outside of the schedule, after its first step",
        "change the model before create_schedule(model)",
    )


def _lost(spec: TensorSpec) -> Unexplained:
    return Unexplained(
        spec.name,
        f"'{spec.name}' {spec.shape} of the reference model was removed, but no step declares its successor",
        'its primitive must declare it: edit.replace_module(..., moved={"old": "new"}) or '
        f'dropped=["{spec.name.rpartition(".")[2]}"], or its plugin answer slapo_to_reference',
    )
