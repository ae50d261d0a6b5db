"""The seven models of the paper's evaluation, at its sizes, for a CPU, and tiny; and the steps of its ablation."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import slapo_core as slapo
import slapo_models

__all__ = ["MODELS", "STEPS", "Model", "Step", "batch_of", "loss_of", "make", "schedule", "schedule_lines"]


@dataclass(frozen=True)
class Model:
    """A model of the paper.

    Args:
        title: its name there.
        lines: of schedule, in the paper's table.
        parameters: in billions, there; None for a model that its table of sizes has not.
        paper: layers, width, heads, inner width, vocabulary, samples a step, tokens a sequence (of the decoder, too).
            Of WideResNet: blocks of the four groups, planes, classes, samples, side of a picture.
    """

    title: str
    lines: int
    parameters: float | None
    paper: Mapping[str, Any]


def _sizes(
    layers: int, width: int, heads: int, inner: int, vocabulary: int, length: int, **more: Any
) -> dict[str, Any]:
    named = {"layers": layers, "width": width, "heads": heads, "inner": inner, "vocabulary": vocabulary}
    return {**named, "batch": 8, "length": length, **more}


MODELS = {
    "bert": Model("BERT", 21, 0.96, _sizes(24, 1792, 16, 7168, 30528, 512)),
    "roberta": Model("RoBERTa", 21, 1.3, _sizes(24, 2048, 16, 8192, 50304, 512)),
    "gpt": Model("GPT", 10, 2.86, _sizes(32, 2560, 32, 10240, 50304, 1024)),
    "opt": Model("OPT", 10, 2.69, _sizes(32, 2560, 32, 10240, 50304, 1024)),
    "t5": Model("T5", 11, 2.85, _sizes(24, 1024, 32, 16384, 32128, 1024, target=512, head=128)),
    "llama": Model("LLaMA", 11, None, _sizes(32, 4096, 32, 11008, 32000, 1024)),
    "wide_resnet": Model(
        "WideResNet", 12, 2.4, {"blocks": (3, 4, 23, 3), "planes": 280, "classes": 1000, "batch": 8, "side": 224}
    ),
}
"""Vocabularies are rounded up to a multiple of 64, as Megatron-LM pads them."""

_CPU = _sizes(4, 256, 4, 1024, 8192, 128, target=64, head=64)
_SMALL = _sizes(2, 32, 4, 64, 128, 16, target=8, head=8)
_PICTURES = {
    "cpu": {"blocks": (1, 1, 2, 1), "planes": 32, "classes": 64, "batch": 8, "side": 64},
    "small": {"blocks": (1, 1, 1, 1), "planes": 4, "classes": 8, "batch": 8, "side": 64},
}


@dataclass(frozen=True)
class Step:
    """A step of the ablation: what is on, with all steps before it.

    Args:
        options: of the schedule; None for the model as it is.
        machine: the mesh on which its time is predicted: at most 8 GPUs a node.
    """

    options: Mapping[str, Any] | None
    machine: Mapping[str, int]


_ON = {"kernels": True, "checkpoint": 0.5}
STEPS = {
    "vanilla": Step(None, {"tp": 1}),
    "+ kernels": Step({"kernels": True, "checkpoint": 0.0, "embeddings": False}, {"tp": 1}),
    "+ checkpoint": Step({**_ON, "embeddings": False}, {"tp": 1}),
    "+ shard layers": Step({**_ON, "embeddings": False}, {"tp": 8}),
    "+ shard embeddings": Step({**_ON, "embeddings": True}, {"tp": 8}),
    "+ pipeline": Step({**_ON, "embeddings": True, "stages": 2}, {"pp": 2, "tp": 8}),
}


def _tests_of_models(name: str) -> Any:
    """A module of slapo-models' tests, which have the tiny WideResNet and the count of lines."""
    package = sys.modules.setdefault("slapo_models_tests", types.ModuleType("slapo_models_tests"))
    package.__path__ = [str(Path(slapo_models.__file__).resolve().parents[1] / "tests")]  # type: ignore[attr-defined]
    return importlib.import_module(f"slapo_models_tests.{name}")


