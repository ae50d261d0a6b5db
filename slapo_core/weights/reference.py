"""To the untouched model's layout and back: state dicts with its names and full shapes, whatever the schedule did."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from slapo_core.errors import WeightsError
from slapo_core.spec.layout import Layout
from slapo_core.weights.sources import Source, open_source
from slapo_core.weights.survey import LiveTensor, Survey, TensorSpec, live_tensors, survey
from slapo_core.weights.translation import Translations

if TYPE_CHECKING:
    from slapo_core.plugins.manager import HookManager
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.mesh import Mesh
    from slapo_core.tree.tree import Tree

__all__ = ["Reference", "check_names", "load_reference_state_dict", "read_tensor", "reference_state_dict"]


@dataclass
class Reference:
    """The untouched model's state dict, seen through the scheduled model.

    Args:
        tree: the scheduled model with its layouts.
        survey: the tensors of the untouched model.
        hooks: of the schedule: plugins say what the tensors stand for that no layout explains.
        kept: untouched tensors that no tensor of the scheduled model carries any more, by first name, on the CPU.
    """

    tree: Tree
    survey: Survey
    hooks: HookManager
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    _told: bool = False
    _translations: Translations | None = None

    @classmethod
    def of(cls, schedule: Schedule) -> Reference:
        """The reference of a schedule that is not sealed.

        Raises:
            SealedError: the originals were dropped.
            WeightsError: a tensor that the schedule dropped has no values, because it is on the meta device.
        """
        surveyed, tensors = survey(schedule)
        reference = cls(schedule.tree, surveyed, schedule.hooks)
        for spec in reference.dropped():
            if tensors[spec.name].is_meta:
                raise WeightsError(f"'{spec.name}' is on the meta device, so there is no state dict yet")
            reference.kept[spec.name] = tensors[spec.name].detach().to("cpu", copy=True)
        return reference

    @property
    def mesh(self) -> Mesh | None:
        return self.tree.mesh

    def live(self) -> list[LiveTensor]:
        """Every tensor of the scheduled model, each once."""
        return live_tensors(self.tree)

    def carried(self) -> Iterator[tuple[LiveTensor, TensorSpec]]:
        """Each live tensor that stands for an untouched one, with that."""
        for live in self.live():
            spec = self.survey.spec_of(live.layout)
            if spec is not None:
                yield live, spec

    @property
    def translations(self) -> Translations:
        """What plugins say about the tensors that no layout explains; asked once."""
        if self._translations is None:
            self._translations = Translations.of(self.tree, self.survey, self.hooks, self.live())
        return self._translations

    def translated(self) -> list[tuple[LiveTensor, tuple[TensorSpec, ...]]]:
        """Each live tensor that, as a plugin says, stands for untouched ones, with those."""
        stands_for = self.translations.stands_for
        return [(live, stands_for[live.name]) for live in self.live() if live.name in stands_for]

    def dropped(self) -> list[TensorSpec]:
        """What belongs into the state dict, but no live tensor carries it."""
        present = {spec.name for _, spec in self.carried()}
        present |= {spec.name for _, specs in self.translated() for spec in specs}
        return [spec for spec in self.survey.specs.values() if spec.keys and spec.name not in present]

    def added(self) -> list[LiveTensor]:
        """Persistent live tensors that stand for nothing in the untouched model."""
        known = {live.name for live, _ in self.carried()} | set(self.translations.stands_for)
        return [live for live in self.live() if live.is_persistent and live.name not in known]

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, torch.Tensor]:
        """The untouched model's state dict: a collective where anything is sharded.

        Args:
            rank0_only: other ranks take part but return an empty dictionary.
            include_added: also give what a replacement added, under its own name; without, a warning names it once.

        Returns:
            copies on the CPU, with the keys of the untouched model's ``state_dict()`` in its order; tied keys share
            one tensor.
        """
        wanted = not rank0_only or is_first_rank(self.mesh)
        full: dict[str, torch.Tensor] = {}
        for live, spec in self.carried():
            if spec.keys and spec.name not in full:
                value = live.layout.full(live.tensor, self.mesh)
                if wanted:
                    full[spec.name] = value.to("cpu", copy=True)
        for live, _ in self.translated():
            value = live.layout.full(live.tensor, self.mesh)
            if wanted:
                tensors = self.translations.to_reference(live, value)
                full.update((name, tensor.to("cpu", copy=True).contiguous()) for name, tensor in tensors.items())
        added = self._added_state(wanted, include_added)
        if not wanted:
            return {}
        full.update((name, tensor.clone()) for name, tensor in self.kept.items())
        return {key: full[origin] for key, origin in self.survey.keys.items()} | added

    def _added_state(self, wanted: bool, include: bool) -> dict[str, torch.Tensor]:
        added = self.added()
        if not include:
            left_out = [live.name for live in added] + list(self.survey.not_tensors)
            if left_out and not self._told:
                self._told = True
                warnings.warn(
                    "not in the state dict, because the untouched model has no such tensor: " + ", ".join(left_out),
                    stacklevel=4,
                )
            return {}
        values = {live.name: live.layout.full(live.tensor, self.mesh) for live in added}
        return {name: value.to("cpu", copy=True) for name, value in values.items()} if wanted else {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor] | Source) -> None:
        """The reverse of :meth:`state_dict`: every rank copies its own pieces into the live tensors.

        Args:
            state: full tensors with the untouched model's names; of tied names one is enough.

        Raises:
            WeightsError: missing or unexpected names, or other shapes; nothing was changed.
        """
        source = open_source(state)
        names = check_names(self.survey, source)
        with torch.no_grad():
            pieces = [(live, self.read_translated(source, names, live, specs)) for live, specs in self.translated()]
            for live, spec in self.carried():
                if spec.keys:
                    live.tensor.copy_(source.read(names[spec.name], live.layout, self.mesh))
            for live, piece in pieces:
                live.tensor.copy_(piece)
            for name in self.kept:
                self.kept[name] = read_tensor(source, names[name], self.survey.specs[name])

    def read_translated(
        self, source: Source, names: Mapping[str, str], live: LiveTensor, specs: tuple[TensorSpec, ...]
    ) -> torch.Tensor:
        """This rank's piece of a live tensor that stands for ``specs``, made of a source's tensors."""
        tensors = {spec.name: read_tensor(source, names[spec.name], spec) for spec in specs}
        return live.layout.local(self.translations.from_reference(live, tensors), self.mesh)


def reference_state_dict(
    schedule: Schedule, *, rank0_only: bool = False, include_added: bool = False
) -> dict[str, torch.Tensor]:
    """The untouched model's state dict of a scheduled model; see :meth:`Reference.state_dict`."""
    return Reference.of(schedule).state_dict(rank0_only=rank0_only, include_added=include_added)


