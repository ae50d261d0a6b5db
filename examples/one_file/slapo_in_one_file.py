"""Slapo in one file: what a schedule is, and how it runs a model that nobody edited.

    python examples/one_file/slapo_in_one_file.py     # schedule, verify and train a model on two processes

A *schedule* says how a PyTorch model runs, apart from the model. It is made of *primitives*, values such as
`Shard("weight", axis=0)`, each applied at one module. This file has the idea without the breadth: three primitives, one
kind of layer, one dimension of ranks. Read it from the top; a section needs those above it only.

Names and records are those of the library: `slapo_core.replay` reads what `Schedule.to_json` writes here.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SlapoError(Exception):
    """What is wrong, where, and the corrected call."""


# -- 1. The tree ------------------------------------------------------------------------------------------------------
# The model is the tree. A node is a *place* in it and not a module: it keeps its path and looks the module up, so that
# it is right before and after any step. `sch["fc1"]` is the node of `model.get_submodule("fc1")`, always.


@dataclass(frozen=True)
class Node:
    """A place in the scheduled model."""

    schedule: Schedule
    path: str

    @property
    def module(self) -> nn.Module:
        return self.schedule.model.get_submodule(self.path)

    def __getitem__(self, path: str) -> Node:
        below = Node(self.schedule, f"{self.path}.{path}".strip("."))
        self.schedule.model.get_submodule(below.path)  # a path that leads nowhere raises here
        return below

    def apply(self, primitive: Primitive) -> Node:
        self.schedule.apply_at(self, primitive)
        return self

    def __getattr__(self, name: str) -> Callable[..., Node]:
        """Find a primitive by its short name: `node.shard(...)` is `node.apply(Shard(...))`."""
        for full_name, primitive in PRIMITIVES.items():
            if full_name.rpartition(".")[2] == name:
                return lambda *args, **kwargs: self.apply(primitive(*args, **kwargs))
        raise AttributeError(f"no primitive '{name}'; there are {', '.join(PRIMITIVES)}")


# -- 2. Edits ---------------------------------------------------------------------------------------------------------
# Primitives never touch the model. They ask an `Edit`, which makes the change and keeps an entry in a journal: how to
# do it again, and how to take it back. Undoing restores the *same objects*: an optimizer of the parameters stays valid.


@dataclass
class Edit:
    """The changes of one step, each as a pair of functions: do it again, take it back."""

    model: nn.Module
    entries: list[tuple[Callable[[], Any], Callable[[], Any]]] = field(default_factory=list)

    def _do(self, redo: Callable[[], Any], undo: Callable[[], Any]) -> None:
        redo()
        self.entries.append((redo, undo))  # after it worked: what raised changed nothing

    def redo(self) -> None:
        for redo, _ in self.entries:
            redo()

    def undo(self) -> None:
        for _, undo in reversed(self.entries):
            undo()

    def set_parameter(self, node: Node, name: str, value: nn.Parameter) -> None:
        """Put a tensor in the place of a parameter, wherever the model has it: a tied weight is one tensor."""
        old = node.module._parameters[name]
        tables = [module._parameters for module in self.model.modules()]
        sites = [(table, key) for table in tables for key, own in table.items() if own is old]
        self._do(lambda: [t.update({k: value}) for t, k in sites], lambda: [t.update({k: old}) for t, k in sites])

    def replace_module(self, node: Node, new: nn.Module) -> None:
        """Put another module at a node's place."""
        parent, _, name = node.path.rpartition(".")
        children, old = self.model.get_submodule(parent)._modules, node.module
        self._do(lambda: children.update({name: new}), lambda: children.update({name: old}))

    def set_attribute(self, node: Node, name: str, value: Any) -> None:
        """Set an attribute of the module itself, e.g. `out_features`, or `forward` in place of the class's."""
        attributes = vars(node.module)
        old = {name: attributes[name]} if name in attributes else {}
        self._do(lambda: attributes.update({name: value}), lambda: (attributes.pop(name), attributes.update(old)))

    def add_hook(self, node: Node, kind: str, hook: Callable[..., Any]) -> None:
        """Register a `"forward"` or `"forward_pre"` hook."""
        register = getattr(node.module, f"register_{kind}_hook")
        handles: list[Any] = []
        self._do(lambda: handles.append(register(hook)), lambda: handles.pop().remove())


