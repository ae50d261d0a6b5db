"""The stages of a schedule: get them from plugins, check and run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import ArgumentError, HookError
from slapo_core.internals import Internals, buffers_of, children_of, module_index, parameters_of
from slapo_runtime.batches import bound_batch, in_mode
from slapo_runtime.private import non_persistent_buffers_of, pytree, write_count
from slapo_runtime.stages.partition import Liveness, Output, Partition, Stage

if TYPE_CHECKING:
    from slapo_core import Schedule


Outputs = Sequence[str] | Callable[["Output"], Sequence[str]] | None
"""Names of the values of the output that the last stage needs, or a function that picks them; None: all of them."""

# `StagedModel`: the stages of a model with the values sent between them, and their run one after the other.


@dataclass(frozen=True)
class StagedModel:
    """The stages of a model for one input signature and mode.

    Args:
        partition: the stages.
        liveness: the values that each of them sends to the next.
        partition_by: the plugin of the partition, e.g. ``"slapo-pipeline 0.1.0"``.
        liveness_by: the plugin of the liveness.
    """

    partition: Partition
    liveness: Liveness
    partition_by: str = "the caller"
    liveness_by: str = "the caller"

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """Run the stages one after another; return the model's output.

        They are isolated like processes: values without a declared gradient are detached, and a stage gets copies of
        its inputs, so that its writes have no effect elsewhere.

        Args:
            inputs: the arguments of the model's forward, by parameter.

        Raises:
            HookError: a stage's values differ from its declaration, or it changes a tensor of other stages.
        """
        own = [_copied({name: inputs[name] for name in stage.inputs if name in inputs}) for stage in self._stages]
        shared = SharedState(self._stages)
        values: dict[str, torch.Tensor] = {}
        received: dict[str, torch.Tensor] = {}
        for stage, given in zip(self._stages, own, strict=True):
            made = self._made(stage, given, {name: received[name] for name in stage.uses})
            self._refuse(stage, shared.changed())
            values.update((name, made[name]) for name in self.partition.output.names if name in made)
            there = {**received, **made}
            received = {name: self._sent(name, there[name]) for name in self.liveness.sent(stage.index)}
        return self.partition.output.assemble(values)

    @property
    def _stages(self) -> tuple[Stage, ...]:
        return self.partition.stages

    def _made(self, stage: Stage, given: dict[str, Any], values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            made = stage.module(given, values)
        except Exception as error:
            error.add_note(f"in {_place(stage)}, made by {self.partition_by}")
            raise
        self._refuse(stage, made_problems(made, stage, self.partition))
        return made  # type: ignore[no-any-return]

    def _refuse(self, stage: Stage, problems: Sequence[str]) -> None:
        if problems:
            raise HookError(
                f"{_place(stage)}, made by {self.partition_by}, does not match its declaration: {'; '.join(problems)}",
                plugin=self.partition_by,
            )

    def _sent(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.clone(memory_format=torch.contiguous_format)
        return own if self.partition.values[name].requires_grad else own.detach()


def staged(
    schedule: Schedule,
    inputs: Mapping[str, Any],
    *,
    outputs: Sequence[str] | None = None,
    batch_axes: Mapping[str, int | None] | None = None,
) -> StagedModel | None:
    """Ask the plugins for the stages of a schedule; None if no plugin cuts it.

    Args:
        schedule: its model is in the wanted mode.
        inputs: the arguments of the model's forward, by parameter.
        outputs: values of the output that the last stage needs; None: all of them.
        batch_axes: see the hook `slapo_partition`.

    Raises:
        TraceError: the model cannot be cut there.
        HookError: an answer is invalid, or a partition has no answer about liveness.
    """
    before = {name: StateMark(tensor) for name, tensor in held_by(schedule.model)}
    random = torch.get_rng_state()
    answer = Internals(schedule).hooks.single(
        "slapo_partition", schedule=schedule, inputs=inputs, batch_axes=dict(batch_axes or {})
    )
    if answer is None:
        return None
    plugin, partition = answer
    now = dict(held_by(schedule.model))
    changed = [f"'{name}'" for name, mark in before.items() if not mark.holds(now.get(name))]
    changed += ["the RNG state"] if not torch.equal(random, torch.get_rng_state()) else []
    if changed:
        raise HookError(
            f"{plugin} changes {', '.join(changed[:3])} while it makes the stages (slapo_partition)", plugin=plugin
        )
    check_partition(partition, plugin, schedule.model)
    needed = tuple(partition.output.names if outputs is None else outputs)
    return needing(schedule, StagedModel(partition, Liveness(()), plugin), needed)


def needing(schedule: Schedule, found: StagedModel, outputs: Sequence[str]) -> StagedModel:
    """Return the stages with liveness for other required outputs.

    Args:
        schedule: of the stages.
        found: the stages.
        outputs: values of the output that the last stage needs.

    Raises:
        HookError: as for :func:`staged`.
    """
    needed = tuple(outputs)
    answer = Internals(schedule).hooks.single("slapo_liveness", partition=found.partition, outputs=needed)
    if answer is None:
        raise HookError(
            f"{found.partition_by} cut the model into stages, but no active plugin gives the values sent between them "
            "(slapo_liveness)",
            plugin=found.partition_by,
            hint='create_schedule(model, plugins=["slapo-pipeline"])',
        )
    plugin, liveness = answer
    check_liveness(liveness, found.partition, needed, plugin)
    return replace(found, liveness=liveness, liveness_by=plugin)


def ask(
    schedule: Schedule,
    inputs: Mapping[str, Any],
    outputs: Outputs = None,
    batch_axes: Mapping[str, int | None] | None = None,
) -> StagedModel | None:
    """Ask the plugins for stages; ``outputs`` may be a function of the :class:`Output`."""
    found = staged(schedule, inputs, batch_axes=batch_axes)
    if found is None or outputs is None:
        return found
    return needing(schedule, found, outputs(found.partition.output) if callable(outputs) else outputs)


def _place(stage: Stage) -> str:
    return f"stage {stage.index}" + (f" (up to '{stage.last}')" if stage.last is not None else " (the last)")


def _copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """Copy the tensors of arguments."""
    known: dict[int, torch.Tensor] = {}  # one object in the batch has one copy

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return known.setdefault(id(leaf), leaf) if id(leaf) in known else known.setdefault(id(leaf), leaf.clone())

    return pytree.tree_map(own, inputs)  # type: ignore[no-any-return]


# This rank's modules of the model, at the reference paths.


class RankModule(nn.Module):
    """The modules of this rank's stages, without a forward.

    ``module.get_submodule("encoder.layer.3")`` is the scheduled model's module, the same object, if this rank runs it.
    At the path of a module above a cut is a container of its submodules.

    Args:
        model: the scheduled model.
        stages: modules of the stages.
    """

    def __init__(self, model: nn.Module, stages: Iterable[nn.Module]) -> None:
        super().__init__()
        self.__dict__["_model"] = model  # not as a submodule
        own = set(model.modules())
        for stage in stages:
            _merge(self, stage, model, own)

    def train(self, mode: bool = True) -> RankModule:
        """Set the mode of the entire model; call it on all ranks."""
        if "_model" in self.__dict__:
            self.__dict__["_model"].train(mode)
        return super().train(mode)  # type: ignore[return-value]

    def forward(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            "one rank has some of the model's modules: call engine.train_step(batch) or eval_step"
        )


class _Above(nn.Module):
    """A container in place of a module above a cut."""


def _merge(into: nn.Module, stage: nn.Module, above: nn.Module, own: set[nn.Module]) -> None:
    present = parameters_of(above)  # a stage takes over replaced parameters with its next call
    for name, parameter in parameters_of(stage).items():
        if name not in parameters_of(into):
            into.register_parameter(name, present.get(name, parameter))
    for name, buffer in buffers_of(stage).items():
        if name not in buffers_of(into):
            into.register_buffer(name, buffer, persistent=name not in non_persistent_buffers_of(stage))
    for name, child in children_of(stage).items():
        there = children_of(into).get(name)
        if child is None or there in own:
            continue
        if child in own:
            into.add_module(name, child)
            continue
        if there is None:  # a module above several stages has another container in each of them
            there = _Above()
            into.add_module(name, there)
        _merge(there, child, children_of(above).get(name) or child, own)


# The stages of a schedule as in ``build``, for scripts and plugins.


@dataclass(frozen=True)
class StageAnswers(StagedModel):
    """The plugins' answers, with their batch.

    Args:
        inputs: the arguments of the model's forward, by parameter.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict)


