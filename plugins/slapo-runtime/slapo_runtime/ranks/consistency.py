"""Compare ranks before a build and in the first steps."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import BuildError, RankMismatchError, place
from slapo_core.internals import Internals, describe
from slapo_core.layout import accelerator
from slapo_core.primitive import Violation
from slapo_runtime._skipped_forwards import ForwardWatch
from slapo_runtime.options import flat
from slapo_runtime.ranks.facts import RankFact, describe_tensor, first_difference
from slapo_runtime.ranks.world import World, ranks_along

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.dialect import Plan
    from slapo_core.layout import Mesh
    from slapo_runtime.build import UserArguments
    from slapo_runtime.weights.sources import WeightsSource
    from slapo_runtime.weights.state import ModelState


def obligations(schedule: Schedule) -> tuple[Violation, ...]:
    """Return every reason why the schedule certainly trains a model other than the reference model.

    Raises:
        HookError: a plugin's ``slapo_check`` raised, or gave something else than violations.
    """
    hint = 'yield slapo_core.Violation("reduction is missing", hint="the call to add")'
    found = Internals(schedule).hooks.collect("slapo_check", (Violation,), hint, schedule=schedule)
    return tuple(violation for _, violation in found)


def refuse_if_incomplete(schedule: Schedule, *, trains: bool = True) -> None:
    """Refuse a schedule that certainly trains another model, or, without ``trains``, computes another output.

    Raises:
        BuildError: with every reason.
    """
    missing = [str(one) for one in obligations(schedule) if trains or not one.gradients_only]
    if missing:
        raise BuildError(with_reasons("the schedule is incomplete", missing))


def with_reasons(problem: str, reasons: Sequence[str]) -> str:
    """Return the message of a problem with its reason, or with a list of them."""
    return f"{problem}: {reasons[0]}" if len(reasons) == 1 else "\n  - ".join([f"{problem}:", *reasons])


SAME_SCRIPT = "run the same script on the same installation on every rank"
"""Hint for ranks with different schedules."""


def schedule_facts(schedule: Schedule) -> Iterator[RankFact]:
    """Yield versions, mesh, model, every step with its arguments and provider, and the active plugins."""
    yield RankFact("the version of slapo-core", str(Internals(schedule).registry.core_version))
    yield RankFact("the version of torch", torch.__version__)
    yield RankFact("the mesh", _mesh(schedule.mesh))
    yield RankFact("the model", f"{type(schedule.model).__module__}.{type(schedule.model).__qualname__}")
    for record in schedule.records:
        arguments = ", ".join(f"{key}={describe(value)}" for key, value in record.primitive.arguments().items())
        where = place(record.path)
        provider = f"{record.distribution} {record.version}"
        yield RankFact(f"step {record.index}", f"{record.name}({arguments}) at {where}, from {provider}")
    labels = {plugin.name: plugin.label for plugin in Internals(schedule).registry.plugins}
    active = ", ".join(labels.get(name, name) for name in Internals(schedule).hooks.active)
    yield RankFact("the active plugins", active or "none")


def _mesh(mesh: Mesh | None) -> str:
    """Return the sizes of a mesh, and its ranks if they are not ascending."""
    grid = mesh.device_mesh.mesh if mesh is not None and mesh.device_mesh is not None else None
    if grid is None or grid.flatten().tolist() == sorted(grid.flatten().tolist()):
        return str(mesh)
    return f"{mesh} of the ranks {grid.tolist()}"


OTHER = ("Python's random module", "NumPy's global generator")


def torch_states() -> dict[str, bytes]:
    """Return torch's RNG states of the CPU and of the current GPU in use."""
    states = {"the CPU": torch.get_rng_state()}
    device = accelerator()
    if device is not None:
        states["the GPU"] = torch.get_device_module(device).get_rng_state()
    return {device: bytes(state.tolist()) for device, state in states.items()}


