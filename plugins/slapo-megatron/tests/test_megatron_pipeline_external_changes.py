"""What changed in one stage between two steps is refused on its rank, which ends the job; taken back, it trains on."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import slapo_core as slapo
from slapo_testing import run_ranks
from tests.messages import Messages
from tests.support import tied_model

pytestmark = pytest.mark.ranks

_DISTRIBUTED = {"use_distributed_optimizer": True}


def cut(sch: slapo.Schedule) -> None:
    sch["blocks.0"].pipeline_split()


def on_rank() -> dict[str, tuple[str, list[float]]]:
    from tests.support.cpu_megatron import install

    install()
    found = {}
    for name, options in {"plain": {}, "distributed": {"optimizer_config": _DISTRIBUTED}}.items():
        sch, engine = tied_model.built(
            {"pp": 2}, target="megatron", steps=cut, microbatches=3, max_grad_norm=tied_model.CLIP, **options
        )
        losses = [float(engine.train_step(tied_model.batch(0)).loss)]
        frozen: Any = sch.model.get_parameter("blocks.0.q.weight")
        said = ""
        if dist.get_rank() == 0:  # the rank that holds it
            frozen.requires_grad_(False)
            with pytest.raises(slapo.BuildError) as refused:
                engine.train_step(tied_model.batch(1))
            said = refused.value.message
            frozen.requires_grad_(True)
        losses += [float(engine.train_step(tied_model.batch(step)).loss) for step in (1, 2)]
        engine.close()
        found[name] = said, losses
    return found


def test_a_change_in_one_stage_is_refused_and_undone_the_engine_trains_on(message: Messages) -> None:
    losses, _, _ = tied_model.trained()
    first, second = run_ranks(on_rank, world_size=2, timeout=300)
    for name in first:
        message(first[name][0], "'blocks.0.q.weight'", "frozen")
        for _, found in (first[name], second[name]):
            assert found == pytest.approx(losses, rel=2e-6)
