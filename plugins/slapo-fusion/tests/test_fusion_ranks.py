"""``compile``, ``fuse`` and ``decompose`` beside the collectives of slapo-tp, on two ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo
from slapo_fusion import Compile, Decompose, Fuse
from slapo_testing import preload_modules, run_ranks

preload_modules("transformers.models.bert.modeling_bert", "slapo_tp")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.down(F.gelu(self.up(x)))) + x)


def split(sch: Any) -> None:
    sch["*.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["*.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def scheduled(blocks: int = 2) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp() for _ in range(blocks)))
    return slapo.create_schedule(model, mesh={"tp": 2}, example_inputs=X)


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def compiled_before_and_after_the_split() -> None:
    for first in (True, False):
        sch = scheduled(blocks=2 if first else 1)  # two with one code once: every verify compiles them anew
        if first:
            split(sch)
        sch["*"].apply(Compile(backend="eager", fullgraph=True))
        if not first:  # the parameters that were there when it was compiled are no longer there
            sch.model(X)
            split(sch)
        slapo.verify(sch, X)


def collectives_of_traced_and_compiled_layers_are_observed_as_they_run() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    sch = scheduled()
    split(sch)
    sch["*"].trace(flatten=True)
    sch["*"].apply(Compile(backend=counter, fullgraph=True))
    x = X.clone().requires_grad_()
    sch.model(x).sum().backward()
    compiled = counter.frame_count
    found = slapo.observe(sch, x)
    assert not found.missing, found.missing
    assert [each.seen for each in found.findings if "compile" in each.source] == [
        "compiled code with no graph breaks"
    ] * 2
    assert sum(found.record.collectives.values()) == 4
    sch.model(x).sum().backward()
    assert counter.frame_count == compiled


def a_lost_collective_is_found_in_compiled_code() -> None:
    sch = scheduled(blocks=1)
    sch["*.up"].shard(["weight", "bias"], axis=0)
    sch["*.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch["*"].apply(Compile(backend="eager", fullgraph=True))
    with pytest.raises(slapo.VerifyError, match="gradient"):
        slapo.verify(sch, X)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


_ANY = slapo.patterns.any_constant()


def dropout_add(x: Any, residual: Any, p: Any = _ANY, training: Any = _ANY) -> Any:
    return F.dropout(x, p, training) + residual


def decomposed_and_fused() -> None:
    sch = scheduled()
    split(sch)
    sch["*.up"].apply(Decompose())
    sch["*.down"].apply(Decompose())
    slapo.verify(sch, X)
    sch["*"].trace(flatten=True)
    sch["*"].apply(Fuse(bias_gelu, "eager", name_="bias_gelu"))
    sch["*"].apply(Fuse(dropout_add, "torchscript", name_="dropout_add"))
    code = str(sch["0"].graph)
    assert "bias_gelu(" in code
    assert "all_reduce" in code  # of the row-split layer, between its product and its bias
    slapo.verify(sch, X)


def fused_beside_a_sync() -> None:
    sch = scheduled()
    split(sch)
    sch["*"].trace()
    sch["*"].apply(Fuse(dropout_add, "aot_eager"))
    sch["0"].checkpoint()
    slapo.verify(sch, X)


def decomposed_before_it_is_split_or_synchronized() -> None:
    sch = scheduled()
    sch["0.down"].apply(Decompose())
    sch["1.down"].shard("weight", axis=1).apply(Decompose())
    sch["*.up"].apply(Decompose())
    sch["*.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["0.down"].shard("weight", axis=1)
    sch["*.down"].sync("fwd_post", "all_reduce")
    assert sch["0.down"].module.in_features == 4
    slapo.verify(sch, X)


def bert_layer() -> None:
    from transformers.models.bert.modeling_bert import BertConfig, BertLayer

    config = BertConfig(hidden_size=16, num_attention_heads=4, intermediate_size=24, attn_implementation="sdpa")
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    sch: Any = slapo.create_schedule(nn.Sequential(BertLayer(config)), mesh={"tp": 2}, example_inputs=x)
    attention = sch["0.attention"]
    for name in ("query", "key", "value"):
        attention[f"self.{name}"].shard(["weight", "bias"], axis=0)
    attention["self"].shard_attribute(["num_attention_heads", "all_head_size"]).sync("bwd_post", "all_reduce")
    attention["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch["0.intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["0.output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch["0.attention.output"].apply(Compile(backend="eager", fullgraph=True))
    sch["0.output"].trace(example_inputs=(torch.randn(2, 5, 12), x))
    sch["0.output"].apply(Fuse(dropout_add, "aot_eager"))
    slapo.verify(sch, x)


def penalty(model: nn.Module) -> float:
    x = X.double().requires_grad_()
    out = (model(x) * X).sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    loss = out + gradient.square().sum()
    loss.backward()
    return loss.item()


def gradients_of_gradients_are_right_or_refused() -> None:
    steps: list[Any] = [
        lambda sch: None,
        lambda sch: sch["0"].checkpoint(),
        lambda sch: (sch["0"].trace(flatten=True), sch["0"].fuse("up", compiler="eager")),
        lambda sch: sch.apply(Compile(backend="eager")),
        lambda sch: sch.apply(Compile(backend="aot_eager")),
    ]
    torch.manual_seed(0)
    reference = nn.Sequential(Mlp()).double().eval()
    expected = penalty(reference), reference[0].up.weight.grad
    for number, step in enumerate(steps):
        torch.manual_seed(0)
        model = nn.Sequential(Mlp()).double().eval()
        sch = slapo.create_schedule(model, mesh={"tp": 2}, example_inputs=X.double())
        split(sch)
        step(sch)
        if number > 2:
            with pytest.raises(RuntimeError, match="double backward"):
                penalty(sch.model)
            continue
        assert penalty(sch.model) == pytest.approx(expected[0], rel=1e-10)
        own = expected[1].chunk(2)[sch.mesh.rank("tp")]
        torch.testing.assert_close(sch["0.up"].module.weight.grad, own)


def check_compile() -> None:
    collectives_of_traced_and_compiled_layers_are_observed_as_they_run()
    compiled_before_and_after_the_split()
    a_lost_collective_is_found_in_compiled_code()


def check_graphs() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)
    decomposed_before_it_is_split_or_synchronized()
    decomposed_and_fused()
    fused_beside_a_sync()
    gradients_of_gradients_are_right_or_refused()


@pytest.mark.breadth
@pytest.mark.ranks
def test_compiled_regions_around_collectives_equal_the_reference() -> None:
    run_ranks(check_compile, world_size=2, timeout=600)  # compiling: minutes on a busy machine


@pytest.mark.breadth
@pytest.mark.ranks
def test_decomposed_and_fused_layers_beside_collectives_equal_the_reference() -> None:
    run_ranks(check_graphs, world_size=2)


@pytest.mark.breadth
@pytest.mark.ranks
def test_a_bert_layer_is_split_compiled_and_fused() -> None:
    run_ranks(bert_layer, world_size=2)