# -- 3. Primitives ----------------------------------------------------------------------------------------------------
# A primitive is a frozen dataclass. Its fields *are* its arguments: equality, printing and JSON follow from them. It
# says everything that is wrong before anything is touched, and then makes its edits. The library finds primitives by
# the entry points of installed packages; here they are in a table, `PRIMITIVES`.


@dataclass(frozen=True)
class Primitive:
    """One way to change how a module runs; subclasses add fields."""

    name: ClassVar[str]

    def preconditions(self, node: Node) -> Iterator[str]:
        """Yield every reason why it cannot be applied at a node."""
        yield from ()

    def apply(self, node: Node, edit: Edit) -> None:
        raise NotImplementedError

    def __str__(self) -> str:
        """Show the call: `shard('weight', axis=0)`; defaults are left out."""
        shown = {name: getattr(value, "__qualname__", repr(value)) for name, value in vars(self).items()}
        first, *rest = dataclasses.fields(self)
        given = [f"{one.name}={shown[one.name]}" for one in rest if getattr(self, one.name) != one.default]
        return f"{self.name.rpartition('.')[2]}({', '.join([shown[first.name], *given])})"


# -- 4. The schedule --------------------------------------------------------------------------------------------------
# Applying a step is a transaction: check, edit, record. If anything raises, the edits made so far are undone, and the
# model is bit for bit what it was. The records are the schedule: what was done, where, in which order.


@dataclass(frozen=True)
class Record:
    index: int
    primitive: Primitive
    path: str

    def __str__(self) -> str:
        return f"#{self.index} {self.primitive} at {repr(self.path) if self.path else 'the root'}"