def restore(states: Mapping[str, bytes]) -> None:
    """Restore the states that :func:`torch_states` returned."""
    for device, content in states.items():
        state = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if device == "the CPU":
            torch.set_rng_state(state)
        elif torch.accelerator.is_available():
            torch.get_device_module().set_rng_state(state)


def foreign_states() -> dict[str, str]:
    """Return digests of the RNG states outside of torch; NumPy's only if it is imported."""
    found = {OTHER[0]: repr(random.getstate())}
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    if numpy_random is not None:
        name, keys, *rest = numpy_random.get_state()
        found[OTHER[1]] = f"{name} {keys.tobytes()!r} {rest}"
    return {source: hashlib.sha256(state.encode()).hexdigest() for source, state in found.items()}


def synchronize(world: World, ranks: Sequence[int]) -> list[str]:
    """Give ``ranks`` the first one's RNG states of torch: a collective of ``world``.

    Returns:
        the devices on which the states differed.
    """
    by_rank = dict(zip(world.ranks, world.gather(torch_states()), strict=True))
    states = [by_rank[rank] for rank in ranks]
    first = {device: state for device, state in states[0].items() if all(device in own for own in states)}
    differing = [device for device in first if any(own[device] != first[device] for own in states)]
    if differing:
        restore(first)
    return differing


def synchronize_and_warn(world: World, problem: str, *, stacklevel: int) -> list[str]:
    """Synchronize torch's RNG states, with a warning where they differed: a collective.

    Args:
        world: the tensor-parallel ranks of a replica.
        problem: for the warning, e.g. ``"differs"``.
        stacklevel: of the warning.

    Returns:
        the other generators, of :data:`OTHER`, whose states differ.
    """
    differing = synchronize(world, world.ranks)
    if differing:
        warnings.warn(
            f"torch's RNG state on {' and '.join(differing)} {problem} on ranks "
            f"{', '.join(map(str, world.ranks))}, which must drop the same elements of their replicas: it is set to "
            f"rank {world.ranks[0]}'s now; call torch.manual_seed(seed) with the same seed on all ranks of a replica",
            stacklevel=stacklevel + 1,
        )
    others = world.gather(foreign_states())
    return [source for source in OTHER if len({foreign.get(source) for foreign in others} - {None}) > 1]


_FROM_MODEL = "the values of the model"
_SAME_WEIGHTS = {
    _FROM_MODEL: "call torch.manual_seed(0) on every rank before the model is made, or pass weights=",
    "a mapping": 'give every rank the same weights=, or files: weights="dir/with/safetensors"',
    "a path": "give every rank a copy of the same files",
}
_LOG = logging.getLogger("slapo_runtime.build")


def agree(
    world: World,
    schedule: Schedule,
    arguments: UserArguments,
    plan: Plan,
    source: WeightsSource | None,
    reference: Mapping[str, torch.Tensor],
) -> None:
    """Compare the schedule, the arguments of ``build`` and the weights over all ranks.

    Args:
        world: the ranks of the schedule's mesh.
        schedule: every rank's own, like all that follows.
        arguments: the user's arguments of ``build``.
        plan: the dialect's, with its options after defaults were filled in.
        source: the opened weights; None without any.
        reference: the tensors of the reference model by name.

    Raises:
        RankMismatchError: on every rank, with the first difference and the ranks.
    """
    world.agree(chain(schedule_facts(schedule), build_facts(schedule, arguments, plan)), hint=SAME_SCRIPT)
    tensors = arguments.weights if isinstance(arguments.weights, Mapping) else reference if source is None else None
    world.agree(weights_facts(tensors, source), hint=_SAME_WEIGHTS[_kind(arguments.weights)])


