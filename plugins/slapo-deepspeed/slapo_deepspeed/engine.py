"""Run target ``"deepspeed"``: steps and checkpoints of both engines, and the engine without a pipeline."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core import BuildError, Plan, StepResult
from slapo_deepspeed.config import AUTO, MUON
from slapo_deepspeed.marks import keep_norm, mark, mark_tensors, marks_taken_back, norm_of_last_step
from slapo_deepspeed.private import linear_restored
from slapo_deepspeed.runtime import MeshUnit, start
from slapo_deepspeed.state import (
    DeepSpeedOptimizer,
    DeepSpeedTensors,
    Group,
    check_stages,
    groups_of,
    held_by,
    read_extra_state,
    refuse_unsaved,
    unsaved,
    used_extra_state,
    write_extra_state,
)
from slapo_deepspeed.zero3 import Partitioning, gather_below_changed, partitioned_linear, with_shapes
from slapo_runtime.correspondence.flat_storage import FlatStorage
from slapo_runtime.engine import StatefulEngine, StepInvariants, UnusedParameters
from slapo_runtime.flat_shards import send_buffers
from slapo_runtime.ranks.consistency import refuse_if_incomplete
from slapo_runtime.state import ModelState

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_runtime.context import BuildContext
    from slapo_runtime.correspondence.storage import LiveTensor
    from slapo_runtime.weights.saving import PendingSave


# -- making DeepSpeed's engine


def has_optimizer(plan: Plan, context: BuildContext) -> bool:
    """Return whether there is an optimizer: the user's factory, or one of the configuration."""
    return context.optimizer is not None or bool(plan.config["config"].get("optimizer"))


def initialize(plan: Plan, context: BuildContext, model: nn.Module, *, mpu: Any = None) -> tuple[Any, list[Group]]:
    """Make DeepSpeed's engine of a materialized model.

    Args:
        plan: ``plan.config["config"]`` is DeepSpeed's completed configuration; DeepSpeed changes a copy of it.
        context: of the build; its optimizer is made here.
        model: the scheduled model, or DeepSpeed's ``PipelineModule`` of its stages.
        mpu: the groups of the mesh; None with a ``PipelineModule``, which has its own.

    Returns:
        the engine, and the optimizer's groups before DeepSpeed changed them.

    Raises:
        BuildError: one of the groups has no trained parameters on a pipeline rank.
    """
    import deepspeed

    config = copy.deepcopy(dict(plan.config["config"]))
    with context.together("making the optimizer"), with_shapes(context.schedule.model):
        optimizer = context.make_optimizer(
            partitioned=config["zero_optimization"]["stage"] > 0,
            has_main_weights=any((config.get(name) or {}).get("enabled") for name in ("bf16", "bfloat16", "fp16")),
        )
    own = None  # groups of the optimizer that DeepSpeed makes
    if optimizer is not None:
        groups = groups_of(optimizer.param_groups)
    else:
        here = [live.tensor for live in context.state.tensors() if live.is_local and live.is_parameter]
        own = context.parameter_groups() if has_optimizer(plan, context) else None
        groups = groups_of(own or [{"params": here}])
    if has_optimizer(plan, context):
        check_stages(groups, context.schedule.mesh)
    for group in own or [] if optimizer is None else optimizer.param_groups:  # DeepSpeed fails with one of frozen ones
        group["params"] = [one for one in group["params"] if one.requires_grad]
    _fill_rates(config, optimizer)
    with _numbers_left_out(model):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=own, config=config, mpu=mpu
        )
    return engine, groups


