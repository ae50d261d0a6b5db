"""Negative controls on a real BERT: whichever collective is missing, verify fails and names steps near it.

Where the missing one leaves a partial sum, build refuses the schedule before anything runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.internals import Internals
from slapo_testing import preload_modules, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.breadth]
preload_modules("transformers.models.bert.modeling_bert")

SYNCS = 11
VERIFIED = (0, 1, 8, 10)
"""Backward and forward of an attention; the head; the embedding."""


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
            max_position_embeddings=12,
        )
    )  # fmt: skip


def split(sch: Any, *, without: int | None) -> str:
    """Split layers and the tied vocabulary; the path of the collective that was left out."""
    syncs: list[tuple[Any, str]] = []
    for layer in sch["bert.encoder.layer.*"]:
        for name in ("query", "key", "value"):
            layer[f"attention.self.{name}"].shard(["weight", "bias"], axis=0)
        layer["attention.output.dense"].shard("weight", axis=1)
        layer["intermediate.dense"].shard(["weight", "bias"], axis=0)
        layer["output.dense"].shard("weight", axis=1)
        syncs += [(layer["attention.self"], "backward"), (layer["attention.output.dense"], "forward")]
        syncs += [(layer["intermediate.dense"], "backward"), (layer["output.dense"], "forward")]
    sch["cls.predictions"].shard("bias", axis=0)
    sch["cls.predictions.decoder"].shard("weight", axis=0)
    syncs += [(sch["cls.predictions.decoder"], mode) for mode in ("backward", "forward")]
    syncs += [(sch["bert.embeddings.word_embeddings"], "forward")]
    assert len(syncs) == SYNCS
    for position, (node, mode) in enumerate(syncs):
        if position != without:
            node.sync(mode)
    return syncs[without][0].path if without is not None else ""


def schedules_by_missing_sync() -> dict[int, tuple[str, list[str]]]:
    """Of each collective that was left out: where it belongs, and what is said to be missing."""
    found = {}
    for number in range(SYNCS):
        sch = slapo.create_schedule(bert(), mesh={"tp": 2})
        path = split(sch, without=number)
        found[number] = path, [str(one) for one in Internals(sch).hooks.call("slapo_check", schedule=sch)[0]]
    return found


def test_each_partial_sum_of_a_bert_that_nobody_reduces_is_refused_by_build() -> None:
    for number, (path, missing) in schedules_by_missing_sync().items():
        is_partial = path.endswith((".output.dense", "word_embeddings"))
        assert len(missing) == is_partial, (number, path, missing)
        if is_partial:
            assert f"the output of '{path}' a partial sum" in missing[0]
            assert missing[0].endswith(f'; add sch[\'{path}\'].sync("fwd_post", "all_reduce")')


def verify_each() -> list[tuple[str, list[str]]]:
    ids = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "labels": ids}
    whole = slapo.create_schedule(bert(), mesh={"tp": 2})
    split(whole, without=None)
    assert not slapo.verify(whole, batch, optimizer_steps=1).not_compared
    assert Internals(whole).hooks.call("slapo_check", schedule=whole) == [[]]
    found = []
    for number in VERIFIED:
        sch = slapo.create_schedule(bert(), mesh={"tp": 2})
        path = split(sch, without=number)
        try:
            slapo.verify(sch, batch, optimizer_steps=1)
        except slapo.VerifyError as error:
            found.append((path, error.steps))
        else:
            found.append((path, []))
    return found


def test_a_missing_collective_of_a_bert_is_found_and_steps_of_its_own_block_are_named() -> None:
    for path, steps in run_ranks(verify_each, world_size=2)[0]:
        assert steps, f"nobody noticed that the sync at {path} is missing"
        layer = ".".join(path.split(".")[:4])
        near = (layer,) if "encoder" in path else ("cls.predictions", "bert.embeddings.word_embeddings")
        assert all(any(place in step for place in near) for step in steps), (path, steps)
