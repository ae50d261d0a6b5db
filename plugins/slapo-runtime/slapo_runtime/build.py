"""`build`: a scheduled model becomes an engine, phase by phase.

Plan (the dialect, pure) -> agree (the ranks compare) -> place (which rank holds what, where there are pipeline stages)
-> materialize (only what this rank keeps) -> hand over (the dialect makes its engine) -> seal. A failure in any phase
leaves the schedule, and the model, usable. Planning comes before agreeing because the options that a dialect fills in
are among what the ranks have to agree about.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import Schedule
from slapo_core.dialect import BuildArguments, Dialect
from slapo_core.errors import (
    ArgumentError,
    BuildError,
    HookError,
    OptimizerError,
    RankMismatchError,
    SealedError,
    SlapoError,
    TraceError,
)
from slapo_core.layout import device_of
from slapo_core.plugins import current_registry
from slapo_core.schedule.mesh_dims import sharded_mesh_dims, unused_mesh_dims
from slapo_runtime.batches import bound_batch, in_mode
from slapo_runtime.consistency import SAME_SCRIPT, agree, refuse_if_incomplete, synchronized_rng
from slapo_runtime.context import BuildContext
from slapo_runtime.correspondence import placed, placement_facts
from slapo_runtime.planning import with_choices
from slapo_runtime.replicas import divergence, replicas_of
from slapo_runtime.stages import StagedModel, ask
from slapo_runtime.weights.files import open_source
from slapo_runtime.weights.materialize import Materialization
from slapo_runtime.world import World

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.dialect import Engine, Plan
    from slapo_runtime.context import BuildContext


_SAME_ADDED = (
    "call torch.manual_seed(0) on every rank before the step that adds it, or give it values that draw nothing"
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
    **config: Any,
) -> Engine:
    """Hand a scheduled model to a runtime, with its values in place; every rank of the mesh calls it.

    Args:
        sch: the schedule. It is sealed when everything went well; after an error it can be used as before.
        target: the dialect, e.g. ``"torch"``.
        optimizer: a factory that is given the list of the engine's parameters, e.g.
            ``lambda params: torch.optim.AdamW(params, lr=1e-4)``. Without one the engine can only evaluate.
        weights: full weights with the reference model's names: a directory with safetensors files, one such file, or
            a mapping. Files in the published format of a model of transformers, whose names and shapes may be others
            than those of its modules, are read by its ``from_pretrained``, with the whole model in each process's
            memory. Without weights real tensors are used as they are, and tensors on the meta device are initialized
            by the model's own initialization, to the same full values under every schedule.
        loss: ``loss(output, batch)``, a scalar tensor; default: the output's ``loss``. With it, what a batch holds
            beyond the arguments of the model's forward is left to the loss.
        max_grad_norm: largest L2 norm of all gradients over all ranks; larger ones are scaled down.
        device: where to put the model, e.g. ``"cuda:0"``; None leaves it where it is.
        seed: another number gives other initial values.
        accumulate: how many micro-batches ``train_step`` cuts a batch into, along the axis of the samples: the
            gradients are their mean, which is the batch's for a loss that is a mean over equally weighted samples.
        elementwise: whether the optimizer updates every element by that element's own gradients alone, as SGD and AdamW
            do. One that is not known to is refused where a parameter is split, unless this says so.
        lr_scheduler: a factory that is given the optimizer, e.g.
            ``lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)``. It steps after each step
            of the optimizer, and is saved and resumed with the engine.
        loss_weight: ``loss_weight(batch)``, of how many items the loss of a (micro-)batch is the mean, e.g.
            ``lambda batch: (batch["labels"] != -100).sum()``: micro-batches and replicas then count by it, and the loss
            that a replica is given is scaled so that the mean over replicas is that of all items. Default: they count
            equally. A batch with ``num_items_in_batch``, by which models of transformers divide a sum themselves, needs
            none: it counts the items of all replicas.
        config: options of the dialect.

    Raises:
        UnknownNameError: no such target is installed.
        BuildError: the target cannot run this schedule; every reason is given.
        WeightsError: weights are missing, unexpected or of another shape, a tensor cannot be initialized, or a
            reference tensor has no successor.
        OptimizerError: an optimizer instead of a factory, one that does not hold the engine's parameters, whose
            ``step`` requires a closure (LBFGS), or that is not known to be element-wise where a parameter is split.
        RankMismatchError: ranks disagree about the schedule, the plugins, the versions, the weights, the options, or
            what a step added.
        SealedError: the schedule was built or sealed before.
    """
    if not isinstance(sch, Schedule):
        raise ArgumentError(
            f"build takes a schedule (got {type(sch).__name__})", hint="build(slapo_core.create_schedule(model))"
        )
    arguments = Arguments(
        optimizer,
        weights,
        loss,
        max_grad_norm,
        device,
        seed,
        accumulate,
        elementwise,
        lr_scheduler,
        loss_weight,
    )
    try:
        with World(sch.mesh) as world:
            engine: Engine = _Build(sch, arguments, world).run(target, config)
            return engine
    except BaseException:
        sch._core.refresh()
        raise


def simulates(target: str) -> bool:
    """Return whether a target says what its training step needs: ``"torch"`` by estimates of their own.

    Raises:
        PluginError: no such target is installed, or it is not usable.
    """
    registry = current_registry()
    dialect = registry.load(registry.resolve("dialects", target))
    return target == "torch" or dialect.simulate is not Dialect.simulate


def simulated_step(sch: Schedule, target: str, **arguments: Any) -> Callable[[Any], Any]:
    """Make the training step of a target on tensors without memory; see :meth:`slapo_core.dialect.Dialect.simulate`.

    Args:
        sch: of a model whose tensors are fake; within :func:`~slapo_runtime.world.simulated_rank`.
        target: the dialect.
        arguments: those of :func:`build`, and options of the dialect.

    Raises:
        BuildError: the target cannot run this schedule, or does not know what a step of it needs.
    """
    own = {name: arguments.pop(name, default) for name, default in _defaults().items()}
    run = _Build(sch, Arguments(**own), World(sch.mesh)).run
    step: Callable[[Any], Any] = run(target, arguments, simulates=True)
    return step


def _defaults() -> dict[str, Any]:
    """The arguments of :func:`build` beside schedule, target and options, with their defaults."""
    parameters = inspect.signature(build).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


@dataclass
class _Build:
    """One call of :func:`build`."""

    schedule: Schedule
    arguments: Arguments
    world: World

    def run(self, name: str, config: Mapping[str, Any], *, simulates: bool = False) -> Any:
        """Return the engine; where it ``simulates``, the training step of the target on tensors without memory."""
        schedule, arguments, world = self.schedule, self.arguments, self.world
        with world.together(f"build(target='{name}')"):
            arguments.check()
            target = Target.named(name, schedule)
            plan = target.plan(schedule, config, arguments.for_plan())
            source = open_source(arguments.weights) if arguments.weights is not None else None
        with world.together("looking at the tensors of the model"):
            values = Materialization(schedule, source, device=arguments.torch_device(), seed=arguments.seed)
        agree(world, schedule, arguments, plan, source, values.reference)
        stage_ranks = self._place(target, plan, values)
        try:
            with synchronized_rng(world, schedule.mesh):
                if not target.dialect.takes_tensors:
                    with world.together("giving the model its values"):
                        for _ in values.run():
                            pass
                with world.together(f"build() of target '{plan.target}'"):
                    context = BuildContext(schedule, arguments, values, stage_ranks=stage_ranks)
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
        schedule.seal("build()")
        return engine

    def _place(self, target: Target, plan: Plan, values: Materialization) -> tuple[int, ...]:
        """Decide which rank holds which tensors, and return each stage's pipeline rank."""
        with self.world.together("making the stages"):
            found = stages_of_build(self.schedule, self.arguments, target, plan)
            if found is None:
                return ()
            stages, ranks = found
            placement = placed(values.correspondence, stages.partition, ranks)
        facts = placement_facts(stages.partition, ranks, placement, stages.liveness.boundaries)
        self.world.agree(facts, hint=SAME_SCRIPT)
        values.place(placement)
        return ranks

    @staticmethod
    def _refuse_incomplete(target: Target, values: Materialization, context: BuildContext) -> None:
        """Refuse an engine whose dialect has not taken every tensor, or leaves out the user's scheduler."""
        if not context.schedules_learning_rate:
            raise BuildError(
                f"target '{target.dialect.name}' of {target.label} does not schedule the learning rate",
                plugin=target.label,
                hint="leave out lr_scheduler, and step a scheduler of engine.optimizer after each training step",
            )
        if not values.is_complete:
            raise BuildError(
                f"target '{target.dialect.name}' of {target.label} left tensors without their values",
                plugin=target.label,
                hint="with takes_tensors = True, build() takes them all: for tensor in context.materialize(): ...",
            )

    def _compare_added(self, values: Materialization) -> None:
        """Compare added tensors, after the runtime may have broadcast them."""
        mesh = self.schedule.mesh
        if mesh is None or self.world.is_alone:
            return
        added = {live.name for live in values.correspondence.added()}
        copies = replicas_of(values.correspondence, values.state.kept)
        error = divergence(self.world, mesh, [one for one in copies if one.name in added], hint=_SAME_ADDED)
        if error is not None:
            raise RankMismatchError(error.message, hint=_SAME_ADDED)


