"""For ``slapo plugins check``: cases of the primitives, and the model on which they are tried."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo
from slapo_core import Primitive
from slapo_fusion.bind import Bind
from slapo_fusion.compile import Compile
from slapo_fusion.cudagraphify import Cudagraphify
from slapo_fusion.decompose import Decompose
from slapo_fusion.fuse import Fuse
from slapo_fusion.quantize import Quantize
from slapo_testing import Case


class Feed(nn.Module):
    """A feed-forward layer with everything that the primitives are about."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def batch() -> tuple[Tensor]:
    return (torch.randn(5, 6),)


def traced() -> Primitive:
    """Return the step that traces a module."""
    sch = slapo.create_schedule(Feed(), example_inputs=batch())
    sch.root.trace()
    return sch.records[0].primitive


def gelu_of_a_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute the middle of :class:`Feed`, as a pattern."""
    return F.gelu(F.linear(x, weight, bias))


COMMON: dict[str, Any] = {"model": lambda: nn.Sequential(Feed(), Feed()), "inputs": batch}


def slapo_cases() -> list[Case]:
    """Return cases of every primitive; `Quantize` only where torchao is installed."""
    compiled = Compile(backend="aot_eager")
    return [
        Case(
            Bind("aten::linear"),
            path="0.up",
            rejects=[Bind("linear"), Bind("aten::lineal"), Bind("aten::linear", inputs=("input", "wieght"))],
            **COMMON,
        ),
        Case(
            compiled,
            path="0",
            before=[("1", compiled)],
            rejects=[Compile(backend="inducter"), Compile("fastest"), Compile(options={"max_autotun": True})],
            **COMMON,
        ),
        Case(Cudagraphify(), path="0", rejects=[Cudagraphify(warmup=0)], **COMMON),
        Case(Decompose(), path="0.up", rejects=[("0.dropout", Decompose()), ("", Decompose())], **COMMON),
        Case(Decompose(), path="1.norm", name="decompose-norm", **COMMON),
        Case(
            Fuse(gelu_of_a_linear, "aot_eager", name_="linear_gelu"),
            path="0",
            before=[("0", traced)],
            rejects=[Fuse(None), Fuse(gelu_of_a_linear, "induktor"), Fuse(gelu_of_a_linear, name_="linear gelu")],
            **COMMON,
        ),
        *(
            [Case(Quantize(), path="0", rejects=[("0.norm", Quantize()), Quantize(group_size=4)], **COMMON)]
            if importlib.util.find_spec("torchao") is not None
            else []
        ),
    ]
