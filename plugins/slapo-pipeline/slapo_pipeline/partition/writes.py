"""In-place writes, and tensors that share memory, across a cut: right, or refused."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx, nn

from slapo_core.tracing import FlatGraph
from slapo_pipeline.partition.nodes import is_given, is_part, readers
from slapo_pipeline.partition.places import Uncuttable
from slapo_pipeline.partition.segments import Segments

__all__ = ["settle_shared_modules", "settle_writes"]

_HINT = "write `x = x + y` instead of `x += y` there, or cut elsewhere"


def settle_writes(segments: Segments, pieces: Iterable[fx.Node]) -> None:
    """Give stages copies of what they receive and write to; refuse what stages would see of each other's writes.

    A stage that gets a value has memory of its own. So after a write only that stage has the new contents, in the
    tensors that lie in the memory that it wrote to.

    Args:
        segments: of all stages.
        pieces: nodes whose values the model returns.

    Raises:
        Uncuttable: another stage, or another tensor of the stage, would have to see a write.
    """
    writes = _Writes(segments, frozenset(pieces))
    for node, written in segments.flat.writes.items():
        for tensor in written:
            writes.settle(node, tensor)


def settle_shared_modules(segments: Segments) -> None:
    """Refuse a buffer that a called module changes, and another stage needs too: each stage would have its own.

    Raises:
        Uncuttable: a module that changes it is called on both sides of a cut, or code on one side reads it.
    """
    flat, places = segments.flat, segments.places
    names = _changing(flat)
    if not names:
        return
    stages: dict[int, set[int]] = {}
    for node, position in places.position.items():
        if node.op == "call_module":
            called: nn.Module = flat.module.get_submodule(str(node.target))
            for buffer in called.buffers():
                stages.setdefault(id(buffer), set()).add(position)
    hint = "cut so that all its calls lie in one stage, or give each side a module of its own"
    for number, name in names.items():
        if len(stages.get(number, ())) > 1:
            problem = f"'{name}' is written to by a module that is called on both sides of the cut"
            raise Uncuttable(places.cuts[min(stages[number])], problem, hint)
    for segment in segments.segments:
        for node in segment.graph.nodes:
            read = id(_attribute(flat.module, str(node.target))) if node.op == "get_attr" else 0
            for writer in stages.get(read, set()) - {segment.index} if read in names else ():
                problem = f"'{names[read]}' is written to by a module on one side of the cut, and read on the other"
                raise Uncuttable(places.cuts[min(writer, segment.index)], problem, "cut so that both lie in one stage")


def _changing(flat: FlatGraph) -> dict[int, str]:
    """Names of the buffers that calls change, by their identity: running statistics count no writes."""
    names = {}
    for path, module in flat.module.named_modules():
        running = isinstance(module, nn.modules.batchnorm._NormBase) and module.training
        for name, buffer in module._buffers.items():
            full = f"{path}.{name}" if path else name
            if buffer is not None and (running or full in flat.written):
                names[id(buffer)] = full
    return names


def _attribute(root: nn.Module, path: str) -> object:
    owner, _, name = path.rpartition(".")
    return getattr(root.get_submodule(owner), name)


class _Writes:
    def __init__(self, segments: Segments, pieces: frozenset[fx.Node]) -> None:
        self.segments, self.flat, self.places = segments, segments.flat, segments.places
        self.pieces = pieces
        self.sharing: dict[int, list[fx.Node]] = {}
        for node, storage in self.flat.storages.items():
            if node in self.places.order:  # others were dropped: nothing uses them
                self.sharing.setdefault(storage, []).append(node)

    def settle(self, node: fx.Node, written: fx.Node) -> None:
        """One write, by ``node``, to the memory of ``written``."""
        stage, order = self.places.position[node], self.places.order[node]
        origins = self._origins(written, stage)
        if len(origins) > 1:
            raise self._refusal(node, written, written, "may lie in the memory of several values")
        (origin,) = origins
        for other in self.sharing[self.flat.storages[written]]:
            is_older = self.places.order[other] <= order
            for user in readers(other):
                position = self.places.position[user]
                if other.op == "get_attr" and position != stage and user.op != "output":
                    raise self._refusal(node, written, other, f"is read in stage {position} too")
                if self.places.order[user] < order:
                    continue
                if position == stage and other is not written and self._origins(other, stage) != origins:
                    raise self._refusal(node, written, other, "shares its memory, and is sent on its own")
                if is_older and position > stage and user.op != "output" and self.places.home(other) < stage:
                    raise self._refusal(node, written, other, f"is read in stage {position}, which gets it as it was")
                if is_older and position > stage and is_given(other) and user.op != "output":
                    raise self._refusal(node, written, other, f"is read in stage {position}, which gets it as it was")
            is_returned = other in self.pieces and is_older
            if is_returned and (self.places.home(other) < stage):
                raise self._refusal(node, written, other, "is returned as it was before")
        segment = self.segments.segments[stage]
        if origin in segment.uses and segment.known[origin] is segment.uses[origin]:
            segment.clone_first(origin)

    def _origins(self, node: fx.Node, stage: int) -> frozenset[fx.Node]:
        """Where, as a stage has it, the memory of a tensor comes from: a received value, an argument, a call."""
        if is_given(node) or self.places.home(node) < stage:
            return frozenset([node])
        call = node
        while is_part(call, self.flat) and isinstance(call.args[0], fx.Node):
            call = call.args[0]
        storage = self.flat.storages.get(node)
        sources = [read for read in _inputs(call) if self.flat.storages.get(read) == storage]
        if not sources:
            return frozenset([call])
        return frozenset().union(*(self._origins(read, stage) for read in sources))

    def _refusal(self, node: fx.Node, written: fx.Node, other: fx.Node, problem: str) -> Uncuttable:
        stage = self.places.position[node]
        cut = self.places.cuts[min(max(self.places.home(other), 0), len(self.places.cuts) - 1)]
        cut = cut if stage > 0 else self.places.cuts[0]
        return Uncuttable(
            cut,
            f"stage {stage} writes to '{written}' in place, and '{other}' {problem}",
            _HINT,
            node.meta.get("location"),
        )


def _inputs(call: fx.Node) -> Iterable[fx.Node]:
    """What a call gets, in containers that were made for it too."""
    for read in call.all_input_nodes:
        yield read
        if isinstance(read.target, type):
            yield from _inputs(read)
