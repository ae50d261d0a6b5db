"""A model that is a program of eight blocks, and its stages by hand, for the tests of the pipeline runtime.

It has what is hard at a boundary: a value used by later stages only, and again behind those (relayed), integers and
booleans, a float without a gradient, a value that is sent with a gradient and used without one, a transposed value,
a write to a received value, a weight of the first stage and the last one, one that is used twice in a stage, one that
never meets a received value, a frozen one, batch norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from slapo_runtime.stages.partition import Liveness, Output, Partition, Stage, StageModule, Tie, Value

TOKENS, WIDTH, LENGTH = 11, 6, 5
Values = dict[str, torch.Tensor]


class Double(torch.autograd.Function):
    """Custom, and a place where a parameter meets a received value; counts its backward passes."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        Double.passes += 1
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(tuple(range(grad.dim() - 1)))


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.free = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.BatchNorm1d(LENGTH) if number % 2 else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpoints else self.inner(x)  # type: ignore[no-any-return]

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.second(torch.tanh(self.first(self.norm(x)))))


class Net(nn.Module):
    """Eight blocks between an embedding and a head of the same weight."""

    def __init__(self, *, checkpoints: bool = False, hooks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(number) for number in range(8))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.double()
        self.blocks[1].first.bias.requires_grad_(False)
        self.blocks[4].checkpoints = self.blocks[6].checkpoints = checkpoints
        self.hooked: list[int] = []
        if hooks:
            for number, block in enumerate(self.blocks):
                block.register_full_backward_hook(lambda *_, number=number: self.hooked.append(number))

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        values: Values = {}
        for run in PROGRAM:
            values.update(run(self, {"tokens": tokens, "labels": labels, "bias": bias}, values))
        return assemble(values)


def assemble(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in ("loss", "logits", "early") if name in values}


def _block(number: int) -> Callable[[Net, Mapping[str, Any], Values], Values]:
    def run(net: Net, inputs: Mapping[str, Any], values: Values) -> Values:
        made: Values = {}
        if number == 0:
            x = net.embed(inputs["tokens"])
            made["early"] = torch.tanh(x)
            made["mask"] = inputs["tokens"] > 2
            made["third"] = inputs["tokens"] % 3
            made["still"] = x.detach().exp()
        else:
            x = values[f"x{number}"]
            if number == 4:
                x = x.transpose(1, 2)
            if number == 7:
                x.mul_(1.5)  # what came
        block = net.blocks[number]
        x = block(x)
        if number in (2, 5):
            x = x + values["early"]
        if number == 3:
            x = x.masked_fill(values["mask"][..., None], 0.5) + values["still"]
            x = x.transpose(1, 2)  # sent as it is, not contiguous
        if number == 4:
            made["apart"] = block.free.sin() * 2  # no received value is in it
            x = x + values["x1"].detach() + block.free.cos()
        if number == 5 and inputs.get("bias") is not None:
            x = x + inputs["bias"]
        if number == 6:
            x = block.first(block.first(x)) + values["apart"] + Double.apply(x, block.free)  # type: ignore[no-untyped-call]
        if number == 7:
            made["logits"] = net.head(x + values["early"] * (values["third"] == 1)[..., None])
            if inputs.get("labels") is not None:
                made["loss"] = cross_entropy(made["logits"].flatten(0, 1), inputs["labels"].flatten())
        else:
            made[f"x{number + 1}"] = x
        return made

    return run


PROGRAM = tuple(_block(number) for number in range(8))
USES = {
    **{number: [f"x{number}"] for number in range(1, 8)},
    2: ["x2", "early"],
    3: ["x3", "mask", "still"],
    4: ["x4", "x1"],
    5: ["x5", "early"],
    6: ["x6", "apart"],
    7: ["x7", "early", "third"],
}
MAKES = {
    **{number: [f"x{number + 1}"] for number in range(7)},
    0: ["x1", "early", "mask", "third", "still"],
    4: ["x5", "apart"],
    7: ["logits", "loss"],
}
READS = {0: ("tokens",), 5: ("bias",), 7: ("labels",)}


