"""Split modules are traced whole by ``torch.compile``, collectives and hooks included, with the right gradients."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_core as slapo
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


class Language(nn.Module):
    """Embedding, a layer of two, head, with one weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer, self.head = nn.Embedding(12, 6), mlp(), nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: Tensor, has_head: bool = True) -> Tensor:
        hidden = self.layer(self.embed(ids))
        if not has_head:
            return hidden.square().mean()
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def split_language(sch: Any) -> None:
    split_mlp(sch["layer"])
    sch["embed"].shard("weight", axis=0)
    sch["embed"].sync("fwd_post", "all_reduce")
    sch["head"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")


def losses(model: nn.Module, run: Any, has_head: bool) -> list[float]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for seed in range(3):
        ids = torch.randint(0, 12, (3, 5), generator=torch.Generator().manual_seed(seed))
        loss = run(ids, has_head)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def compiled_inside(model: Any, way: str) -> Any:
    """Compile by a way that torch has; return what to call."""
    compiled = functools.partial(torch.compile, backend="eager")
    path, _, how = way.partition(" ")
    module = model.get_submodule(path) if path != "model" else model
    if how == "in place":
        module.compile(backend="eager")
    elif how == "set back":
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, compiled(module))
    return compiled(model) if how == "around" else model


PATHS = ("layer", "layer.0", "layer.2", "head", "embed")
WAYS = (*(f"{path} {how}" for path in PATHS for how in ("in place", "set back")), "model in place", "model around")


def check_compiled_layers(cases: list[tuple[str, bool]]) -> None:
    plain = {has_head: losses(one := Language(), one, has_head) for has_head in (True, False)}
    for way, has_head in cases:
        sch: Any = slapo.create_schedule(Language(), mesh={"tp": 2})
        split_language(sch)
        run = compiled_inside(sch.model, way)
        assert losses(sch.model, run, has_head) == pytest.approx(plain[has_head], rel=1e-12), (way, has_head)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "cases",
    [
        [("layer.0 in place", True), ("embed set back", False)],  # whose weight is that of a head that does not run
        pytest.param([(way, has_head) for way in WAYS for has_head in (True, False)], marks=pytest.mark.breadth),
    ],
    ids=["some", "all"],
)
def test_synced_layers_that_torch_compiles_in_place_or_apart_train_as_the_plain_model(cases: Any) -> None:
    run_ranks(functools.partial(check_compiled_layers, cases), world_size=2)
