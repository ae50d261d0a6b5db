"""`build`: make an engine of a scheduled model, phase by phase.

Plan (the dialect, pure) -> agree (the ranks compare) -> place (which rank holds what, where there are pipeline stages)
-> materialize (only what this rank keeps) -> hand over (the dialect makes its engine) -> seal. A failure in any phase
leaves the schedule, and the model, usable. Planning comes before agreeing because the ranks compare the options that a
dialect fills in, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import Schedule
from slapo_core.dialect import BuildArguments, Dialect
from slapo_core.errors import ArgumentError, BuildError, HookError, OptimizerError, RankMismatchError, TraceError
from slapo_core.internals import Internals
from slapo_core.layout import device_of
from slapo_core.plugins import current_registry
from slapo_runtime.batches import bound_batch, in_mode
from slapo_runtime.build_target import BuildTarget
from slapo_runtime.context import BuildContext
from slapo_runtime.correspondence import placement_facts, placement_of
from slapo_runtime.ranks.consistency import SAME_SCRIPT, agree, synchronized_rng
from slapo_runtime.ranks.world import World
from slapo_runtime.receipts.engines import Built, check_first_step, note_built
from slapo_runtime.replicas import divergence, replicas_of
from slapo_runtime.stages import StagedModel, ask
from slapo_runtime.weights.checkpoint_source import open_source
from slapo_runtime.weights.materialize import Materialization
from slapo_runtime.weights.parameter_groups import ParameterGroups, check_patterns

if TYPE_CHECKING:
    from slapo_core.dialect import Engine, Plan
    from slapo_runtime.state import ModelState


_SAME_ADDED = (
    "call torch.manual_seed(0) on every rank before the step that adds it, or give it deterministic initial values"
)


def build(
    sch: Schedule,
    target: str = "torch",
    *,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    weights: str | os.PathLike[str] | Mapping[str, torch.Tensor] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    max_grad_norm: float | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    accumulate: int = 1,
    elementwise: bool = False,
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    loss_weight: Callable[[Any], Any] | None = None,
    no_decay: Sequence[str] | str = (),
    param_groups: Mapping[str, Mapping[str, Any]] | None = None,
    receipts: bool = False,
    **config: Any,
) -> Engine:
    """Make an engine of a scheduled model; every rank of the mesh calls it.

    Args:
        sch: the schedule. It is sealed by a successful build; after an error it can be used as before.
        target: the dialect, e.g. ``"torch"``.
        optimizer: a factory of the optimizer, called with the list of the engine's parameters, e.g.
            ``lambda params: torch.optim.AdamW(params, lr=1e-4)``. Without one the engine can only evaluate.
        weights: full weights with the reference model's names: a directory with safetensors files, one such file, a
            checkpoint of ``engine.save``, or a mapping. A rank reads its own shards from files. Files in the published
            format of a transformers model whose names and shapes differ from its modules' are read by its
            ``from_pretrained``, with the entire model in each process's memory. Without weights real tensors are used
            as they are, and tensors on the meta device are initialized by the model's own initialization, to the same
            full values under every schedule.
        loss: ``loss(output, batch)``, a scalar tensor; default: the output's ``loss``. With it, a batch may hold more
            than the arguments of the model's forward, for the loss.
        max_grad_norm: largest L2 norm of all gradients over all ranks; larger ones are scaled down.
        device: where to put the model, e.g. ``"cuda:0"``; None leaves it where it is.
        seed: of the initial values of tensors on the meta device.
        accumulate: the number of micro-batches into which ``train_step`` cuts a batch, along the axis of the samples.
            Their gradients are averaged, which equals the batch's gradient for a mean over equally weighted samples.
        elementwise: whether the update of each element depends on its own gradients alone, as for SGD and AdamW. An
            optimizer that is not known to be element-wise is refused for a split parameter, unless this is True.
        lr_scheduler: a factory of the scheduler, called with the optimizer, e.g.
            ``lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)``. It steps after each step
            of the optimizer, and is saved and resumed with the engine.
        loss_weight: ``loss_weight(batch)``, the number of items over which the loss of a (micro-)batch is a mean, e.g.
            ``lambda batch: (batch["labels"] != -100).sum()``. Micro-batches and replicas are weighted by it, so that
            the averaged loss is the mean over all items. Default: equal weights. A batch with ``num_items_in_batch``,
            by which transformers models divide a sum themselves, needs none: it counts the items of all replicas.
        no_decay: patterns (:mod:`fnmatch`) of reference names of parameters without weight decay, e.g.
            ``("*.bias", "*norm*")``. With it, or with ``param_groups``, the factory gets the list of groups that
            ``torch.optim`` takes in place of parameters, the same on every rank; it passes the list on as it is.
        param_groups: settings by pattern of reference names, e.g. ``{"lm_head.*": {"lr": 1e-5}}``. A parameter has the
            settings of all patterns that it matches by one of its names; for the same setting, the first one's.
        receipts: whether the engine's first ``train_step`` is observed, and raises a ReceiptError on every rank where
            one misses an effect of a step or of the target, after its update. Later steps are as without it.
        config: options of the dialect.

    Raises:
        UnknownNameError: no such target is installed.
        BuildError: the target cannot run this schedule; every reason is given.
        WeightsError: weights are missing, unexpected or of another shape, a tensor cannot be initialized, or a
            reference tensor has no successor.
        OptimizerError: an optimizer instead of a factory, an optimizer of other parameters than the engine's, one
            whose ``step`` requires a closure (LBFGS), or one not known to be element-wise for a split parameter; or a
            pattern of ``no_decay`` or ``param_groups`` that matches no parameter, or contradicts another.
        RankMismatchError: ranks disagree about the schedule, the plugins, the versions, the weights, the options, or
            the tensors that a step added.
        SealedError: the schedule was built or sealed before.
    """
    if not isinstance(sch, Schedule):
        raise ArgumentError(
            f"build takes a schedule (got {type(sch).__name__})", hint="build(slapo.create_schedule(model))"
        )
    arguments = UserArguments(
        optimizer=optimizer,
        weights=weights,
        loss=loss,
        max_grad_norm=max_grad_norm,
        device=device,
        seed=seed,
        accumulate=accumulate,
        elementwise=elementwise,
        lr_scheduler=lr_scheduler,
        loss_weight=loss_weight,
        no_decay=no_decay,
        param_groups=param_groups,
    )
    try:
        with World(sch.mesh) as world:
            engine: Engine = _Build(sch, arguments, world).run(target, config, receipts=receipts)
            return engine
    except BaseException:
        Internals(sch).refresh_hooks()
        raise


def simulates(target: str) -> bool:
    """Return whether a target can simulate its training step.

    Raises:
        PluginError: no such target is installed, or it is not usable.
    """
    registry = current_registry()
    dialect = registry.load(registry.resolve("dialects", target))
    return dialect.simulate is not Dialect.simulate


def simulated_step(sch: Schedule, target: str, **arguments: Any) -> Callable[[Any], Any]:
    """Make a target's training step on fake tensors; see :meth:`slapo_core.dialect.Dialect.simulate`.

    Args:
        sch: a schedule of a model with fake tensors; within :func:`~slapo_runtime.ranks.world.simulated_rank`.
        target: the dialect.
        arguments: of :func:`build`, and options of the dialect.

    Raises:
        BuildError: the target cannot run this schedule, or cannot simulate a step of it.
    """
    known = {field.name for field in dataclasses.fields(UserArguments)} & arguments.keys()
    own = UserArguments(**{name: arguments.pop(name) for name in known})
    step: Callable[[Any], Any] = _Build(sch, own, World(sch.mesh)).run(target, arguments, simulates=True)
    return step


@dataclass
class _Build:
    """Run the phases of one call of :func:`build`."""

    schedule: Schedule
    arguments: UserArguments
    world: World

    def run(self, name: str, config: Mapping[str, Any], *, simulates: bool = False, receipts: bool = False) -> Any:
        """Return the engine, or, if it ``simulates``, the target's training step on fake tensors."""
        schedule, arguments, world = self.schedule, self.arguments, self.world
        with world.together(f"build(target='{name}')"):
            arguments.check()
            target = BuildTarget(name, schedule)
            plan = target.plan(schedule, config, arguments.for_plan())
            source = open_source(arguments.weights) if arguments.weights is not None else None
            if source is not None:
                source.check_files(part=(world.index, world.size))
        with world.together("mapping the tensors of the model"):
            values = Materialization(schedule, source, device=arguments.torch_device(), seed=arguments.seed)
            groups = arguments.groups(values.state)
        agree(world, schedule, arguments, plan, source, values.reference)
        stage_ranks = self._place(target, plan, values)
        built = None if simulates else Built.before(schedule, plan)
        if built is not None and receipts:
            with world.together("asking the steps for their effects"):
                _ = built.expected  # raises the error of a step
        try:
            with synchronized_rng(world, schedule.mesh):
                if not target.dialect.takes_tensors:
                    with world.together("materializing the model"):
                        for _ in values.run():
                            pass
                with world.together(f"build() of target '{plan.target}'"):
                    context = BuildContext(schedule, arguments, values, groups, stage_ranks=stage_ranks)
                    if simulates:
                        context.training_is_over()  # the first step compares the ranks
                        engine: Any = target.simulate(plan, context)
                    else:
                        engine = target.build(plan, context)
                    self._refuse_incomplete(target, values, context)
                self._compare_added(values)
        except BaseException:
            values.take_back()
            raise
        values.keep()
        schedule.seal("build()", hands_over=True)
        if built is not None:
            note_built(engine, built)
            if receipts:
                check_first_step(engine, built)
        return engine

    def _place(self, target: BuildTarget, plan: Plan, values: Materialization) -> tuple[int, ...]:
        """Place tensors on pipeline ranks, and return each stage's rank."""
        with self.world.together("making the stages"):
            found = stages_of_build(self.schedule, self.arguments, target, plan)
            if found is None:
                return ()
            stages, ranks = found
            placement = placement_of(values.correspondence, stages.partition, ranks)
        facts = placement_facts(stages.partition, ranks, placement, stages.liveness.boundaries)
        self.world.agree(facts, hint=SAME_SCRIPT)
        values.place(placement)
        return ranks

    @staticmethod
    def _refuse_incomplete(target: BuildTarget, values: Materialization, context: BuildContext) -> None:
        """Refuse an engine without all tensors, or without the user's scheduler or parameter groups."""
        if not context.has_groups_of_parameters:
            raise BuildError(
                f"no_decay and param_groups have no effect: build(target='{target.dialect.name}') got no optimizer",
                plugin=target.label,
                hint="build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4), no_decay=...)",
            )
        if not context.schedules_learning_rate:
            raise BuildError(
                f"target '{target.dialect.name}' of {target.label} does not schedule the learning rate",
                plugin=target.label,
                hint="leave out lr_scheduler, and step a scheduler of engine.optimizer after each training step",
            )
        if not values.is_complete:
            raise BuildError(
                f"target '{target.dialect.name}' of {target.label} left tensors without values",
                plugin=target.label,
                hint="with takes_tensors = True, build() takes all of them: for tensor in context.materialize(): ...",
            )

    def _compare_added(self, values: Materialization) -> None:
        """Compare the tensors that steps added, after the runtime may have broadcast them."""
        mesh = self.schedule.mesh
        if mesh is None or self.world.is_alone:
            return
        added = {live.name for live in values.correspondence.added()}
        copies = replicas_of(values.correspondence, values.state.kept)
        error = divergence(self.world, mesh, [one for one in copies if one.name in added], hint=_SAME_ADDED)
        if error is not None:
            raise RankMismatchError(error.message, hint=_SAME_ADDED)


