"""Collectives that an estimate lists: as many as torch's own count, of the bytes that one works out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.modules.module import register_module_forward_hook

import slapo_core as slapo
from slapo_estimate.private import FakeStore, FakeTensorMode
from slapo_estimate.results import Assumptions, CollectiveCall
from slapo_estimate.simulation import Request, estimate_rank, fake_batch, without_memory
from slapo_estimate.values import KnownValues
from slapo_runtime.launcher import run_process
from tests.integration.bank.models import LENGTH, MODELS, batch_of
from tests.integration.bank.right import base
from tests.integration.zoo.tensor_parallel import split
from tests.tiers import sampled


@dataclass(frozen=True)
class Case:
    """A schedule; also the source that a rank's process makes it from.

    Args:
        model: of the bank, or ``"wide"``: a BERT of eight heads.
        kind: of :func:`base`.
        tp: ranks.
        checkpoint: a glob.
    """

    model: str
    kind: str
    tp: int
    checkpoint: str = ""

    @property
    def name(self) -> str:
        return f"{self.model}/{self.kind}/{self.tp}{'/checkpointed' if self.checkpoint else ''}"

    @property
    def mesh(self) -> dict[str, int]:
        return {"tp": self.tp}

    @property
    def batch(self) -> Any:
        return batch_of("bert" if self.model == "wide" else self.model, size=2)

    def schedule(self, mesh: Any = None, example_inputs: Any = None) -> slapo.Schedule:
        with torch.device("meta"):
            model = wide() if self.model == "wide" else MODELS[self.model]()
        sch = slapo.create_schedule(model, mesh=self.mesh)
        if self.model == "wide":
            split(sch)
        else:
            for step in base(self.model, self.kind).steps:
                step.apply(sch)
        if self.checkpoint:
            sch[self.checkpoint].checkpoint()
        return sch


def wide() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=44, hidden_size=32, num_hidden_layers=2, num_attention_heads=8, intermediate_size=64,
            max_position_embeddings=14,
        )
    )  # fmt: skip


CASES = (
    Case("bert", "whole", 4),
    Case("bert", "whole", 2, "bert.encoder.layer.*"),
    Case("gpt2", "each", 2, "transformer.h.1"),
    Case("llama", "sequence", 2),
    *sampled(
        (
            Case("wide", "all", 8, "bert.encoder.layer.0"),
            Case("bert", "each", 2),
            Case("gpt2", "whole", 4),
            Case("llama", "whole", 4, "model.layers.0"),
            Case("llama", "sequence", 2, "model.layers.*"),
            Case("t5", "each", 2, "*.block.1"),
            Case("qwen3", "whole", 2),
            Case("t5", "whole", 4),
            Case("vit", "whole", 2),
            Case("wide", "all", 8),
        ),
        5,
    ),
)


def play() -> dict[str, tuple[tuple[CollectiveCall, ...], dict[str, int]]]:
    """Each case: our list, and what torch's own mode counts in the same step."""
    found = {}
    for case in CASES:
        ours = estimate_rank(Request(case, case.mesh, 1, (1,), case.batch, torch.optim.SGD)).collectives
        dist.destroy_process_group()
        found[case.name] = (ours, judged(case))
    return found


def judged(case: Case) -> dict[str, int]:
    dist.init_process_group("fake", rank=1, world_size=case.tp, store=FakeStore())
    schedule = case.schedule()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values = KnownValues(mode)
    without_memory(schedule, mode, values)
    batch, judge = fake_batch(case.batch, mode, values, Assumptions()), CommDebugMode()
    if case.model in ("t5", "vit"):  # its tracker of modules fails on a module that is held twice
        judge.advanced_module_tracker = NoModules()
    with mode, judge:
        schedule.model(**batch).loss.backward()
    dist.destroy_process_group()
    return {str(operation): count for operation, count in judge.get_comm_counts().items()}


