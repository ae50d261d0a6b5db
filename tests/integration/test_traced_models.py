"""Blocks of real models compute, traced, what they compute untouched, bit by bit; or refuse with a reason.

A sample of what ``tools/model_zoo.py --all`` runs, a model for each mechanism; ``docs/results/models.md`` has all.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_core as slapo
from slapo_graph.tracing.recording import Recording
from tests.integration.zoo.checks import blocks
from tests.integration.zoo.subjects import Subject, subject
from tests.integration.zoo.tracing import differences, trace_every_block, traces
from tests.tiers import sampled

TRACED = {
    "llama": "2/2",  # rotary embedding, grouped queries
    "gemma2": "2/2",  # sliding windows, capped scores
    "bloom": "2/2",  # ALiBi
    "gpt2": "2/2",  # one projection that is split
    "mixtral": "2/2",  # experts, a grouped product in float32
    "jetmoe": "2/2",  # experts, picked by values on the way
    "mamba": "2/2",  # a loop over the sequence
    "t5": "4/4",  # encoder and decoder, a bias that one layer hands to the next
    "vit": "2/2",
    "torch: resnet with batch norm": "3/3",  # buffers that the forward writes
    "torch: nested outputs": "3/3",
}
FLATTENED = ("llama", "mixtral", "t5", "torch: resnet with batch norm")


@pytest.mark.parametrize("name", sampled(TRACED))
def test_every_block_of_an_unmodified_model_is_traced_bit_by_bit(name: str) -> None:
    assert traces(subject(name)) == f"ok: {TRACED[name]}"


@pytest.mark.parametrize("name", FLATTENED)
def test_flattened_blocks_too(name: str) -> None:
    assert traces(subject(name), flatten=True) == f"ok: {TRACED[name]}"


def test_untraced_models_have_a_reason_with_a_line() -> None:
    result = traces(subject("falcon_mamba"), flatten=True)
    assert result.startswith("refused: 0/2; backbone.layers.0: the graph of it was recorded with ")
    assert "shape[2] == 12, and this call has 7" in result
    assert "transformers/models/falcon_mamba/modeling_falcon_mamba.py:" in result


class Deciding(nn.Module):
    """Blocks that decide on a size, and scale by a constant."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 0.5 if x.shape[0] > 1 else self.inner(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


DECIDING = Subject("deciding", "Deciding", Deciding, lambda _: (torch.ones(4, 8),))


def test_a_tracer_that_drops_its_guards_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert traces(DECIDING).startswith(
        "refused: 0/2; layers.0: the graph of it was recorded with x.shape[0] > 1 == True"
    )
    monkeypatch.setattr(Recording, "guard", lambda *_: None)
    with pytest.raises(AssertionError, match=r"gradient of input\[0\]: differs by up to"):
        traces(DECIDING)


def test_a_tracer_that_changes_a_constant_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Recording.call

    def changed(self: Recording, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return written(self, func, tuple(1.001 * part if type(part) is float else part for part in args), kwargs)

    monkeypatch.setattr(Recording, "call", changed)
    with pytest.raises(AssertionError, match=r"gradient of input\[0\]: differs by up to"):
        traces(DECIDING)


def variations(batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Other calls of a language model than the one it was traced with."""
    ids = batch["input_ids"]
    padded = torch.ones_like(ids)
    padded[0, -4:] = 0
    sizes = ids.shape
    short = {name: value[:1, :1] if isinstance(value, Tensor) else value for name, value in batch.items()}
    other = {name: value.t().contiguous().t() if isinstance(value, Tensor) else value for name, value in batch.items()}
    return {
        "one token": short,
        "other strides": other,
        "a mask of two axes": {**batch, "attention_mask": padded},
        "a mask of four axes": {**batch, "attention_mask": torch.zeros(sizes[0], 1, sizes[1], sizes[1])},
        "attentions and hidden states": {**batch, "output_attentions": True, "output_hidden_states": True},
        "a tuple": {**batch, "return_dict": False},
        "a cache": {**batch, "use_cache": True},
    }


def pair(name: str) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """A traced model, a reference model, and their batch."""
    given = subject(name)
    model, batch = given.given()
    untouched = copy.deepcopy(model)
    sch = slapo.create_schedule(model, example_inputs=batch)
    assert trace_every_block(sch, blocks(model)) == {}
    return model, untouched, batch


@pytest.mark.parametrize("name", sampled(["t5", "bert", "llama"], 3))
def test_traced_blocks_compute_the_same_however_the_model_is_called(name: str) -> None:
    model, untouched, batch = pair(name)
    for label, given in variations(batch).items():
        if (name, label) == ("t5", "a mask of four axes"):
            continue  # encoder and decoder differ in length: the model takes no such mask
        for training in (True, False):
            assert differences(model, untouched, given, training=training) == [], label
    for dtype in (torch.bfloat16, torch.float64):
        model.to(dtype), untouched.to(dtype)
        assert differences(model, untouched, batch, training=True) == [], dtype


def test_a_model_with_traced_blocks_generates_what_it_generated() -> None:
    model, untouched, batch = pair("llama")
    prompt = batch["input_ids"][:, :5]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for use_cache in (True, False):
        mine, plain = (each.eval().generate(prompt, use_cache=use_cache, **options) for each in (model, untouched))
        assert torch.equal(mine, plain)
