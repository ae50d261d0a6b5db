"""Six families of tiny models with one layer each, and the steps that are right for them wherever they stand."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integration.bank.steps import Step, step

__all__ = ["FAMILIES", "Family", "Unit", "after_merge", "batch_of", "family", "model_of", "relu_kernel", "renewed"]

HIDDEN, HEADS, INNER, WORDS, LENGTH = 32, 4, 48, 96, 6
_WITH_BIAS = ("weight", "bias")


@dataclass(frozen=True)
class Unit:
    """Steps that are right together, and what has to be there for their arguments to mean anything.

    Args:
        name: e.g. ``"shard attention"``; unique in its family.
        steps: in their order; steps of other units may stand between them.
        after: units that come before, e.g. the trace in whose graph a pattern is looked for; drawn along with it.
        once: a schedule has one unit of a kind at most: two splits of one layer, two replacements of one match.
        heads: how many parts the ranks share; None: nothing that is divided.
    """

    name: str
    steps: tuple[Step, ...]
    after: tuple[str, ...] = ()
    once: str = ""
    heads: int | None = None


@dataclass(frozen=True)
class Family:
    """A model, and where its parts are.

    Args:
        name: its key.
        make: gives a fresh instance.
        layer, attention: paths; of T5, those of the decoder.
        columns: query, key and value below the attention; or the one that holds all three.
        out: behind the attention, its full path.
        mlp: the module around ``ups`` and ``down``; None where they are the layer's own.
        ups, down: full paths.
        norm: a norm of the layer.
        vocabulary: the steps that split embeddings and head.
        axes: of a weight, the output axis and the input axis.
        counts: the attention's attributes that are divided.
        inputs: of the attention, the arguments whose gradients are partial.
        biased: whether columns have a bias.
        patterns: name -> what is done with its matches in the layer's flat graph, of ``replace``, ``fuse``,
            ``checkpoint`` and ``bind``.
        packed: of the columns.
        merged: whether the columns are linear layers of one input, which ``merge`` takes.
        heads: how many parts the ranks share.
        forks: whether the attention's module holds what drops attention weights, and no other dropout.
        blocks, linears, norms: paths of further modules.
    """

    name: str
    make: Callable[[], nn.Module]
    layer: str
    attention: str
    columns: tuple[str, ...]
    out: str
    mlp: str | None
    ups: tuple[str, ...]
    down: str
    norm: str
    vocabulary: tuple[Step, ...]
    patterns: tuple[tuple[str, tuple[str, ...]], ...]
    axes: tuple[int, int] = (0, 1)
    counts: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    mlp_inputs: tuple[str, ...] = ()
    biased: bool = True
    packed: int = 1
    merged: bool = True
    heads: int = HEADS
    forks: bool = False
    blocks: tuple[str, ...] = ()
    linears: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()

    @property
    def names(self) -> Any:
        return list(_WITH_BIAS) if self.biased else "weight"


# -- what replaces, by name, so that it can be saved ----------------------------------------------------------------


def renewed(old: nn.Module) -> nn.Module:
    """Another module of the same class, with the same parameters."""
    new = copy.copy(old)
    for table in ("_parameters", "_buffers", "_modules"):
        new.__dict__[table] = dict(old.__dict__[table])
    for name in list(new.__dict__):
        if name.endswith("_hooks"):
            new.__dict__[name] = type(old.__dict__[name])()
    new.__dict__.pop("forward", None)
    return new


def gelu_kernel(*args: Tensor) -> Tensor:
    """GELU of a linear layer, or of a sum."""
    return F.gelu(F.linear(*args) if len(args) == 3 else args[0] + args[1])


def activated(x: Tensor) -> Tensor:
    """GELU by tanh."""
    return F.gelu(x, approximate="tanh")


def swiglu_kernel(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU."""
    return F.silu(gate) * up


def relu_kernel(x: Tensor) -> Tensor:
    """ReLU."""
    return F.relu(x)


