"""On a rank that has values for one stage only, the partition is that of every other rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from .staging import asked, cut_schedule
from .test_pipeline_containers import Outer

transformers = pytest.importorskip("transformers")


def stand_in(model: nn.Module, keep: str) -> None:
    """What ``build`` does on a rank: tensors that are not below ``keep`` go to the meta device."""
    kept = {id(tensor) for tensor in model.get_submodule(keep).parameters()} if keep else set()
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in kept:
                made = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = known.setdefault(id(parameter), made)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to("meta")


def described(made: Any) -> Any:
    partition = made.partition
    stages = [(each.inputs, each.uses, each.makes, each.last) for each in partition.stages]
    values = {name: (each.shape, each.dtype, each.requires_grad) for name, each in partition.values.items()}
    return stages, values, partition.ties, partition.output.names, made.liveness


class OfItsParameter(nn.Module):
    """Asks its parameters for their device and dtype, in code that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        h = self.a(x + self.table) + torch.arange(4, device=self.table.device, dtype=self.table.dtype)
        h = self.b(h.to(self.b.weight.device) * self.shift[None, :])
        return h * torch.ones(4, device=self.table.device)


def bert() -> tuple[nn.Module, dict[str, Any], list[str], str]:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=64
    )
    ids = torch.randint(0, 64, (2, 5))
    cuts = ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    batch = {"input_ids": ids, "attention_mask": ids.ne(3).long(), "labels": ids}
    return transformers.BertForMaskedLM(config), batch, cuts, "bert.encoder.layer.1"


CASES = [
    lambda: (Outer(), {"x": torch.rand(2, 3, 6)}, ["left.blocks.0", "right.blocks.1"], "left"),
    lambda: (OfItsParameter(), {"x": torch.rand(2, 4)}, ["a"], "b"),
    bert,
]


@pytest.mark.parametrize("case", CASES)
def test_partition_on_a_rank_with_stand_ins_is_the_same(case: Any) -> None:
    model, batch, cuts, keep = case()
    schedule = cut_schedule(model, cuts)
    wanted = described(asked(schedule, **batch))
    stand_in(model, keep)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert any(not parameter.is_meta for parameter in model.parameters())
    assert described(asked(schedule, **batch)) == wanted
    stand_in(model, "")
    assert described(asked(schedule, **batch)) == wanted, "all of it stands in"
    on_meta = {name: value.to("meta") for name, value in batch.items()}
    assert described(asked(schedule, **on_meta)) == wanted, "the batch too"


def test_a_stage_runs_on_a_rank_that_has_only_its_tensors() -> None:
    torch.manual_seed(0)
    model, batch, cuts, _ = CASES[1]()
    wanted = model(**batch)
    schedule = cut_schedule(model, cuts)
    first = asked(schedule, **batch)
    made = first.partition.stages[0].module({"x": batch["x"]}, {})
    for name in ("a.weight", "a.bias"):
        owner, _, own = name.partition(".")
        module = model.get_submodule(owner)
        module._parameters[own] = nn.Parameter(module._parameters[own].to("meta"))
    second = asked(schedule, **batch).partition.stages[1]
    torch.testing.assert_close(second.module(batch, made)[second.makes[0]], wanted)


def test_stages_follow_their_tensors_to_another_device() -> None:
    model, batch, cuts, _ = CASES[1]()
    made = asked(cut_schedule(model, cuts), **batch)
    model.to("meta")
    assert made.run({"x": batch["x"].to("meta")}).is_meta