def build_facts(schedule: Schedule, arguments: UserArguments, plan: Plan) -> Iterator[RankFact]:
    """Describe the arguments of ``build``, then the dialect's options, for comparison across ranks.

    The arguments come first: a dialect fills in options from them, and messages name the user's own arguments.
    """
    yield RankFact("the target of build", plan.target)
    optimizer, device = arguments.optimizer, arguments.device
    yield RankFact("the optimizer given to build", "none" if optimizer is None else describe(optimizer))
    yield RankFact("the loss given to build", "none" if arguments.loss is None else "a function")
    yield RankFact("the weights given to build", _kind(arguments.weights))
    yield RankFact("max_grad_norm given to build", describe(arguments.max_grad_norm))
    yield RankFact("accumulate given to build", describe(arguments.accumulate))
    yield RankFact("the seed given to build", describe(arguments.seed))
    yield RankFact("no_decay given to build", describe(arguments.no_decay))
    yield RankFact("param_groups given to build", describe(arguments.param_groups))
    tensors = [*schedule.model.parameters(), *schedule.model.buffers()]
    devices = {torch.device(device).type} if device is not None else {tensor.device.type for tensor in tensors}
    yield RankFact("the device of the model", ", ".join(sorted(devices)) or "none")
    for name in sorted(set(plan.config) - set(plan.notes)):
        for key, value in flat(plan.config[name]):
            where = f", in {key}" if key else ""
            yield RankFact(f"option '{name}' of target '{plan.target}'{where}", describe(value))


def weights_facts(tensors: Mapping[str, torch.Tensor] | None, source: WeightsSource | None) -> Iterator[RankFact]:
    """Describe the given weights: tensors by checksum, files by shape."""
    if tensors is not None:
        for name, tensor in tensors.items():
            yield RankFact(f"the weights '{name}'", describe_tensor(tensor))
    elif source is not None:
        for name, shape in source.shapes().items():
            yield RankFact(f"the weights '{name}'", describe(tuple(shape)))


@contextlib.contextmanager
def synchronized_rng(world: World, mesh: Mesh | None) -> Iterator[None]:
    """Give the tensor-parallel ranks of a replica the RNG state of the first of them.

    They then drop the same elements of their replicas, whatever their seeds. Replicas (``dp``) keep different states.
    If the block fails, every rank's own state is restored.
    """
    if mesh is None or world.is_alone or mesh.size("tp") == 1:
        yield
        return
    own = torch_states()
    row = next(ranks for ranks in ranks_along(mesh, ("tp",)) if world.rank in ranks)
    differing = synchronize(world, row)
    if differing:
        _LOG.info(
            "torch's RNG state on %s differed on ranks %s; it is now set to rank %d's",
            " and ".join(differing),
            ", ".join(map(str, row)),
            row[0],
        )
    try:
        yield
    except BaseException:
        if differing:
            restore(own)
        raise


def _kind(weights: Any) -> str:
    return _FROM_MODEL if weights is None else "a mapping" if isinstance(weights, Mapping) else "a path"


_SAME_BATCH = (
    "give the ranks of one replica (same 'dp' rank) the same batch: give the loader and its sampler the same seed, "
    'with num_replicas=mesh.size("dp") and rank=mesh.rank("dp")'
)


