"""`build`: a scheduled model becomes an engine, phase by phase.

Plan (the dialect, pure) -> agree (the ranks compare) -> place (which rank holds what, where there are pipeline stages)
-> materialize (only what this rank keeps) -> hand over (the dialect makes its engine) -> seal. A failure in any phase
leaves the schedule, and the model, usable. Planning comes before agreeing because the options that a dialect fills in
are among what the ranks have to agree about.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import Schedule
from slapo_core.errors import ArgumentError, BuildError, RankMismatchError
from slapo_runtime.building.agreement import agree, synchronized_rng
from slapo_runtime.building.request import Request
from slapo_runtime.building.target import Arguments, Target, stages_of_build
from slapo_runtime.consistency import SAME_SCRIPT
from slapo_runtime.ranks.world import World
from slapo_runtime.weights.correspondence import placed, placement_facts
from slapo_runtime.weights.materialize import Materialization
from slapo_runtime.weights.replicas import divergence, replicas_of
from slapo_runtime.weights.sources import Source, open_source

if TYPE_CHECKING:
    from slapo_core.dialect import Engine, Plan


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
    **config: Any,
) -> Engine:
    """Hand a scheduled model to a runtime, with its values in place; every rank of the mesh calls it.

    Args:
        sch: the schedule. It is sealed when everything went well; after an error it can be used as before.
        target: the dialect, e.g. ``"torch"``.
        optimizer: a factory that is given the list of the engine's parameters, e.g.
            ``lambda params: torch.optim.AdamW(params, lr=1e-4)``. Without one the engine can only evaluate.
        weights: full weights with the reference model's names: a directory with safetensors files, one such file, or
            a mapping. Without them real tensors are used as they are, and tensors on the meta device are initialized
            by the model's own initialization, to the same full values under every schedule.
        loss: ``loss(output, batch)``, a scalar tensor; default: the output's ``loss``. With it, what a batch holds
            beyond the arguments of the model's forward is left to the loss.
        max_grad_norm: largest L2 norm of all gradients over all ranks; larger ones are scaled down.
        device: where to put the model, e.g. ``"cuda:0"``; None leaves it where it is.
        seed: another number gives other initial values.
        accumulate: how many micro-batches ``train_step`` cuts a batch into, along the first axis of every tensor: the
            gradients are their mean, which is the batch's for a loss that is a mean over equally weighted samples.
        elementwise: whether the optimizer updates every element by that element's own gradients alone, as SGD and AdamW
            do. One that is not known to is refused where a parameter is split, unless this says so.
        config: options of the dialect.

    Raises:
        UnknownNameError: no such target is installed.
        BuildError: the target cannot run this schedule; every reason is given.
        WeightsError: weights are missing, unexpected or of another shape, a tensor cannot be initialized, or a
            reference tensor has no successor.
        OptimizerError: an optimizer instead of a factory, one that does not hold the engine's parameters, or one that
            is not known to be element-wise where a parameter is split.
        RankMismatchError: ranks disagree about the schedule, the plugins, the versions, the weights, the options, or
            what a step added.
        SealedError: the schedule was built or sealed before.
    """
    if not isinstance(sch, Schedule):
        raise ArgumentError(
            f"build takes a schedule (got {type(sch).__name__})", hint="build(slapo_core.create_schedule(model))"
        )
    arguments = Arguments(optimizer, weights, loss, max_grad_norm, device, seed, accumulate, elementwise)
    try:
        with World(sch.mesh) as world:
            return _Build(sch, arguments, world).run(target, config)
    except BaseException:
        sch.forget_target()
        raise


@dataclass
class _Build:
    """One call of :func:`build`."""

    schedule: Schedule
    arguments: Arguments
    world: World

    def run(self, name: str, config: Mapping[str, Any]) -> Engine:
        with self.world.together(f"build(target='{name}')"):
            target, plan, source = self._plan(name, config)
        with self.world.together("looking at the tensors of the model"):
            values = Materialization(
                self.schedule, source, device=self.arguments.torch_device(), seed=self.arguments.seed
            )
        agree(self.world, self.schedule, self.arguments, plan, source, values.reference)
        stage_ranks = self._place(target, plan, values)
        try:
            with synchronized_rng(self.world, self.schedule.mesh):
                self._materialize(target, values)
                engine = self._hand_over(target, plan, values, stage_ranks)
                self._compare_added(values)
        except BaseException:
            values.take_back()
            raise
        self._seal(values)
        return engine

    def _plan(self, name: str, config: Mapping[str, Any]) -> tuple[Target, Plan, Source | None]:
        """Make the plan, without changes and communication."""
        self.arguments.check()
        target = Target.named(name, self.schedule)
        plan = target.plan(self.schedule, config, self.arguments.for_plan())
        source = open_source(self.arguments.weights) if self.arguments.weights is not None else None
        return target, plan, source

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

    def _materialize(self, target: Target, values: Materialization) -> None:
        """Give every tensor its value, unless the dialect takes them one by one."""
        if not target.dialect.takes_tensors:
            with self.world.together("giving the model its values"):
                for _ in values.run():
                    pass

    def _hand_over(self, target: Target, plan: Plan, values: Materialization, stage_ranks: tuple[int, ...]) -> Engine:
        with self.world.together(f"build() of target '{plan.target}'"):
            request = Request(self.schedule, self.arguments, values, stage_ranks=stage_ranks)
            engine = target.build(plan, request)
            if not values.is_complete:
                raise BuildError(
                    f"target '{plan.target}' of {target.label} left tensors without their values",
                    plugin=target.label,
                    hint="with takes_tensors = True, build() takes them all: for tensor in request.materialize(): ...",
                )
            return engine

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

    def _seal(self, values: Materialization) -> None:
        values.keep()
        self.schedule.seal("build()")
