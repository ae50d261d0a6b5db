"""The dialect of target ``"torch"``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from slapo_core import BuildError, Dialect, Plan
from slapo_runtime.planning import checked_axes
from slapo_torch.data_options import (
    OF_REPLICAS,
    OF_SHARDS,
    check_shards,
    data_parallel,
    data_steps,
    is_sharded,
    options_of_replicas,
)
from slapo_torch.effects import effects_of
from slapo_torch.precision import OPTIONS, checked_precision, precision_steps
from slapo_torch.schedules import schedule_named, schedule_of

if TYPE_CHECKING:
    import torch

    from slapo_core import Engine, Schedule
    from slapo_runtime.context import BuildContext
    from slapo_runtime.stages import StagedModel
    from slapo_runtime.stages.partition import Partition
    from slapo_torch.precision import ModelPrecision
    from slapo_torch.running_stage import PipelineRunner
    from slapo_torch.sharded_data import ShardedStages


_PIPELINED: dict[str, Any] = {
    "pipeline_schedule": None,
    "microbatches": None,
    "batch_axes": None,
    "bucket_cap_mb": 25,
}
_PRECISION = ("amp", "autocast", "bf16", "bfloat16", "dtype", "float16", "fp16", "mixed_precision", "torch_dtype")
_PRECISION_HINT = 'precision="bf16-mixed", or "fp32", "bf16" or "fp16-mixed": see docs/guides/fsdp-and-precision.md'


class TorchDialect(Dialect):
    """Plain PyTorch: one process, a tensor-parallel group, a pipeline, and replicas.

    Options with one rank along ``pp``:

    - ``batch_axes``: as below, for ``accumulate``.
    - ``data_parallel``: ``"ddp"``, every rank along ``dp`` holds a replica, by DistributedDataParallel; or ``"fsdp"``,
      it holds shards of parameters, gradients and optimizer state, by ``fully_shard``: of the units that steps mark
      (``sch["model.layers.*"].fully_shard()``), else of the repeated blocks. With ``dp_replicate`` in the mesh, groups
      of ``dp`` ranks that share parameters are replicated (HSDP). Default: ``"fsdp"`` where a step marks units or the
      mesh has ``dp_replicate``, else ``"ddp"``.
    - ``precision``: ``"fp32"``, ``"bf16-mixed"``, ``"bf16"`` or ``"fp16-mixed"``, compared with the types in the first
      training step; see ``docs/guides/fsdp-and-precision.md``. Default: the model's own types.
    - ``fp32``: patterns of the names of modules that compute in float32 in a lower precision, e.g.
      ``("*norm*", "lm_head")``.
    - with ``"ddp"`` options of DistributedDataParallel, by their own names, e.g. ``find_unused_parameters`` or
      ``static_graph``. Default: its own, but ``gradient_as_bucket_view=True``.
    - with ``"fsdp"``, ``reshard_after_forward``: of units whose step says nothing else.

    Options with several ranks along ``pp``, besides ``data_parallel``, ``precision`` and ``fp32``:

    - ``pipeline_schedule``: ``"gpipe"``, ``"1f1b"``, ``"interleaved_1f1b"``, ``"looped_bfs"``,
      ``"interleaved_zero_bubble"``, ``"zbv_zero_bubble"`` or ``"dualpipe_v"``. Default: ``"1f1b"`` with one stage per
      rank, ``"interleaved_1f1b"`` with several.
    - ``microbatches``: the number of equal micro-batches of a batch. Default: the smallest number from ``pp`` on
      that the schedule runs.
    - ``batch_axes``: for an argument of the forward, the axis of its tensors that counts the samples, None for a tensor
      that is not split into micro-batches, e.g. ``{"bias": None, "x": 1}``. Default: the first axis of every tensor,
      and the second one of positions of shape ``(3, batch, length)``.
    - ``bucket_cap_mb``: the size of a bucket of gradients in the exchange of replicas (default 25, in MiB).
    """

    name: ClassVar[str] = "torch"
    supports: ClassVar[frozenset[str]] = frozenset({"dp", "dp_replicate", "pp", "tp"})
    accumulates: ClassVar[bool] = True
    takes_tensors: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a ``build`` of a subclass a model with values, unless it takes the tensors itself."""
        super().__init_subclass__(**kwargs)
        if "build" in vars(cls) and "takes_tensors" not in vars(cls):
            cls.takes_tensors = False

    def plan(self, schedule: Schedule, config: Mapping[str, Any]) -> Plan:
        mesh = schedule.mesh
        pp = mesh.size("pp") if mesh is not None else 1
        parallel = data_parallel(schedule, config)
        known = {"batch_axes": None, "data_parallel": parallel, **OPTIONS} | (
            _PIPELINED if pp > 1 else OF_SHARDS if parallel == "fsdp" else OF_REPLICAS
        )
        passed_on = options_of_replicas() if pp == 1 and parallel == "ddp" else frozenset()
        for name in sorted(set(config) - set(known) - passed_on):
            raise self._unknown(name, known, parallel, schedule, pp)
        options = {**known, **config, "data_parallel": parallel, "batch_axes": checked_axes(config.get("batch_axes"))}
        options |= checked_precision(schedule, config, parallel)
        if parallel == "fsdp":
            check_shards(schedule, {**OF_SHARDS, **options})
        steps = [f"the scheduled {type(schedule.model).__name__}, {len(schedule.records)} steps applied"]
        if mesh is not None:
            if pp > 1:
                options |= _pipeline_options(options, pp)
                steps += _pipeline_steps(options, pp)
            steps += [
                f"collectives of the steps over mesh_dim '{mesh_dim}' ({size} ranks)"
                for mesh_dim, size in mesh.sizes.items()
                if mesh_dim not in ("dp", "dp_replicate", "pp") and size > 1
            ]
            if mesh.size("tp") > 1:
                steps.append("one RNG state for the ranks of mesh_dim 'tp': the first rank's")
        steps += data_steps(schedule, options)
        steps += precision_steps(schedule, options)
        return Plan("torch", tuple(steps), options, effects=tuple(effects_of(schedule, options)))

    @staticmethod
    def _unknown(name: str, known: Mapping[str, Any], parallel: str, schedule: Schedule, pp: int) -> BuildError:
        if name in OF_SHARDS:
            return BuildError(
                f"option {name!r} of target 'torch' is for data_parallel='fsdp' (got '{parallel}')",
                hint=f'data_parallel="fsdp", or leave {name} out',
            )
        if name in _PIPELINED or name in OF_REPLICAS or (parallel == "fsdp" and name in options_of_replicas()):
            if parallel == "fsdp" and name not in _PIPELINED:
                return BuildError(
                    f"option {name!r} is DistributedDataParallel's, and data_parallel is 'fsdp'",
                    hint=f'leave {name} out, or data_parallel="ddp"',
                )
            why = "several ranks" if pp == 1 else "one rank"
            given = "no mesh" if schedule.mesh is None else schedule.mesh
            return BuildError(
                f"option {name!r} of target 'torch' is for a mesh with {why} along 'pp' (got {given})",
                hint=f"leave it out; this mesh has the options {', '.join(known)}",
            )
        others = ", and the options of DistributedDataParallel" if pp == 1 and parallel == "ddp" else ""
        shown = ", ".join(known) + others
        hint = _PRECISION_HINT if name in _PRECISION else None
        return BuildError(f"target 'torch' has no option {name!r}; it has {shown}", hint=hint)

    def stage_ranks(self, plan: Plan, stages: int, pp: int) -> tuple[int, ...]:
        """Return ``(0, 1, 0, 1)`` for looped schedules, ``(0, 1, 1, 0)`` for V-shaped ones.

        Raises:
            BuildError: the schedule does not run this number of stages or micro-batches.
        """
        return schedule_of(plan.config, stages, pp).stage_ranks(stages, pp)

    def stage_runner(
        self, plan: Plan, stages: StagedModel, ranks: Sequence[int], rank: int, *, group: Any, device: torch.device
    ) -> PipelineRunner:
        """Make the runner of this rank's stages, for estimates, too.

        Args:
            plan: with the options of the pipeline.
            stages: of a micro-batch.
            ranks: the rank along ``pp`` of each stage.
            rank: this rank.
            group: of the ranks along ``pp``.
            device: of the stages.
        """
        from slapo_torch.running_stage import PipelineRunner

        schedule = schedule_of(plan.config, len(ranks), len(set(ranks)))
        count = plan.config["microbatches"]
        return PipelineRunner(
            stages.partition, stages.liveness, schedule, ranks, rank, group=group, device=device, count=count
        )

    def averaging(
        self, plan: Plan, runner: PipelineRunner, parameters: Sequence[torch.Tensor], group: Any
    ) -> tuple[Callable[[int], None], Callable[[], None]]:
        """Average the gradients of a pipeline's step over its replicas, for estimates, too.

        Args:
            plan: with the options of the pipeline.
            runner: of this rank's stages.
            parameters: the trained parameters of this rank.
            group: of the replicas; None for one.

        Returns:
            a function to call with the index of each finished stage, and one to call after the schedule.
        """
        from slapo_torch.replica_gradients import averaging

        return averaging(runner, parameters, group, bucket_bytes=plan.config["bucket_cap_mb"] << 20)

    def stage_precision(
        self, plan: Plan, schedule: Schedule, partition: Partition, *, device: torch.device
    ) -> ModelPrecision:
        """Return the types of a pipeline, with its casts installed, for estimates.

        Args:
            plan: with the options of the precision.
            schedule: whose model is cut.
            partition: of the model.
            device: of the stages.
        """
        from slapo_torch.pipeline_engine import borders_of_stages
        from slapo_torch.precision import ModelPrecision

        precision = ModelPrecision(schedule, plan.config, device)
        precision.install(borders_of_stages(schedule, partition, precision))
        return precision

    def shard_stages(
        self, plan: Plan, schedule: Schedule, stages: Iterable[torch.nn.Module], precision: ModelPrecision
    ) -> ShardedStages | None:
        """Put shards in the places of the parameters of a pipeline rank, for estimates; None without shards.

        Args:
            plan: with the options of the shards.
            schedule: whose model is cut.
            stages: the modules of this rank's stages.
            precision: of the model.
        """
        from slapo_torch.sharded_data import shard_stages

        if not is_sharded(schedule, precision, plan.config):
            return None
        return shard_stages(schedule, stages, precision, plan.config)

    def build(self, plan: Plan, context: BuildContext) -> Engine:
        if context.stage_ranks:
            from slapo_torch.pipeline_engine import PipelineEngine

            return PipelineEngine(plan, context)
        from slapo_torch.engine import TorchEngine

        return TorchEngine(plan, context)

    def simulate(self, plan: Plan, context: BuildContext) -> Callable[[Any], Any]:
        return self.build(plan, context).train_step


