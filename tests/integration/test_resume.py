"""A checkpoint of any layout goes on under every other one: torch, Megatron, DeepSpeed, with their pipelines."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_runtime import engine
from slapo_runtime.weights import loading
from slapo_testing import preload_modules, run_ranks
from tests.integration.dialects import state_cells
from tests.integration.dialects.layouts import LAYOUTS
from tests.integration.dialects.small import build, train
from tests.integration.dialects.state_cells import StateCell
from tests.processor import Outcome, run_case
from tests.support.checkpoints import stored

pytestmark = pytest.mark.ranks
preload_modules("deepspeed", "slapo_tp", "slapo_pipeline", "torch.distributed.fsdp", "tests.support.cpu_megatron")

SAMPLE = (
    "plain",
    "tp2, sequences",
    "ZeRO-1, dp2",
    "pp2 x fsdp2",
    "Megatron, pp2 x dp2",
)
"""All pairs of all layouts are in docs/results/state_matrix.md, by tools/state_matrix.py."""

RING = list(LAYOUTS) if os.environ.get("SLAPO_TEST_WHOLE") else SAMPLE
CELLS = [StateCell(layout, RING[number - 1]) for number, layout in enumerate(RING)]
"""Each layout after the one before it, of as many ranks or fewer; the first one after the last one."""


def apart(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups, the first of which the second stage has no parameters of."""
    own = parameters[-1:] if dist.get_rank() < 2 else []
    rest = [parameter for parameter in parameters if not own or parameter is not own[0]]
    return torch.optim.AdamW([{"params": own}, {"params": rest}])


BF16 = {"bf16": {"enabled": True}}


def in_stages(directory: Path) -> list[str]:
    """Masters of DeepSpeed's pipeline in bfloat16, resumed bit for bit."""
    form, options = "ZeRO-1 pp2 tp2", {"config": BF16, "dtype": torch.bfloat16}
    one = build(form, **options)
    train(one, 0, 2)
    one.save(directory)
    train(one, 2, 4)
    other = build(form, seed=7, **options)
    other.load(directory)
    other.check_replicas()
    train(other, 2, 4)
    state, wanted = other.state_dict(), one.state_dict()
    differing = [name for name in wanted if not torch.equal(state[name], wanted[name])]
    has_main = any(tensor.dtype == torch.float32 for tensor in stored(directory).values())
    return differing + ([] if has_main else ["no masters"])


def refused() -> str:
    """What is said of groups that stages do not share."""
    try:
        build("ZeRO-1 pp2 tp2", optimizer=apart)
    except slapo.BuildError as error:
        return str(error)
    return "fine"


class Found(NamedTuple):
    """What a rank found: what differs in each cell; and on four ranks, further cases."""

    differing: dict[str, list[str]]
    masters: Outcome[list[str]] | None = None
    refused: str | None = None


def save_and_load(saving: Sequence[StateCell], loading: Sequence[StateCell], directory: Path) -> Found:
    """Write the checkpoints that some cells load, and run others."""
    state_cells.save(saving)
    differing = {str(cell): found for cell in loading if (found := list(cell.differences()))}
    if not dist.is_initialized() or dist.get_world_size() < 4:
        return Found(differing)
    return Found(differing, run_case(BF16, in_stages, directory / "masters"), refused())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each rank found, around the ring in the order of the numbers of ranks."""
    directory = tmp_path_factory.mktemp("saved")
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(state_cells.DIRECTORY, str(directory))
        for size in (1, 2, 4):
            saving = [cell for cell in CELLS if state_cells.world_size(cell.mesh) == size]
            loading = [cell for cell in CELLS if cell.world_size == size]
            if size == 1:
                state_cells.save(saving)
            else:
                results += run_ranks(save_and_load, saving, loading, directory, world_size=size, timeout=1800)
        return [save_and_load([], [cell for cell in CELLS if cell.world_size == 1], directory), *results]


def test_every_layout_goes_on_where_another_one_was(found: list[Found]) -> None:
    assert [rank.differing for rank in found] == [{}] * 7


def test_masters_of_a_pipeline_are_resumed_bit_for_bit(found: list[Found]) -> None:
    assert [rank.masters.get() for rank in found if rank.masters is not None] == [[]] * 4


def test_groups_that_stages_do_not_share_are_refused(found: list[Found]) -> None:
    for rank in found[-4:]:
        assert rank.refused is not None
        assert "group 0 of the optimizer" in rank.refused
        assert "on rank 1 of 'pp': " in rank.refused


def without_a_moment(load: Any) -> Any:
    """Load the optimizer's state of all parameters but the first one."""

    def loaded(self: torch.optim.Optimizer, state: Any) -> None:
        load(self, {**state, "state": {key: one for key, one in state["state"].items() if key}})

    return loaded


def without(_: Any) -> Any:
    """Load nothing."""
    return lambda *_: None


LOST: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "after 2 steps: ['embedding.weight::exp_avg'": (torch.optim.Optimizer, "load_state_dict", without_a_moment),
    "the loss of step 4": (engine, "resume", without),
    "the RNG of replica 0": (loading, "restore", without),
}


def test_what_is_lost_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the comparisons of the other test say where something is not loaded."""
    monkeypatch.setenv(state_cells.DIRECTORY, str(tmp_path))
    cell = StateCell("plain", "plain")
    state_cells.save([cell])
    assert list(cell.differences()) == []
    for what, (owner, name, broken) in LOST.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken(getattr(owner, name)))
            found = list(cell.differences())
        assert any(one.startswith(what) for one in found), (what, found)
