"""Full schedules with the loss from shards of the logits, in float64, against the plain model."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import slapo_core as slapo
import slapo_models
from slapo_testing import preload_modules, run_ranks

preload_modules("slapo_models", "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert")

WORDS = 97  # padded to 98
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


def entropy(logits: Any, labels: Tensor, **_: Any) -> Tensor:
    """As transformers computes it, but in the logits' type."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))


def llama() -> nn.Module:
    """One KV head for both ranks, and without what LLaMA computes in float32 in any case."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 1, "intermediate_size": 48}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))  # type: ignore[arg-type]
    model.loss_function = entropy
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = nn.RMSNorm(32, 1e-6), nn.RMSNorm(32, 1e-6)
    model.model.norm = nn.RMSNorm(32, 1e-6)
    return model.double()  # type: ignore[no-any-return]


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}
    return BertForMaskedLM(BertConfig(**SIZES, **off, intermediate_size=48)).double()  # type: ignore[arg-type, no-any-return]


MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (llama, functools.partial(slapo_models.llama, kernels=False)),
    "bert": (bert, functools.partial(slapo_models.bert, compiler="eager")),
}


def batches() -> list[dict[str, Tensor]]:
    """Labels of one rank's shard only, of both, and some that have no part in the loss."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for highest in (40, WORDS, WORDS):
        ids = torch.randint(0, WORDS, (2, 16), generator=generator)
        labels = ids.clamp_max(highest - 1)
        labels[:, 3::4] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def plain(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model = MODELS[name][0]()
    optimizer = adamw(model.parameters())
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, model.state_dict()


def trained() -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    found = {}
    for name, (make, schedule) in MODELS.items():
        sch = slapo.create_schedule(make(), mesh={"tp": 2}, example_inputs=batches()[0])
        schedule(sch, checkpoint=0.5)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*was never verified")
            engine = slapo.build(sch, optimizer=adamw, receipts=True)
        losses = [float(engine.train_step(batch).loss) for batch in batches()]
        found[name] = losses, engine.state_dict()
    return found


@pytest.mark.ranks
def test_three_steps_are_those_of_the_plain_model() -> None:
    ranks = run_ranks(trained, world_size=2)
    for name in MODELS:
        losses, parameters = plain(name)
        for found in ranks:
            assert found[name][0] == pytest.approx(losses, rel=1e-12)
            assert found[name][1].keys() == parameters.keys()
            for key, value in parameters.items():
                torch.testing.assert_close(found[name][1][key], value, rtol=1e-12, atol=1e-12, msg=f"{name}: {key}")