def stages(schedule: Schedule, batch: Any = None, *, full_output: bool = False) -> StageAnswers:
    """Return the stages of a schedule, as for a training step.

    A model entirely in evaluation mode is cut in training mode.

    Args:
        schedule: with cuts.
        batch: a batch of ``train_step``; None takes the schedule's example inputs.
        full_output: whether the last stage needs the full output, as for ``build(loss=...)``. Without it, it needs the
            loss, if the model computes one.

    Returns:
        an object with ``partition``, ``liveness`` and ``inputs``; see `slapo_runtime.stages.partition`.

    Raises:
        ArgumentError: there is no batch, or no step cuts the model.
        TraceError: the model cannot be cut there.
        HookError: a plugin's answer is invalid.
    """
    batch = schedule.example_inputs if batch is None else batch
    if batch is None:
        raise ArgumentError(
            "stages need a batch, but none was given, and the schedule has no example inputs",
            hint="stages(sch, {'input_ids': ids}), or create_schedule(model, example_inputs={'input_ids': ids})",
        )
    inputs = bound_batch(schedule.model, batch, for_loss=full_output)
    with in_mode(list(schedule.model.modules()), training=True):
        found = staged(schedule, inputs)
        if found is not None and not full_output and found.partition.output.loss is not None:
            found = needing(schedule, found, (found.partition.output.loss,))
    if found is None:
        raise ArgumentError(
            "no step cuts this model into stages", hint='sch["encoder.layer.5"].pipeline_split() cuts after that module'
        )
    return StageAnswers(found.partition, found.liveness, found.partition_by, found.liveness_by, inputs)