# -- models -----------------------------------------------------------------------------------------------------------


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS,
            intermediate_size=INNER, max_position_embeddings=14, attn_implementation="eager",
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_embd=HIDDEN, n_layer=1, n_head=HEADS, n_inner=INNER, n_positions=14, use_cache=False,
            attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, attn_implementation="eager",
        )
    )  # fmt: skip


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=WORDS, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS, ffn_dim=INNER,
            word_embed_proj_dim=HIDDEN, max_position_embeddings=14, use_cache=False, attn_implementation="eager",
        )
    )  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1,
            num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=14, use_cache=False,
            attn_implementation="eager",
        )
    )  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS, d_model=HIDDEN, d_kv=8, d_ff=INNER, num_layers=1, num_decoder_layers=1, num_heads=HEADS,
            relative_attention_num_buckets=8, relative_attention_max_distance=16, use_cache=False,
            attn_implementation="eager", decoder_start_token_id=0,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=INNER, image_size=12,
            patch_size=4, hidden_dropout_prob=0.1, num_labels=8, attn_implementation="eager",
        )
    )  # fmt: skip


def _vocabulary(head: str, *tables: str, more: Sequence[Step] = ()) -> tuple[Step, ...]:
    """A table of words, tied to the head: one shard splits both."""
    return (
        *more,
        step(head, "shard", "weight", axis=0),
        step(head, "sync", "bwd_post", "all_reduce"),
        step(head, "sync", "fwd_post", "all_gather"),
        *(step(table, "sync", "fwd_post", "all_reduce") for table in tables),
    )


_QKV = ("q_proj", "k_proj", "v_proj")
FAMILIES = {
    "bert": Family(
        "bert", bert, "bert.encoder.layer.0", "bert.encoder.layer.0.attention.self", ("query", "key", "value"),
        "bert.encoder.layer.0.attention.output.dense", "bert.encoder.layer.0.intermediate",
        ("bert.encoder.layer.0.intermediate.dense",), "bert.encoder.layer.0.output.dense",
        "bert.encoder.layer.0.output.LayerNorm",
        _vocabulary(
            "cls.predictions.decoder", "bert.embeddings.word_embeddings",
            more=[step("cls.predictions", "shard", "bias", axis=0)],
        ),
        (
            ("fusion.sdpa", ("replace", "fuse", "checkpoint")),
            ("fusion.bias_gelu", ("fuse", "checkpoint", "bind")),
            ("fusion.bias_dropout_add_norm", ("fuse", "checkpoint")),
        ),
        forks=True, blocks=("bert.embeddings", "bert.encoder.layer.0.output", "cls.predictions.transform"),
        linears=("cls.predictions.transform.dense",), norms=("bert.embeddings.LayerNorm",),
    ),
    "gpt2": Family(
        "gpt2", gpt2, "transformer.h.0", "transformer.h.0.attn", ("c_attn",), "transformer.h.0.attn.c_proj",
        "transformer.h.0.mlp", ("transformer.h.0.mlp.c_fc",), "transformer.h.0.mlp.c_proj", "transformer.h.0.ln_1",
        _vocabulary("lm_head", "transformer.wte"),
        (
            ("fusion.sdpa", ("replace", "fuse", "checkpoint")),
            ("fusion.gelu_tanh", ("replace", "fuse", "bind")),
            ("fusion.bias_dropout_add_norm", ("fuse", "checkpoint")),
        ),
        axes=(1, 0), counts=("split_size",), inputs=("hidden_states",), packed=3, merged=False,
        blocks=("transformer.h.0.ln_2",), norms=("transformer.ln_f", "transformer.h.0.ln_2"),
    ),
    "opt": Family(
        "opt", opt, "model.decoder.layers.0", "model.decoder.layers.0.self_attn", _QKV,
        "model.decoder.layers.0.self_attn.out_proj", None, ("model.decoder.layers.0.fc1",),
        "model.decoder.layers.0.fc2", "model.decoder.layers.0.final_layer_norm",
        _vocabulary("lm_head", "model.decoder.embed_tokens"),
        (("fusion.sdpa", ("replace", "fuse", "checkpoint")), ("relu", ("replace", "bind", "fuse"))),
        counts=("num_heads",), inputs=("hidden_states",), norms=("model.decoder.final_layer_norm",),
    ),
    "t5": Family(
        "t5", t5, "decoder.block.0", "decoder.block.0.layer.1.EncDecAttention", ("q", "k", "v"),
        "decoder.block.0.layer.1.EncDecAttention.o", "decoder.block.0.layer.2.DenseReluDense",
        ("decoder.block.0.layer.2.DenseReluDense.wi",), "decoder.block.0.layer.2.DenseReluDense.wo",
        "decoder.block.0.layer.2.layer_norm", _vocabulary("lm_head", "encoder.embed_tokens", "decoder.embed_tokens"),
        (
            ("fusion.sdpa", ("replace", "fuse", "checkpoint")),
            ("fusion.rms_norm", ("replace", "fuse", "checkpoint")),
            ("relu", ("replace", "bind", "fuse")),
        ),
        counts=("n_heads", "inner_dim"), biased=False, merged=False,
        blocks=("encoder.block.0", "encoder.block.0.layer.0.SelfAttention", "encoder.block.0.layer.1.DenseReluDense"),
        linears=("encoder.block.0.layer.1.DenseReluDense.wo", "decoder.block.0.layer.0.SelfAttention.o"),
    ),
    "llama": Family(
        "llama", llama, "model.layers.0", "model.layers.0.self_attn", _QKV, "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp", ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"),
        "model.layers.0.mlp.down_proj", "model.layers.0.input_layernorm",
        (
            *_vocabulary("lm_head"),
            step("model.embed_tokens", "shard", "weight", axis=0),
            step("model.embed_tokens", "sync", "fwd_post", "all_reduce"),
        ),
        (
            ("fusion.sdpa", ("replace", "fuse", "checkpoint")),
            ("fusion.rms_norm", ("replace", "fuse", "checkpoint")),
            ("fusion.swiglu", ("fuse", "bind")),
            ("fusion.rotary", ("fuse", "checkpoint")),
        ),
        inputs=("hidden_states",), biased=False, heads=2, blocks=("model.norm", "model.rotary_emb"),
        linears=("lm_head",),
    ),
    "vit": Family(
        "vit", vit, "vit.layers.0", "vit.layers.0.attention", _QKV, "vit.layers.0.attention.o_proj", "vit.layers.0.mlp",
        ("vit.layers.0.mlp.fc1",), "vit.layers.0.mlp.fc2", "vit.layers.0.layernorm_before",
        (
            step("classifier", "shard", list(_WITH_BIAS), axis=0),
            step("classifier", "sync", "bwd_post", "all_reduce"),
            step("classifier", "sync", "fwd_post", "all_gather"),
        ),
        (
            ("fusion.sdpa", ("replace", "fuse", "checkpoint")),
            ("fusion.bias_gelu", ("fuse", "checkpoint", "bind")),
        ),
        inputs=("hidden_states",), blocks=("vit.embeddings",), linears=("classifier",), norms=("vit.layernorm",),
    ),
}  # fmt: skip

