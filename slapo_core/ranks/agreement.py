"""Do all ranks mean the same? Schedules, plugins, versions and weights are compared before anything is built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slapo_core.errors import BuildError, RankMismatchError

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.mesh import Mesh

__all__ = ["check_agreement", "check_weights_agreement", "checksum", "fingerprint", "gather_objects", "together"]

Facts = list[tuple[str, str]]
"""``(what, value)`` in an order that is the same on every rank; values are for people and for comparing."""

_NOTHING = "(nothing)"


def fingerprint(schedule: Schedule) -> Facts:
    """What must be the same on every rank: versions, mesh, active plugins, and every step in order."""
    mesh = schedule.mesh
    plugins = {name: schedule.registry.plugin(name) for name in schedule.hooks.active}
    facts = [
        ("the version of slapo-core", str(schedule.registry.core_version)),
        ("the version of torch", torch.__version__),
        ("the mesh", str(mesh)),
        ("the model", f"{type(schedule.model).__module__}.{type(schedule.model).__qualname__}"),
    ]
    for record in schedule.records:
        arguments = ", ".join(f"{key}={_describe(value)}" for key, value in record.primitive.arguments().items())
        where = f"'{record.path}'" if record.path else "the root"
        provider = f"{record.distribution} {record.version}"
        facts.append((f"step {record.index}", f"{record.name}({arguments}) at {where}, from {provider}"))
    active = ", ".join(plugin.label if plugin is not None else name for name, plugin in plugins.items())
    return [*facts, ("the active plugins", active or "none")]


def check_agreement(schedule: Schedule, *, more: Sequence[tuple[str, str]] = ()) -> None:
    """Compare the fingerprint over all ranks of the mesh: a collective if it has more than one running rank.

    Args:
        schedule: every rank's own.
        more: further facts that must be the same, e.g. the arguments of ``build``.

    Raises:
        RankMismatchError: on every rank; it names the first difference and the ranks.
    """
    facts = [*fingerprint(schedule), *more]
    _compare(schedule.mesh, facts, hint="run the same script on the same installation on every rank")


def check_weights_agreement(mesh: Mesh | None, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare real weights over all ranks of the mesh: a collective if it has more than one running rank.

    Args:
        mesh: the schedule's.
        tensors: the untouched model's tensors by name; those on the meta device are left out.

    Raises:
        RankMismatchError: on every rank; it names the first tensor that differs, and the ranks.
    """
    if not _is_running(mesh):
        return
    facts = [
        (f"the weights '{name}'", f"{tuple(tensor.shape)}, {tensor.dtype}, checksum {checksum(tensor):016x}")
        for name, tensor in tensors.items()
        if not tensor.is_meta
    ]
    _compare(mesh, facts, hint="call torch.manual_seed(0) on every rank before the model is made, or pass weights=")


def checksum(tensor: torch.Tensor) -> int:
    """A number that two tensors share if they have the same bits in the same order (64 bits, not cryptographic)."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat.contiguous()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    total = flat.numel()
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].view(integer).to(torch.int64)
        weights = torch.arange(1, bits.numel() + 1, device=bits.device)
        part = int((bits * (2 * weights + 1)).sum()) ^ (int(bits.sum()) << 20)
        total = (total * 1_000_003 + part) % (1 << 64)
    return total


_CHUNK = 1 << 20  # elements, so that the temporary integers stay small


@contextlib.contextmanager
def together(mesh: Mesh | None, what: str) -> Iterator[None]:
    """Let no rank go on alone: if the block raises on one rank, every rank raises. No collectives inside.

    Args:
        mesh: the schedule's; without running ranks this does nothing.
        what: the work of the block, for the message on the other ranks, e.g. ``"loading the weights"``.

    Raises:
        BuildError: on the ranks where the block went well, naming the rank where it did not, and why.
    """
    if not _is_running(mesh):
        yield
        return
    assert mesh is not None
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again below, when every rank knows of it
        failure = error
    outcomes = gather_objects(mesh, f"{type(failure).__name__}: {failure}" if failure is not None else None)
    if failure is not None:
        raise failure
    for rank, outcome in outcomes:
        if outcome is not None:
            raise BuildError(f"{what} failed on rank {rank}: {outcome}")


def gather_objects(mesh: Mesh, value: Any) -> list[tuple[int, Any]]:
    """``(global rank, value)`` of every rank of the mesh, in the mesh's order: a collective."""
    gathered = [(dist.get_rank(), value)]
    if mesh.world_size == dist.get_world_size():
        return _all_gather(gathered, None)
    for mesh_dim in reversed(mesh.sizes):  # the mesh is a part of the world: only its own groups may be used
        group = mesh.group(mesh_dim)
        if group is not None:
            gathered = _all_gather(gathered, group)
    return gathered


def _all_gather(items: list[tuple[int, Any]], group: dist.ProcessGroup | None) -> list[tuple[int, Any]]:
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, items, group=group)
    return [item for part in parts for item in part]


def _is_running(mesh: Mesh | None) -> bool:
    return mesh is not None and mesh.device_mesh is not None and mesh.world_size > 1


def _compare(mesh: Mesh | None, facts: Facts, *, hint: str) -> None:
    if not _is_running(mesh):
        return
    assert mesh is not None
    by_rank = dict(gather_objects(mesh, facts))
    difference = _first_difference(by_rank)
    if difference is not None:
        what, values = difference
        lines = [f"  {_ranks(ranks)}: {value}" for value, ranks in values.items()]
        raise RankMismatchError("\n".join([f"ranks disagree about {what}:", *lines]), hint=hint)


def _first_difference(by_rank: Mapping[int, Facts]) -> tuple[str, dict[str, list[int]]] | None:
    for position in range(max(len(facts) for facts in by_rank.values())):
        at = {rank: facts[position] if position < len(facts) else None for rank, facts in by_rank.items()}
        if len(set(at.values())) == 1:
            continue
        subjects = [fact for fact in at.values() if fact is not None]
        # A step that some rank does not have tells more than what stands there instead.
        first = min(subjects, key=lambda fact: all(fact[0] in dict(facts) for facts in by_rank.values()))
        values: dict[str, list[int]] = {}
        for rank, fact in at.items():
            same_subject = fact is not None and fact[0] == first[0]
            value = fact[1] if fact is not None and same_subject else dict(by_rank[rank]).get(first[0], _NOTHING)
            values.setdefault(value, []).append(rank)
        if len(values) > 1:
            return first[0], values
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _describe(value: Any) -> str:
    """JSON values as they are; of anything else the type, because addresses differ from process to process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_describe, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_describe, value))) + "}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_describe(key)}: {_describe(item)}" for key, item in value.items()) + "}"
    kind = type(value)
    return f"<{kind.__module__}.{kind.__qualname__}>"