@dataclass(frozen=True)
class UserArguments:
    """The user's arguments of :func:`slapo_core.build`, with its defaults."""

    optimizer: Any = None
    weights: Any = None
    loss: Any = None
    max_grad_norm: float | None = None
    device: torch.device | str | None = None
    seed: int = 0
    accumulate: int = 1
    elementwise: bool = False
    lr_scheduler: Any = None
    loss_weight: Any = None
    no_decay: Any = ()
    param_groups: Any = None

    def check(self) -> None:
        """Refuse invalid arguments.

        Raises:
            OptimizerError: an optimizer instead of a factory.
            BuildError: an invalid number, or a loss that cannot be called.
        """
        optimizer = self.optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            name = type(optimizer).__name__
            rate = optimizer.param_groups[0].get("lr")
            shown = f", lr={float(rate):g}" if isinstance(rate, (int, float)) else ""
            raise OptimizerError(
                f"optimizer must be a factory (got an optimizer, {name}, of the parameters from before build)",
                hint=f"build(sch, optimizer=lambda params: torch.optim.{name}(params{shown}))",
            )
        if optimizer is not None and not callable(optimizer):
            raise OptimizerError(
                f"optimizer must be a factory (got {optimizer!r})",
                hint="build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))",
            )
        if self.loss is not None and not callable(self.loss):
            raise BuildError(
                f"loss must be a function of the output and the batch (got {self.loss!r})",
                hint="loss=lambda output, batch: ...",
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise BuildError(
                f"max_grad_norm must be positive (got {self.max_grad_norm})", hint="max_grad_norm=1.0, or None"
            )
        if self.lr_scheduler is not None and not callable(self.lr_scheduler):
            raise OptimizerError(
                f"lr_scheduler must be a factory (got {type(self.lr_scheduler).__name__})",
                hint="lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)",
            )
        if self.lr_scheduler is not None and self.optimizer is None:
            raise OptimizerError(
                "lr_scheduler is given without an optimizer",
                hint="build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4), lr_scheduler=...)",
            )
        if self.loss_weight is not None and not callable(self.loss_weight):
            raise BuildError(
                f"loss_weight must be a function of the batch (got {self.loss_weight!r})",
                hint='loss_weight=lambda batch: (batch["labels"] != -100).sum()',
            )
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise BuildError(
                f"accumulate must be a positive number of micro-batches (got {self.accumulate!r})", hint="accumulate=4"
            )

    def groups(self, state: ModelState) -> ParameterGroups | None:
        """Divide the parameters by ``no_decay`` and ``param_groups``; None without any."""
        if not self.no_decay and not self.param_groups:
            check_patterns(self.no_decay, self.param_groups)
            return None
        return ParameterGroups(state, self.no_decay, self.param_groups)

    def for_plan(self) -> BuildArguments:
        """Return the arguments for the dialect's plan."""
        return BuildArguments(
            has_optimizer=self.optimizer is not None,
            has_loss=self.loss is not None,
            max_grad_norm=self.max_grad_norm,
            accumulate=self.accumulate,
            device=self.torch_device(),
            has_lr_scheduler=self.lr_scheduler is not None,
        )

    def torch_device(self) -> torch.device | None:
        """Return the device with its index, equal to that of a tensor."""
        if self.device is None:
            return None
        device = torch.device(self.device)
        return device_of(device.type) if device.index is None and device.type not in ("cpu", "meta") else device


def stages_of_build(
    schedule: Schedule, arguments: UserArguments, target: BuildTarget, plan: Plan
) -> tuple[StagedModel, tuple[int, ...]] | None:
    """Find the stages for the schedule's example inputs, and each stage's pipeline rank.

    Returns:
        None where there is one rank along ``pp``.

    Raises:
        BuildError: stages and mesh do not fit together, there are no example inputs, or the dialect's answer is
            invalid.
        TraceError: the model cannot be cut there.
        HookError: a plugin's answer is invalid.
    """
    pp = schedule.mesh.size("pp") if schedule.mesh is not None else 1
    if pp == 1:
        _refuse_cut(schedule, arguments)
        return None
    if schedule.example_inputs is None:
        raise BuildError(
            f"mesh_dim 'pp' has {pp} ranks, but the schedule has no example inputs, from which stages are made",
            hint=f"create_schedule(model, mesh={schedule.mesh}, example_inputs=batch), with a batch of train_step",
        )
    inputs = bound_batch(schedule.model, schedule.example_inputs, for_loss=arguments.loss is not None)
    with in_mode(list(schedule.model.modules()), training=True):
        found = ask(schedule, inputs)
    if found is None:
        raise BuildError(
            f"mesh_dim 'pp' has {pp} ranks, but no step cuts the model into stages",
            hint='sch["encoder.layer.5"].pipeline_split() cuts it after that module',
        )
    stages = len(found.partition.stages)
    if stages % pp:
        fitting = ", ".join(str(number * pp) for number in range(1, 4))
        raise BuildError(
            f"the model is cut into {stages} stages ({_cuts(found)}), not divisible by the {pp} ranks of mesh_dim 'pp'",
            hint=f"cut it into {fitting}, ... stages: n stages take n - 1 pipeline_split()",
        )
    return found, target.stage_ranks(plan, stages, pp)


def _refuse_cut(schedule: Schedule, arguments: UserArguments) -> None:
    """Refuse a cut model on a mesh without several pipeline ranks."""
    inputs: dict[str, Any] = {}
    if schedule.example_inputs is not None:
        with contextlib.suppress(ArgumentError):  # an unsuitable batch: only a message depends on it here
            inputs = bound_batch(schedule.model, schedule.example_inputs, for_loss=arguments.loss is not None)
    found: StagedModel | None = None
    cause: Exception | None = None
    try:
        with in_mode(list(schedule.model.modules()), training=True):
            found = ask(schedule, inputs)
    except (TraceError, HookError) as error:  # a plugin without cuts answers None, whatever the inputs
        cause = error
    if found is None and cause is None:
        return
    what = f"into {len(found.partition.stages)} stages ({_cuts(found)})" if found is not None else "into stages"
    where = "the schedule has no mesh" if schedule.mesh is None else f"the mesh {schedule.mesh} has one rank along 'pp'"
    sizes = {**(schedule.mesh.sizes if schedule.mesh is not None else {}), "pp": 2}
    raise BuildError(
        f"the model is cut {what}, and {where}",
        hint=f"create_schedule(model, mesh={sizes}, example_inputs=batch), or leave out pipeline_split()",
    ) from cause


def _cuts(found: StagedModel) -> str:
    return "after " + ", ".join(f"'{stage.last}'" for stage in found.partition.stages[:-1])
