"""Deep models: the plan of two blocks of each kind is that of all blocks, or all blocks are searched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
import slapo_models
from slapo_models.auto.recording import record, without_memory
from slapo_models.auto.repetition import Repetition

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 96}
GROUPED = {**SIZES, "num_key_value_heads": 2, "use_cache": False, "attn_implementation": "eager"}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**GROUPED, num_hidden_layers=6))  # type: ignore[no-any-return]


def gemma3() -> nn.Module:
    """Local and global attention in turn, chosen by the number of the layer."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    types = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    sizes = {"num_hidden_layers": 9, "layer_types": types, "sliding_window": 4, "head_dim": 8}
    return Gemma3ForCausalLM(Gemma3TextConfig(**GROUPED, **sizes))  # type: ignore[no-any-return]


def qwen3_moe() -> nn.Module:
    """Layers with experts, and without."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_hidden_layers": 9, "mlp_only_layers": [0, 3, 8], "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**GROUPED, **sizes, **experts))  # type: ignore[no-any-return]


def gpt_neo() -> nn.Module:
    """Blocks that return tuples."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    sizes = {"num_layers": 10, "attention_types": [[["global", "local"], 5]], "window_size": 4, "use_cache": False}
    given = {"hidden_size": 32, "num_heads": 4, "vocab_size": 96, "max_position_embeddings": 16}
    return GPTNeoForCausalLM(GPTNeoConfig(**given, **sizes, bos_token_id=1, eos_token_id=2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, number: int, odd: int | None, when: str) -> None:
        super().__init__()
        self.number, self.odd, self.when = number, odd, when
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        y = self.up(self.norm(x)) * scale
        is_odd = {"always": True, "in evaluation": not self.training, "with one sample": len(x) == 1}[self.when]
        return x + self.down(torch.relu(y) if self.number == self.odd and is_odd else y.sigmoid())


class Blocks(nn.Module):
    """Eight blocks; one may run something else, be read once more or be tied, or a parameter scales them all."""

    def __init__(
        self,
        odd: int | None = None,
        read: int | None = None,
        tied: int | None = None,
        *,
        when: str = "always",
        is_scaled: bool = False,
    ) -> None:
        super().__init__()
        self.layers, self.read = nn.ModuleList(Block(number, odd, when) for number in range(8)), read
        self.scale = nn.Parameter(torch.ones(32)) if is_scaled else None
        if tied is not None:
            self.get_submodule(f"layers.{tied}.up").weight = self.get_parameter("layers.0.up.weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = x
        for number, layer in enumerate(self.layers):
            x = layer(x) if self.scale is None else layer(x, self.scale)
            read = x if number == self.read else read
        return x + read


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (llama, 2),
        (Blocks, 2),
        (lambda: Blocks(is_scaled=True), None),  # a split spans all blocks
        pytest.param(gemma3, 4, marks=pytest.mark.breadth),
        pytest.param(qwen3_moe, 4, marks=pytest.mark.breadth),
        pytest.param(gpt_neo, 4, marks=pytest.mark.breadth),
    ],
)
def test_the_plan_of_few_blocks_is_that_of_all(make: Any, kept: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.ones(2, 12, dtype=torch.long)
    batch: Any = {"input_ids": ids, "labels": ids}
    batch = torch.ones(2, 16) if isinstance(make(), Blocks) else batch
    few: list[int | None] = []
    expanded = Repetition.expanded
    with monkeypatch.context() as patched:

        def seen(self: Repetition, plan: Any) -> Any:
            found = expanded(self, plan)
            few.append(None if found is None else len(self.blocks.kept()))
            return found

        patched.setattr(Repetition, "expanded", seen)
        by_few = scheduled(make(), batch)
    assert few == [kept]
    monkeypatch.setattr(Repetition, "of", lambda *given: None)
    by_all = scheduled(make(), batch)
    assert by_few[0].records == by_all[0].records
    assert str(by_few[0].explain()) == str(by_all[0].explain())
    assert by_few[1] == by_all[1]


def scheduled(model: nn.Module, batch: Any) -> tuple[slapo.Schedule, Any]:
    sch = slapo.create_schedule(model, mesh={"tp": 2}, example_inputs=batch)
    return sch, slapo_models.auto(sch, kernels=False)


@pytest.mark.parametrize(
    ("options", "is_alike"),
    [
        ({}, True),
        ({"odd": 5}, False),
        ({"odd": 5, "when": "in evaluation"}, False),
        ({"odd": 5, "when": "with one sample"}, False),
        ({"read": 5}, False),
        ({"read": 0}, True),
        ({"tied": 6}, False),
    ],
)
def test_a_block_that_differs_by_its_number_is_found(options: dict[str, Any], is_alike: bool) -> None:
    model, batch = without_memory(Blocks(**options)), torch.ones(3, 16)
    assert (Repetition.of(model, batch, record(model, batch)) is not None) is is_alike


def test_few_blocks_are_not_skipped() -> None:
    model, batch = without_memory(Blocks()), torch.ones(3, 16)
    model.layers = model.get_submodule("layers")[:4]  # type: ignore[index]
    assert Repetition.of(model, batch, record(model, batch)) is None