def _fill_rates(config: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
    """Replace an "auto" warm-up target by the learning rates of the factory's optimizer."""
    params = (config.get("scheduler") or {}).get("params") or {}
    if optimizer is not None and params.get("warmup_max_lr") == AUTO:
        params["warmup_max_lr"] = [float(group["lr"]) for group in optimizer.param_groups if group["params"]]


@contextlib.contextmanager
def _numbers_left_out(model: nn.Module) -> Iterator[None]:
    """Leave scalar parameters out of DeepSpeed's broadcast over the replicas, which fails on them.

    Replicas have equal values before.
    """
    numbers: list[Any] = [one for one in model.parameters() if not one.dim() and not hasattr(one, "ds_optim_param")]
    for number in numbers:
        number.ds_optim_param = True  # DeepSpeed does not send such parameters
    try:
        yield
    finally:
        for number in numbers:
            del number.ds_optim_param


# -- for a script's own deepspeed.initialize


def prepared(sch: Schedule) -> tuple[nn.Module, MeshUnit, list[nn.Parameter]]:
    """Implement :func:`slapo_deepspeed.prepare`."""
    mesh = sch.mesh
    if mesh is not None and mesh.size("pp") > 1:
        raise BuildError(
            f"prepare() runs no pipeline, and the mesh {mesh} has {mesh.size('pp')} ranks along 'pp'",
            hint='slapo.build(sch, target="deepspeed", config=...)',
        )
    if mesh is not None and mesh.world_size > 1 and mesh.device_mesh is None:
        raise BuildError(
            f"prepare() needs the processes of the mesh {mesh}",
            hint="torchrun, and torch.distributed.init_process_group() before create_schedule()",
        )
    refuse_if_incomplete(sch)
    state = ModelState.of(sch)
    start(mesh)
    mark_tensors(state.tensors(), mesh)
    sch.seal("slapo_deepspeed.prepare()", hands_over=True)
    return sch.model, MeshUnit(mesh), [one for one in sch.model.parameters() if one.requires_grad]


# -- both engines


class DeepSpeedExternalChanges(StepInvariants):
    """Refuse changes of parameters between steps, and of DeepSpeed's counters.

    Args:
        context: of the build.
        engine: DeepSpeed's.
        tensors: compares the forward's parameters with their main weights.
    """

    def __init__(self, context: BuildContext, engine: Any, tensors: DeepSpeedTensors) -> None:
        self._engine = engine
        self._count = engine.gradient_accumulation_steps()
        super().__init__(context, tensors, "DeepSpeed", partitioned=tensors.storage.are_parts)

    def check(self) -> list[LiveTensor]:
        """Check before a step.

        Raises:
            BuildError: a parameter was frozen, unfrozen or modified in place; DeepSpeed's accumulation was changed; or
                micro-batches ran outside of train_step.
        """
        written = super().check()
        count = self._engine.gradient_accumulation_steps()
        if count != self._count:
            raise BuildError(
                f"DeepSpeed accumulates {count} micro-batches now, but this engine runs {self._count} in a step",
                hint=f"leave engine.deepspeed.set_train_batch_size(); or build(accumulate={count})",
            )
        done = self._engine.micro_steps % self._count
        if done:
            raise BuildError(
                f"train_step called in the middle of an accumulation window of engine.deepspeed ({done} of "
                f"{self._count} micro-batches already ran)",
                hint="first run the remaining ones by engine.deepspeed.backward(loss) and engine.deepspeed.step()",
            )
        return written

    def steps_frozen(self, live: LiveTensor) -> bool:
        """Return whether the optimizer steps a frozen parameter; ZeRO-3 steps partitions."""
        return super().steps_frozen(live) or hasattr(live.tensor, "ds_tensor")


class DeepSpeedEngine(StatefulEngine):
    """State dicts and checkpoints of both engines, read from DeepSpeed's storage.

    Args:
        plan: of the build; ``plan.config["config"]`` is DeepSpeed's completed configuration.
        context: from ``build``.
        engine: DeepSpeed's, made by ``deepspeed.initialize``.
        groups: of the optimizer before DeepSpeed changed them.

    Attributes:
        deepspeed: DeepSpeed's engine, e.g. for gradients by ``deepspeed.utils``, its checkpoints, its scheduler.
    """

    def __init__(self, plan: Plan, context: BuildContext, engine: Any, groups: Sequence[Group]) -> None:
        self.plan, self.deepspeed = plan, engine
        self._context, self._state = context, context.state
        mesh, device = context.schedule.mesh, torch.device(engine.device)
        here = [live for live in context.state.tensors() if live.is_local]
        parameters = [live.tensor for live in here if live.is_parameter]
        if context.lr_scheduler is not None and engine.basic_optimizer is not None:
            engine.lr_scheduler = context.make_lr_scheduler(engine.basic_optimizer)  # which DeepSpeed steps
        self.lr_scheduler = engine.lr_scheduler
        self._unsaved = unsaved(plan.config["config"], engine)
        has_weights = self._unsaved in ("", MUON)
        storage = FlatStorage(held_by(engine, parameters) if has_weights else {}, mesh, device)
        self._storage: DeepSpeedOptimizer | None = None
        if engine.basic_optimizer is not None and not self._unsaved:
            names = {id(live.tensor): live.reference_name for live in here}
            self._storage = DeepSpeedOptimizer(engine, storage, groups, names)
        tensors = DeepSpeedTensors(storage, "" if has_weights else self._unsaved)
        context.state.keep_in(tensors)
        self._external_changes = DeepSpeedExternalChanges(context, engine, tensors)
        self._unused = unused_parameters(context, engine)
        self._is_closed = False

    @property
    def module(self) -> nn.Module:
        return self._context.schedule.model

    @property
    def optimizer(self) -> Any:  # type: ignore[override]
        """DeepSpeed's optimizer; None if the engine only evaluates, or is closed."""
        trains = self.deepspeed.basic_optimizer is not None and not self._is_closed
        return self.deepspeed.optimizer if trains else None

    def close(self) -> None:
        """Remove DeepSpeed's hooks from the model; the model and its state stay."""
        if self._is_closed:
            return
        self._is_closed = True
        self.lr_scheduler = None
        self.deepspeed.destroy()
        self._release()

    # -- for the engines ----------------------------------------------------------------------------------------

    def _require_training(self) -> None:
        """Refuse a training step of a closed or evaluating engine."""
        self._require_open()
        if self.deepspeed.basic_optimizer is None:
            raise self._without_optimizer()
        self._refuse_without_gradients()

    def _trained(self, loss: torch.Tensor, output: Any = None) -> StepResult:
        """Finish a training step and return its result."""
        self.steps += 1
        self._external_changes.note()
        self._unused.step_is_over()
        self._context.training_is_over()
        norm = norm_of_last_step(self.deepspeed) if self.deepspeed.gradient_clipping() else None
        return self._context.step_result(loss, output, norm)

    def _release(self) -> None:
        """Release the engine's own state, once, after DeepSpeed's."""
        self._unused.stop()

    def _require_open(self) -> None:
        if self._is_closed:
            raise self._closed(self._reason or "")

    # -- state; documented in slapo_core/engine.py -------------------------------------------------------

    def save(
        self, directory: str | os.PathLike[str], *, keep: int | None = None, asynchronous: bool = False
    ) -> PendingSave | None:
        refuse_unsaved(self._unsaved)
        return super().save(directory, keep=keep, asynchronous=asynchronous)

    def load(self, directory: str | os.PathLike[str]) -> None:
        refuse_unsaved(self._unsaved)
        super().load(directory)

    def _kept_optimizer(self) -> DeepSpeedOptimizer | None:
        return None if self._is_closed else self._storage

    def _runtime_state(self) -> Mapping[str, Any]:
        return read_extra_state(self.deepspeed) if self._kept_optimizer() is not None else {}

    def _loaded_names(self) -> Collection[str]:
        return used_extra_state(self.deepspeed) if self._kept_optimizer() is not None else ()

    def _load_runtime_state(self, runtime: Mapping[str, Any]) -> None:
        if self._kept_optimizer() is not None:
            write_extra_state(self.deepspeed, runtime)


# -- without a pipeline


class ZeroEngine(DeepSpeedEngine):
    """The implementation of :class:`slapo_core.dialect.Engine` by DeepSpeed's engine.

    Args:
        plan: of the build; ``plan.config["config"]`` is DeepSpeed's completed configuration.
        context: from ``build``.
    """

    def __init__(self, plan: Plan, context: BuildContext) -> None:
        mesh = context.schedule.mesh
        start(mesh)
        self._config = plan.config["config"]
        self._unit = MeshUnit(mesh)
        self._replicas = mesh.group("dp") if mesh is not None else None
        partitioning = Partitioning(context, self._config, self._unit)
        with linear_restored(), partitioning.materialized(), marks_taken_back(context):
            mark(context)
            engine, groups = initialize(plan, context, context.schedule.model, mpu=self._unit)
        keep_norm(engine)
        gather_below_changed(context, engine)
        super().__init__(plan, context, engine, groups)

    # -- steps; documented in slapo_core/engine.py ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        self._require_training()
        self._external_changes.check()
        micro_batches = self._micro_batches(batch)
        losses, output = [], None
        with self._ending(), partitioned_linear(self._config):
            send_buffers(self.module, self._replicas)
            forget_gradients(self.deepspeed)
            for number, micro_batch in enumerate(micro_batches, start=1):
                loss, output = self._context.compute_loss(micro_batch, self.deepspeed)
                self._has_gradients = True
                with last_micro_batch(self.deepspeed) if number == len(micro_batches) > 1 else contextlib.nullcontext():
                    self.deepspeed.backward(loss)
                self.deepspeed.step()
                losses.append(loss.detach())
        if len(micro_batches) == 1:
            return self._trained(losses[0], output)
        return self._trained(torch.stack(losses).mean())

    def eval_step(self, batch: Any) -> StepResult:
        self._require_open()
        with self._context.evaluating(batch), partitioned_linear(self._config):
            loss, output = self._context.compute_loss(batch, self.deepspeed)
        return StepResult(loss, output)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Close the engine if a step fails with gradients accumulated, which the next step would add.

        Without gradients, DeepSpeed has only run the model: ZeRO-3 partitions its gathered parameters again.
        """
        self._has_gradients = False
        try:
            yield
        except BaseException as error:
            if self._has_gradients:
                self._reason = f"a step failed: {type(error).__name__}: {error}".split("\n")[0]
                self.close()
            elif self.deepspeed.zero_optimization_partition_weights():
                self.deepspeed.empty_partition_cache()
            raise

    def _micro_batches(self, batch: Any) -> list[Any]:
        """Return the micro-batches of a step, as many as DeepSpeed accumulates."""
        count = self._config.get("gradient_accumulation_steps", 1)
        axes = self.plan.config.get("batch_axes") or None
        return self._context.micro_batches(batch, None if count == self._context.accumulate else count, axes=axes)

    def _release(self) -> None:
        super()._release()
        self._unit.forget()


# -- stale gradients
#
# DeepSpeed 0.19 overwrites the previous step's gradient if the first micro-batch gives one, and adds to it otherwise.
# With ZeRO-3, and with an offloaded optimizer, a parameter that only later micro-batches use gets the previous step's
# gradient added, and an unused one is stepped with the previous step's gradient once more.


def forget_gradients(engine: Any) -> None:
    """Zero the gradients before the first micro-batch of a step, on every rank.

    Args:
        engine: DeepSpeed's, of any stage.
    """
    optimizer = engine.optimizer
    kept = getattr(optimizer, "grad_partitions_flat_buffer", None)  # of ZeRO-3
    main_weights: list[torch.Tensor] = []  # to whose gradients offloading copies
    if getattr(optimizer, "offload_optimizer", False):
        main_weights += optimizer.fp32_partitioned_groups_flat
    if getattr(optimizer, "cpu_offload", False):
        main_weights += optimizer.single_partition_of_fp32_groups
    with torch.no_grad():
        if kept is not None:
            kept.zero_()
        for main in main_weights:
            if main.grad is not None:
                main.grad.zero_()
        for summed in getattr(optimizer, "accumulated_grads_in_cpu", {}).values():
            summed.zero_()
    if main_weights:
        optimizer.norm_for_param_grads.clear()


_USED = {"offload_optimizer": "_offload_boundary_param_ids", "cpu_offload": "_offload_accumulated_param_ids"}
"""Flag of an offloading optimizer -> its set of parameters with gradients in a step."""


@contextlib.contextmanager
def last_micro_batch(engine: Any) -> Iterator[None]:
    """Wrap the backward pass of a step's last micro-batch.

    An offloaded optimizer takes only gradients of parameters that this pass reaches; earlier ones would be lost.

    Args:
        engine: DeepSpeed's, of any stage.
    """
    optimizer = engine.optimizer
    name = next((used for flag, used in _USED.items() if getattr(optimizer, flag, False)), None)
    if name is None:
        yield
        return
    earlier = getattr(optimizer, name)
    setattr(optimizer, name, set())
    yield
    now = getattr(optimizer, name)
    if earlier - now:
        setattr(optimizer, name, earlier - now)
        optimizer.finalize_gradient_accumulation_boundary()
    setattr(optimizer, name, earlier | now)


def unused_parameters(context: BuildContext, engine: Any) -> UnusedParameters:
    """Make the guard against unused parameters.

    Full precision without ZeRO on one replica needs none: torch's optimizer steps by the model's gradients.

    Args:
        context: of the build.
        engine: DeepSpeed's.
    """
    low = engine.fp16_enabled() or engine.bfloat16_enabled()
    with_zeros = engine.optimizer is not None and (engine.zero_optimization() or low or engine.dp_world_size > 1)
    return UnusedParameters(context, "DeepSpeed", steps_with_zeros=bool(with_zeros))