class FirstSteps:
    """Compare batches and RNG states in the first training step and the first evaluation.

    Args:
        mesh: of the schedule.
        model: the scheduled model.
        state: its ``uses_rng`` is set if a training step uses the RNG.
    """

    def __init__(self, mesh: Mesh | None, model: nn.Module, state: ModelState) -> None:
        self._mesh, self._model, self._state = mesh, model, state
        watched = mesh is not None and not mesh.is_abstract and mesh.size("tp") * mesh.size("pp") > 1
        self._training = self._evaluating = watched

    def training_is_over(self) -> None:
        """End the first training step: later calls are not compared."""
        self._training = False

    def end_with(self, optimizer: torch.optim.Optimizer) -> None:
        """End the first training step with the first step of an optimizer."""
        if not self._training:
            return

        def over(*_: Any) -> None:
            self.training_is_over()
            handle.remove()

        handle = optimizer.register_step_post_hook(over)

    @contextlib.contextmanager
    def watched(self, batch: Any) -> Iterator[None]:
        """Compare the ranks around one call of the model; do nothing after the first step.

        Raises:
            RankMismatchError: on every rank of a replica: their batches differ, before the model runs; or, after it,
                the model used a foreign generator whose state differs between them.
        """
        is_training = torch.is_grad_enabled()
        if not (self._training if is_training else self._evaluating):
            yield
            return
        with World(self._mesh, over=("pp", "tp")) as replica:
            self._compare(replica, batch, is_training=is_training)
            if not is_training:
                self._evaluating = False
                yield
                return
            has_stages = self._mesh is not None and self._mesh.size("pp") > 1
            with World(self._mesh, over="tp") if has_stages else contextlib.nullcontext(replica) as world:
                differing = synchronize_and_warn(world, "was changed after build() and differs", stacklevel=7)
                before = {**torch_states(), **foreign_states()}
                yield  # if a rank raises, the others end by their process groups
                after = {**torch_states(), **foreign_states()}
                drew = {source for source, state in after.items() if before.get(source) != state}
                anywhere = set().union(*world.gather(drew))
        if anywhere - set(OTHER):
            self._state.uses_rng = True
        for source in differing:
            if source in anywhere:
                raise RankMismatchError(
                    f"the model uses {source}, whose state differs on ranks {', '.join(map(str, world.ranks))}: "
                    "tensor-parallel ranks will diverge",
                    hint="random.seed(0) and numpy.random.seed(0) on every rank of a replica (same 'dp' rank)",
                )

    @contextlib.contextmanager
    def forward(self, schedule: Schedule) -> Iterator[Callable[[Any], None]]:
        """Give a check of the loss in the first training step.

        Raises:
            MeshError: from the check, if steps around a module were skipped.
        """
        if not (self._training and torch.is_grad_enabled()):
            yield lambda loss: None
            return
        watch = ForwardWatch(schedule)
        try:
            yield watch.check
        finally:
            watch.close()

    def _compare(self, world: World, batch: Any, *, is_training: bool) -> None:
        with world.together("describing the batch"):
            facts = [*batch_facts(batch), *(_mode_facts(self._model) if is_training else ())]
        by_rank = dict(zip(world.ranks, world.gather(facts), strict=True))
        message = first_difference(by_rank, {None: [world.ranks]})
        if message is not None:
            is_of_batch = "batch" in message.split("\n")[0]
            raise RankMismatchError(
                message, hint=_SAME_BATCH if is_of_batch else "set it to the same value on every rank"
            )


def _mode_facts(model: nn.Module) -> Iterator[RankFact]:
    """Describe the modules in training mode and the trained parameters, which may change after build()."""
    for what, names in (
        ("the modules in training mode", [name for name, module in model.named_modules() if module.training]),
        ("the parameters to train", [name for name, one in model.named_parameters() if one.requires_grad]),
    ):
        digest = hashlib.sha256(repr(names).encode()).hexdigest()[:8]
        yield RankFact(what, f"{len(names)}, names with digest {digest}")


def batch_facts(batch: Any) -> Iterator[RankFact]:
    """Describe the tensors and plain values in a batch, by their positions or keys."""
    yield from _facts("the batch", batch)


def _facts(place: str, value: Any) -> Iterator[RankFact]:
    if isinstance(value, torch.Tensor):
        yield RankFact(place, describe_tensor(value))
    elif isinstance(value, Mapping):
        yield RankFact(f"the names in {place}", ", ".join(sorted(map(repr, value))))
        for key in sorted(value, key=repr):
            yield from _facts(f"{place}[{key!r}]", value[key])
    elif isinstance(value, (tuple, list)):
        yield RankFact(f"the length of {place}", str(len(value)))
        for number, item in enumerate(value):
            yield from _facts(f"{place}[{number}]", item)
    else:
        yield RankFact(place, describe(value))
