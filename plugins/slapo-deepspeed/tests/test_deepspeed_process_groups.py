"""DeepSpeed is started with the accelerator and the groups of the schedule, or it is said why not."""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_deepspeed.runtime import import_deepspeed, quietly
from slapo_runtime import installed
from slapo_testing import preload_modules, run_ranks
from tests.messages import Messages

from .planned import plan, refusal

preload_modules("deepspeed", "slapo_deepspeed.dialect")


def installed_is(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(installed, "version", version)
    monkeypatch.setattr(installed, "requires", lambda name: ["deepspeed>=0.19"])


@pytest.mark.parametrize(("found", "word"), [(None, "not installed"), ("0.18.9", "0.18.9 is installed")])
def test_another_deepspeed_is_refused_when_a_plan_is_made(
    monkeypatch: pytest.MonkeyPatch, found: str | None, word: str, message: Messages
) -> None:
    installed_is(monkeypatch, found)
    message(refusal(), word, "pip install ")


def test_newer_versions_than_tested_give_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("0.19.0", "0.19.8", "0.19.9+cu128"):
        installed_is(monkeypatch, found)
        plan()
    installed_is(monkeypatch, "0.20.0")
    with pytest.warns(UserWarning, match=r"deepspeed 0.20.0 is newer than .* slapo-deepspeed is tested with, 0.19"):
        plan()


def test_a_plan_of_a_model_on_cpus_does_not_keep_a_later_one_from_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator, set_accelerator

    monkeypatch.setattr(comm.comm, "cdb", None)  # where another test in this process has made it communicate
    plan()
    before = get_accelerator()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        import_deepspeed("cuda")
        assert get_accelerator().device_name() == "cuda"
        plan()
        assert get_accelerator().device_name() == "cpu"
    finally:
        set_accelerator(before)


def test_another_accelerator_than_the_models_device_is_refused_with_both(
    monkeypatch: pytest.MonkeyPatch, message: Messages
) -> None:
    import_deepspeed("cpu")
    with pytest.raises(slapo.BuildError) as caught:
        import_deepspeed("cuda")
    message(caught, "on 'cuda'", "on 'cpu'", "build(device='cpu')")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(slapo.BuildError, match="'cpu': DS_ACCELERATOR=cpu"):
        import_deepspeed("cuda")


def test_warnings_are_silenced_in_a_block_alone() -> None:
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    with quietly():
        assert not logger.isEnabledFor(logging.WARNING)
    assert logger.level == before


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _trained(mesh: dict[str, int] | None) -> list[float]:
    torch.manual_seed(0)
    schedule = slapo.create_schedule(nn.Linear(4, 2), mesh=mesh)
    config = {"zero_optimization": {"stage": 1}}
    engine = slapo.build(schedule, target="deepspeed", config=config, optimizer=_sgd, loss=_loss)
    losses = [float(engine.train_step(torch.ones(2, 4)).loss) for _ in range(2)]
    engine.close()
    return losses


def _alone_and_again(directory: str) -> list[Any]:
    """A process without a group, then with groups that were destroyed and made again."""
    import torch.distributed as dist

    rank = dist.get_rank()
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    found: list[Any] = [_trained(None), dist.is_initialized() and dist.get_world_size(), os.environ["LOCAL_RANK"]]
    for number in range(2):
        dist.destroy_process_group()
        store = dist.FileStore(str(Path(directory) / str(number)), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        found.append(_trained({"dp": 2}))
    return found


@pytest.mark.ranks
def test_a_process_alone_gets_a_group_and_groups_may_be_made_again(tmp_path: Path) -> None:
    alone, size, local_rank, first, second = run_ranks(_alone_and_again, str(tmp_path), world_size=2)[0]
    assert (size, local_rank) == (1, "0")
    assert alone[0] > alone[1]
    assert first == second == pytest.approx(alone)
