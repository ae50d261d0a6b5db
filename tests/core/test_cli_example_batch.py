"""Batches made for a model: from its configuration, its signature or its first layer; and of ``--batch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from slapo_core.cli import batch_for
from slapo_core.errors import ArgumentError
from slapo_testing import ModelSnapshot
from slapo_testing.models import MLP, Tied, bert, cnn, gpt2
from tests.messages import Messages


class Positions(nn.Module):
    """Learned positions of 8 tokens, and linear layers by name."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.out = nn.Embedding(40, 8), nn.Embedding(8, 8), nn.Linear(8, 40)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        return self.out(x) if targets is None else nn.functional.cross_entropy(self.out(x).mT, targets)


class Attention(nn.Module):
    """Takes three axes only."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _samples, _length, _channels = x.shape
        return nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


TINY: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def _classifier(kind: str) -> nn.Module:
    config = transformers.BertConfig(**TINY, num_labels=3)
    return getattr(transformers, f"BertFor{kind}Classification")(config)  # type: ignore[no-any-return]


def _t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(**{**TINY, "image_size": 12, "patch_size": 4, "num_labels": 3})
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[int, ...]]]] = {
    "bert": (bert, {"input_ids": (3, 12), "labels": (3, 12)}),
    "gpt2": (gpt2, {"input_ids": (3, 12), "labels": (3, 12)}),
    "sequences": (lambda: _classifier("Sequence"), {"input_ids": (3, 12), "labels": (3,)}),
    "tokens": (lambda: _classifier("Token"), {"input_ids": (3, 12), "labels": (3, 12)}),
    "t5": (_t5, {"input_ids": (3, 12), "decoder_input_ids": (3, 10), "labels": (3, 10)}),
    "vit": (_vit, {"pixel_values": (3, 3, 12, 12), "labels": (3,)}),
    "mlp": (MLP, {"0": (3, 8)}),
    "tied": (Tied, {"0": (3, 12)}),
    "cnn": (cnn, {"0": (3, 3, 32, 32)}),
    "positions": (Positions, {"0": (3, 4)}),
    "attention": (Attention, {"0": (3, 12, 8)}),
    "lstm": (lambda: nn.LSTM(8, 8, batch_first=True), {"0": (3, 12, 8)}),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True), {"0": (3, 12, 8)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_made_that_the_model_runs_on(name: str) -> None:
    make, shapes = MODELS[name]
    torch.manual_seed(0)
    model: Any = make()
    modes = {module: module.training for module in model.modules()}
    before, state = ModelSnapshot(model), torch.get_rng_state()
    made = batch_for(model, None)
    given = made.inputs if isinstance(made.inputs, dict) else dict(zip("0123", made.inputs, strict=False))
    tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    assert {key: tuple(value.shape) for key, value in tensors.items()} == shapes
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if "input_ids" in given:
        assert f"of {vocabulary} tokens" in made.how
        assert len(given["input_ids"].unique()) > 5
        assert int(given["input_ids"].max()) < vocabulary
        assert model.config.pad_token_id not in given["input_ids"].unique().tolist()
    assert {module: module.training for module in model.modules()} == modes
    assert before.differences(model) == []
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "mlp"])
def test_a_model_without_memory_gets_a_batch_with_values(name: str) -> None:
    make, shapes = MODELS[name]
    with torch.device("meta"):
        inputs = batch_for(make(), None).inputs
    given = inputs if isinstance(inputs, dict) else dict(zip("0123", inputs, strict=False))
    tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    assert {key: tuple(value.shape) for key, value in tensors.items()} == shapes
    assert not any(value.is_meta for value in tensors.values())


def test_no_batch_is_made_of_guesses(message: Messages) -> None:
    class Two(MLP):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * mask

    class Picky(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(f"not of {x.dim()} axes")

    for model, word in ((Two(), "its shapes are not known"), (Picky(), "ValueError: not of 3 axes")):
        with pytest.raises(ArgumentError) as refused:
            batch_for(model, None)
        message(refused, word, "--batch")


def test_integers_by_name() -> None:
    words = [f"{name}=40x5:int64" for name in ("attention_mask", "position_ids", "token_type_ids", "input_ids")]
    given = batch_for(_classifier("Sequence"), [*words, "labels=40:int64", "x=40x2:float64"]).inputs
    assert given["attention_mask"].eq(1).all()
    assert given["position_ids"][1].tolist() == [0, 1, 2, 3, 4]
    assert [int(given[name].max()) for name in ("token_type_ids", "labels")] == [1, 2]
    assert 40 < int(given["input_ids"].max()) < 60
    assert given["x"].dtype is torch.float64