_KERNELS = {
    "fusion.bias_gelu": gelu_kernel,
    "fusion.gelu_tanh": activated,
    "fusion.swiglu": swiglu_kernel,
    "relu": relu_kernel,
}


def model_of(name: str) -> nn.Module:
    """A fresh instance in training mode, always the same; biases and norms get values that are not trivial."""
    torch.manual_seed(0)
    model = FAMILIES[name].make()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            else:
                parameter.mul_(1.0 if name == "t5" else 4.0)
    return model.train()


def batch_of(name: str) -> dict[str, Tensor]:
    """One batch, always the same."""
    generator = torch.Generator().manual_seed(2)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 12, 12, generator=generator), "labels": torch.tensor([1, 5])}
    ids = torch.randint(3, WORDS, (2, LENGTH), generator=generator)
    if name == "t5":
        return {"input_ids": ids, "labels": ids.flip(1)[:, :4].clone()}
    return {"input_ids": ids, "labels": ids.clone()}


@cache
def family(name: str) -> dict[str, Unit]:
    """The units of a family, by their names."""
    found = list(_units(FAMILIES[name]))
    if name == "llama":
        found.append(Unit("shard sequence", tuple(_sequence(FAMILIES[name])), once="tp", heads=2))
    assert len({unit.name for unit in found}) == len(found)
    return {unit.name: unit for unit in found}


