"""One tensor-parallel schedule for all architectures whose layers have familiar names, after Megatron-LM.

Attention: the projections of queries, keys and values are split by heads, the output projection by its input. MLP: the
first matrices are split by their output, the last by its input. Everything else is on every rank.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

import slapo_core as slapo
from tests.integration.zoo.architectures import CannotMake
from tests.integration.zoo.checks import NotApplicable
from tests.integration.zoo.subjects import subject

__all__ = ["split", "verify_on_ranks"]

# (matrices split by their output, matrix split by its input); those of BERT stand in modules side by side.
_ATTENTIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("q_proj", "k_proj", "v_proj"), "dense"),
    (("q_proj", "k_proj", "v_proj"), "proj"),
    (("q_proj", "k_proj", "v_proj"), "projection_layer"),
    (("q", "k", "v"), "o"),
    (("q", "k", "v"), "out_proj"),
    (("query", "key", "value"), "output"),
    (("q_lin", "k_lin", "v_lin"), "out_lin"),
    (("self.query", "self.key", "self.value"), "output.dense"),
    (("attention.query", "attention.key", "attention.value"), "output.dense"),
    (("attn.q_proj", "attn.k_proj", "attn.v_proj"), "out_proj"),
    (("query", "key", "value"), "dense"),
    (("q_proj", "k_proj", "v_proj"), "c_proj"),
    (("c_attn",), "c_proj"),
    (("q_attn", "c_attn"), "c_proj"),
    (("query_key_value",), "dense"),
    (("qkv_proj",), "o_proj"),
    (("Wqkv",), "Wo"),
    (("Wqkv",), "out_proj"),
    (("qkv",), "proj"),
    (("qkv",), "projection_layer"),
    (("qkv_proj",), "out_proj"),
    (("qkv_proj",), "dense"),
)
_MLPS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("Wi",), "Wo"),
    (("w1", "w3"), "w2"),
    (("c_fc_0", "c_fc_1"), "c_proj"),
    (("c_fc",), "c_proj"),
    (("fc_in",), "fc_out"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("lin1",), "lin2"),
    (("ffn",), "ffn_output"),
    (("intermediate.dense",), "output.dense"),
    (("intermediate_dense",), "output_dense"),
    (("linear_1",), "linear_2"),
    (("gate_linear", "up_linear"), "down_linear"),
)
_TWO_IN_ONE = ("gate_up_proj", "Wi")
# A fused weight holds queries, keys and values one after the other; in these three it holds them head by head.
_HEAD_BY_HEAD = ("GPTNeoX", "Bloom", "Falcon", "Persimmon")
_COUNTS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads", "all_head_size",
    "inner_dim", "split_size", "embed_dim", "hidden_size", "dim", "kv_dim",
)  # fmt: skip


def split(sch: slapo.Schedule) -> tuple[int, int]:
    """Split every attention and MLP that is recognized.

    Returns:
        the number of attentions, and of MLPs.
    """
    done: set[int] = set()
    attentions = mlps = 0
    for path, module in list(sch.model.named_modules()):
        for first, last in _ATTENTIONS:
            if _has(module, (*first, last), done):
                _attention(sch, path, first, last)
                attentions += 1
                break
        for first, last in _MLPS:
            if _has(module, (*first, last), done) and _fits(module, first, last):
                _pair(sch, path, first, last)
                mlps += 1
                break
    return attentions, mlps


def verify_on_ranks(names: Sequence[str]) -> dict[str, str]:
    """On every rank: split and verify; what came out of it for each model."""
    import torch.distributed as dist

    return {name: _verify(name, dist.get_world_size()) for name in names}


def _verify(name: str, size: int) -> str:
    try:
        made = subject(name)
        model = made.make()
        sch = slapo.create_schedule(model, mesh={"tp": size})
        attentions, mlps = split(sch)
        if not attentions or not mlps:
            raise NotApplicable(f"{attentions} attentions and {mlps} MLPs recognized")
        slapo.verify(sch, made.batch(model), optimizer_steps=1)
    except (CannotMake, NotApplicable) as reason:
        return f"none: {reason}"
    except (
        slapo.PreconditionError,
        slapo.VerifyError,
    ) as error:  # the schedule is wrong for this model
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001
        return f"FAILED: {type(error).__name__}: {error}"
    return f"ok: {attentions} attentions, {mlps} MLPs"


def _has(module: nn.Module, names: Sequence[str], done: set[int]) -> bool:
    found = []
    for name in names:
        below: Any = module
        for level in name.split("."):
            below = below._modules.get(level) if below is not None else None
        if below is None or not (type(below) is nn.Linear or type(below).__name__ == "Conv1D") or id(below) in done:
            return False
        found.append(below)
    done.update(map(id, found))
    return True


def _sizes(module: Any) -> tuple[int, int]:
    """Input and output features."""
    return (module.nx, module.nf) if hasattr(module, "nf") else (module.in_features, module.out_features)


def _fits(module: nn.Module, first: Sequence[str], last: str) -> bool:
    wide = sum(_sizes(module.get_submodule(name))[1] for name in first)
    return wide == _sizes(module.get_submodule(last))[0] * (len(first) if first[0] not in _TWO_IN_ONE else 2)


def _column(node: Any, packed: Any = 1) -> None:
    conv1d = hasattr(node.module, "nf")
    names = ["weight", "bias"] if node.module.bias is not None else ["weight"]
    node.shard(names, axis=1 if conv1d else 0, packed=packed).sync("backward")


def _row(node: Any) -> None:
    node.shard("weight", axis=0 if hasattr(node.module, "nf") else 1).sync("forward")


def _pair(sch: slapo.Schedule, path: str, first: Sequence[str], last: str) -> None:
    node: Any = sch[path] if path else sch.root
    for name in first:
        _column(node[name], packed=2 if name in _TWO_IN_ONE else 1)
    _row(node[last])


def _attention(sch: slapo.Schedule, path: str, first: Sequence[str], last: str) -> None:
    node: Any = sch[path] if path else sch.root
    outer = _sizes(node[last].module)[0]
    for name in first:
        _column(node[name], packed=_packing(node, name, outer))
    for name in ("gate_proj", "g_proj"):  # gates of the heads' outputs
        gate = node.module._modules.get(name)
        if type(gate) is nn.Linear and _sizes(gate) == (_sizes(node[first[0]].module)[0], outer):
            _column(node[name])
    _row(node[last])
    inner = node[first[0]].parent
    holders = {each.path: each for each in (node, inner)}.values()
    for holder in holders:
        counts = _counts_used(holder.module)
        if counts:
            holder.shard_attribute(counts)
        _norms(holder)
        bias = holder.module._modules.get("relative_attention_bias")
        if isinstance(bias, nn.Embedding):
            holder["relative_attention_bias"].shard("weight", axis=1)


def _norms(holder: Any) -> None:
    """Norms of each head by itself are whole on every rank, but see only this rank's heads."""
    size = getattr(holder.module, "head_dim", None)
    for name, norm in holder.module.named_children():
        own = dict(norm.named_parameters(recurse=False))
        if "norm" in type(norm).__name__.lower() and own and all(t.shape == (size,) for t in own.values()):
            holder[name].sync_gradient(list(own))


def _packing(node: Any, name: str, queries: int) -> Any:
    total = _sizes(node[name].module)[1]
    fused = total > queries and name in ("c_attn", "query_key_value", "qkv_proj", "Wqkv", "qkv")
    if not fused or type(node.module).__name__.startswith(_HEAD_BY_HEAD):
        return 1
    rest = (total - queries) // 2
    return 3 if rest == queries else (queries, rest, rest)


def _counts_used(module: nn.Module) -> list[str]:
    """The attributes that the attention's own methods read and that follow the number of heads."""
    source = "".join(
        inspect.getsource(method)
        for cls in type(module).__mro__
        if cls.__module__.startswith("transformers.models")
        for name, method in vars(cls).items()
        if inspect.isfunction(method) and name != "__init__"
    )
    read = set(re.findall(r"self\.(\w+)\b(?!\()", source))
    return [name for name in _COUNTS if name in read and type(module.__dict__.get(name)) is int]
