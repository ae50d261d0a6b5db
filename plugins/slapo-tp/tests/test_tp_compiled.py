"""Split modules are traced whole by ``torch.compile``, collectives and hooks included, with the right gradients."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slapo_testing import preload_modules, run_ranks

from .checks import differs_from_untouched, rand, same_as_untouched

preload_modules("transformers.models.bert.modeling_bert")


def whole(backend: str) -> dict[str, Any]:
    return {"run": functools.partial(torch.compile, backend=backend, fullgraph=True)}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


def split_mlp(sch: Any) -> None:
    sch["0"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def forget_the_gradient(sch: Any) -> None:
    sch["0"].shard(["weight", "bias"], axis=0)
    sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def bert_layer() -> nn.Module:
    from transformers.models.bert.modeling_bert import BertConfig, BertLayer

    config = BertConfig(
        hidden_size=16, num_attention_heads=4, intermediate_size=24, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    return BertLayer(config)


def split_bert_layer(sch: Any) -> None:
    attention = sch["attention"]
    for name in ("query", "key", "value"):
        attention[f"self.{name}"].shard(["weight", "bias"], axis=0)
    attention["self"].shard_attribute(["num_attention_heads", "all_head_size"]).sync("bwd_post", "all_reduce")
    attention["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def check(cache: str) -> None:
    torch._inductor.config.compile_threads = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        for backend in ("aot_eager", "inductor"):  # what "eager" does is a part of what "aot_eager" does
            same_as_untouched(mlp, split_mlp, (rand(3, 6),), **whole(backend))
        differs_from_untouched(mlp, forget_the_gradient, (rand(3, 6),), **whole("aot_eager"))
        same_as_untouched(bert_layer, split_bert_layer, (rand(2, 5, 16),), **whole("aot_eager"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = tmp_path_factory.getbasetemp()
    # With test_fusion_fuse.py, which another process may run: torch's headers are compiled once.
    return (own.parent if own.name.startswith("popen-") else own) / "inductor"


@pytest.mark.breadth
@pytest.mark.ranks
def test_a_split_mlp_and_a_split_bert_layer_compile_into_one_graph(cache: Path) -> None:
    run_ranks(functools.partial(check, str(cache)), world_size=2)