def _units(at: Family) -> Iterator[Unit]:
    layer, attention = at.layer, at.attention
    columns = [f"{attention}.{name}" for name in at.columns]
    yield Unit("trace layer", (step(layer, "trace", flatten=True),), once="trace layer")
    yield Unit("trace layer, children as calls", (step(layer, "trace"),), once="trace layer")
    yield Unit("trace attention", (step(attention, "trace", flatten=True),), once="trace attention")
    if at.mlp is not None:
        yield Unit("trace mlp", (step(at.mlp, "trace", flatten=True),), once="trace mlp")
    for pattern, calls in at.patterns:
        for call in calls:
            yield from _rewrite(at, pattern, call)
    wrapped = {"layer": layer, "attention": attention, **({"mlp": at.mlp} if at.mlp else {}), "up": at.ups[0]}
    for path in at.blocks:
        yield Unit(f"trace {path}", (step(path, "trace", flatten=True),), once=f"trace {path}")
    for place, path in (*wrapped.items(), *((path, path) for path in at.blocks)):
        yield Unit(f"checkpoint {place}", (step(path, "checkpoint"),), once=f"checkpoint {place}")
        yield Unit(f"compile {place}", (step(path, "compile", backend="eager"),), once=f"compile {place}")
        yield Unit(f"cudagraphify {place}", (step(path, "cudagraphify"),), once=f"cudagraphify {place}")
    for place, path in (
        ("column", columns[0]),
        ("up", at.ups[0]),
        ("down", at.down),
        *zip(at.linears, at.linears, strict=True),
    ):
        if at.axes == (0, 1):
            yield Unit(f"decompose {place}", (step(path, "decompose"),), once=f"kind of {place}")
            yield Unit(f"bind {place}", (step(path, "bind", "aten::linear"),), once=f"kind of {place}")
    for path in (at.norm, *at.norms):
        yield Unit(f"replace {path}", (step(path, "replace", renewed),), once=f"kind of {path}")
        if type(model_of(at.name).get_submodule(path)) is nn.LayerNorm:
            yield Unit(f"decompose {path}", (step(path, "decompose"),), once=f"kind of {path}")
    yield Unit("replace up", (step(at.ups[0], "replace", renewed),), once="kind of up")
    if at.axes == (0, 1):
        yield Unit("quantize up", (step(at.ups[0], "quantize"),), once="kind of up")
    if at.merged:
        merge = step(attention, "merge", at.columns, name="merged")
        yield Unit("merge attention", (merge,), after=("trace attention",), once="merge attention")
        below = tuple(path.removeprefix(f"{layer}.") for path in columns)
        merge = step(layer, "merge", below, name="merged")
        yield Unit("merge attention in layer", (merge,), after=("trace layer",), once="merge attention")
    if len(at.ups) > 1:
        below = tuple(path.removeprefix(f"{at.mlp}.") for path in at.ups)
        merge = step(str(at.mlp), "merge", below, name="merged")
        yield Unit("merge mlp", (merge,), after=("trace mlp",), once="merge mlp")
    yield Unit("cut behind layer", (step(layer, "pipeline_split"),), once="cut behind layer")
    yield Unit("shard attention", tuple(_shard_attention(at, columns)), once="tp attention", heads=at.heads)
    if at.forks:
        yield Unit("fork_rng attention", (step(attention, "fork_rng"),), after=("shard attention",), once="fork_rng")
    yield Unit("shard mlp", tuple(_shard_mlp(at)), once="tp mlp")
    yield Unit("shard up", tuple(_shard_up(at)), once="tp mlp")
    yield Unit("shard vocabulary", at.vocabulary, once="tp vocabulary")


def _rewrite(at: Family, pattern: str, call: str) -> Iterator[Unit]:
    given: dict[str, Any] = {"fuse": {"compiler": "eager"}}.get(call, {})
    args: tuple[Any, ...] = (pattern,)
    if call == "bind" or (call == "replace" and pattern in _KERNELS and not pattern.startswith("fusion.")):
        args, given = (_KERNELS[pattern],), {"match": pattern}
    elif call in ("replace", "checkpoint"):
        args, given = (), {"match": pattern}
    places = [("layer", at.layer)]
    if pattern == "fusion.sdpa" and call != "replace":  # there it returns the weights as well
        places.append(("attention", at.attention))
    for place, path in places:
        yield Unit(
            f"{call} {pattern} in {place}", (step(path, call, *args, **given),), after=(f"trace {place}",),
            once=f"{pattern} in layer",
        )  # fmt: skip


