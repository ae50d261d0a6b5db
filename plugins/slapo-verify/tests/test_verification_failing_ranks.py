"""A rank that fails while verify runs: every rank hears of it, and everything goes on to work."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slapo_core as slapo
from slapo_core.layout import declare_mesh
from slapo_runtime.launcher import run_ranks
from slapo_runtime.ranks.world import World
from tests.support.failing_ranks import INPUTS, Fail, LeaveOut, outcome, scheduled

pytestmark = pytest.mark.ranks

LIMIT = 300.0  # seconds


Found = list[dict[str, tuple[Any, float]]]
"""Rank by rank: case -> what it got, and a sum over the user's own groups after it."""


def cases(sizes: dict[str, int], *names: str) -> dict[str, tuple[Any, float]]:
    """One case after the other in the same processes; without names, all."""
    last = dist.get_world_size() - 1
    steps: dict[str, list[tuple[str, slapo.Primitive]]] = {
        "forward": [("down", Fail((last,), "forward"))],
        "backward": [("down", Fail((last,), "backward"))],
        "evaluation": [("down", Fail((last,), "evaluation"))],
        "updates": [("down", Fail((last,), "updates"))],
        "unsendable": [("down", Fail((last,), "forward", "unsendable"))],
        "exit": [("down", Fail((last,), "forward", "exit"))],
        "two places": [("down", Fail((last,), "forward")), ("up", Fail((0,), "backward"))],
        "two ranks": [("down", Fail((0, last), "forward"))],
        "left out": [("head", LeaveOut((last,)))],
        "right": [],
    }
    mesh = declare_mesh(sizes)
    assert mesh is not None
    found = {}
    for name, extra in steps.items():
        if names and name not in names:
            continue
        options = {"timeout": 3.0} if name == "left out" else {}  # only its end depends on it
        result = outcome(scheduled(mesh, *extra), **options)
        found[name] = (result, user_groups_sum(mesh))
    return found


def user_groups_sum(mesh: Any) -> float:
    one = torch.ones(1)
    dist.all_reduce(one)
    for mesh_dim in mesh.sizes:
        dist.all_reduce(one, group=mesh.group(mesh_dim))
    gathered = torch.ops._c10d_functional.all_reduce(one, "sum", mesh.group("tp").group_name)
    return float(torch.ops._c10d_functional.wait_tensor(gathered))


QUICK = ("forward", "updates", "unsendable", "two ranks", "left out")


@pytest.fixture(scope="module")
def found() -> Found:
    names = () if os.environ.get("SLAPO_TEST_WHOLE") else QUICK
    return run_ranks(cases, {"tp": 2}, *names, world_size=2, timeout=LIMIT)


@pytest.fixture(scope="module")
def found_wide() -> Found:
    """Of eight ranks in two dimensions; the others hear of a failure through those in whose collective it was."""
    return run_ranks(cases, {"dp": 2, "tp": 4}, "forward", "backward", "right", world_size=8, timeout=LIMIT)


@pytest.mark.parametrize(
    ("case", "step"),
    [
        ("forward", "phase='forward') at 'down'"),
        pytest.param("backward", "phase='backward') at 'down'", marks=pytest.mark.breadth),
        pytest.param("evaluation", "phase='evaluation') at 'down'", marks=pytest.mark.breadth),
        ("updates", "phase='updates') at 'down'"),
        pytest.param("two places", "phase='forward') at 'down'", marks=pytest.mark.breadth),
    ],
)
def test_every_rank_names_the_rank_that_raised_and_the_step(case: str, step: str, found: Found) -> None:
    require_named(found, case, step)


@pytest.mark.breadth
@pytest.mark.parametrize("case", ["forward", "backward"])
def test_every_rank_of_a_mesh_with_two_dimensions_names_it_too(case: str, found_wide: Found) -> None:
    require_named(found_wide, case, f"phase='{case}') at 'down'")


def require_named(found: Found, case: str, step: str) -> None:
    last = len(found) - 1
    for rank in found:
        error, _ = rank[case]
        assert isinstance(error, slapo.VerifyError), error
        assert error.rank == last
        first, blamed, named = error.message.splitlines()
        assert f" raises on rank {last} " in first
        assert f": ValueError: out of paint on rank {last} (" in first
        assert "the steps that cause it" in blamed
        assert named.startswith(f"    #5 fail(({last},), {step}  (")


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("unsendable", "UnsentError: number {last} ("),
        pytest.param("exit", "SystemExit: 3 (", marks=pytest.mark.breadth),
    ],
)
def test_whatever_is_raised_is_told(case: str, text: str, found: Found) -> None:
    last = len(found) - 1
    for rank in found:
        first, *_ = rank[case][0].message.splitlines()
        assert f" raises on rank {last} " in first
        assert f": {text.format(last=last)}" in first


