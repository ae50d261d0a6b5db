"""What cannot be saved by the reference model's names is a limit of saving, and not of training."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.messages import Messages

pytestmark = pytest.mark.ranks
preload_modules("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "slapo_deepspeed.dialect")

MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}
CONFIGS: dict[str, dict[str, Any]] = {
    "Muon": {**MUON, "zero_optimization": {"stage": 2}},
    "ZeRO++": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    "another wrapper": {"zero_optimization": {"stage": 1}},
}


def said(call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except slapo.BuildError as error:
        return str(error)
    return "fine"


def trained(name: str, directory: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    engine = slapo.build(
        slapo.create_schedule(model, mesh={"dp": 2}),
        target="deepspeed",
        config=CONFIGS[name],
        optimizer=None if "optimizer" in CONFIGS[name] else lambda them: torch.optim.AdamW(them, lr=0.01),
        loss=lambda output, batch: output.square().mean(),
    )
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.compiler.set_stance("force_eager"):  # DeepSpeed compiles Muon's iteration, for minutes
        losses = [float(engine.train_step(batch).loss) for _ in range(4)]
    found = {"losses": losses, "save": said(engine.save, directory), "load": said(engine.load, directory)}
    found["state"] = said(engine.state_dict)
    engine.close()
    return found


def all_of(directory: Path) -> dict[str, dict[str, Any]]:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    found = {"ZeRO++": trained("ZeRO++", directory)}
    kept = DeepSpeedZeroOptimizer.__init__
    try:

        def made(self: Any, *arguments: Any, **options: Any) -> None:
            kept(self, *arguments, **options)
            self.__class__ = type("NewOptimizer", (DeepSpeedZeroOptimizer,), {})

        DeepSpeedZeroOptimizer.__init__ = made
        found["another wrapper"] = trained("another wrapper", directory)
    finally:
        DeepSpeedZeroOptimizer.__init__ = kept
    return found


@functools.cache
def found(directory: Path) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(all_of, directory, world_size=2)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return found(tmp_path_factory.mktemp("limits"))


def check(ranks: list[dict[str, Any]], state: str | None, message: Messages) -> None:
    for rank in ranks:
        assert rank["losses"][-1] < rank["losses"][0]
        assert rank["state"] == (state or rank["state"])
        assert "engine.deepspeed.save_checkpoint(directory)" in rank["load"]
    message(ranks[0]["save"], "cannot express", "save_checkpoint(directory)")


@pytest.mark.parametrize("name", ["ZeRO++", "another wrapper"])
def test_untested_settings_train_and_save_refuses_their_state(both: Any, name: str, message: Messages) -> None:
    check([rank[name] for rank in both], None, message)


@pytest.mark.breadth  # DeepSpeed compiles its Adam in C++ for it, for minutes
def test_muon_trains_and_save_refuses_its_state(tmp_path: Path, message: Messages) -> None:
    check(run_ranks(trained, "Muon", tmp_path, world_size=2), "fine", message)