@dataclass(frozen=True)
class Arguments:
    """The arguments of :func:`slapo_core.build`, as they were given."""

    optimizer: Any
    weights: Any
    loss: Any
    max_grad_norm: float | None
    device: torch.device | str | None
    seed: int
    accumulate: int = 1
    elementwise: bool = False
    lr_scheduler: Any = None
    loss_weight: Any = None

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            OptimizerError: an optimizer instead of a factory.
            BuildError: a bad number, or a loss that cannot be called.
        """
        optimizer = self.optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            name = type(optimizer).__name__
            rate = optimizer.param_groups[0].get("lr")
            shown = f", lr={float(rate):g}" if isinstance(rate, (int, float)) else ""
            raise OptimizerError(
                f"optimizer must be a factory (got the optimizer {name}, made before the schedule was built, which "
                "holds the parameters of the reference model)",
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
                "lr_scheduler is given, and no optimizer whose learning rate it would set",
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

    def for_plan(self) -> BuildArguments:
        """Return the arguments that a dialect may put into its plan."""
        return BuildArguments(
            has_optimizer=self.optimizer is not None,
            has_loss=self.loss is not None,
            max_grad_norm=self.max_grad_norm,
            accumulate=self.accumulate,
            device=self.torch_device(),
            has_lr_scheduler=self.lr_scheduler is not None,
        )

    def torch_device(self) -> torch.device | None:
        """The device with its index, so that it compares equal to that of a tensor."""
        if self.device is None:
            return None
        device = torch.device(self.device)
        return device_of(device.type) if device.index is None and device.type not in ("cpu", "meta") else device


@dataclass(frozen=True)
class Target:
    """A dialect with the plugin that it comes from.

    Args:
        dialect: the dialect.
        label: its plugin, e.g. ``"slapo-megatron 0.1.0"``.
        is_own: whether it is slapo-torch's: what its ``build`` raises is then the user's own, such as the optimizer's
            factory, and is not given another name.
    """

    dialect: Dialect
    label: str
    is_own: bool

    @classmethod
    def named(cls, name: str, schedule: Schedule) -> Target:
        """Find a dialect, and activate the hooks of its plugin in the schedule.

        Raises:
            SealedError: the schedule was built or sealed before.
            PluginError: no such target is installed, or it is not usable.
            BuildError: the dialect cannot be made.
        """
        if schedule.is_sealed:
            raise SealedError(
                "cannot build: the schedule was built or sealed before, and the originals are gone",
                hint="create a new schedule of a fresh model; sch.to_json() and replay() repeat the steps",
            )
        entry = schedule._core.registry.resolve("dialects", name)
        dialect = schedule._core.registry.load(entry)
        is_own = entry.distribution == "slapo-torch"
        with _blamed(entry.label, name, "__init__", is_own=is_own):
            target = cls(dialect(), entry.label, is_own)
        schedule._core.hooks.activate(entry.distribution, version=entry.version)
        return target

    def plan(self, schedule: Schedule, config: Mapping[str, Any], arguments: BuildArguments) -> Plan:
        """Make the dialect's plan.

        Args:
            schedule: the schedule to build.
            config: the options of the dialect, as the user gave them.
            arguments: the user's other arguments.

        Raises:
            BuildError: it cannot run this schedule, or a plugin says that the schedule is incomplete: every reason is
                given; or an option is wrong.
        """
        self._check(schedule, trains=arguments.has_optimizer or not self.is_own)  # others: by their options too
        if arguments.accumulate > 1 and not self.dialect.accumulates:
            raise BuildError(
                f"target '{self.dialect.name}' does not accumulate gradients (got accumulate={arguments.accumulate})",
                hint='accumulate=1, or target="torch"',
            )
        with self._blamed("options"):
            options: Any = self.dialect.options(config, arguments)
        if not isinstance(options, Mapping):
            raise BuildError(
                f"target '{self.dialect.name}' of {self.label} must give a mapping of options (got {options!r})",
                plugin=self.label,
                hint="options(config, arguments) returns {**config, ...}",
            )
        with self._blamed("plan"):
            return with_choices(self.dialect.plan(schedule, options), schedule)

    def stage_ranks(self, plan: Plan, stages: int, pp: int) -> tuple[int, ...]:
        """Return the pipeline rank of each stage.

        Raises:
            BuildError: the dialect's answer leaves out a stage or a rank.
        """
        with self._blamed("stage_ranks"):
            ranks = self.dialect.stage_ranks(plan, stages, pp)
        if not isinstance(ranks, tuple) or len(ranks) != stages or set(ranks) != set(range(pp)):
            raise BuildError(
                f"target '{self.dialect.name}' of {self.label} must give one of the {pp} ranks along 'pp' for each of "
                f"{stages} stages, and each rank a stage (got {ranks!r})",
                plugin=self.label,
                hint="stage_ranks(plan, 4, 2) == (0, 0, 1, 1)",
            )
        return ranks

    def build(self, plan: Plan, context: BuildContext) -> Engine:
        """Let the dialect make its engine."""
        with self._blamed("build"):
            return self.dialect.build(plan, context)

    def simulate(self, plan: Plan, context: BuildContext) -> Callable[[Any], Any]:
        """Let the dialect make its training step on tensors without memory.

        Raises:
            BuildError: it does not know what a step needs.
        """
        with self._blamed("simulate"):
            step = self.dialect.simulate(plan, context)
        if step is None:
            raise BuildError(
                f"target '{self.dialect.name}' does not know what a training step of this schedule with these options "
                "needs (pipeline stages, offloading)",
                plugin=self.label,
                hint='target="torch", and leave room for what the runtime adds; or train, and see what it takes',
            )
        return step

    def _check(self, schedule: Schedule, *, trains: bool) -> None:
        mesh = schedule.mesh
        with self._blamed("check"):
            reasons = [str(violation) for violation in self.dialect.check(schedule) or ()]
        for mesh_dim, size in mesh.sizes.items() if mesh is not None else ():
            if size > 1 and mesh_dim not in self.dialect.supports:
                can = ", ".join(sorted(self.dialect.supports)) or "none"
                reasons.append(f"it does not run mesh_dim '{mesh_dim}' (size {size}); it runs {can}")
        if reasons:
            start = f"target '{self.dialect.name}' cannot run this schedule"
            lines = [f"{start}: {reasons[0]}"] if len(reasons) == 1 else [f"{start}:", *(f"  - {r}" for r in reasons)]
            raise BuildError("\n".join(lines))
        refuse_if_incomplete(schedule, trains=trains)
        _warn_of_unused_dimensions(schedule)
        if mesh is not None and mesh.is_abstract:
            raise BuildError(
                f"the mesh {mesh} is abstract: build() needs {mesh.world_size} processes, and torch.distributed is not "
                "initialized",
                hint=f"call torch.distributed.init_process_group() first and launch with `{mesh.launch_command()}`",
            )
        _warn_if_alone(schedule)
        _warn_if_unverified(schedule)

    def _blamed(self, method: str) -> contextlib.AbstractContextManager[None]:
        return _blamed(self.label, self.dialect.name, method, is_own=self.is_own)


@contextlib.contextmanager
def _blamed(label: str, name: str, method: str, *, is_own: bool) -> Iterator[None]:
    """Add the plugin's name to unexpected exceptions of a dialect."""
    try:
        yield
    except SlapoError:
        raise
    except Exception as error:
        if is_own:
            raise
        raise BuildError(
            f"target '{name}' of {label} failed in {method}(): {type(error).__name__}: {error}", plugin=label
        ) from error


