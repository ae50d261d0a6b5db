"""A model, and a distribution that cuts it: `slapo_partition` written by hand, with mistakes to choose."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slapo_testing.distributions import FakeDistribution

__all__ = ["LIVENESS", "Reader", "batch", "cutter", "liveness", "reader"]


class Block(nn.Module):
    """A block that may leave something for later ones on a board, beside what it returns."""

    def __init__(self, width: int, board: dict[str, torch.Tensor] | None) -> None:
        super().__init__()
        self.fc, self.drop, self.board = nn.Linear(width, width), nn.Dropout(0.2), board

    def forward(self, hidden: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        if self.board is not None:
            hidden = hidden + self.board.get("hint", torch.zeros(1)).to(hidden)
            self.board["hint"] = hidden.detach().mean()
        return hidden + self.drop(torch.tanh(self.fc(hidden))) * keep.unsqueeze(-1)


class Reader(nn.Module):
    """What crosses a cut: a hidden state, a skip that a later stage reads, and a mask of booleans.

    The input and output embeddings are tied, and a norm keeps running statistics.
    """

    def __init__(
        self, width: int = 4, words: int = 7, blocks: int = 3, *, talks: bool = False, writes: bool = False
    ) -> None:
        super().__init__()
        self.writes = writes
        self.embed = nn.Embedding(words, width)
        board: dict[str, torch.Tensor] | None = {} if talks else None
        self.blocks = nn.ModuleList(Block(width, board) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.blocks[0].board is not None:
            self.blocks[0].board.clear()
        if self.writes:
            ids.clamp_(min=1)
        keep = ids.ne(0)
        hidden = self.embed(ids)
        if scale is not None:
            hidden = hidden * scale.unsqueeze(-1)
        skip = torch.sin(hidden)
        for block in self.blocks:
            hidden = block(hidden, keep)
        last = self.norm((hidden - skip).transpose(1, 2)).transpose(1, 2)
        return {"logits": self.head(last) + (ids.unsqueeze(-1) if self.writes else 0), "skip": skip}


def reader(**sizes: Any) -> Reader:
    torch.manual_seed(0)
    return Reader(**sizes)


def batch(samples: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "ids": torch.randint(0, 7, (samples, 5), generator=generator),
        "scale": torch.rand(samples, 5, generator=generator) + 0.5,
    }


CUT = '''
from dataclasses import dataclass
from slapo_core import Equivalence, Primitive

@dataclass(frozen=True)
class After(Primitive):
    """Cut the model after this module.

    rewrite: ``rest(module(x))`` -> ``stage 0: v = module(x)``, ``stage 1: rest(v)``
    """
    name = "cut.after"
    equivalence = Equivalence.EXACT
    def apply(self, node, edit):
        edit.note("a stage ends here")
'''
PARTITION = '''
import copy
import torch
from torch import nn
from slapo_core import hookimpl
from slapo_core.errors import TraceError
from slapo_runtime.partition import Output, Partition, Stage, StageModule, Tie, Value

FAULT = {fault!r}
CALLS = []

class Part(StageModule):
    def __init__(self, model, paths, steps, makes):
        super().__init__()
        self.steps, self.makes, self.writes = steps, makes, model.writes
        for path in paths:
            *above, own = path.split(".")
            at = self
            for name in above:
                if name not in at._modules:
                    at.add_module(name, nn.Module())
                at = at.get_submodule(name)
            at.add_module(own, model.get_submodule(path))

    def forward(self, inputs, values):
        there = {{**inputs, **values}}
        for step in self.steps:
            step(self, there)
        made = {{name: there[name] for name in self.makes}}
        if FAULT == "swap" and "skip" in made:
            made["hidden"], made["skip"] = made["skip"], made["hidden"]
        return made

def start(part, there):
    ids = there["ids"]
    if part.blocks.get_submodule("0").board is not None:
        part.blocks.get_submodule("0").board.clear()
    if part.writes:
        ids.clamp_(min=1)
    there["keep"] = ids.ne(0)
    there["hidden"] = part.embed(ids)
    if there.get("scale") is not None:
        there["hidden"] = there["hidden"] * there["scale"].unsqueeze(-1)
    there["skip"] = torch.sin(there["hidden"])
    if FAULT == "shared norm":
        there["skip"] = there["skip"] + 0 * seen_by(part.norm, there["hidden"])

def seen_by(norm, hidden):
    """The statistics are those of every call, here of one more."""
    if norm.training:
        nn.functional.batch_norm(hidden.detach().transpose(1, 2), norm.running_mean, norm.running_var, training=True)
    return hidden

def block(number):
    def step(part, there):
        there["hidden"] = part.blocks.get_submodule(str(number))(there["hidden"], there["keep"])
    return step

def end(norm):
    def step(part, there):
        called = part.norm if norm is None else norm[0]
        last = called((there["hidden"] - there["skip"]).transpose(1, 2)).transpose(1, 2)
        there["logits"] = part.head(last) + (there["ids"].unsqueeze(-1) if part.writes else 0)
    return step

@hookimpl
def slapo_partition(schedule, inputs):
    model = schedule.model
    CALLS.append((model.training, {{name: tuple(value.shape) for name, value in inputs.items()}}))
    cuts = [int(each.path.rpartition(".")[2]) for each in schedule.records if each.name == "cut.after"]
    if not cuts:
        return None
    assert schedule.root["embed"].module is model.embed
    if FAULT == "refuses large" and len(inputs["ids"]) > 4:
        raise TraceError("cannot cut a large batch")
    if FAULT == "refuses":
        raise TraceError("cannot cut after 'blocks.0': nobody knows why", path="blocks.0")
    if FAULT == "runs":
        model(**inputs)
    if FAULT == "draws":
        torch.rand(1)
    ends = [*sorted(cuts), len(model.blocks)]
    samples, length = inputs["ids"].shape
    AGAIN = len(CALLS) if FAULT == "other names" else 0
    norm = [copy.deepcopy(model.norm)] if FAULT == "stale" else None
    stages, first = [], 0
    for index, last in enumerate(ends):
        is_last = index == len(ends) - 1
        numbers = range(first, len(model.blocks) if is_last else last + 1)
        first = last + 1
        paths = [f"blocks.{{number}}" for number in numbers]
        steps = [block(number) for number in numbers]
        reads, uses, makes = (), ("hidden", "keep", "skip") if is_last else ("hidden", "keep"), ("hidden",)
        if index == 0:
            paths, steps, uses = ["embed", *paths], [start, *steps], ()
            reads, makes = tuple(name for name in inputs), ("hidden", "keep", "skip")
            paths = [*paths, "norm"] if FAULT == "shared norm" else paths
        if is_last:
            paths, steps, makes = [*paths, "norm", "head"], [*steps, end(norm)], ("logits",)
            reads = ("ids",) if model.writes else ()
        if FAULT == "forgets" and index:
            uses = tuple(name for name in uses if name != "keep")
        names = {{name: name if name in ("keep", "skip", "logits") else f"hidden{{index + AGAIN}}" for name in makes}}
        before = {{name: name if name in ("keep", "skip") else f"hidden{{index - 1 + AGAIN}}" for name in uses}}
        module = Renamed(Part(model, paths, steps, makes), names, before)
        after = None if is_last else f"blocks.{{last + (FAULT == 'elsewhere')}}"
        stages.append(Stage(index, module, reads, tuple(before.values()), tuple(names.values()), after))
    width, dtype = model.embed.weight.shape[1], model.embed.weight.dtype
    values = {{}}
    for stage in stages:
        for name in stage.makes:
            readers = tuple(other.index for other in stages if name in other.uses)
            shape = (samples, length) if name == "keep" else (samples, length, width)
            if name == "logits":
                shape = (samples, length, model.head.weight.shape[0])
            kind = torch.bool if name == "keep" else dtype
            needs = name != "keep" and not (FAULT == "no gradient" and name.startswith("hidden"))
            if FAULT == "wrong shape" and name == "keep":
                shape = (samples, length, 1)
            values[name] = Value(name, stage.index, readers, shape, kind, needs)
    ties = () if FAULT == "no tie" else (Tie("embed.weight", (0, len(stages) - 1)),)
    if FAULT == "shared norm":
        ties += tuple(Tie(f"norm.{{name}}", (0, len(stages) - 1)) for name in ("weight", "bias"))
    output = Output(("logits", "skip"), lambda made: {{"logits": made.get("logits"), "skip": made.get("skip")}})
    return Partition(tuple(stages), values, ties, output)

class Renamed(StageModule):
    """The part, whose own names stand for values of the whole model."""
    def __init__(self, part, makes, reads):
        super().__init__()
        for name, child in part.named_children():
            self.add_module(name, child)
        self.part, self.makes_names, self.reads = [part], makes, reads
    def forward(self, inputs, values):
        made = self.part[0](inputs, {{own: values[name] for own, name in self.reads.items()}})
        return {{name: made[own] for own, name in self.makes_names.items()}}
'''
LIVENESS = """
@hookimpl
def slapo_liveness(partition, outputs):
    last = len(partition.stages) - 1
    until = {
        name: last if name in outputs else max(value.consumers, default=value.producer)
        for name, value in partition.values.items()
    }
    return Liveness(tuple(
        tuple(name for name, value in partition.values.items() if value.producer <= at < until[name])
        for at in range(last)
    ))
"""


def cutter(fault: str = "") -> FakeDistribution:
    """``cut-slapo``: ``sch["blocks.0"].after()``, and `slapo_partition`; no liveness.

    Args:
        fault: what it does wrong; "" for nothing.
    """
    points = {"slapo.v1.primitives": {"cut.after": "cut_slapo:After"}, "slapo.v1.hooks": {"cut": "cut_hooks"}}
    modules = {"cut_slapo": CUT, "cut_hooks": PARTITION.format(fault=fault)}
    return FakeDistribution("cut-slapo", "1.0", points, modules)


def liveness(name: str = "live-slapo", source: str = LIVENESS) -> FakeDistribution:
    """A distribution with `slapo_liveness` alone."""
    module = f"{name.replace('-', '_')}_hooks"
    head = "from slapo_core import hookimpl\nfrom slapo_runtime.partition import Liveness\n"
    return FakeDistribution(name, "1.0", {"slapo.v1.hooks": {module: module}}, {module: head + source})
