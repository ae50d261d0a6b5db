"""Models of transformers and nested ones with deferred logits."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo


@pytest.fixture
def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).train()


def scheduled(model: nn.Module, head: str, **options: Any) -> Any:
    sch = slapo.create_schedule(copy.deepcopy(model))
    sch[head].linear_cross_entropy(**options)
    return sch.model


def compared(plain: Any, model: Any, **batch: Any) -> Any:
    found, expected = model(**batch), plain(**batch)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=1e-6)
    found["loss"].backward()
    expected["loss"].backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    plain.zero_grad()
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"num_items_in_batch": torch.tensor(7)}, {"logits_to_keep": 4}, {"num_items_in_batch": 5, "ignore_index": 3}],
    ids=["plain", "items", "kept", "ignored"],
)
def test_a_model_of_transformers_gives_its_loss(llama: Any, options: dict[str, Any]) -> None:
    ids = torch.randint(0, 37, (2, 9))
    labels = ids[:, -options.get("logits_to_keep", 9) :].clone()
    labels[0, 2:] = -100
    model = scheduled(llama, "lm_head", chunk=5)
    output = compared(llama, model, input_ids=ids, labels=labels if "ignore_index" not in options else ids, **options)
    assert output.logits.shape[-1] == 37
    assert type(output.logits) is not Tensor
    with pytest.raises(RuntimeError, match="keep_logits"):
        output.logits.softmax(-1)
    kept = scheduled(llama, "lm_head", keep_logits=True)
    output = compared(llama, kept, input_ids=ids, labels=ids)
    torch.testing.assert_close(output.logits, llama(input_ids=ids).logits)


def test_evaluation_generation_and_forwards_without_labels_give_logits(llama: Any) -> None:
    ids, model = torch.randint(0, 37, (2, 5)), scheduled(llama, "lm_head")
    torch.testing.assert_close(model(input_ids=ids).logits, llama(input_ids=ids).logits)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids, labels=ids).logits, llama(input_ids=ids).logits)
    model.eval(), llama.eval()
    torch.testing.assert_close(model(input_ids=ids, labels=ids).logits, llama(input_ids=ids).logits)
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), llama.generate(ids, **settings))


class Nested(nn.Module):
    """Two heads of one body, whose outputs are nested; one head is not in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 9)

    def forward(self, inputs: Tensor, labels: Tensor | None = None, frozen: bool = False) -> Any:
        with torch.no_grad() if frozen else nullcontext():
            hidden = self.body(inputs).tanh()
        first, second = self.head(hidden), self.head(hidden * 2)
        loss = None if labels is None else F.cross_entropy(first.flatten(0, 1), labels.flatten())
        return {"loss": loss, "nested": [(first, {"second": second})]}


def test_logits_in_nested_outputs_and_of_a_head_that_is_called_twice() -> None:
    torch.manual_seed(0)
    plain = Nested()
    model, inputs, labels = scheduled(plain, "head"), torch.randn(2, 3, 4), torch.randint(0, 9, (2, 3))
    output = compared(plain, model, inputs=inputs, labels=labels)
    assert all(type(one) is not Tensor for one in (output["nested"][0][0], output["nested"][0][1]["second"]))
    frozen = model(inputs, labels, frozen=True)["loss"]
    frozen.backward()
    assert model.body.weight.grad is None
    assert model.head.weight.grad is not None
    output, expected = model(inputs), plain(inputs)
    torch.testing.assert_close(output["nested"][0][0], expected["nested"][0][0])
    torch.testing.assert_close(output["nested"][0][1]["second"], expected["nested"][0][1]["second"])


class Shifted(nn.Module):
    """A body, a head, and the loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 9)

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        logits = torch.tanh(self.head(self.body(inputs)).float() / 5) * 5
        logits = logits[..., :-1, :].contiguous()
        return {"loss": F.cross_entropy(logits.view(-1, 9), labels[..., 1:].reshape(-1)), "logits": logits}


@pytest.mark.breadth
def test_a_compiled_model_defers_its_logits() -> None:
    torch.manual_seed(0)
    plain = Shifted()
    model = scheduled(plain, "head")
    compiled: Any = torch.compile(model, backend="eager")
    given = {"inputs": torch.randn(2, 3, 4), "labels": torch.randint(0, 9, (2, 3))}
    output = compared(plain, compiled, **given)
    assert type(output["logits"]) is not Tensor
