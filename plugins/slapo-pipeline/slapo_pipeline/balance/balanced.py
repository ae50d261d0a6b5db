"""From ``pipeline_split(stages=N, balance=...)`` to the blocks after which it cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from slapo_core import ArgumentError, Node, PreconditionError, TraceError, Violation
from slapo_pipeline.balance.agreeing import first_ranks
from slapo_pipeline.balance.blocks import find_blocks
from slapo_pipeline.balance.costs import Costs, flops, parameters_as_registered, parameters_in_use
from slapo_pipeline.balance.cutting import best_cuts, piece_costs
from slapo_pipeline.balance.sections import Call, run_in_sections
from slapo_pipeline.balance.timing import seconds_of

__all__ = ["balanced", "container_violations"]


def container_violations(node: Node, stages: int, other_cuts: Sequence[str]) -> Iterator[Violation]:
    """Why a node cannot be cut into so many stages, as far as its modules and the mesh say it.

    Args:
        node: the container.
        stages: how many are wanted.
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
    full = [_full(node, path) for path in blocks]
    inside = [cut for cut in other_cuts if any(cut == path or cut.startswith(f"{path}.") for path in full[:-1])]
    inside += [cut for cut in other_cuts if full and cut.startswith(f"{full[-1]}.")]
    if inside:
        yield Violation(
            f"the model is cut among these blocks already, after '{inside[0]}'",
            "one pipeline_split(stages=...) for the whole list, or single cuts everywhere",
        )


def balanced(node: Node, stages: int, balance: str, other_cuts: Sequence[str]) -> tuple[str, ...]:
    """The blocks after which ``node`` is cut, as paths relative to it: the last one of each stage but the last.

    Args:
        node: what :func:`container_violations` says nothing about.
        stages: how many.
        balance: ``"parameters"``, ``"flops"`` or ``"time"``.
        other_cuts: paths of modules after which the schedule cuts already.

    Raises:
        PreconditionError: it is not known what the model is called with, or it does not run its blocks in turn.
    """
    blocks, _ = find_blocks(node, stages)
    if stages == 1:
        return ()
    full = [_full(node, path) for path in blocks]
    root = _root(node)

    def find() -> tuple[int, ...]:
        costs = _costs(root, node, full, balance, other_cuts)
        return best_cuts(piece_costs(costs.before, costs.blocks, costs.after), stages)

    try:
        cuts = first_ranks(node.mesh, find, stages - 1) if balance == "time" else find()
    except (ArgumentError, TraceError) as error:
        violation = Violation(error.message, error.hint)
        raise PreconditionError(
            f"cannot apply pipeline_split(stages={stages}, balance={balance!r}) at "
            f"{repr(node.path) if node.path else 'the root'}: {violation}",
            violations=[violation],
            path=node.path,
        ) from error
    return tuple(blocks[cut - 1] for cut in cuts)


def _costs(root: Node, node: Node, blocks: Sequence[str], balance: str, cuts: Sequence[str]) -> Costs:
    try:
        call = root.example_call()
    except ArgumentError:
        if balance != "parameters":
            raise ArgumentError(
                f'balance="{balance}" runs the model once without values, and this schedule has no example inputs',
                hint="create_schedule(model, example_inputs={'input_ids': ids}), or balance=\"parameters\"",
            ) from None
        with root.untouched() as model:
            return parameters_as_registered(model, blocks)
    with root.untouched() as model:
        _check_same(node, model, blocks)
        if balance == "parameters":
            return parameters_in_use(model, call, blocks, cuts)
        if balance == "flops":
            return flops(run_in_sections(model, call, blocks, cuts))
        return _times(root, model, call, blocks, cuts)


def _check_same(node: Node, model: nn.Module, blocks: Sequence[str]) -> None:
    """The untouched model must have these blocks too: they are what is measured."""
    for path in blocks:
        try:
            model.get_submodule(path)
        except AttributeError:
            raise TraceError(
                f"a step brought '{path}': blocks of the untouched model are measured",
                path=node.path,
                hint="cut the list before that step, or after single modules: pipeline_split()",
            ) from None


def _times(root: Node, model: nn.Module, call: Call, blocks: Sequence[str], cuts: Sequence[str]) -> Costs:
    """Each block's time; outside of the blocks, that of the modules that are called there."""
    sections = run_in_sections(model, call, blocks, cuts)
    before, after = sections.before.modules, sections.after.modules
    paths = [*before, *blocks, *after]
    for path in paths:
        module = model.get_submodule(path)
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            raise TraceError(
                f"'{path}' is on the meta device, so that its time cannot be measured",
                path=path,
                hint='balance="flops"',
            )

    def calling(path: str) -> Callable[[], Call]:
        return lambda: root[path].example_call()  # type: ignore[no-any-return]

    seconds = seconds_of([(model.get_submodule(path), calling(path)) for path in paths])
    times: list[dict[Any, float]] = [{path: each} for path, each in zip(paths, seconds, strict=True)]
    first, last = len(before), len(before) + len(blocks)
    return Costs(_joined(times[:first]), tuple(times[first:last]), _joined(times[last:]))


def _joined(shares: Sequence[dict[Any, float]]) -> dict[Any, float]:
    return {key: cost for share in shares for key, cost in share.items()}


def _root(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def _full(node: Node, path: str) -> str:
    return f"{node.path}.{path}" if node.path else path