def _pipeline_options(options: Mapping[str, Any], pp: int) -> dict[str, Any]:
    """Check the options of a pipeline, and return its number of micro-batches."""
    name, cap = options["pipeline_schedule"], options["bucket_cap_mb"]
    schedule = schedule_named("1f1b" if name is None else name)
    count = options["microbatches"]
    if name is None:  # a schedule for several stages per rank takes other numbers, but the stages are unknown yet
        schedule_named("gpipe").check_micro_batches(schedule.default(pp) if count is None else count, pp)
    elif count is not None:
        schedule.check_micro_batches(count, pp)
    if type(cap) is not int or cap < 1:
        raise BuildError(f"bucket_cap_mb must be a positive number of MiB (got {cap!r})", hint="bucket_cap_mb=25")
    return {"microbatches": schedule.default(pp) if count is None else count}


def _pipeline_steps(options: Mapping[str, Any], pp: int) -> list[str]:
    name, count = options["pipeline_schedule"], options["microbatches"]
    shown = name or "1f1b with one stage per rank, interleaved_1f1b with several"
    steps = [f"a pipeline over mesh_dim 'pp' ({pp} ranks): {count} micro-batches a step, schedule {shown}"]
    if name is not None:
        schedule = schedule_named(name)
        stages = "one stage" if schedule.per_rank == 1 else "two stages" if schedule.per_rank == 2 else "stages in turn"
        steps.append(f"{stages} on each of its ranks" + (", there and back" if schedule.shape == "v" else ""))
        if schedule.splits_backward:
            steps.append(
                "weight gradients after input gradients, unless a stage checkpoints, hooks tensors or is compiled"
            )
    return steps
