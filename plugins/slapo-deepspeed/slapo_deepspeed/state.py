"""Locate parameters and optimizer state in DeepSpeed's storage, for state dicts and checkpoints.

DeepSpeed documents functions that return one full parameter (``deepspeed.utils.safe_get_full_fp32_param`` and others),
but none before the first step, none for an optimizer without ZeRO, and none that works after ``engine.destroy()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import BuildError
from slapo_deepspeed.config import unverified
from slapo_deepspeed.private import link_optimizer_state, partition_rank
from slapo_runtime.correspondence.flat_storage import (
    FlatOptimizer,
    FlatStorage,
    FlatTensors,
    StoredGroup,
    StoredParameter,
)
from slapo_runtime.flat_shards import FlatShard
from slapo_runtime.options import Options
from slapo_runtime.ranks.world import World
from slapo_runtime.weights import lr_scheduler

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_runtime.correspondence.storage import LiveTensor


# -- storage of parameters -------------------------------------------------------------------------------------------


def held_by(engine: Any, parameters: Iterable[torch.Tensor]) -> dict[int, StoredParameter]:
    """Locate the parameters in the storage of DeepSpeed's engine, once it is ready to train.

    Args:
        engine: DeepSpeed's.
        parameters: of the model, on this rank.

    Returns:
        id of a parameter -> its storage; nothing for parameters that stay in the model.
    """
    inner, wrapper = engine.basic_optimizer, engine.optimizer
    mains = {} if inner is None or wrapper is inner else {id(one): place for one, place in _mains(wrapper)}
    is_part = hasattr(wrapper, "real_dp_process_group") or engine.zero_optimization_partition_weights()
    held = {}
    for parameter in parameters:
        main, working = mains.get(id(parameter)), _partition(parameter, engine)
        if main is not None:
            held[id(parameter)] = StoredParameter(main, working, main.flat.dtype, is_part, wrapper.optimizer)
        elif working is not None:
            held[id(parameter)] = StoredParameter(None, working, parameter.dtype, is_part=True)
    return held


def _mains(wrapper: Any) -> Iterator[tuple[torch.Tensor, FlatShard]]:
    """Yield every parameter with main weights, and their location: all access to the optimizers' internals."""
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # ZeRO-3: equal parts of every parameter, the last one padded
        for parameter in _all(wrapper.fp16_groups):
            number, start, size = wrapper.grad_position[wrapper.get_param_id(parameter)]
            flat, offset = wrapper.fp32_partitioned_groups_flat[number], partition_rank(wrapper, parameter) * size
            yield parameter, FlatShard(flat, start, offset, _within(parameter, offset, size), shape_of(parameter))
    elif hasattr(wrapper, "single_partition_of_fp32_groups"):  # ZeRO-1 and ZeRO-2: equal parts of flat groups
        for number, flat in enumerate(wrapper.single_partition_of_fp32_groups):
            begin = _rank(wrapper.real_dp_process_group[number]) * wrapper.partition_size[number]
            starts = wrapper.round_robin_bit16_offsets[number]
            for parameter, start in zip(wrapper.round_robin_bit16_groups[number], starts, strict=True):
                yield parameter, _fragment(parameter, start, flat, begin)
    elif hasattr(wrapper, "fp32_groups_flat_partition"):  # the optimizer for bfloat16: likewise
        for number, flat in enumerate(wrapper.fp32_groups_flat_partition):
            begin = _rank(wrapper.real_dp_process_group[number]) * flat.numel()
            for parameter, start in _consecutive(wrapper.bf16_groups[number]):
                yield parameter, _fragment(parameter, start, flat, begin)


def _all(groups: Iterable[Iterable[torch.Tensor]]) -> Iterator[torch.Tensor]:
    for group in groups:
        yield from group


