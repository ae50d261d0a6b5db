"""Vocabularies that do not divide by the ranks: padded, and nobody sees it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks

from .checks import CLOSE, same_as_untouched

preload_modules("transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2")
preload_modules("transformers.models.llama.modeling_llama", "transformers.models.t5.modeling_t5")


def ids(vocabulary: int, length: int = 6) -> torch.Tensor:
    found = torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(3))
    found[0, 0], found[-1, -1] = 0, vocabulary - 1  # both ends
    return found


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "use_cache": False}
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, bos_token_id=0, eos_token_id=0, **sizes, **off))


def split_gpt2(sch: slapo.Schedule) -> None:
    sch["transformer.wte"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
    sch["lm_head"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def split_bert(sch: slapo.Schedule) -> None:
    sch["cls.predictions"].shard("bias", axis=0, pad=True)
    sch["cls.predictions.decoder"].shard("weight", axis=0, pad=True).sync("backward").sync("forward")
    sch["bert.embeddings.word_embeddings"].sync("forward")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=33, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def split_llama(sch: slapo.Schedule) -> None:
    sch["model.embed_tokens"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
    sch["lm_head"].shard("weight", axis=0, pad=True).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=30, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_decoder_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def split_t5(sch: slapo.Schedule) -> None:
    sch["shared"].shard("weight", axis=0, pad=True)
    for stack in ("encoder", "decoder"):
        sch[f"{stack}.embed_tokens"].sync("fwd_post", "all_reduce")
    sch["lm_head"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")


def words() -> nn.Module:
    """Of the embedding, the last of four ranks has nothing but padding."""
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 7))


def gathered_above(sch: slapo.Schedule) -> None:
    sch["0"].shard("weight", axis=0, pad=True).sync("forward")
    sch["1"].shard(["weight", "bias"], axis=0, pad=True).sync("backward")
    sch.sync("fwd_post", "all_gather")


def traced(sch: slapo.Schedule) -> None:
    sch["0"].shard("weight", axis=0, pad=True).sync("forward")
    sch["1"].shard(["weight", "bias"], axis=0, pad=True).sync("backward").sync("forward")
    sch.trace(flatten=True, example_inputs=ids(9))


def labeled(vocabulary: int) -> dict[str, torch.Tensor]:
    labels = ids(vocabulary)
    labels[0, 1] = -100  # ignored
    return {"input_ids": ids(vocabulary), "labels": labels}


def check_models() -> None:
    momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    adam = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    cases: list[tuple[Callable[[], nn.Module], Callable[[slapo.Schedule], None], int, str]] = [
        (gpt2, split_gpt2, 97, "lm_head"),
        (bert, split_bert, 30, "cls.predictions.decoder"),
        (llama, split_llama, 33, "lm_head"),
        (t5, split_t5, 30, "lm_head"),
    ]
    for number, (build, split, vocabulary, head) in enumerate(cases):
        sch = same_as_untouched(build, split, kwargs=labeled(vocabulary), optimizer=adam if number % 2 else momentum)
        rows = -(-vocabulary // 4)
        own = max(0, min(rows, vocabulary - rows * dist.get_rank()))
        linear = sch[head].module
        assert linear.out_features == linear.weight.shape[0] == rows
        for tensor in filter(lambda each: each is not None, (linear.weight, linear.bias)):
            assert not tensor[own:].any()
            assert not tensor.grad[own:].any()
        state = slapo.state_dict(sch)
        reference = build().state_dict()
        assert {key: value.shape for key, value in state.items()} == {k: v.shape for k, v in reference.items()}
    for split in (gathered_above, traced):
        sch = same_as_untouched(words, split, (ids(9),))
    for unknown in (9, 12, -1):
        with pytest.raises(IndexError):
            sch["0"].module(torch.tensor([unknown]))


def engine(mesh: dict[str, int] | None, device: str = "cpu", **options: Any) -> Any:
    torch.manual_seed(7)
    with torch.device(device):
        sch = slapo.create_schedule(gpt2().double(), mesh=mesh, example_inputs=labeled(97))
    if mesh is not None:
        split_gpt2(sch)
    if "pp" in (mesh or {}):
        sch["transformer.h.0"].pipeline_split()
    return slapo.build(sch, optimizer=functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1), **options)


def check_engines(directory: Path) -> dict[str, torch.Tensor]:
    """What four ranks trained and saved goes on under other meshes, in stages and from the meta device too."""
    torch.manual_seed(0)
    whole = gpt2().double().state_dict()
    batch = {"input_ids": ids(97), "labels": ids(97)}
    first = engine({"tp": 4}, "meta")
    first.load_state_dict(whole)
    first.train_step(batch)
    first.save(directory)
    others = [engine({"dp": 2, "tp": 2}, "meta"), engine({"pp": 2, "tp": 2}, microbatches=2)]
    trained = first.state_dict()
    assert {name: value.shape for name, value in trained.items()} == {key: one.shape for key, one in whole.items()}
    for other in others:
        other.load(directory)
        torch.testing.assert_close(other.state_dict(), trained, rtol=0, atol=0)
    first.train_step(batch)
    trained = first.state_dict()
    for other in others:
        other.train_step(batch)
        torch.testing.assert_close(other.state_dict(), trained, **CLOSE)
    return trained


@pytest.mark.ranks
def test_padded_vocabularies_are_not_seen(tmp_path: Path) -> None:
    trained = run_ranks(check_on_four, tmp_path, world_size=4)[0]
    plain = engine(None)
    plain.load(tmp_path)
    plain.train_step({"input_ids": ids(97), "labels": ids(97)})
    torch.testing.assert_close(plain.state_dict(), trained, **CLOSE)


def check_on_four(directory: Path) -> dict[str, torch.Tensor]:
    check_models()
    return check_engines(directory)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_padded_schedule_is_the_same_at_every_size(size: int) -> None:
    model = gpt2()
    before = dict(model.named_parameters())
    rows = model.lm_head.weight.detach().clone()
    sch = slapo.create_schedule(gpt2(), mesh={"tp": 4})
    split_gpt2(sch)
    again = slapo.replay(model, sch.to_json(), mesh={"tp": size}, rank=size - 1)
    assert again.records == sch.records
    own = -(-97 // size)
    wanted = torch.cat([rows, torch.zeros(size * own - 97, 8)])[-own:]
    assert torch.equal(model.lm_head.weight, wanted)
    assert model.lm_head.weight is model.transformer.wte.weight
    again.undo(to=0)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


@pytest.mark.ranks
def test_a_padded_gather_is_estimated() -> None:
    sch = slapo.create_schedule(gpt2(), mesh={"tp": 4})
    split_gpt2(sch)
    collectives = sch.estimate(labeled(97)).kinds[0].collectives
    assert [(each.kind, each.bytes) for each in collectives] == [
        ("all_reduce", 2 * 6 * 8 * 4), ("all_gather", 2 * 6 * 25 * 4), ("all_reduce", 2 * 6 * 8 * 4),
    ]  # fmt: skip


def test_padding_shows_in_the_record_and_stays_when_another_axis_is_split() -> None:
    sch = slapo.create_schedule(words(), mesh={"ep": 2, "tp": 4}, rank=3)
    gathered_above(sch)
    assert sch.records[0].edits[0] == "weight (9, 4) -> (3, 4), tp: S(0), padded by 3 on axis 0"
    sch["1"].shard("weight", axis=1, mesh_dim="ep")
    assert sch["1"].layout("weight").padding == ((0, 1),)
    assert sch["1"].layout("weight").local_shape(sch.mesh) == (2, 2)
