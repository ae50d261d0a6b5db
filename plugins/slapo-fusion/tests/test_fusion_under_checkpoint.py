"""A checkpoint that ends its second run as soon as it has what it needs ends it inside of a fused region too."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_core.internals import checkpoints
from slapo_core.observers import goes_around
from tests.tiers import sampled


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(F.dropout(self.inner(x), 0.5, self.training) + x)


@pytest.mark.filterwarnings("ignore:fuse.compiler='torchscript'", "ignore:a region fused by TorchScript")
@pytest.mark.parametrize("compiler", sampled(["eager", "aot_eager", "torchscript"], 3))
def test_a_region_at_the_end_of_what_is_checkpointed(compiler: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).train()
    x = torch.randn(2, 3, 8)
    sch = slapo.create_schedule(model, example_inputs=x)
    sch["*"].trace()
    sch["*"].fuse("fusion.bias_dropout_add_norm", compiler=compiler)
    sch["*"].checkpoint()
    model(x).sum().backward()
    slapo.verify(sch)


@pytest.mark.parametrize("backend", sampled(["eager", "aot_eager"]))
def test_checkpoint_inside_a_compiled_module_restores_the_rng_state(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).train()
    sch = slapo.create_schedule(model, example_inputs=torch.randn(2, 3, 8))
    sch["0"].checkpoint().compile(backend=backend)
    assert slapo.verify(sch, optimizer_steps=0).steps_verified == 2


def test_a_whole_forward_goes_on_being_checkpointed_when_its_weight_is_split() -> None:
    sch = slapo.create_schedule(Block(), mesh={"tp": 2}, example_inputs=torch.randn(2, 3, 8))
    sch["inner"].checkpoint().shard("weight", axis=1)
    first, second = sch["inner"].wrappers
    assert checkpoints(sch["inner"])
    assert (goes_around(first), goes_around(second)) == (False, True)


class Scores(nn.Module):
    """Gives what is inside of a match too, which its caller drops."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.up(x).softmax(-1)
        return scores * x, scores


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scores()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.inner(x)
        return out + 1


def test_a_part_that_gives_more_than_its_kernel_is_refused_when_it_becomes_a_call() -> None:
    sch = slapo.create_schedule(nn.Sequential(Drops()), example_inputs=torch.randn(2, 3, 8))
    sch["0"].trace(flatten=True)
    sch["0"].replace(lambda x, y: x.softmax(-1) * y, match=lambda x, y: x.softmax(-1) * y)
    with pytest.raises(slapo.ApplyError, match="part of a rewritten region"):
        sch["0.inner"].checkpoint()
    slapo.verify(sch)