# Tensors of several stages: each process has another copy, so no stage may write to them.


def held_by(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer under each of its names."""
    for path, module in module_index.walk(model):
        prefix = f"{path}." if path else ""
        for table in (parameters_of(module), buffers_of(module)):
            yield from ((f"{prefix}{name}", tensor) for name, tensor in table.items() if tensor is not None)


def holders(stages: Sequence[Stage]) -> dict[int, tuple[str, torch.Tensor, tuple[int, ...]]]:
    """Return tensors of several stages: id -> first name, tensor, stages."""
    found: dict[int, tuple[str, torch.Tensor, dict[int, None]]] = {}
    for stage in stages:
        for name, tensor in held_by(stage.module):
            found.setdefault(id(tensor), (name, tensor, {}))[2][stage.index] = None
    return {key: (name, tensor, tuple(where)) for key, (name, tensor, where) in found.items() if len(where) > 1}


class SharedState:
    """Detect a stage that changes tensors of other stages.

    Args:
        stages: of the model.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._shared = list(holders(stages).values())
        self._stages = stages
        self._before = [StateMark(tensor) for _, tensor, _ in self._shared]

    def changed(self) -> list[str]:
        """Return messages on shared tensors that a stage changed."""
        return [
            f"it changes '{name}' of the stages {', '.join(map(str, where))}, which have separate copies: the others "
            "would not change"
            for (name, _, where), before in zip(self._shared, self._before, strict=True)
            if not before.holds(self._at(name, where[0]))
        ]

    def _at(self, name: str, index: int) -> torch.Tensor | None:
        """Return a stage's present tensor of a name."""
        path, _, own = name.rpartition(".")
        return getattr(self._stages[index].module.get_submodule(path), own, None)


class StateMark:
    """Detect writes to a tensor, by version or by values.

    Values are compared for buffers: norms write to them without a new version, and recording a forward restores them.

    Args:
        tensor: in its present state.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        has_values = not isinstance(tensor, nn.Parameter) and not tensor.is_meta
        self._tensor, self._version = tensor, write_count(tensor)
        self._values = tensor.detach().clone() if has_values else None

    def holds(self, tensor: torch.Tensor | None) -> bool:
        """Return whether ``tensor`` is the same object, with the same values."""
        if tensor is not self._tensor:
            return False
        if self._values is None:
            is_empty = tensor.is_meta and not isinstance(tensor, nn.Parameter)  # a buffer of another stage
            return is_empty or write_count(tensor) == self._version
        return torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(self._values))


# Whether the answers of two plugins about stages are consistent.


def check_partition(partition: Partition, plugin: str, model: nn.Module) -> None:
    """Refuse an answer to `slapo_partition` that contradicts the model.

    Args:
        partition: the answer.
        plugin: of the answer, e.g. ``"slapo-pipeline 0.1.0"``.
        model: of the partition.

    Raises:
        HookError: with every contradiction.
    """
    _require_type("slapo_partition", plugin, partition, Partition)
    _refuse("slapo_partition", plugin, list(_of_modules(partition, model)))


def check_liveness(liveness: Liveness, partition: Partition, outputs: Sequence[str], plugin: str) -> None:
    """Refuse an answer to `slapo_liveness` that contradicts the partition.

    Args:
        liveness: the answer.
        partition: of the liveness.
        outputs: values of the output that the last stage needs.
        plugin: of the answer.

    Raises:
        HookError: with every contradiction.
    """
    _require_type("slapo_liveness", plugin, liveness, Liveness)
    _refuse("slapo_liveness", plugin, list(_of_liveness(liveness, partition, outputs)))


def made_problems(made: Any, stage: Stage, partition: Partition) -> list[str]:
    """Return the contradictions between a stage's output and its declaration."""
    if not isinstance(made, dict):
        return [f"it gives a {type(made).__name__}, not a dictionary"]
    missing = [f"it does not make '{name}'" for name in stage.makes if name not in made]
    more = [f"it makes '{name}' too" for name in made if name not in stage.makes]
    return (
        missing + more + [text for name in stage.makes if name in made for text in _made(made[name], name, partition)]
    )


def _made(tensor: Any, name: str, partition: Partition) -> Iterator[str]:
    value = partition.values[name]
    if not isinstance(tensor, torch.Tensor):
        yield f"'{name}' is a {type(tensor).__name__}, not a tensor"
    elif (tuple(tensor.shape), tensor.dtype) != (tuple(value.shape), value.dtype):
        yield f"'{name}' is {tuple(tensor.shape)} of {tensor.dtype}, not {tuple(value.shape)} of {value.dtype}"


def _require_type(hook: str, plugin: str, answer: Any, kind: type) -> None:
    if not isinstance(answer, kind):
        _refuse(hook, plugin, [f"it is a {type(answer).__name__}, not a {kind.__name__}"])


def _refuse(hook: str, plugin: str, problems: list[str]) -> None:
    if problems:
        raise HookError(f"the answer of {plugin} to {hook} is invalid: {'; '.join(problems)}", plugin=plugin)


def _of_modules(partition: Partition, model: nn.Module) -> Iterator[str]:
    """Check that stages hold the model's tensors, and declare shared ones as ties."""
    tensors = dict(held_by(model))
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    for stage in partition.stages:
        if stage.last is not None and stage.last not in dict(stage.module.named_modules(remove_duplicate=False)):
            yield f"stage {stage.index} is declared to end after '{stage.last}', which it does not hold"
        for name, tensor in held_by(stage.module):
            if tensors.get(name, None if isinstance(tensor, nn.Parameter) else tensor) is not tensor:
                which = "is not the model's" if name in tensors else "is not a tensor of the model"
                yield f"'{name}' of stage {stage.index} {which}"
    declared = {tie.name: tie.stages for tie in partition.ties}
    found = {
        first[key]: where
        for key, (_, tensor, where) in holders(partition.stages).items()
        if isinstance(tensor, nn.Parameter) and key in first
    }
    for name in dict.fromkeys((*found, *declared)):
        if name not in declared:
            yield f"the stages {_numbers(found[name])} hold '{name}' without a tie"
        elif name not in found:
            yield f"'{name}' is tied over the stages {_numbers(declared[name])}, but one stage alone holds it"
        elif declared[name] != found[name]:
            declaration, holding = _numbers(declared[name]), _numbers(found[name])
            yield f"'{name}' is tied over the stages {declaration}, but the stages {holding} hold it"


def _of_liveness(liveness: Liveness, partition: Partition, outputs: Sequence[str]) -> Iterator[str]:
    last = len(partition.stages) - 1
    if len(liveness.boundaries) != last:
        yield f"{len(partition.stages)} stages have {last} boundaries, but it lists {len(liveness.boundaries)}"
        return
    for stage in partition.stages:
        there = {*liveness.received(stage.index), *stage.makes}
        for name in stage.uses:
            if name not in liveness.received(stage.index):
                yield f"stage {stage.index} reads '{name}', which is not sent to it"
        for name in liveness.sent(stage.index):
            if name not in there:
                yield f"stage {stage.index} sends '{name}', which it neither makes nor receives"
        if len(set(liveness.sent(stage.index))) != len(liveness.sent(stage.index)):
            yield f"stage {stage.index} sends a value twice"
    for name in outputs:
        if name not in {*liveness.received(last), *partition.stages[last].makes}:
            yield f"the last stage needs '{name}' for the loss, but it is not sent"


def _numbers(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages))
