"""The ranks of a mesh take every decision together, also where the mesh is a part of the processes."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

import slapo_core as slapo
from slapo_core import layout
from slapo_core.layout import Mesh, declare_mesh
from slapo_runtime.launcher import run_ranks
from slapo_runtime.ranks.consistency import schedule_facts
from slapo_runtime.ranks.facts import RankFact
from slapo_runtime.ranks.world import World, _new_store as new_store, together
from slapo_testing.bench import seeded
from slapo_verify.phases import fixed_conditions
from tests.messages import Messages
from tests.support.building import real


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (slapo.SlapoError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def fail_on(mesh: Mesh | None, rank: int) -> None:
    with together(mesh, "painting"):
        if dist.get_rank() == rank:
            raise ValueError("out of paint")


def broken(rank: int) -> Iterator[RankFact]:
    yield RankFact("the color", "red")
    if dist.get_rank() == rank:
        raise ValueError("out of paint")


def scoped(mesh: Any, value: object) -> str:
    with World(declare_mesh(mesh)) as world:
        return error_of(world.agree, [RankFact("the seed", str(value), over="tp")], hint="one seed")


def whole_world() -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = declare_mesh({"dp": 2, "tp": 2})
    assert mesh is not None
    transposed = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    with World(mesh) as world, torch.device("meta"):  # of the model that a user makes around the call
        found: dict[str, Any] = {
            "ranks": world.ranks,
            "gathered": world.gather("x" * rank),
            "failing fact": error_of(world.agree, broken(2), hint=""),
            "failures": [failure.rank for failure in world.attempt(lambda: 1 // (rank % 2)).failures],
        }
    return found | {
        "by replica": scoped(mesh, mesh.rank("dp")),
        "by rank": scoped(mesh, rank),
        "transposed, by column": scoped(transposed, rank % 2),
        "transposed, by row": scoped(transposed, rank // 2),
        "without the dimension": scoped({"dp": 4}, rank),
        "together": error_of(fail_on, mesh, 3),
        "sizes alone": mesh_fact(mesh),
        "unusual order": mesh_fact(declare_mesh(transposed)),
    }


def mesh_fact(mesh: Mesh | None) -> str | None:
    schedule = slapo.create_schedule(real("mlp"), mesh=mesh)  # type: ignore[arg-type]
    return {fact.what: fact.value for fact in schedule_facts(schedule)}["the mesh"]


@pytest.mark.ranks
def test_the_ranks_of_a_mesh_hear_of_each_other(message: Messages) -> None:
    every = run_ranks(whole_world, world_size=4, timeout=60)
    for rank, found in enumerate(every):
        assert found["ranks"] == (0, 1, 2, 3)
        assert found["gathered"] == ["", "x", "xx", "xxx"]
        assert found["failures"] == [0, 2]
        assert (found["failing fact"] == "ValueError: out of paint") == (rank == 2)
        assert (found["together"] == "ValueError: out of paint") == (rank == 3)
        assert found["by replica"] == found["transposed, by column"] == found["without the dimension"] == "fine"
        assert found["sizes alone"] == "{'dp': 2, 'tp': 2}"
        assert found["unusual order"] == "{'dp': 2, 'tp': 2} of the ranks [[0, 2], [1, 3]]"
    for case, ranks, words in (
        ("failing fact", (0, 1, 3), ("RankMismatchError: rank 2", "ValueError: out of paint (")),
        ("together", (0, 1, 2), ("BuildError", "failed on rank 3: ValueError: out of paint")),
        ("by rank", range(4), ("RankMismatchError", "rank 0: 0\n  rank 1: 1\n  hint: one seed")),
        ("transposed, by row", range(4), ("RankMismatchError", "rank 0: 0\n  rank 2: 1\n  hint: one seed")),
    ):
        [text] = {every[rank][case] for rank in ranks}
        message(text, *words)


def part_of_the_world() -> list[Any]:
    rank = dist.get_rank()
    parts = [DeviceMesh("cpu", ranks, mesh_dim_names=("tp",)) for ranks in ([0], [1, 2])]
    if rank == 0:
        return []
    if rank == 2:
        dist.new_group([2], use_local_synchronization=True)  # ranks need not have as many groups as each other
    mesh = declare_mesh(parts[1])
    found: list[Any] = []
    for _ in range(3):
        with World(mesh) as world:
            found.append(world.gather(f"value {rank}"))
    return [*found, world.ranks, error_of(fail_on, mesh, 2), scoped(parts[1], rank)]


@pytest.mark.ranks
def test_world_over_some_processes_needs_no_others(message: Messages) -> None:
    outside, first, second = run_ranks(part_of_the_world, world_size=3, timeout=60)
    both = ["value 1", "value 2"]
    assert outside == []
    assert first[:4] == second[:4] == [both] * 3 + [(1, 2)]
    assert second[4] == "ValueError: out of paint"
    message(first[4], "BuildError", "failed on rank 2: ValueError: out of paint")
    assert first[5:] == second[5:]
    message(*first[5:], "RankMismatchError", "rank 1: 1\n  rank 2: 2\n  hint: one seed")


def never() -> Iterator[RankFact]:
    raise AssertionError("nobody is there to compare with")
    yield


@pytest.mark.parametrize("mesh", [None, {"tp": 1}, {"tp": 2}], ids=["no mesh", "one rank", "only declared"])
def test_a_process_by_itself_has_nobody_to_ask(mesh: dict[str, int] | None) -> None:
    with World(declare_mesh(mesh)) as world:
        assert (world.is_alone, world.size, world.rank) == (True, 1, 0)
        assert world.gather(torch.Size([2])) == [torch.Size([2])]
        world.agree(never(), hint="")
        attempt = world.attempt(lambda: 1 // 0)
        assert [str(failure)[:17] for failure in attempt.failures] == ["ZeroDivisionError"]
        with pytest.raises(ValueError, match="out of paint"), world.together("painting"):
            raise ValueError("out of paint")


def blocks_within_a_block(fails: str) -> str:
    """What this rank is told when rank 1 fails between, inside of, or after inner blocks, or hides that it did."""
    guilty = dist.get_rank() == 1
    with World(declare_mesh({"dp": 2})) as world:
        try:
            with world.together("the whole"):
                if fails == "before" and guilty:
                    raise ValueError("rank 1 before the inner block")
                try:
                    with world.together("a part"):
                        if fails in ("inside", "hidden") and guilty:
                            raise ValueError("rank 1 inside the inner block")
                except ValueError:
                    if fails != "hidden":
                        raise
                if fails == "after" and guilty:
                    raise ValueError("rank 1 after the inner block")
        except (ValueError, slapo.BuildError) as error:
            return str(error)
    return "fine"


@pytest.mark.ranks
def test_rank_failure_in_nested_block_ends_other_ranks(message: Messages) -> None:
    for fails, block, reason in (
        ("before", "a part", "rank 1 before the inner block"),
        ("inside", "a part", "rank 1 inside the inner block"),
        ("hidden", "a part", "rank 1 inside the inner block"),
        ("after", "the whole", "rank 1 after the inner block"),
    ):
        rank_0, rank_1 = run_ranks(blocks_within_a_block, fails, world_size=2)
        assert rank_0.startswith(block)
        assert rank_0.endswith(f" on rank 1: ValueError: {reason}")
        if fails == "hidden":
            message(rank_1, "the whole went on")
        else:
            assert rank_1 == reason
    assert run_ranks(blocks_within_a_block, "nowhere", world_size=2) == ["fine", "fine"]


class Model:
    """Something that a frame of a failing run holds."""


def what_stays_of_a_failed_attempt(mesh: dict[str, int] | None) -> list[bool]:
    """Whether it is there while the attempt is kept, and when it is dropped; without the garbage collector."""
    seen = []

    def run() -> None:
        model = Model()
        seen.append(weakref.ref(model))
        raise ValueError("out of paint")

    with World(declare_mesh(mesh)) as world:
        gc.disable()
        try:
            attempt = world.attempt(run)
            stays = [seen[0]() is not None]
            del attempt
            return [*stays, seen[0]() is not None]
        finally:
            gc.enable()


@pytest.mark.ranks
def test_failed_attempt_keeps_its_frames_only_as_long_as_itself() -> None:
    assert what_stays_of_a_failed_attempt(None) == [True, False]
    assert run_ranks(what_stays_of_a_failed_attempt, {"tp": 2}, world_size=2) == [[True, False]] * 2


# -- accelerators -------------------------------------------------------------------------------------------------


def test_only_the_devices_in_use_are_touched_by_a_fork_of_the_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Module:
        @staticmethod
        def is_initialized() -> bool:
            return True

    def forked(**options: Any) -> Any:
        asked.append(options)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.random, "fork_rng", forked)
    with fixed_conditions(0), seeded():
        pass
    assert all("devices" in options for options in asked)
    asked.clear()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: Module)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda index: 512 * (index == 5))
    layout.fork_rng()
    assert asked == [{"devices": [3, 5], "device_type": "xpu"}]
    assert layout.device_of("xpu") == torch.device("xpu", 3)
    assert layout.device_of("cpu") == torch.device("cpu")


# -- calls on some ranks only -------------------------------------------------------------------------------------


def different_calls() -> list[str]:
    rank, answers = dist.get_rank(), []
    sch = slapo.create_schedule(real("mlp"), mesh={"dp": 2})
    calls: list[Any] = [lambda: slapo.state_dict(sch, rank0_only=True), lambda: slapo.load_state_dict(sch, {})]
    try:
        calls[rank]()
    except slapo.RankMismatchError as error:
        answers.append(str(error))
    if rank == 0:
        for _ in range(2):  # as calls that rank 1 did not make
            new_store((0, 1), 0)
    dist.barrier()
    if rank == 1:
        try:
            calls[0]()
        except slapo.RankMismatchError as error:
            answers.append(str(error))
    return answers


@pytest.mark.ranks
def test_ranks_in_different_calls_raise_instead_of_hanging(message: Messages) -> None:
    first, second = run_ranks(different_calls, world_size=2, timeout=300)
    message(first[0], "rank 0: state_dict", "rank 1: load_state_dict", "if rank == 0:")
    assert second[0] == first[0]
    assert len(first) == 1
    message(second[1], "rank 0 made a call that rank 1 did not make")


@pytest.mark.parametrize(
    ("kind", "backends", "expected"),
    [
        ("cuda", "cuda:nccl", "cuda"),
        ("cuda", "cpu:gloo,cuda:nccl", "cuda"),  # of init_process_group() without a backend
        ("cuda", "cpu:gloo,cuda:gloo", "cpu"),
        ("cuda", "cpu:gloo", "cpu"),
        ("xpu", "cpu:gloo,xpu:xccl", "xpu"),
        ("hpu", "hpu:hccl", "hpu"),
        ("mps", "cpu:gloo,mps:gloo", "cpu"),
        (None, "cpu:gloo", "cpu"),
    ],
)
def test_a_mesh_is_made_on_the_devices_of_the_process_group(
    kind: str | None, backends: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def init(device_type: str, shape: tuple[int, ...], **options: Any) -> Any:
        made.append(device_type)
        return SimpleNamespace(get_local_rank=lambda mesh_dim: 0)

    device = torch.device(kind) if kind is not None else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl" if backends == "cuda:nccl" else "undefined")
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(device_mesh, "init_device_mesh", init)
    declare_mesh({"tp": 2})
    assert made == [expected]