def test_first_of_equal_errors_is_named(found: Found) -> None:
    for rank in found:
        text = rank["two ranks"][0].message
        assert " raises on rank 0 " in text
        assert ": ValueError: out of paint on rank 0 (" in text
        assert "Connection" not in text
        assert f"#5 fail((0, {len(found) - 1}), phase='forward') at 'down'" in text


def test_a_rank_that_leaves_out_a_collective_ends_the_others_wait(found: Found) -> None:
    for rank in found:
        text = rank["left out"][0].message
        assert "waits in a collective" in text
        assert "finished without entering it" in text
        assert f"#5 leave_out(({len(found) - 1},)) at 'head'" in text


@pytest.mark.breadth
def test_after_a_failure_verify_and_the_users_groups_work(found: Found, found_wide: Found) -> None:
    for ranks, total in ((found, 2 * 2 * 2), (found_wide, 8 * 2 * 4 * 4)):
        for rank in ranks:
            report, _ = rank["right"]
            assert report == ranks[0]["right"][0]
            assert (report.world_size, report.notes) == (len(ranks), ())
        assert {seen for rank in ranks for _, seen in rank.values()} == {total}


def interrupted() -> Any:
    last = dist.get_world_size() - 1
    try:
        return outcome(scheduled({"tp": 2}, ("down", Fail((last,), "forward", "interrupt"))))
    except KeyboardInterrupt:
        return "interrupted"


def test_an_interrupted_rank_leaves_at_once_and_the_other_one_hears_of_it() -> None:
    other, interrupted_rank = run_ranks(interrupted, world_size=2, timeout=LIMIT)
    assert interrupted_rank == "interrupted"
    assert isinstance(other, slapo.RankFailedError)
    assert other.first == 1
    assert "rank 1: KeyboardInterrupt: " in other.message


def test_a_declared_mesh_names_the_rank_that_raised() -> None:
    sch = scheduled({"tp": 2}, ("down", Fail((1,), "backward")))
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, INPUTS, timeout=LIMIT)
    assert caught.value.rank == 1
    assert "ValueError: out of paint on rank 1 (" in caught.value.message
    assert "#5 fail((1,), phase='backward') at 'down'" in caught.value.message


def test_a_declared_mesh_names_the_rank_that_was_killed() -> None:
    sch = scheduled({"tp": 2}, ("down", Fail((1,), "forward", "kill")))
    with pytest.raises(slapo.RankFailedError) as caught:
        slapo.verify(sch, INPUTS, timeout=LIMIT)
    assert caught.value.first == 1
    assert "first on rank 1\n" in caught.value.message
    assert "The process ended by signal SIGKILL" in caught.value.failures[1]


def broken() -> list[str]:
    """A rank that raises ends the wait of the other one in whatever collective of the mesh; then all works again."""
    mesh = declare_mesh({"tp": 2})
    seen = []
    with World(mesh) as world, world.trial_mesh(None) as own:
        assert own is not None

        def run(way: str) -> None:
            if dist.get_rank() == 1:
                raise ValueError(way)
            one, group = torch.ones(1), own.group("tp")
            assert group is not None
            if way == "broadcast":
                dist.broadcast(one, src=1, group=group)
            elif way == "asynchronous":
                dist.all_reduce(one, group=group, async_op=True).wait()
            elif way == "object":
                dist.all_gather_object([None, None], "x", group=group)
            elif way == "receive":
                dist.recv(one, src=1, group=group)
            else:
                torch.ops._c10d_functional.wait_tensor(
                    torch.ops._c10d_functional.all_reduce(one, "sum", group.group_name)
                )

        for way in ("broadcast", "asynchronous", "object", "receive", "by name"):
            failures = world.attempt(lambda way=way: run(way)).failures  # type: ignore[misc]
            seen.append(f"{[str(failure).partition(' (')[0] for failure in failures]}")
        seen.append(str(world.attempt(lambda: user_groups_sum(own)).value()))
    return [*seen, str(user_groups_sum(mesh))]


def test_a_rank_that_raises_ends_the_wait_in_the_groups_of_a_trial() -> None:
    first, second = run_ranks(broken, world_size=2, timeout=LIMIT)
    ways = ["broadcast", "asynchronous", "object", "receive", "by name"]
    assert first == second == [*(f"['ValueError: {way}']" for way in ways), "8.0", "8.0"]