def sizes(name: str, size: str) -> Mapping[str, Any]:
    """Of a model at ``"paper"``, ``"cpu"``, ``"cpu 32k"`` (but WideResNet) or ``"small"``."""
    if size == "paper":
        return MODELS[name].paper
    if name == "wide_resnet":
        return _PICTURES[size]
    return {"cpu": _CPU, "cpu 32k": {**_CPU, "vocabulary": 32768}, "small": _SMALL}[size]


def make(name: str, size: str, attention: str | None = "eager", dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same values every time; without dropout, so that losses can be compared.

    Args:
        name: of the model.
        size: see :func:`sizes`.
        attention: transformers' implementation; None for the one that it takes by itself.
        dtype: of the parameters.
    """
    torch.manual_seed(0)
    model: nn.Module = _wide_resnet(size) if name == "wide_resnet" else _transformer(name, size, attention)
    return model.to(dtype).train()


def _wide_resnet(size: str) -> nn.Module:
    own = sizes("wide_resnet", size)
    kind = _tests_of_models("families").WideResNet
    return kind(blocks=own["blocks"], planes=own["planes"], classes=own["classes"])  # type: ignore[no-any-return]


def _transformer(name: str, size: str, attention: str | None) -> nn.Module:
    import transformers

    own = sizes(name, size)
    layers, width, heads, inner = (own[key] for key in ("layers", "width", "heads", "inner"))
    shared: dict[str, Any] = {"vocab_size": own["vocabulary"]}
    if attention is not None:
        shared["attn_implementation"] = attention
    usual = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    positions = {"max_position_embeddings": own["length"] + 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "bert":
        config: Any = transformers.BertConfig(**usual, **positions, **off, **shared, intermediate_size=inner)
        return transformers.BertForMaskedLM(config)
    if name == "roberta":
        config = transformers.RobertaConfig(**usual, **positions, **off, **shared, intermediate_size=inner)
        return transformers.RobertaForMaskedLM(config)
    if name == "gpt":
        given = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_inner": inner, "n_positions": own["length"]}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**given, **off, **ends, **shared, use_cache=False))
    if name == "opt":
        off = {"dropout": 0.0, "attention_dropout": 0.0}
        given = {"ffn_dim": inner, "word_embed_proj_dim": width, "use_cache": False}
        return transformers.OPTForCausalLM(transformers.OPTConfig(**usual, **positions, **given, **off, **shared))
    if name == "t5":
        given = {"d_model": width, "d_kv": own["head"], "d_ff": inner, "num_layers": layers, "num_heads": heads}
        others = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**given, **others, **shared))
    given = {"intermediate_size": inner, "num_key_value_heads": heads, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**usual, **positions, **given, **shared))


def batch_of(name: str, size: str, replica: int = 0, replicas: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """The samples of one of so many replicas: of a step, all replicas together have the same."""
    own = sizes(name, size)
    generator = torch.Generator().manual_seed(1)
    if name == "wide_resnet":
        pictures = torch.randn(own["batch"], 3, own["side"], own["side"], generator=generator).to(dtype)
        return (pictures.chunk(replicas)[replica],)
    ids = torch.randint(3, own["vocabulary"], (own["batch"], own["length"]), generator=generator)
    labels = ids[:, : own["target"]] if name == "t5" else ids
    return {"input_ids": ids.chunk(replicas)[replica], "labels": labels.clone().chunk(replicas)[replica]}


def _entropy(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output, torch.arange(len(output), device=output.device) % output.shape[-1])


def loss_of(name: str) -> Any:
    """Of the output and the batch, where the model gives none; else None."""
    return _entropy if name == "wide_resnet" else None


def schedule(sch: slapo.Schedule, name: str, options: Mapping[str, Any] | None, compiler: str = "eager") -> None:
    """That of slapo-models; nothing without options."""
    if options is None:
        return
    function = getattr(slapo_models, name)
    compiled = {"compiler": compiler} if "compiler" in inspect.signature(function).parameters else {}
    function(sch, **options, **compiled)


@functools.cache
def schedule_lines() -> dict[str, int]:
    """Lines of each schedule function, as the tests of slapo-models count them."""
    counting = _tests_of_models("test_models_schedules")
    functions = counting.schedule_functions()
    assert all(isinstance(function, ast.FunctionDef) for function in functions.values())
    return {name: counting.lines_of(functions[name], functions) for name in MODELS}
