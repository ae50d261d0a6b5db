"""Find wrappers of plain PyTorch that treat shards as replicas, and copied shards."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.errors import MeshError, WeightsError
from slapo_core.layout import Mesh
from slapo_runtime.private import active_ddp, is_functorch_wrapped
from slapo_runtime.ranks.checksums import checksum

_SAMPLE = 16  # shards that are compared: a tool that copies one rank's shards over the others copies them all
_OWN_LOOP = (
    "transformers' Trainer and accelerate's prepare() make such wrappers under torchrun: in their places, "
    "slapo_transformers.SlapoTrainer(schedule=sch, ...) and slapo_transformers.prepare(accelerator, sch, optimizer) "
    "train it; TRL's: class MyTrainer(slapo_transformers.ScheduledTrainerMixin, SFTTrainer)"
)

_HOSTS = {
    "lightning.pytorch.strategies.strategy": (
        "Trainer(strategy=slapo_lightning.SlapoStrategy(...)), with the function of the steps"
    ),
    "lightning.fabric.wrappers": (
        "Fabric(strategy=slapo_lightning.fabric.SlapoStrategy(...)), with the function of the steps"
    ),
    "deepspeed.runtime.engine": (
        "module, mpu, parameters = slapo_deepspeed.prepare(sch); deepspeed.initialize(model=module, "
        "model_parameters=parameters, mpu=mpu, config=...)"
    ),
}
"""Module of a host that calls forwards -> what trains shards there."""
_CALLS = ("training_step", "validation_step", "test_step", "predict_step", "forward")


@dataclass(frozen=True)
class ShardShape:
    """The shapes of a shard and its full tensor.

    Args:
        local: the shape of the shard.
        full: the shape of the full tensor.
        is_partial: whether the full tensor is the sum of the ranks' tensors.
    """

    local: tuple[int, ...]
    full: tuple[int, ...]
    is_partial: bool


def described(shards: dict[str, ShardShape]) -> str:
    """Describe shards: ``"12 tensors, e.g. 'fc1.weight', here (8, 6) of (16, 6)"``."""
    name, shard = next(iter(shards.items()))
    kind = "a partial value of shape" if shard.is_partial else "here"
    example = f"'{name}', {kind} {shard.local} of {shard.full}"
    return example if len(shards) == 1 else f"{len(shards)} tensors, e.g. {example}"


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has readable values: not fake, batched or of a subclass."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not is_functorch_wrapped(tensor)


def refuse_unaware_host(model: nn.Module, shards: dict[str, ShardShape], dims: list[str]) -> None:
    """Refuse the loop of a host around this forward, if it has no schedule.

    Raises:
        MeshError: it would take the norm of one rank's shards, samples by rank, and checkpoints of the first rank.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        right = _HOSTS.get(str(frame.f_globals.get("__name__"))) if frame.f_code.co_name in _CALLS else None
        host = frame.f_locals.get("self") if right is not None else None
        host = getattr(host, "_strategy", host)
        if host is not None and not hasattr(host, "sch"):
            raise MeshError(
                f"{type(host).__name__} has no schedule, and this {type(model).__name__} is split along "
                f"{', '.join(map(repr, dims))}: {described(shards)}; it would take norms, samples and checkpoints "
                "of one rank",
                hint=right,
            )
        frame = frame.f_back


def wrong_wrapper(model: nn.Module, shards: dict[str, ShardShape], dims: list[str], mesh: Mesh) -> str | None:
    """Describe the wrapper that treats shards as replicas; None if there is none."""
    if getattr(model, "_is_replica", False):
        return f"DataParallel copies this {type(model).__name__} in one process, and its collectives would meet"
    assert mesh.device_mesh is not None
    place = tuple(mesh.rank(name) if name in dims else slice(None) for name in mesh.sizes)
    equal = frozenset(mesh.device_mesh.mesh[place].flatten().tolist())  # the ranks that hold the same shards
    for kind, start, ranks, ignored in _wrappers(model):
        inside = {name: shard for name, shard in shards.items() if name.startswith(start)}
        leaves_alone = len(equal) == 1 and inside.keys() <= ignored
        if inside and not ranks <= equal and not leaves_alone:
            return (
                f"{kind} treats the tensors of this {type(model).__name__} as replicas on the ranks "
                f"{', '.join(map(str, sorted(ranks)))}, but they hold different shards along "
                f"{', '.join(map(repr, dims))}: {described(inside)}; it has mixed up the shards, or would mix up their "
                "gradients"
            )
    return None