def _warn_of_unused_dimensions(schedule: Schedule) -> None:
    unused = [f"'{mesh_dim}'" for mesh_dim in unused_mesh_dims(schedule)]
    if unused and schedule.mesh is not None:
        warnings.warn(
            f"mesh_dim {', '.join(unused)} of the mesh {schedule.mesh} is used by no step: its ranks do the same work",
            stacklevel=6,
        )


def _warn_if_unverified(schedule: Schedule) -> None:
    mesh, sharded = schedule.mesh, sharded_mesh_dims(schedule)
    if mesh is not None and sharded and mesh.is_first_rank and not schedule.is_verified:
        dims = ", ".join(f"mesh_dim '{mesh_dim}' ({mesh.size(mesh_dim)} ranks)" for mesh_dim in sharded)
        warnings.warn(
            f"the schedule shards tensors over {dims} and was never verified with these steps on this mesh: call "
            "slapo_core.verify(sch, batch) before build(); sch.to_json() keeps its result for replay()",
            stacklevel=6,
        )


def _warn_if_alone(schedule: Schedule) -> None:
    import torch.distributed as dist

    if schedule.mesh is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        world_size = dist.get_world_size()
        warnings.warn(
            f"torch.distributed runs {world_size} processes, but the schedule has no mesh: this rank trains "
            f'on its own; create_schedule(model, mesh={{"dp": {world_size}}}) trains replicas together',
            stacklevel=6,
        )


