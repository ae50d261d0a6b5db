"""The groups that trials go through: made and broken again and again, and broken whatever is in flight in them."""

from __future__ import annotations

import gc
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slapo_core as slapo
from slapo_core.ranks import stand_ins
from slapo_core.ranks.connections import connections_since, mutual, open_sockets
from slapo_core.ranks.launcher import run_ranks
from slapo_core.ranks.world import World
from slapo_core.spec.mesh import declare_mesh
from tests.messages import Messages

pytestmark = pytest.mark.ranks

LIMIT = 300.0  # seconds; a rank that waits for a broken collective does so until the groups' timeout, half an hour


def used() -> tuple[int, int, int]:
    """File descriptors, threads, and resident memory in KiB of this process."""
    with open("/proc/self/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


def break_again_and_again(sizes: dict[str, int], renewals: int) -> list[tuple[int, int, int]]:
    """Every rank raises in turn, while the others wait for it; what is in use after 20 of them, and at last."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # a rank that is told to go on has to wait for its turn
    kept = []
    seen = []
    with World(declare_mesh(sizes), runs_models=True) as world:
        for number in range(renewals):

            def run(number: int = number) -> None:
                if dist.get_rank() == number % dist.get_world_size():
                    raise ValueError(f"number {number}")
                dist.all_reduce(torch.ones(1))

            attempt = world.attempt(run)
            assert [str(failure).partition(" (")[0] for failure in attempt.failures] == [f"ValueError: number {number}"]
            if number in (20, renewals - 1):
                seen.append(used())
            kept[:] = [attempt.error]
        one = torch.ones(1)
        world.attempt(lambda: dist.all_reduce(one)).value()
    dist.all_reduce(one)
    assert float(one) == dist.get_world_size() ** 2
    return seen


@pytest.mark.breadth
@pytest.mark.parametrize(("sizes", "renewals"), [({"tp": 2}, 300), ({"dp": 2, "tp": 2}, 60)], ids=str)
def test_groups_are_made_anew_again_and_again_and_nothing_of_the_old_ones_stays(
    sizes: dict[str, int], renewals: int
) -> None:
    for early, late in run_ranks(break_again_and_again, sizes, renewals, world_size=2 * len(sizes), timeout=LIMIT):
        descriptors, threads, resident = (after - before for before, after in zip(early, late, strict=True))
        assert descriptors < 40
        assert threads < 20
        assert resident < 100_000


def fail_at_once() -> None:
    raise ValueError("at once")


def fail_in_making(times: int) -> tuple[Any, int, float, bool]:
    """Rank 1 fails so many times to make a group after a broken trial; what came of it, and what is left."""
    mesh = declare_mesh({"tp": 2})
    before, make, calls = dict(vars(dist.ProcessGroup)), stand_ins.make_group, []
    is_open = False

    def failing(*args: Any) -> Any:
        group = make(*args)
        if is_open and dist.get_rank() == 1:
            calls.append(1)
            if len(calls) <= times:
                raise RuntimeError("no buffer space available")
        return group

    told: Any = None
    stand_ins.make_group = failing
    try:
        with World(mesh, runs_models=True) as world:
            is_open = True
            told = [str(failure).partition(" (")[0] for failure in world.attempt(fail_at_once).failures]
            one = torch.ones(1)
            world.attempt(lambda: dist.all_reduce(one)).value()
    except slapo.RankFailedError as error:
        told = (error.message, error.failures, error.first)
    finally:
        stand_ins.make_group = make
    one = torch.ones(1)
    dist.all_reduce(one)
    return told, gc.get_freeze_count(), float(one), dict(vars(dist.ProcessGroup)) == before


def test_ranks_that_cannot_be_connected_try_again_together_and_then_say_why(message: Messages) -> None:
    twice, for_ever = (run_ranks(fail_in_making, times, world_size=2, timeout=LIMIT) for times in (2, 100))
    division = "ValueError: at once"
    assert twice == [([division, division], 0, 2.0, True)] * 2
    said = "RuntimeError: no buffer space available"
    (text, *told), *left = for_ever[0]
    assert (told, left) == ([{1: said}, 1], [0, 2.0, True])
    assert for_ever[1] == for_ever[0]
    message(text, "3 times", f"rank 1: {said}")


def fail_at_first() -> tuple[Any, int, float, bool]:
    stand_ins._TRIES = 1
    make, stand_ins.make_group = stand_ins.make_group, refuse
    before = dict(vars(dist.ProcessGroup))
    try:
        with World(declare_mesh({"tp": 2}), runs_models=True):
            told = "opened"
    except slapo.RankFailedError as error:
        told = error.message
    finally:
        stand_ins.make_group = make
    one = torch.ones(1)
    dist.all_reduce(one)
    return told, gc.get_freeze_count(), float(one), dict(vars(dist.ProcessGroup)) == before


def refuse(*args: Any) -> Any:
    if dist.get_rank() == 0:
        raise OSError("too many open files")
    raise RuntimeError("nobody is there")


def test_where_the_first_groups_cannot_be_made_all_is_left_as_it_was(message: Messages) -> None:
    first, second = run_ranks(fail_at_first, world_size=2, timeout=LIMIT)
    assert first == second
    assert first[1:] == (0, 2.0, True)
    message(first[0], "1 times", "rank 0: OSError: too many open files", "rank 1: RuntimeError: nobody is there")


def leave_in_flight() -> list[list[str]]:
    """Rank 1 raises with works in flight that rank 0, which waits for something else, never joins."""
    mesh = declare_mesh({"tp": 2})
    assert mesh is not None
    kept: list[Any] = []
    found = []
    with World(mesh, runs_models=True) as world:

        def run(way: str) -> None:
            one = torch.ones(1)
            if dist.get_rank() == 0:
                dist.recv(one, src=1)
            works = {
                "forgotten": lambda: [dist.all_reduce(one, async_op=True)],
                "many": lambda: [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(8)],
                "kept": lambda: [dist.all_reduce(one, async_op=True)],
                "of another group": lambda: [dist.all_reduce(one, group=mesh.group("tp"), async_op=True)],
                "by name": lambda: [torch.ops._c10d_functional.all_reduce(one, "sum", mesh.group("tp").group_name)],
            }[way]()
            if way == "kept":
                kept.append(works)
            raise ValueError(way)

        for way in ("forgotten", "many", "kept", "of another group", "by name"):
            failures = world.attempt(lambda way=way: run(way)).failures  # type: ignore[misc]
            found.append([str(each).partition(" (")[0] for each in failures])
    for (work,) in kept:
        with pytest.raises(RuntimeError):
            work.wait()
    dist.all_reduce(one := torch.ones(1))
    return [*found, [str(float(one))]]


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_a_rank_that_raises_with_a_collective_in_flight_ends_the_wait_of_all(
    lazy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", lazy)  # of the user's groups, which connect when they are used
    ways = ["forgotten", "many", "kept", "of another group", "by name"]
    first, second = run_ranks(leave_in_flight, world_size=2, timeout=LIMIT)
    assert first == second == [*([f"ValueError: {way}"] for way in ways), ["2.0"]]


def tell_connections() -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as old:
        accepted, _ = server.accept()
        before = open_sockets()
        with accepted, socket.create_connection(server.getsockname()) as new:
            other, _ = server.accept()
            with other, socket.socket(socket.AF_UNIX), socket.socket():
                found = connections_since(before)
                ends = [(new.getsockname(), other.getsockname()), (other.getsockname(), new.getsockname())]
                told = {
                    "new": sorted(each.ends for each in found) == sorted(ends),
                    "one sided": mutual(found[:1], [found[0].ends]),
                    "mutual": mutual(found[:1], [found[1].ends]) == found[:1],
                }
                found[0].end()
                told["both read the end"] = (new.recv(1), other.recv(1))
                found[0].end()
            reused = socket.create_connection(server.getsockname())
            found[1].end()  # closed since
            old.sendall(b"x")
            told["the old one"] = accepted.recv(1)
            with reused, server.accept()[0] as last:
                for each in found:
                    each.end()
                reused.sendall(b"y")
                told["another one under the same descriptor"] = last.recv(1)
    return told


def test_only_the_connections_that_were_meant_are_ended() -> None:
    assert tell_connections() == {
        "new": True,
        "one sided": [],
        "mutual": True,
        "both read the end": (b"", b""),
        "the old one": b"x",
        "another one under the same descriptor": b"y",
    }
