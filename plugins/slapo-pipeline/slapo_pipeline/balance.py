"""Cut a list of blocks into stages, minimizing the largest by parameters or FLOPs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from slapo_core import ArgumentError, Node, PreconditionError, TraceError, Violation
from slapo_core.layout import fork_rng
from slapo_graph.example_calls import example_call
from slapo_graph.flat import copied_model
from slapo_pipeline.private import FLASH_ATTENTION_OF_CPU, GROUPED_MM, TorchDispatchMode, pytree
from slapo_pipeline.rules import root_of

# Floating-point operations of torch's operators, counted at dispatch.

aten = torch.ops.aten


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of one dispatched call."""
    packet = getattr(func, "overloadpacket", None)
    if packet is FLASH_ATTENTION_OF_CPU:
        query, key, value = args[:3]
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))
    if packet is GROUPED_MM:
        return _grouped_product(args[0], args[1])
    if packet is aten.mv or packet is aten.addmv:
        matrix = args[0] if packet is aten.mv else args[1]
        return 2 * int(matrix.numel())
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _grouped_product(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the FLOPs of a grouped matrix product: each row or column belongs to one group."""
    if a.dim() == 2:  # (rows, k) by (groups, k, columns), or (rows, k) by (k, columns) in groups along k
        return 2 * a.shape[0] * a.shape[1] * b.shape[-1]
    return 2 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[-1] // (1 if b.dim() == 3 else a.shape[0])


def container_violations(node: Node, stages: int, other_cuts: Sequence[str]) -> Iterator[Violation]:
    """Yield why a node cannot be cut into a number of stages.

    Args:
        node: the container.
        stages: the number.
        other_cuts: paths of modules after which the schedule cuts already.
    """
    if stages < 1:
        yield Violation(f"stages={stages} must be 1 or more", "pipeline_split(stages=2)")
        return
    blocks, problem = find_blocks(node, stages)
    if problem is not None:
        yield problem
    size = node.mesh.size("pp") if node.mesh is not None else 1
    if size > 1 and stages % size and not other_cuts:
        fitting = [each for each in (size * (stages // size), size * (stages // size + 1)) if each]
        yield Violation(
            f"{stages} {'stage does' if stages == 1 else 'stages do'} not fit mesh_dim 'pp' of size {size}: each of "
            f"its ranks runs as many stages as the others ({' or '.join(map(str, fitting))} in all, ...)",
            f"pipeline_split(stages={fitting[-1]}), or mesh={{'pp': {stages}}}",
        )
    full = [_joined(node.path, path) for path in blocks]
    inside = [cut for cut in other_cuts if any(cut == path or cut.startswith(f"{path}.") for path in full[:-1])]
    inside += [cut for cut in other_cuts if full and cut.startswith(f"{full[-1]}.")]
    if inside:
        yield Violation(
            f"the model is cut among these blocks already, after '{inside[0]}'",
            "one pipeline_split(stages=...) for the entire list, or single cuts everywhere",
        )


def balanced(node: Node, stages: int, balance: str, other_cuts: Sequence[str]) -> tuple[str, ...]:
    """Return the blocks after which ``node`` is cut, as relative paths.

    Args:
        node: a container without :func:`container_violations`.
        stages: number of stages.
        balance: ``"parameters"`` or ``"flops"``.
        other_cuts: paths of modules after which the schedule cuts already.

    Raises:
        PreconditionError: there are no example inputs, or the model does not run its blocks one after another.
    """
    blocks, _ = find_blocks(node, stages)
    if stages == 1:
        return ()
    full = [_joined(node.path, path) for path in blocks]
    root = root_of(node)

    try:
        costs = _costs_of(root, node, full, balance, other_cuts)
    except (ArgumentError, TraceError) as error:
        violation = Violation(error.message, error.hint)
        raise PreconditionError(
            f"cannot apply pipeline_split(stages={stages}, balance={balance!r}) at "
            f"{repr(node.path) if node.path else 'the root'}: {violation}",
            violations=[violation],
            path=node.path,
        ) from error
    before, *inside, after = costs
    cuts = best_cuts(segment_costs(before, inside, after), stages)
    return tuple(blocks[cut - 1] for cut in cuts)


def _costs_of(root: Node, node: Node, blocks: Sequence[str], balance: str, cuts: Sequence[str]) -> Sequence[Share]:
    """Return the cost shares before the blocks, of each block, and after."""
    try:
        call = example_call(root)
    except ArgumentError:
        if balance != "parameters":
            raise ArgumentError(
                f'balance="{balance}" requires example inputs, to run the model once without values',
                hint="create_schedule(model, example_inputs={'input_ids': ids}), or balance=\"parameters\"",
            ) from None
        with root.reference() as model:
            return parameters_as_registered(model, blocks)
    with root.reference() as model:
        _check_same(node, model, blocks)
        if balance == "parameters":
            return parameters_in_use(model, call, blocks, cuts)
        return flops(run_in_sections(model, call, blocks, cuts))


def _check_same(node: Node, model: nn.Module, blocks: Sequence[str]) -> None:
    """Require the blocks in the reference model, which is measured."""
    for path in blocks:
        try:
            model.get_submodule(path)
        except AttributeError:
            raise TraceError(
                f"'{path}' is not in the reference model, whose blocks are measured: a step added it",
                path=node.path,
                hint="call pipeline_split(stages=...) before that step, or pipeline_split() after single modules",
            ) from None


def find_blocks(node: Node, stages: int) -> tuple[tuple[str, ...], Violation | None]:
    """Return the blocks at a node, as relative paths in list order; or a violation.

    Blocks are the children of a ModuleList or Sequential: of the node itself, else of the only list below it that is
    long enough; of several, the only one with enough blocks that have parameters. Lists inside blocks do not count.
    """
    found = list(lists_of_blocks(node.module))
    enough = [(path, names) for path, names in found if len(names) >= stages]
    if len(enough) > 1:  # a classifier (Flatten, Dropout, Linear) does not compete with the blocks
        real = [(path, names) for path, names in enough if _with_parameters(node.module, path, names) >= stages]
        enough = real if len(real) == 1 else enough
    if len(enough) == 1:
        path, names = enough[0]
        return tuple(f"{path}.{name}" if path else name for name in names), None
    call = f"pipeline_split(stages={stages})"
    if len(enough) > 1:
        full = [_joined(node.path, path) for path, _ in enough]
        shown = ", ".join(f"'{path}' ({len(names)})" for path, (_, names) in zip(full, enough, strict=True))
        return (), Violation(
            f"{len(enough)} lists of at least {stages} blocks, where one is required: {shown}",
            f"sch[{full[0]!r}].{call}",
        )
    if not found:
        return (), Violation(
            f"{type(node.module).__name__} contains no list of blocks: no ModuleList and no Sequential",
            'cut after single modules: sch["encoder.layer.5"].pipeline_split()',
        )
    path, names = max(found, key=lambda each: len(each[1]))
    return (), Violation(
        f"{len(names)} {'block' if len(names) == 1 else 'blocks'} in '{_joined(node.path, path)}' cannot make "
        f"{stages} stages",
        f"at most pipeline_split(stages={len(names)}); a stage has one block or more",
    )


def lists_of_blocks(module: nn.Module, path: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each outermost ModuleList and Sequential with its children's names."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        yield path, tuple(name for name, child in module.named_children())
        return
    for name, child in module.named_children():
        yield from lists_of_blocks(child, f"{path}.{name}" if path else name)


def _with_parameters(module: nn.Module, path: str, names: tuple[str, ...]) -> int:
    holder = module.get_submodule(path)
    return sum(next(holder.get_submodule(name).parameters(), None) is not None for name in names)


def _joined(path: str, below: str) -> str:
    return f"{path}.{below}" if path and below else path or below


Share = Mapping[Hashable, float]
"""Costs of a block by key, e.g. a parameter's id: a key that several blocks of a stage share counts once."""


def flops(sections: Sequence[Section]) -> list[Share]:
    """Return the forward FLOPs of each section."""
    return [{position: section.flops} for position, section in enumerate(sections)]


def parameters_in_use(model: nn.Module, call: Call, blocks: Sequence[str], cuts: Sequence[str] = ()) -> list[Share]:
    """Return the parameter elements that each section owns or uses.

    Unused parameters count in the first stage, where their tensors live.
    """
    sections = run_in_sections(model, call, blocks, cuts)
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    of_blocks = [{id(parameter) for parameter in model.get_submodule(path).parameters()} for path in blocks]
    used = [set(section.parameters) for section in sections]
    for position, own in enumerate(of_blocks, start=1):
        used[position] |= own
    if not cuts:  # with others, they are on the first stage of all
        used[0] |= sizes.keys() - set().union(*used)
    return [{key: sizes[key] for key in section} for section in used]


def parameters_as_registered(model: nn.Module, blocks: Sequence[str]) -> Sequence[Share]:
    """Return parameter elements by module order, without running the model.

    Modules registered before (after) the blocks are assigned to the first (last) stage.
    """
    shares: list[dict[Hashable, float]] = [{} for _ in range(len(blocks) + 2)]
    position = 0
    places = {path: index for index, path in enumerate(blocks, start=1)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = next((places[path] for path in _above(name) if path in places), None)
        if inside is not None:
            position = len(shares) - 1
            shares[inside][id(parameter)] = parameter.numel()
        else:
            shares[position][id(parameter)] = parameter.numel()
    return shares


def _above(name: str) -> list[str]:
    """Return the paths of a parameter's modules, the nearest first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Section:
    """Count the FLOPs and used parameters of a section of the run.

    Attributes:
        flops: of matrix products, convolutions and attention, forward only.
        parameters: used ones, by ``id``.
    """

    flops: int = 0
    parameters: set[int] = field(default_factory=set)


def run_in_sections(model: nn.Module, call: Call, blocks: Sequence[str], cuts: Sequence[str] = ()) -> list[Section]:
    """Run a copy of a model, and count FLOPs and parameters by section.

    The first section ends at the first block and begins at the last cut before it. Each block is a section, with the
    code since the previous block. The last section reaches from the last block to the next cut, or to the end.

    Args:
        model: unchanged; the copy shares its parameters.
        call: args and kwargs; tensors without values are enough, on the model's device.
        blocks: paths of the blocks, in the order of their list.
        cuts: paths of modules after which the model is cut already.

    Raises:
        TraceError: the model raised, or does not call each block once, in the order of the list.
    """
    # Buffers are copied, and attributes set by the forward stay on the copy.
    copied = copied_model(model)
    clock = _Clock(copied, blocks, cuts)
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    mode = next((mode for mode in (getattr(each, "fake_mode", None) for each in tensors) if mode is not None), None)
    with mode or contextlib.nullcontext(), fork_rng(), torch.no_grad(), clock.watching(), clock:
        try:
            copied(*call[0], **call[1])
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"without values the model raises {type(error).__name__}: {error}",
                hint='balance="parameters" on a schedule without example inputs needs no run; or cut after single '
                'modules: sch["encoder.layer.5"].pipeline_split()',
            ) from error
    return clock.sections()


class _Clock(TorchDispatchMode):
    """Add each dispatched operator to the current section of the run."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], cuts: Sequence[str]) -> None:
        super().__init__()
        self._model, self._blocks, self._cuts = model, tuple(blocks), tuple(cuts)
        self._ids = {id(parameter) for parameter in model.parameters()}
        self._sections = [Section() for _ in range(len(blocks) + 2)]
        self._now = 0  # 0: before; 1 + i: block i, with the code since the previous block; then: after
        self._done = 0  # blocks
        self._ended = False  # by a cut after the blocks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._ended:
            section = self._sections[self._now]
            section.flops += flops_of(func, args, kwargs or {}, out)
            leaves = pytree.tree_leaves((args, kwargs))
            section.parameters.update(self._ids.intersection(id(each) for each in leaves))
        return out

    def sections(self) -> list[Section]:
        if self._done != len(self._blocks):
            raise TraceError(f"the model does not call '{self._blocks[self._done]}'", path=self._blocks[self._done])
        return self._sections

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hook the calls of the blocks and of the modules with earlier cuts."""
        handles = []
        for index, path in enumerate(self._blocks):
            block = self._model.get_submodule(path)
            handles.append(block.register_forward_pre_hook(self._entering(index), prepend=True))
            handles.append(block.register_forward_hook(self._left(index)))
        for path in self._cuts:
            if path not in self._blocks[:-1]:  # a cut between the blocks is refused before
                handles.append(self._model.get_submodule(path).register_forward_hook(self._cut))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, index: int) -> Any:
        def enter(_module: nn.Module, _args: Any) -> None:
            if index != self._done:
                path = self._blocks[index]
                how = "more than once" if index < self._done else f"before '{self._blocks[self._done]}'"
                raise TraceError(
                    f"the model calls '{path}' {how}: only blocks that run once, in the order of their list, can be "
                    "cut into stages",
                    path=path,
                    hint='cut after single modules: sch["encoder.layer.5"].pipeline_split()',
                )
            self._now = 1 + index

        return enter

    def _left(self, index: int) -> Any:
        def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
            self._done = index + 1
            self._now = 2 + index

        return leave

    def _cut(self, _module: nn.Module, _args: Any, _out: Any) -> None:
        if self._done == 0:
            self._sections[0] = Section()
        elif self._done == len(self._blocks):
            self._ended = True


def segment_costs(before: Share, blocks: Sequence[Share], after: Share) -> list[list[float]]:
    """Return the cost of every candidate stage: ``costs[i][j]`` for blocks ``i`` to ``j - 1``.

    Args:
        before: costs before the first block, added to the stage that begins with it.
        blocks: costs of the blocks, in the order in which they run.
        after: costs after the last block.
    """
    count = len(blocks)
    costs = [[0.0] * (count + 1) for _ in range(count)]
    for first in range(count):
        seen: set[Hashable] = set()
        total: float = 0
        for end in range(first + 1, count + 1):
            shares = [before] if first == 0 and end == 1 else []
            shares.append(blocks[end - 1])
            if end == count:
                shares.append(after)
            for share in shares:
                for key, cost in share.items():
                    if key not in seen:
                        seen.add(key)
                        total += cost
            costs[first][end] = total
    return costs


def best_cuts(costs: Sequence[Sequence[float]], stages: int) -> tuple[int, ...]:
    """Return the number of blocks before each cut, e.g. ``(3, 6, 9)``.

    The cut minimizes the largest stage, and among equal cuts the sum of squares: where a huge head decides the largest
    stage, the others are still balanced.

    Args:
        costs: see :func:`segment_costs`.
        stages: number of stages, from 1 to the number of blocks.
    """
    largest = _solve(costs, stages, lambda so_far, cost: max(so_far, cost), float("inf"))[0]
    return _solve(costs, stages, lambda so_far, cost: so_far + cost * cost, largest)[1]


def _solve(
    costs: Sequence[Sequence[float]], stages: int, joined: Callable[[float, float], float], limit: float
) -> tuple[float, tuple[int, ...]]:
    """Minimize the joined cost of stages of at most ``limit`` each."""
    count = len(costs)
    # best[j]: of the first j blocks in as many stages as rounds so far
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *[None] * count]
    for stage in range(1, stages + 1):
        following: list[tuple[float, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                left, cost = best[start], costs[start][end]
                if left is None or cost > limit:
                    continue
                total = joined(left[0], cost)
                present = following[end]
                if present is None or total < present[0]:
                    following[end] = (total, (*left[1], start) if stage > 1 else ())
        best = following
    found = best[count]
    assert found is not None, "the limit is the largest stage of some cut"
    return found