def stages_of_build(
    schedule: Schedule, arguments: Arguments, target: Target, plan: Plan
) -> tuple[StagedModel, tuple[int, ...]] | None:
    """Find the stages for the schedule's example inputs, and each stage's pipeline rank.

    Returns:
        None where there is one rank along ``pp``.

    Raises:
        BuildError: stages and mesh do not go together, there are no example inputs, or the dialect's answer is none.
        TraceError: the model cannot be cut there.
        HookError: a plugin's answer is invalid.
    """
    pp = schedule.mesh.size("pp") if schedule.mesh is not None else 1
    if pp == 1:
        _refuse_cut(schedule, arguments)
        return None
    if schedule.example_inputs is None:
        raise BuildError(
            f"mesh_dim 'pp' has {pp} ranks, and the schedule has no example inputs, on which the stages of the model "
            "are found",
            hint=f"create_schedule(model, mesh={schedule.mesh}, example_inputs=batch), a batch as train_step takes it",
        )
    inputs = bound_batch(schedule.model, schedule.example_inputs, for_loss=arguments.loss is not None)
    with in_mode(list(schedule.model.modules()), training=True):
        found = ask(schedule, inputs)
    if found is None:
        raise BuildError(
            f"mesh_dim 'pp' has {pp} ranks, and no step cuts the model into stages for them",
            hint='sch["encoder.layer.5"].pipeline_split() cuts it after that module',
        )
    stages = len(found.partition.stages)
    if stages % pp:
        fitting = ", ".join(str(number * pp) for number in range(1, 4))
        raise BuildError(
            f"the model is cut into {stages} stages ({_cuts(found)}), which cannot be divided over the {pp} ranks of "
            "mesh_dim 'pp'",
            hint=f"cut it into {fitting}, ... stages: one pipeline_split() less than stages",
        )
    return found, target.stage_ranks(plan, stages, pp)


def _refuse_cut(schedule: Schedule, arguments: Arguments) -> None:
    """Refuse a model that is cut, where no ranks are there for the stages."""
    inputs: dict[str, Any] = {}
    if schedule.example_inputs is not None:
        with contextlib.suppress(ArgumentError):  # of no batch: nothing but a message depends on it here
            inputs = bound_batch(schedule.model, schedule.example_inputs, for_loss=arguments.loss is not None)
    found: StagedModel | None = None
    cause: Exception | None = None
    try:
        with in_mode(list(schedule.model.modules()), training=True):
            found = ask(schedule, inputs)
    except (TraceError, HookError) as error:  # who does not cut it answers None, whatever the inputs
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
