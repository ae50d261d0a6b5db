"""A checkpoint of a cut transformers model is one that transformers reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from tests.support.building import on_meta, real
from tests.support.staged import build, in_turn

IDS = {name: torch.arange(24).view(3, 8) % 11 for name in ("input_ids", "labels")}


def save(directory: str) -> tuple[dict[str, torch.Tensor], str]:
    with in_turn():
        sch = slapo.create_schedule(on_meta("gpt2"), mesh={"pp": 2}, example_inputs={**IDS, "use_cache": False})
        sch["transformer.h.0"].pipeline_split()
        engine = build(sch, weights=real("gpt2", seed=3).state_dict(), max_grad_norm=1.0)
    engine.state.export(f"{directory}/saved")
    state = engine.state.state_dict()
    if engine.mesh.is_first_rank:
        engine.module.save_pretrained(f"{directory}/by transformers", state_dict=dict(state))  # it empties it
    with pytest.raises(slapo.SealedError) as error:
        slapo.save_pretrained(sch, directory)
    return state, str(error.value)


@pytest.mark.ranks
def test_transformers_reads_the_checkpoint_of_a_cut_model(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    results = run_ranks(save, str(tmp_path), world_size=2)
    expected = real("gpt2", seed=3).state_dict()
    for state, told in results:
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        assert "engine.state_dict()" in told
    for directory in ("saved", "by transformers"):
        model = GPT2LMHeadModel.from_pretrained(tmp_path / directory)
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())
        assert model.lm_head.weight is model.transformer.wte.weight