class Part(StageModule):
    """Blocks ``start`` to ``stop``; fails where it is told to."""

    def __init__(self, net: Net, start: int, stop: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): net.blocks[number] for number in range(start, stop)})
        if start == 0:
            self.embed = net.embed
        if stop == 8:
            self.head = net.head
        self._net, self._range = [net], (start, stop)

    def forward(self, inputs: Mapping[str, Any], values: Mapping[str, torch.Tensor]) -> Values:
        there, made = dict(values), {}
        for number in range(*self._range):
            new = PROGRAM[number](self._net[0], inputs, there)
            there.update(new)
            made.update(new)
        return made


def partition_of(net: Net, stages: int, samples: int, *, labels: bool = True) -> Partition:
    """The stages by hand, for a batch of so many samples."""
    each = 8 // stages
    home = {name: number // each for number, names in MAKES.items() for name in names}
    if not labels:
        del home["loss"]
    readers: dict[str, set[int]] = {name: set() for name in home}
    for number, names in USES.items():
        for name in names:
            if home[name] != number // each:
                readers[name].add(number // each)
    crossing = {name for name, theirs in readers.items() if theirs} | ({"loss"} & set(home)) | {"logits", "early"}
    parts = []
    for index in range(stages):
        inside = range(index * each, (index + 1) * each)
        parts.append(
            Stage(
                index,
                Part(net, inside.start, inside.stop),
                inputs=tuple(name for number in inside for name in READS.get(number, ())),
                uses=tuple(sorted(name for name in crossing if index in readers[name])),
                makes=tuple(sorted(name for name in crossing if home[name] == index)),
                last=f"blocks.{inside.stop - 1}" if index < stages - 1 else None,
            )
        )
    values = {name: _value(name, home[name], tuple(sorted(readers[name])), samples) for name in sorted(crossing)}
    pieces = tuple(name for name in ("loss", "logits", "early") if name in values)
    ties = (Tie("embed.weight", (0, stages - 1)),)
    return Partition(tuple(parts), values, ties, Output(pieces, assemble))


def _value(name: str, producer: int, consumers: tuple[int, ...], samples: int) -> Value:
    shape: tuple[int, ...] = (samples, LENGTH, WIDTH)
    dtype, has_gradient = torch.float64, True
    if name in ("mask", "third"):
        shape, dtype, has_gradient = (samples, LENGTH), torch.bool if name == "mask" else torch.int64, False
    elif name == "x4":
        shape = (samples, WIDTH, LENGTH)
    elif name == "apart":
        shape = (WIDTH,)
    elif name == "logits":
        shape = (samples, LENGTH, TOKENS)
    elif name == "loss":
        shape = ()
    elif name == "still":
        has_gradient = False
    return Value(name, producer, consumers, shape, dtype, has_gradient)


def liveness_of(partition: Partition, outputs: Sequence[str] = ("loss",)) -> Liveness:
    """What the stages send each other."""
    last = len(partition.stages) - 1
    until = {
        name: last if name in outputs else max(value.consumers, default=value.producer)
        for name, value in partition.values.items()
    }
    return Liveness(
        tuple(
            tuple(name for name, value in partition.values.items() if value.producer <= boundary < until[name])
            for boundary in range(last)
        )
    )


def batch(samples: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, TOKENS, (samples, LENGTH), generator=generator)
    labels = torch.randint(0, TOKENS, (samples, LENGTH), generator=generator)
    return {"tokens": tokens, "labels": labels, "bias": torch.full((1, WIDTH), 0.3, dtype=torch.float64)}


def cut(whole: Mapping[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches; what has one row is in each of them."""
    return [
        {name: one.chunk(count)[number] if len(one) > 1 else one for name, one in whole.items()}
        for number in range(count)
    ]