class NoModules:
    """In place of the tracker of modules; with a hook, as that one, in whose presence nothing is summed in place."""

    name, is_bw, activation_checkpointing = "Global", False, False
    module_parents_dict: ClassVar[dict[str, set[str]]] = {"Global": set()}

    def __enter__(self) -> None:
        self.hook = register_module_forward_hook(lambda module, args, output: None)

    def __exit__(self, *_: Any) -> None:
        self.hook.remove()


KINDS = {
    "all_reduce": "c10d_functional.all_reduce",
    "all_gather": "c10d_functional.all_gather_into_tensor",
    "reduce_scatter": "c10d_functional.reduce_scatter_tensor",
}


@pytest.fixture(scope="module")
def played() -> dict[str, tuple[tuple[CollectiveCall, ...], dict[str, int]]]:
    return run_process(play, timeout=300)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_collectives_are_as_many_as_torch_counts(case: Case, played: Any) -> None:
    ours, judge = played[case.name]
    assert Counter(KINDS[each.kind] for each in ours) == judge
    assert sum(judge.values()) >= 8
    assert {(each.mesh_dim, each.ranks) for each in ours} == {("tp", case.tp)}


TOKENS = 2 * LENGTH * 4  # bytes of one float for every token


def test_bytes_are_those_of_the_tensors_that_a_rank_gives(played: Any) -> None:
    size, words = 20, 44

    def count(name: str) -> Counter[tuple[str, str, int]]:
        return Counter((each.kind, each.phase, each.bytes) for each in played[name][0])

    # BERT over 4: two sums of hidden states a layer each way; the head gives logits, the embedding sums rows.
    assert count("bert/whole/4") == {
        ("all_reduce", "forward", TOKENS * size): 5,
        ("all_reduce", "backward", TOKENS * size): 5,
        ("all_gather", "forward", TOKENS * words // 4): 1,
    }
    # Checkpointed: the sums of both layers once more, within the backward pass.
    assert count("bert/whole/2/checkpointed") == {
        ("all_reduce", "forward", TOKENS * size): 5,
        ("all_reduce", "backward", TOKENS * size): 9,
        ("all_gather", "forward", TOKENS * words // 2): 1,
    }
    # LLaMA with a split sequence of 24 features: pieces are gathered, whole sequences summed and scattered.
    assert count("llama/sequence/2") == {
        ("reduce_scatter", "forward", TOKENS * 24): 5,
        ("all_gather", "forward", TOKENS * 24 // 2): 5,
        ("all_gather", "forward", TOKENS * words // 2): 1,
        ("all_gather", "backward", TOKENS * 24 // 2): 5,
        ("reduce_scatter", "backward", TOKENS * 24): 5,
        ("all_reduce", "backward", 24 * 4): 5,  # of the norms' weights
    }


def test_each_collective_names_its_module_and_the_step_that_caused_it(played: Any) -> None:
    ours, _ = played["gpt2/each/2/checkpointed"]
    for each in ours:
        assert each.record.endswith(f"at '{each.module}'"), each
        assert "sync(" in each.record, each
    backward = [each for each in ours if each.phase == "backward"]
    # The second layer is checkpointed: its first sum comes again (nothing needs the last one), then its gradients'.
    assert [(each.module.removeprefix("transformer."), each.record.split(" ")[1]) for each in backward] == [
        ("lm_head", "sync('bwd_post',"),
        ("h.1.attn.c_proj", "sync('fwd_post',"),
        ("h.1.mlp.c_fc", "sync('bwd_post',"),
        ("h.1.attn.c_attn", "sync('bwd_post',"),
        ("h.0.mlp.c_fc", "sync('bwd_post',"),
        ("h.0.attn.c_attn", "sync('bwd_post',"),
    ]


def test_sums_of_gradients_name_the_step_that_wrapped_the_norm(played: Any) -> None:
    ours, _ = played["llama/sequence/2"]
    norms = [each for each in ours if each.kind == "all_reduce"]
    assert [each.module for each in norms] == [
        "model.norm",
        "model.layers.1.post_attention_layernorm",
        "model.layers.1.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.layers.0.input_layernorm",
    ]
    for each in norms:
        assert each.record.endswith(f"sync_gradient('weight') at '{each.module}'"), each
