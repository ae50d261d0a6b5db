"""Every target steps the user's scheduler, counts micro-batches by their tokens, and goes on where another one was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import slapo_core as slapo
from slapo_runtime.launcher import preload_modules, run_ranks
from tests.tiers import sampled

pytestmark = pytest.mark.ranks
preload_modules("deepspeed", "slapo_deepspeed.engine", "tests.support.cpu_megatron", "slapo_megatron.engine")

LEFT_OUT, STEPS = -100, 4
DISTRIBUTED = {
    "ddp_config": {"use_distributed_optimizer": True},
    "optimizer_config": {"use_distributed_optimizer": True},
}
TARGETS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "torch dp": ("torch", {"dp": 2}, {"accumulate": 2}),
    "deepspeed ZeRO-1": ("deepspeed", {"dp": 2}, {"accumulate": 2, "config": {"zero_optimization": {"stage": 1}}}),
    "megatron distributed": ("megatron", {"dp": 2}, {"accumulate": 2, **DISTRIBUTED}),
    "deepspeed pp": ("deepspeed", {"pp": 2}, {"accumulate": 2}),
    "deepspeed ZeRO-3": ("deepspeed", {"dp": 2}, {"accumulate": 2, "config": {"zero_optimization": {"stage": 3}}}),
    "megatron pp": ("megatron", {"pp": 2}, {"accumulate": 2}),
    "torch pp": ("torch", {"pp": 2}, {"microbatches": 2}),
    "deepspeed without ZeRO": ("deepspeed", {"dp": 2}, {"accumulate": 2}),
}


class Tagger(nn.Module):
    """Embeds and classifies tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.up(self.embed(tokens)).tanh())
        return logits


def loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=LEFT_OUT)


def count(batch: Any) -> torch.Tensor:
    return (batch["labels"] != LEFT_OUT).sum()


def model() -> Tagger:
    torch.manual_seed(3)
    return Tagger()


def whole(step: int) -> dict[str, torch.Tensor]:
    """Eight sequences, whose numbers of labels differ much."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(size, (8, 6), generator=generator) for size in (11, 5))
    for row, kept in enumerate((1, 0, 6, 5, 6, 6, 4, 3)):
        labels[row, kept:] = LEFT_OUT
    return {"tokens": tokens, "labels": labels}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-4)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.MultiStepLR(optimizer, [1, 2, 3], gamma=0.5)


def reference() -> dict[str, torch.Tensor]:
    plain = model()
    optimizer = adamw(plain.parameters())
    scheduler = falling(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(plain(whole(step)["tokens"]), whole(step)).backward()
        optimizer.step()
        scheduler.step()
    return plain.state_dict()


def built(name: str, **left_out: Any) -> tuple[Any, int, int]:
    target, mesh, options = TARGETS[name]
    if target == "megatron":
        from tests.support.cpu_megatron import install

        install()
    sch = slapo.create_schedule(model(), mesh=mesh, example_inputs=whole(0))
    if "pp" in mesh:
        sch["up"].pipeline_split()
    given = {"lr_scheduler": falling, "loss_weight": count, **left_out}
    engine = slapo.build(sch, target=target, optimizer=adamw, loss=loss, **given, **options)
    assert sch.mesh is not None
    return engine, sch.mesh.size("dp"), sch.mesh.rank("dp")


def train(first: str, then: str, directory: str, without: str = "") -> tuple[dict[str, torch.Tensor], list[float]]:
    """Two steps by one target, the others by another that loads what the first one saved; the learning rates."""
    rates: list[float] = []
    for name, steps in ((first, range(2)), (then, range(2, STEPS))):
        engine, replicas, place = built(name, **({without: None} if without else {}))
        if steps[0]:
            engine.load(directory)
        for step in steps:
            rates.append(engine.optimizer.param_groups[0]["lr"])
            engine.train_step({key: one.chunk(replicas)[place] for key, one in whole(step).items()})
        engine.save(directory)
        state: dict[str, torch.Tensor] = engine.state_dict()
        engine.close()
    return state, rates


PAIRS = list(zip(TARGETS, [*list(TARGETS)[1:], "torch dp"], strict=True))


@pytest.mark.parametrize(("first", "then"), sampled(PAIRS), ids=[f"{one}, {other}" for one, other in sampled(PAIRS)])
def test_two_targets_train_as_one_process(first: str, then: str, tmp_path: Path) -> None:
    expected = reference()
    for state, rates in run_ranks(train, first, then, str(tmp_path), world_size=2, timeout=300):
        assert rates == pytest.approx([0.02, 0.01, 0.005, 0.0025])
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=10)


def higher_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.06, total_steps=10)


def cycled(first: str, scheduler: Any, directory: str) -> list[float]:
    """The learning rates of two steps with a scheduler, or with none, and of two of target torch with a higher one."""
    rates = []
    for name, chosen in ((first, scheduler), ("torch dp", higher_cycle)):
        engine, replicas, place = built(name, lr_scheduler=chosen)
        if rates:
            engine.load(directory)
        for step in range(2):
            rates.append(engine.optimizer.param_groups[0]["lr"])
            engine.train_step({key: one.chunk(replicas)[place] for key, one in whole(step).items()})
        engine.save(directory)
        engine.close()
    return rates


def rates_of(factory: Any) -> list[float]:
    optimizer = adamw([nn.Parameter(torch.zeros(1))])
    scheduler, found = factory(optimizer), []
    for _ in range(4):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_a_scheduler_that_keeps_rates_in_groups_goes_on_or_begins(tmp_path: Path) -> None:
    for found in run_ranks(cycled, "megatron distributed", one_cycle, str(tmp_path / "saved"), world_size=2):
        assert found == pytest.approx(rates_of(one_cycle))  # those of the checkpoint, as torch has it
    for found in run_ranks(cycled, "torch dp", None, str(tmp_path / "without"), world_size=2):
        assert found[:2] == [0.02, 0.02]
        assert found[3] == pytest.approx(rates_of(higher_cycle)[1])  # the first one is that of the checkpoint


@pytest.mark.parametrize("without", ["lr_scheduler", "loss_weight"])
def test_without_one_of_them_it_is_another_training(without: str, tmp_path: Path) -> None:
    ((state, _), _) = run_ranks(train, "torch dp", "torch dp", str(tmp_path), without, world_size=2)
    assert not torch.allclose(state["head.weight"], reference()["head.weight"], rtol=1e-3, atol=1e-4)