class Schedule:
    """A model, the steps applied to it, and the way back."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._steps: list[tuple[Record, Edit]] = []

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(record for record, _ in self._steps)

    def __getitem__(self, path: str) -> Node:
        return Node(self, "")[path]

    def apply_at(self, node: Node, primitive: Primitive) -> None:
        """Apply one step: all of it, or nothing."""
        reasons = list(primitive.preconditions(node))
        if reasons:
            raise SlapoError(f"cannot apply {primitive} at '{node.path}': {'; '.join(reasons)}")
        edit = Edit(self.model)
        try:
            primitive.apply(node, edit)
        except BaseException:
            edit.undo()
            raise
        self._steps.append((Record(len(self._steps) + 1, primitive, node.path), edit))

    def undo(self, to: int | None = None) -> None:
        """Take steps back: the last one, or all but the first `to`."""
        kept = len(self._steps) - 1 if to is None else to
        while len(self._steps) > kept:
            self._steps.pop()[1].undo()

    @contextmanager
    def rewound(self, to: int = 0) -> Iterator[nn.Module]:
        """Give the model as it was after the first `to` steps; 0: the reference model."""
        later = self._steps[to:]
        self.undo(to)
        try:
            yield self.model
        finally:
            for _, edit in later:
                edit.redo()
            self._steps += later

    def to_json(self) -> str:
        """Write the schedule down as data."""
        records = []
        for record in self.records:
            values = vars(record.primitive).items()
            arguments = {name: f"{v.__module__}:{v.__qualname__}" if callable(v) else v for name, v in values}
            records.append({"primitive": record.primitive.name, "path": record.path, "arguments": arguments})
        return json.dumps({"format": 1, "records": records}, indent=2)


# -- 5. Replay --------------------------------------------------------------------------------------------------------
# Nothing in a record depends on the number of ranks or on this copy of the model: saved on one process, a schedule is
# applied on two, at another instance. Functions are saved by name, and a file never imports anything.


def replay(model: nn.Module, document: str) -> Schedule:
    """Apply a saved schedule to a model."""
    schedule = Schedule(model)
    for record in json.loads(document)["records"]:
        arguments = record["arguments"]
        for name, value in arguments.items():
            if isinstance(value, str) and ":" in value:
                module, _, function = value.partition(":")
                arguments[name] = getattr(sys.modules[module], function)
        schedule[record["path"]].apply(PRIMITIVES[record["primitive"]](**arguments))
    return schedule


# -- 6. Layouts -------------------------------------------------------------------------------------------------------
# A shard is a plain tensor, smaller than the one that the author wrote, and its layout says which part. By the layouts
# every name and shape of the reference model is found again: a state dict that leaves loads into the plain model.


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@dataclass(frozen=True)
class Layout:
    """The part of a tensor that each rank holds: equal shards along one axis, in the order of the ranks."""

    axis: int

    def shard(self, full: Tensor) -> Tensor:
        return full.chunk(world_size(), self.axis)[dist.get_rank()].contiguous()

    def full(self, shard: Tensor) -> Tensor:
        parts = [torch.empty_like(shard) for _ in range(world_size())]
        dist.all_gather(parts, shard.contiguous())
        return torch.cat(parts, self.axis)


def layout_of(tensor: Tensor | None) -> Layout | None:
    """Find the layout of a shard, which is kept with the tensor: ties and moved modules need no bookkeeping."""
    return getattr(tensor, "slapo_layout", None)


def state_dict(schedule: Schedule) -> dict[str, Tensor]:
    """Gather the parameters and buffers under the names and shapes of the reference model, on every rank."""
    gathered = {}
    for name, tensor in schedule.model.state_dict(keep_vars=True).items():
        layout = layout_of(tensor)
        gathered[name] = tensor.detach() if layout is None else layout.full(tensor.detach())
    return gathered


# -- 7. The primitives ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replace(Primitive):
    """Replace a module by the result of a function of it; parameters of the same name and shape stay the same objects.

    rewrite: `child: Old(weight (m, n))` -> `child: New(weight (m, n))`
    """

    name = "core.replace"
    new_module: Callable[[nn.Module], nn.Module]

    def preconditions(self, node: Node) -> Iterator[str]:
        if not node.path:
            yield "the root cannot be replaced: replace its children"

    def apply(self, node: Node, edit: Edit) -> None:
        old, new = node.module, self.new_module(node.module)
        kept, found = dict(old.named_parameters()), dict(new.named_parameters())
        if {name: p.shape for name, p in kept.items()} != {name: p.shape for name, p in found.items()}:
            raise SlapoError(f"{self} at '{node.path}': the new module must have the parameters {sorted(kept)}")
        for name, parameter in kept.items():
            owner, _, last = name.rpartition(".")
            new.get_submodule(owner)._parameters[last] = parameter
        edit.replace_module(node, new)


@dataclass(frozen=True)
class Shard(Primitive):
    """Keep this rank's shard of a linear layer's tensor.

    rewrite: (n ranks)
        axis 0: `weight (out, in)` -> `(out/n, in)`; the layer gives a shard of the features
        axis 1: `weight (out, in)` -> `(out, in/n)`; the layer gives a partial sum, without the bias
    """

    name = "tp.shard"
    names: str
    axis: int

    def preconditions(self, node: Node) -> Iterator[str]:
        tensor = node.module._parameters.get(self.names)
        if not isinstance(node.module, nn.Linear) or tensor is None:
            yield f"an nn.Linear with a parameter '{self.names}' is required (got {node.module})"
        elif not 0 <= self.axis < tensor.dim():
            yield f"'{self.names}' has {tensor.dim()} axes (got axis={self.axis})"
        elif tensor.shape[self.axis] % world_size():
            yield f"axis {self.axis} of '{self.names}', {tensor.shape[self.axis]}, is not divisible by {world_size()}"
        elif layout_of(tensor) is not None:
            yield f"'{self.names}' is a shard already"

    def apply(self, node: Node, edit: Edit) -> None:
        if world_size() == 1:
            return  # the same schedule on one rank: recorded, and nothing to do
        module, layout = node.module, Layout(self.axis)
        full = module._parameters[self.names]
        shard = nn.Parameter(layout.shard(full.detach()).clone(), full.requires_grad)
        shard.slapo_layout = layout
        edit.set_parameter(node, self.names, shard)
        if self.names == "weight":
            edit.set_attribute(node, "in_features" if self.axis == 1 else "out_features", shard.shape[self.axis])
            if self.axis == 1 and module.bias is not None:
                edit.set_attribute(node, "forward", partial(without_bias, module))


def without_bias(module: nn.Linear, x: Tensor) -> Tensor:
    """Give the partial sum of a layer: its bias is added once, after the reduction."""
    return nn.functional.linear(x, module.weight)


class _Sum(torch.autograd.Function):
    """Sum over the ranks, the value or its gradient: a sum that all ranks use has its full gradient on each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_forward: bool) -> Tensor:
        ctx.in_forward = in_forward
        return summed(x) if in_forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient if ctx.in_forward else summed(gradient), None


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def reduce_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook: sum the partial outputs of the ranks, then add the bias that the layer left out."""
    return _Sum.apply(output, True) + (module.bias if "forward" in vars(module) else 0)


def reduce_input_gradient(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward pre-hook: each rank will have its own gradient of the input, and their sum is the gradient."""
    return tuple(_Sum.apply(x, False) for x in args)