def _consecutive(parameters: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    start = 0
    for parameter in parameters:
        yield parameter, start
        start += parameter.numel()


def _fragment(parameter: torch.Tensor, start: int, flat: torch.Tensor, begin: int) -> FlatShard:
    """Return the intersection of a parameter, at ``start`` in its group, with the shard that begins at ``begin``."""
    first, last = max(start, begin), min(start + parameter.numel(), begin + flat.numel())
    if first >= last:
        return FlatShard(flat, 0, 0, 0, shape_of(parameter))
    return FlatShard(flat, first - begin, first - start, last - first, shape_of(parameter))


def _partition(parameter: Any, engine: Any) -> FlatShard | None:
    """Return this rank's shard of a parameter under ZeRO-3; None where it is not partitioned."""
    own = getattr(parameter, "ds_tensor", None)
    if own is None:
        return None
    offset = _rank(engine.seq_data_parallel_group) * own.ds_numel
    return FlatShard(own, 0, offset, _within(parameter, offset, own.ds_numel), shape_of(parameter))


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the full shape of a parameter, also of one partitioned by ZeRO-3."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _within(parameter: torch.Tensor, offset: int, size: int) -> int:
    return min(size, max(0, math.prod(shape_of(parameter)) - offset))


def _rank(group: Any) -> int:
    import torch.distributed as dist

    return dist.get_rank(group)


class DeepSpeedTensors(FlatTensors):
    """Read and load the model's tensors: ZeRO-3 keeps some parameters gathered between steps.

    Args:
        storage: of the parameters.
        unsaved: state, weights included, that has no names of the reference model; ``""``: none.
    """

    def __init__(self, storage: FlatStorage, unsaved: str = "") -> None:
        super().__init__(storage)
        self._unsaved = unsaved

    def read(self, live: LiveTensor) -> torch.Tensor:
        refuse_unsaved(self._unsaved)
        return super().read(live)

    def loading(self, live: LiveTensor, value: torch.Tensor) -> Callable[[], None]:
        refuse_unsaved(self._unsaved)
        return super().loading(live, value)

    def is_full(self, parameter: torch.Tensor) -> bool:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        return bool(parameter.ds_status == ZeroParamStatus.AVAILABLE)  # type: ignore[attr-defined]


# -- state without names of the reference model ----------------------------------------------------------------------


_KNOWN = ("DeepSpeedZeroOptimizer_Stage3", "DeepSpeedZeroOptimizer", "BF16_Optimizer")


def unsaved(config: Mapping[str, Any], engine: Any) -> str:
    """Return the state that ``engine.save`` cannot express by the reference model's names; ``""``: none.

    Args:
        config: of DeepSpeed, filled in.
        engine: DeepSpeed's.
    """
    wrapper = engine.optimizer
    found = [one.unsaved for one in unverified(Options(config)) if one.unsaved]
    is_own = engine.basic_optimizer is None or wrapper is engine.basic_optimizer
    if not found and not is_own and type(wrapper).__name__ not in _KNOWN:
        found = [f"the state of DeepSpeed's {type(wrapper).__name__}"]
    return found[0] if found else ""


def refuse_unsaved(unsaved: str) -> None:
    """
    Raises:
        BuildError: some state has no names of the reference model.
    """
    if unsaved:
        raise BuildError(
            f"the engine cannot express {unsaved} by the names of the reference model",
            hint="engine.deepspeed.save_checkpoint(directory), and load_checkpoint(directory) on the same mesh",
        )


# -- the optimizer ---------------------------------------------------------------------------------------------------


@dataclass
class Group(StoredGroup):
    """One group of the user's factory.

    Args:
        place: index among DeepSpeed's groups; None if this rank has no trained parameters of the group.
    """

    place: int | None = None


def groups_of(groups: Iterable[Mapping[str, Any]]) -> list[Group]:
    """Copy the groups of an optimizer before DeepSpeed changes them.

    Args:
        groups: with all parameters, also frozen ones, which DeepSpeed does not get.
    """
    found: list[Group] = []
    place = 0
    for group in groups:
        is_kept = any(one.requires_grad for one in group["params"])
        settings = {key: value for key, value in group.items() if key != "params"}
        found.append(Group(tuple(group["params"]), settings, place if is_kept else None))
        place += is_kept
    return found


def check_stages(groups: Sequence[Group], mesh: Mesh | None) -> None:
    """Refuse a group with trained parameters on some stages only: a collective over ``pp``.

    DeepSpeed all-reduces norms group by group over the ranks of a replica: a rank without the group would skip one.

    Raises:
        BuildError: on every rank.
    """
    if mesh is None or mesh.size("pp") == 1:
        return
    by_rank = World(mesh, over="pp").gather_once([group.place is not None for group in groups])
    for number, there in enumerate(zip(*by_rank, strict=True)):
        if any(there) and not all(there):
            lacking = ", ".join(str(rank) for rank, has_some in enumerate(there) if not has_some)
            raise BuildError(
                f"group {number} of the optimizer has no trained parameters on rank {lacking} of 'pp': DeepSpeed sums "
                "the norm of gradients group by group over all stages, and would wait for that rank forever",
                hint="move the cuts, or make one group, or groups that every stage has (weights, biases)",
            )


class DeepSpeedOptimizer(FlatOptimizer):
    """Read and load DeepSpeed's optimizer by the parameters of the model.

    Args:
        engine: DeepSpeed's, with an optimizer.
        storage: of the parameters.
        groups: of the user's factory.
        names: id of a parameter -> its name, for messages.
    """

    def __init__(self, engine: Any, storage: FlatStorage, groups: Sequence[Group], names: Mapping[int, str]) -> None:
        self._engine_optimizer, self._basic = engine.optimizer, engine.basic_optimizer
        super().__init__(storage, groups, names, "DeepSpeed", [self.now])

    @property
    def now(self) -> torch.optim.Optimizer:
        """The optimizer that steps: DeepSpeed replaces some by its own."""
        wrapper, basic = self._engine_optimizer, self._basic
        found: torch.optim.Optimizer = basic if wrapper is basic else getattr(wrapper, "optimizer", basic)
        return found

    def state_of(self, held: StoredParameter) -> dict[str, Any]:
        assert held.main is not None
        return dict(self.now.state.get(held.main.flat, {}))

    def put(self, optimizer: torch.optim.Optimizer, flat: torch.Tensor, state: dict[str, Any]) -> None:
        super().put(self.now, flat, state)

    def settings_of(self, group: StoredGroup) -> dict[str, Any]:
        place = group.place if isinstance(group, Group) else None
        return group.settings if place is None else self.now.param_groups[place]

    def loading(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> Callable[[], None]:
        load = super().loading(groups, states)

        def take() -> None:
            load()
            link_optimizer_state(self._engine_optimizer, self.now)

        return take


# -- further state: scheduler, loss scale and counters ---------------------------------------------------------------

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
SCALE, COUNTERS = "loss_scale", "counters"


def read_extra_state(engine: Any) -> dict[str, Any]:
    """Return the extra state of DeepSpeed's engine, as JSON.

    Raises:
        BuildError: the scheduler's state is not JSON-serializable.
    """
    found: dict[str, Any] = {COUNTERS: {name: int(getattr(engine, name)) for name in _COUNTERS}}
    found |= lr_scheduler.saved(engine.lr_scheduler)
    scaler = _scaler(engine)
    if scaler is not None:
        found[SCALE] = {name: getattr(scaler, name) for name in _SCALE if getattr(scaler, name, None) is not None}
    return found


def used_extra_state(engine: Any) -> list[str]:
    """List the entries of a checkpoint's extra state that an engine uses."""
    there = {lr_scheduler.NAME: engine.lr_scheduler is not None, SCALE: _scaler(engine) is not None, COUNTERS: True}
    return [name for name, is_there in there.items() if is_there]


def write_extra_state(engine: Any, found: Mapping[str, Any]) -> None:
    """Load the result of :func:`read_extra_state`; warn if the scheduler has to start from step 0."""
    for name, value in found.get(COUNTERS, {}).items():
        if name in _COUNTERS:
            setattr(engine, name, value)
    lr_scheduler.resume(engine.lr_scheduler, found)
    scaler = _scaler(engine)
    if scaler is not None and SCALE in found:
        for name, value in found[SCALE].items():
            if name in _SCALE:
                setattr(scaler, name, value)


def _scaler(engine: Any) -> Any:
    """Return the dynamic loss scaler of float16, or None."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None