def load_reference_state_dict(schedule: Schedule, state: Mapping[str, torch.Tensor] | Source) -> None:
    """The reverse of :func:`reference_state_dict`; what the schedule dropped is checked, but not kept."""
    Reference.of(schedule).load_state_dict(state)


def is_first_rank(mesh: Mesh | None) -> bool:
    """Whether this process is the first of the mesh; True without one."""
    return mesh is None or not any(mesh.rank(mesh_dim) for mesh_dim in mesh.sizes)


def check_names(survey: Survey, source: Source) -> dict[str, str]:
    """Hold a source's names and shapes against the untouched model's.

    Returns:
        first name of each tensor of the state dict -> its name in the source.

    Raises:
        WeightsError: every missing name, unexpected name and wrong shape.
    """
    shapes = source.shapes()
    names: dict[str, str] = {}
    wrong: list[str] = []
    for spec in survey.specs.values():
        if not spec.keys:
            continue
        found = [key for key in spec.keys if key in shapes]
        if not found:
            tied = f" (tied with {', '.join(spec.keys[1:])})" if spec.keys[1:] else ""
            wrong.append(f"missing: {spec.keys[0]} {spec.shape}{tied}")
            continue
        names[spec.name] = found[0]
        wrong += [
            f"wrong shape: {key} must be {spec.shape} (got {shapes[key]})" for key in found if shapes[key] != spec.shape
        ]
    wrong += [f"unexpected: {name} {shape}" for name, shape in shapes.items() if name not in survey.keys]
    if wrong:
        raise WeightsError(
            "\n".join([f"{source.label} do not fit the model:", *(f"  - {line}" for line in wrong)]),
            hint="names and shapes are those of the untouched model's state_dict(), whatever the schedule",
        )
    return names


def read_tensor(source: Source, name: str, spec: TensorSpec) -> torch.Tensor:
    """A whole tensor, on the CPU and in the model's dtype."""
    return source.read(name, Layout(spec.name, spec.shape), None).to("cpu", spec.dtype, copy=True)