@dataclass(frozen=True)
class Sync(Primitive):
    """Let the ranks sum a module's output (`"fwd_post"`) or the gradient of its input (`"bwd_post"`).

    rewrite: (n ranks; `y` the output, `dx` the gradient of the input)
        `fwd_post`: `y -> sum of y`, backward `dy -> dy`; `bwd_post`: `x -> x`, backward `dx -> sum of dx`
    """

    name = "tp.sync"
    mode: str
    op: str = ""

    def preconditions(self, node: Node) -> Iterator[str]:
        if self.mode not in ("fwd_post", "bwd_post") or self.op != "all_reduce":
            yield 'mode must be "fwd_post" or "bwd_post", and op "all_reduce"'

    def apply(self, node: Node, edit: Edit) -> None:
        hooks = {"fwd_post": ("forward", reduce_output), "bwd_post": ("forward_pre", reduce_input_gradient)}
        if world_size() > 1:
            edit.add_hook(node, *hooks[self.mode])


PRIMITIVES: dict[str, type[Primitive]] = {one.name: one for one in (Replace, Shard, Sync)}


# -- 8. Verify --------------------------------------------------------------------------------------------------------
# A schedule must not change what the model computes. The reference model is at hand: it is the model, rewound. Outputs
# and gradients are compared on every rank, each gradient with this rank's shard of the reference one. Where they
# differ, the steps are taken back one by one until the rest agrees: the mistake lies behind that point.


def output_and_gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Run a forward and a backward pass; `.grad` stays as it is."""
    parameters = dict(model.named_parameters())
    output = model(x)
    gradients = torch.autograd.grad(output.square().sum(), list(parameters.values()), materialize_grads=True)
    return {"the output": output.detach(), **dict(zip(parameters, gradients, strict=True))}


def difference(schedule: Schedule, x: Tensor) -> str | None:
    """Say how the scheduled model differs from the reference model on any rank; None where it does not."""
    with schedule.rewound() as reference:
        expected = output_and_gradients(reference, x)
    for name, parameter in schedule.model.named_parameters():
        if layout := layout_of(parameter):
            expected[name] = layout.shard(expected[name])
    try:
        got = output_and_gradients(schedule.model, x)
        differing = [name for name in expected if not torch.allclose(got[name], expected[name], rtol=1e-4, atol=1e-5)]
    except RuntimeError as error:  # shapes that do not fit, on every rank alike
        differing = [str(error)]
    if dist.is_initialized():  # what one rank sees concerns all of them
        every: list[Any] = [None] * world_size()
        dist.all_gather_object(every, differing)
        differing = [name for names in every for name in names]
    return differing[0] if differing else None


def verify(schedule: Schedule, x: Tensor) -> str:
    """Compare the scheduled model with the reference model on a batch; raise with the steps to blame."""
    model, steps = type(schedule.model).__name__, len(schedule.records)
    found = difference(schedule, x)
    if found is None:
        return f"verified: {model} with {steps} steps agrees with the reference model ({world_size()} ranks)"
    for agreeing in reversed(range(steps)):
        with schedule.rewound(agreeing):
            if difference(schedule, x) is None:
                break
    suspects = ", ".join(map(str, schedule.records[agreeing:]))
    raise SlapoError(f"{model} differs from the reference model: {found}; to blame: {suspects}")


# -- 9. An example ----------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """A model as its author wrote it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc1 = nn.Linear(8, 16)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(self.norm(x))))


def fast_relu(old: nn.Module) -> nn.Module:
    return nn.Hardtanh(0.0, float("inf"))


def split(sch: Any) -> None:
    """Split an MLP as Megatron-LM does: columns, then rows, and one reduction in each direction."""
    sch["fc1"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", op="all_reduce")
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", op="all_reduce")
    sch["act"].replace(fast_relu)


def train(model: nn.Module, steps: int = 5) -> list[float]:
    """Train on one batch, the same on every rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 5))
    return losses


def on_rank(number: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=number, world_size=2)
    torch.manual_seed(0)
    model, plain, other = (copy.deepcopy(one) for one in [Mlp()] * 3)
    sch = Schedule(model)
    split(sch)
    verified = verify(replay(other, sch.to_json()), torch.randn(4, 8))
    curves = f"two ranks: {train(model)}", f"one rank:  {train(plain)}"
    plain.load_state_dict(state_dict(sch))
    if number == 0:
        print(*sch.records, verified, *curves, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(on_rank, args=(f"{directory}/rendezvous",), nprocs=2)