def _shard_attention(at: Family, columns: Sequence[str]) -> Iterator[Step]:
    packed: dict[str, Any] = {"packed": at.packed} if at.packed > 1 else {}
    for path in columns:
        yield step(path, "shard", at.names, axis=at.axes[0], role="attention column", **packed)
    yield step(at.attention, "sync", "bwd_post", "all_reduce", **({"inputs": at.inputs} if at.inputs else {}))
    if at.counts:
        yield step(at.attention, "shard_attribute", list(at.counts))
    yield step(at.out, "shard", "weight", axis=at.axes[1])
    yield step(at.out, "sync", "fwd_post", "all_reduce")


def _shard_mlp(at: Family) -> Iterator[Step]:
    for path in at.ups:
        yield step(path, "shard", at.names, axis=at.axes[0], role="mlp column")
    yield step(at.mlp or at.ups[0], "sync", "bwd_post", "all_reduce")
    yield step(at.down, "shard", "weight", axis=at.axes[1])
    yield step(at.down, "sync", "fwd_post", "all_reduce")


def _shard_up(at: Family) -> Iterator[Step]:
    """A layer split by itself, its output gathered."""
    yield step(at.ups[0], "shard", at.names, axis=at.axes[0], role="mlp column")
    yield step(at.ups[0], "sync", "bwd_post", "all_reduce")
    yield step(at.ups[0], "sync", "fwd_post", "all_gather")


def _sequence(at: Family) -> Iterator[Step]:
    """LLaMA's layer with the sequence split between its pairs."""
    layer, attention, mlp = at.layer, at.attention, str(at.mlp)
    yield step("model.embed_tokens", "shard", "weight", axis=0)
    for around, columns, row, norm, given in (
        (attention, [f"{attention}.{name}" for name in at.columns], at.out, f"{layer}.input_layernorm",
         {"inputs": ("hidden_states",)}),
        (mlp, at.ups, at.down, f"{layer}.post_attention_layernorm", {}),
    ):  # fmt: skip
        role = "attention column" if around == attention else "mlp column"
        yield from (step(path, "shard", "weight", axis=0, role=role) for path in columns)
        yield step(around, "sync", "fwd_pre", "all_gather", axis=1, **given)
        yield step(row, "shard", "weight", axis=1)
        yield step(row, "sync", "fwd_post", "reduce_scatter", axis=1)
        yield step(norm, "sync_gradient", "weight")
    yield step(layer, "sync", "fwd_pre", "reduce_scatter", axis=1, inputs=("hidden_states",))
    yield step("model.norm", "sync_gradient", "weight")
    yield step("lm_head", "shard", "weight", axis=0)
    yield step("lm_head", "sync", "fwd_pre", "all_gather", axis=1)
    yield step("lm_head", "sync", "fwd_post", "all_gather")


def after_merge(at: Family, steps: Sequence[Step], each: Step) -> Step | None:
    """A column's step where ``steps`` have merged it before: one split of what holds all; None for the further ones.

    Args:
        at: the family.
        steps: those before it.
        each: a step of a unit.
    """
    if not each.role.endswith("column"):
        return each
    ups = [str(path) for path in at.ups]
    columns = [f"{at.attention}.{name}" for name in at.columns]
    together = columns if each.path in columns else ups
    for before in steps:
        held = [f"{before.path}.{name}" for name in before.args[0]] if before.call == "merge" else []
        if each.path in held:
            if each.path != together[0]:
                return None
            rows = _rows(at, held)
            return dataclasses.replace(
                each, path=f"{before.path}.merged", kwargs=(*each.kwargs, ("packed", rows)), role=each.role
            )
    return each


def _rows(at: Family, paths: Sequence[str]) -> tuple[int, ...]:
    model = model_of(at.name)
    return tuple(model.get_submodule(path).weight.shape[0] for path in paths)  # type: ignore[misc, union-attr]