def _wrappers(model: nn.Module) -> Iterator[tuple[str, str, set[int], set[str]]]:
    """Yield each wrapper's kind, name prefix, global ranks, and ignored names.

    FullyShardedDataParallel around the model, and ``fully_shard`` after gathering the parameters, leave no trace of
    their ranks: :func:`refuse_copies` finds the gathered values.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    active = active_ddp()
    if active is not None and any(module is model for module in active.modules()):
        ignored = set(active.parameters_to_ignore) if active.module is model else set()
        yield "DistributedDataParallel", "", set(dist.get_process_group_ranks(active.process_group)), ignored
    for path, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            ranks = set(dist.get_process_group_ranks(module.process_group))  # type: ignore[arg-type]
            yield type(module).__name__, f"{path}." if path else "", ranks, set()
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            yield "fully_shard", name, set(parameter.device_mesh.mesh.flatten().tolist()), set()


def right_wrapper(mesh: Mesh, dims: list[str]) -> str:
    others = [name for name, size in mesh.sizes.items() if size > 1 and name not in dims]
    if len(others) == 1:
        right = f'DistributedDataParallel(model, process_group=sch.mesh.group("{others[0]}"))'
    elif others:
        right = f"DistributedDataParallel(model, process_group=...) over the mesh dimensions {', '.join(others)}"
    else:
        right = "no wrapper, because no tensor is replicated"
    return f"make a fresh model, schedule it, and use {right}; {_OWN_LOOP}"


def checksums(model: nn.Module, shards: dict[str, ShardShape]) -> dict[str, tuple[int, bool]]:
    """Return the checksums of some shards, and whether all their elements are equal."""
    found: dict[str, tuple[int, bool]] = {}
    for name in shards:
        try:
            tensor = operator.attrgetter(name)(model)
        except AttributeError:  # no longer in the model
            continue
        if shards[name].is_partial or not is_plain(tensor) or not tensor.is_floating_point():
            continue
        has_values = not tensor.is_meta and tensor.untyped_storage().size() > 0  # FullyShardedDataParallel frees them
        if has_values and tensor.numel() > 1 and len(found) < _SAMPLE:
            found[name] = (checksum(tensor), bool((tensor == tensor.flatten()[0]).all()))
    return found


def refuse_copies(
    model: nn.Module,
    shards: dict[str, ShardShape],
    by_rank: list[dict[str, tuple[int, bool]]],
    dims: list[str],
    mesh: Mesh,
) -> None:
    """Refuse equal shards on all ranks where they must differ."""
    same = {}
    for name in by_rank[0]:
        sums = [sums[name] for sums in by_rank if name in sums]
        if not all(is_constant for _, is_constant in sums):
            if len(set(sums)) > 1:
                return
            same[name] = shards[name]
    if not same:
        return
    what = (
        f"all ranks along {', '.join(map(repr, dims))} hold bitwise equal shards of this {type(model).__name__}, which "
        f"must differ: {described(same)}"
    )
    if any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules()):
        raise MeshError(
            f"FullyShardedDataParallel, or fully_shard, mixed up the ranks: {what}", hint=right_wrapper(mesh, dims)
        )
    raise WeightsError(
        f"{what}; a tool copied one rank's tensors over the others (DistributedDataParallel, or "
        "deepspeed.initialize over all ranks), or every rank initialized the same values",
        hint="make a fresh model, schedule it, and do not change its shards: slapo.build(sch, optimizer=...) "
        "wraps and initializes it; slapo.load_state_dict(sch, state) loads each rank's shards",
    )
