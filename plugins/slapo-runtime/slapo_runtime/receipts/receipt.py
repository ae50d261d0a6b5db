"""The receipt: the effects that steps and a runtime expect, compared with a record of training steps."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slapo_core.effects import Calls, Casts, Collective, Compiled, Effect, NeverAllocates, Recomputes, Replays
from slapo_core.errors import ApplyError, PathError, SlapoError
from slapo_core.internals import Internals, forwards, hooks_of
from slapo_core.primitive import Record
from slapo_runtime.receipts.watch import ModuleCalls

if TYPE_CHECKING:
    from slapo_core import Node, Plan, Schedule
    from slapo_runtime.receipts.watch import Observed, Place


@dataclass(frozen=True)
class Finding:
    """An effect, and whether it was seen.

    Args:
        source: the step, as in ``str(record)``, or ``"target 'torch'"``; empty for what nothing explains.
        location: ``file:line`` of the step.
        expected: in words.
        seen: in words.
        is_seen: whether it is in effect.
        cause: of a missing one, the likely cause; empty where it is unknown.
        ranks: on which it is so; empty for all.
    """

    source: str
    location: str
    expected: str
    seen: str
    is_seen: bool
    cause: str = ""
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        at = f" ({self.location})" if self.location else ""
        why = f"; {self.cause}" if self.cause else ""
        where = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.source or 'no step'}{at}: expected {self.expected}, seen{where}: {self.seen}{why}"


@dataclass(frozen=True)
class Expectation:
    """An effect with its step.

    Args:
        step: of the schedule; None: of the runtime.
        effect: what it shows.
        path: of the module that shows it.
        source: as of :class:`Finding`.
        location: as of :class:`Finding`.
        cause: where a hook or wrapper is not in force any more, which one.
        can_be_bypassed: whether gradients of the module's parameters come from its own forward, on this rank.
    """

    step: Record | None
    effect: Effect
    path: str
    source: str
    location: str = ""
    cause: str = ""
    can_be_bypassed: bool = False


def expectations(schedule: Schedule, *, by_runtime: bool = False) -> list[Expectation]:
    """Ask each step that is in force for its effects.

    A step whose module a later one replaced is left out.

    Args:
        schedule: with all its steps in force, before a runtime takes the model over.
        by_runtime: also steps that a runtime carries out, e.g. ``fully_shard`` (``Primitive.targets``); False for a run
            of the scheduled model alone, as ``verify`` makes it.
    """
    internals, found = Internals(schedule), []
    replaced = [record for record in schedule.records if _replaces_module(record)]
    for record in schedule.records:
        if any(later.index > record.index and _below(later.path, record.path) for later in replaced):
            continue
        if record.primitive.targets is not None and not by_runtime:
            continue
        try:
            node = internals.node(record.path)
        except PathError:  # a later step took the module out
            continue
        effects = _effects(record, node)
        gone, is_alone = (_gone(node), _computes_alone(node)) if effects else ("", False)
        for effect in effects:
            if isinstance(effect, Collective) and effect.per == "step" and not by_runtime:
                continue
            path = record.path if effect.at is None else effect.at
            found.append(Expectation(record, effect, path, str(record), record.location, gone, is_alone))
    return found


def _gone(node: Node) -> str:
    """Say which hook or wrapper of a module's steps its calls do not run; empty if none."""
    module = node.module
    registered = [hook for hooks in hooks_of(module).values() for hook in hooks.values()]
    for _, hook in node.hooks:
        if hook not in registered:
            return f"the module has no hook {getattr(hook, '__name__', type(hook).__name__)}"
    if node.wrappers and not isinstance(module.__dict__.get("forward"), forwards.ModuleForward):
        return "the module's forward is not the wrapped one"
    return ""


def _computes_alone(node: Node) -> bool:
    """Return whether no other module, and no other stage, uses the module's parameters."""
    is_staged = node.mesh is not None and "pp" in node.mesh and node.mesh.size("pp") > 1
    return not is_staged and all(len(below.ties(name)) == 1 for below in node.walk() for name in below.parameters)


def _effects(record: Record, node: Node) -> list[Effect]:
    """
    Raises:
        ApplyError: the primitive's ``effects`` raises, or yields something else; it names the distribution.
    """
    hint = "yield effects of slapo_core.effects, e.g. Collective('all_reduce', 'tp')"
    try:
        effects = list(record.primitive.effects(node))
    except SlapoError:
        raise
    except Exception as error:
        raise ApplyError(
            f"effects() of {record} raised {type(error).__name__}: {error}",
            path=record.path,
            plugin=record.distribution,
            hint=hint,
        ) from error
    for effect in effects:
        if _compare.dispatch(type(effect)) is _compare.dispatch(object):
            raise ApplyError(
                f"effects() of {record} must yield effects of slapo_core.effects (got {type(effect).__name__})",
                path=record.path,
                plugin=record.distribution,
                hint=hint,
            )
    return effects


def left_to_targets(schedule: Schedule) -> str | None:
    """Name the steps that do nothing in a run without a target; None if there are none."""
    left = [record for record in schedule.records if record.primitive.targets is not None]
    if not left:
        return None
    targets = sorted({repr(target) for record in left for target in record.primitive.targets or ()})
    more = f" and {len(left) - 1} more" if left[1:] else ""
    return f"without target {' or '.join(targets)} these steps do nothing: {left[0]}{more}"


def expectations_of_plan(plan: Plan) -> list[Expectation]:
    """Return the effects of a dialect's own."""
    source = f"target '{plan.target}'"
    return [Expectation(None, effect, effect.at or "", source) for effect in plan.effects]


def _replaces_module(record: Record) -> bool:
    return record.name == "core.replace" and getattr(record.primitive, "match", None) is None


def receipt(expected: Iterable[Expectation], record: Observed) -> list[Finding]:
    """Compare effects with a record.

    A module that was not called in the record shows no effects, and its expectations are left out, unless it computed
    all the same.
    """
    findings = []
    of_runtime: dict[tuple[str, str, str], list[tuple[Expectation, Collective]]] = {}
    for one in expected:
        if one.step is None and isinstance(one.effect, Collective):
            key = (one.source, one.effect.kind, one.effect.mesh_dim)
            of_runtime.setdefault(key, []).append((one, one.effect))
            continue
        calls = record.calls.get(one.path)
        seen: Seen | None = None
        if one.step is None or (calls is not None and calls.forward) or _fallbacks(record, one.path, here=True):
            seen = _compare(one.effect, one, calls or ModuleCalls(), record)
        elif isinstance(one.effect, Collective) and any(call.record == one.source for call in record.collectives):
            # The graph of a module above has its hooks, and calls of its own.
            seen = _compare(replace(one.effect, times=None), one, ModuleCalls(1, with_gradient=1), record)
        elif isinstance(one.effect, Calls) and (graph := _graph_with(one.effect.name, one.path, record)) is not None:
            seen = f"calls of {one.effect.name} in the graph of '{graph}'", True, ""
        elif _is_bypassed(one, record):
            seen = "no call of the module, which computes", False, _BYPASSED
        if seen is not None:
            words, is_seen, cause = seen
            cause = cause if is_seen else cause or one.cause
            findings.append(Finding(one.source, one.location, str(one.effect), words, is_seen, cause))
    findings += filter(None, (_exchange(several, record) for several in of_runtime.values()))
    return findings


def _graph_with(name: str, path: str, record: Observed) -> str | None:
    """Return the module above an uncalled one whose graph made a call of this name; None if there is none."""
    for each in record.happenings:
        if each.event == "call" and each.name == name and _below(each.place.module, path):
            return each.place.module
    return None


_BYPASSED = "its forward ran past its hooks: call the module, not its forward, and do not read its weight instead"


def _is_bypassed(one: Expectation, record: Observed) -> bool:
    """Return whether a module computed without a call, and nothing of the step was seen."""
    effect = one.effect
    if not one.can_be_bypassed or not isinstance(effect, (Calls, Collective, Recomputes)):
        return False
    if _runs_code(record, one.path, or_region=True):
        return False
    if any(place.record == one.source for place in record.operators):
        return False
    if isinstance(effect, Calls) and effect.name == one.path:  # a graph of a module above has its operations
        return False
    if isinstance(effect, Collective):  # in a graph of a module above, which does not tell its steps apart
        kind = (effect.kind, effect.mesh_dim)
        seen = [call.module for call in record.collectives if (call.kind, call.mesh_dim) == kind and not call.record]
        if any(_below(module, one.path) for module in seen):
            return False
    if isinstance(effect, Recomputes):
        events = [(each.event, each.place.module) for each in record.happenings]
        if any(event == "recomputation" and _below(one.path, module) for event, module in events):
            return False
    is_own = _below if isinstance(effect, Recomputes) else str.__eq__
    has_gradient = any(  # of a parameter of its own; of a checkpoint, of a module below, too
        is_own(one.path, place.module) and place.phase == "backward" and not place.record for place in record.operators
    )
    return has_gradient or any(
        calls.forward and path != one.path and _below(one.path, path) for path, calls in record.calls.items()
    )


def _exchange(several: list[tuple[Expectation, Collective]], record: Observed) -> Finding | None:
    """Compare the effects of a runtime on one kind of collectives over one mesh dimension, in all modules together.

    A runtime may start a collective of one module in the call of another. Counts hold where each of the modules was
    called as often as the model; else there is at least one collective.

    Returns:
        None if none of the modules was called.
    """
    first, effect = several[0]
    calls = {one.path: record.calls[one.path].forward for one, _ in several if one.path in record.calls}
    shown = [one for one in several if one[1].at is None or calls.get(one[0].path)]
    if not shown:
        return None
    made = [
        call
        for call in record.collectives.elements()
        if (call.kind, call.mesh_dim) == (effect.kind, effect.mesh_dim)
        and call.dtype not in _COUNTS
        and (call.bytes > _NUMBER or call.kind != "all_reduce" or effect.times is not None)
    ]
    called = {record.calls[""].forward if "" in record.calls else 0, *calls.values()}
    what, cause = f"{effect.kind} over '{effect.mesh_dim}'", ""
    types = Counter(call.dtype for call in made)
    dtypes = {one.dtype for _, one in shown}
    if effect.bytes is not None:
        wanted, seen = effect.bytes * record.steps, sum(call.bytes for call in made)
        expected, words, is_seen = f"{wanted:,} bytes of {what}", f"{seen:,} bytes", wanted <= seen < 2 * wanted
    elif all(one.times is not None for _, one in shown) and len({*called, 0}) == 2:
        counts: Counter[str | None] = Counter()
        for one, each in shown:
            counts[each.dtype] += _times(each, one.path, calls, record)
        types = Counter(call.dtype for call in made if call.in_passes)
        wanted, seen = sum(counts.values()), sum(types.values())
        expected, words = f"{wanted} x {what}", str(seen)
        is_seen = seen == wanted and (None in dtypes or all(types[str(each)] == counts[each] for each in counts))
    else:
        expected, words, is_seen = what, str(len(made)), bool(made)
    known = sorted(filter(None, dtypes))
    if known and None not in dtypes:
        expected += f" in {' and '.join(known)}"
        shown_types = ", ".join(f"{count} in {dtype}" for dtype, count in sorted(types.items()))
        words += shown_types and f" ({shown_types})"
        if made and not types.keys() >= set(known):
            is_seen, cause = False, "another type was communicated"
    return Finding(first.source, first.location, expected, words, is_seen, cause)


_COUNTS = ("bool", "int32", "int64")
"""Types of what runtimes exchange about tensors, beside the tensors."""
_NUMBER = 8
"""Bytes of one number, e.g. of a norm; its sum over ranks does not exchange gradients."""


def _times(effect: Collective, path: str, calls: Mapping[str, int], record: Observed) -> int:
    """Return how often a collective of a module is made in the watched steps; only in its backward if there was one."""
    if effect.per != "forward" and not _has_backward(record, path):
        return 0
    return (effect.times or 0) * (record.steps if effect.per == "step" else calls[path])


def _has_backward(record: Observed, path: str) -> bool:
    return any(
        place.phase in ("backward", "recomputation") and _below(path, place.module) for place in record.operators
    )


Seen = tuple[str, bool, str]
"""What was seen in words, whether the effect is there, and the likely cause if not."""


@functools.singledispatch
def _compare(effect: Effect, one: Expectation, calls: ModuleCalls, record: Observed) -> Seen | None:
    """Look for an effect; None where it cannot show, e.g. in a backward pass without gradients."""
    raise NotImplementedError(type(effect).__name__)


def _counted(seen: int, times: int | None, calls: int, what: str) -> Seen:
    wanted = None if times is None else times * calls
    is_seen = seen > 0 if wanted is None else seen == wanted
    of = "" if wanted is None else f" of {wanted}"
    return f"{seen}{of} {what}", is_seen, ""


def _runs_code(record: Observed, path: str, *, or_region: bool = False) -> bool:
    """Return whether compiled or captured code ran in the place of a module's Python, so that it shows less.

    Args:
        record: what was seen.
        path: of the module.
        or_region: whether a compiled part of a forward counts, which may call the module.
    """
    return any(
        each.event == "unseen" or (each.event in ("compiled", "replay") and (or_region or not each.name))
        for each in record.happenings
        if _below(each.place.module, path)
    )


@_compare.register(Collective)
def _(effect: Collective, one: Expectation, calls: ModuleCalls, record: Observed) -> Seen | None:
    per_call = {"forward": calls.forward, "backward": calls.with_gradient, "step": record.steps}[effect.per]
    if not per_call:
        return None
    own = {
        call: count
        for call, count in record.collectives.items()
        if call.kind == effect.kind
        and (call.phase == effect.per if effect.per != "step" else call.phase != "recomputation")
        and (call.record == one.source or _is_message(effect) or effect.at == call.module)
    }
    same = {
        call: count
        for call, count in own.items()
        if call.mesh_dim == effect.mesh_dim
        or (_is_message(effect) and effect.mesh_dim in call.mesh_dim.split("_"))  # of a group of more ranks
    }
    if not own and _runs_code(record, one.path):
        return None
    made = sum(same.values())
    words, is_seen, cause = _counted(made, effect.times, per_call, f"{effect.kind} over '{effect.mesh_dim}'")
    if effect.per == "backward" and not is_seen:
        if not made and not _has_backward(record, one.path):
            return None  # no gradient came back to its output
        is_seen = 0 < made <= (effect.times or 1) * per_call  # of several outputs some may have no gradient
    types = sorted({call.dtype for call in same})
    if effect.dtype is not None and same and types != [effect.dtype]:
        return f"{words} in {', '.join(types)}", False, "another type was communicated"
    if own and not same:
        other = next(iter(own))
        cause = f"it ran over {repr(other.mesh_dim) if other.mesh_dim else f'a group of {other.ranks} ranks'}"
    return words, is_seen, cause


def _is_message(effect: Collective) -> bool:
    """Return whether a runtime sends or receives for a step, between code of modules."""
    return effect.kind in ("send", "recv")


def _within(one: Expectation, place: Place) -> bool:
    return place.phase == "forward" and _below(one.path, place.module)


def _below(path: str, module: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")


def _events(record: Observed, path: str, is_one: Callable[[Any], bool]) -> int:
    return sum(
        count for event, count in record.happenings.items() if _below(path, event.place.module) and is_one(event)
    )


@_compare.register(Calls)
def _(effect: Calls, one: Expectation, calls: ModuleCalls, record: Observed) -> Seen | None:
    called = record.calls.get(effect.name)
    if called is not None:  # a module
        words, is_seen, cause = _counted(called.forward, effect.times, calls.forward, f"calls of {effect.name}")
        former = _fallbacks(record, one.path, here=True)
        return words, is_seen and not former, f"{former[0]} runs" if former else cause
    per_call = calls.forward if effect.per == "forward" else calls.with_gradient
    if effect.per == "backward" and not (per_call and _has_backward(record, one.path)):
        return None
    seen = _events(
        record,
        one.path,
        lambda each: each.event == "call" and each.name == effect.name and each.place.phase == effect.per,
    )
    fallbacks = _fallbacks(record, one.path)
    if not seen and not fallbacks and _runs_code(record, one.path):
        return None
    words, is_seen, cause = _counted(seen, effect.times, per_call, f"calls of {effect.name}")
    is_seen = is_seen or (effect.per == "backward" and 0 < seen <= (effect.times or 1) * per_call)
    if fallbacks:
        return words, False, f"it ran its fallback: {fallbacks[0]}"
    return words, is_seen, cause


def _fallbacks(record: Observed, path: str, *, here: bool = False) -> list[str]:
    """Return the reasons of fallbacks at a module, or also below."""
    return [
        each.name
        for each in record.happenings
        if each.event == "fallback" and (each.place.module == path if here else _below(path, each.place.module))
    ]


@_compare.register(Recomputes)
def _(effect: Recomputes, one: Expectation, calls: ModuleCalls, record: Observed) -> Seen | None:
    again = {each: count for each, count in record.happenings.items() if each.event == "recomputation"}
    seen = sum(count for each, count in again.items() if each.name == one.path)
    if not seen:  # a region
        seen = sum(count for each, count in again.items() if not each.name and _below(one.path, each.place.module))
    if not seen and _needs_no_gradient(calls, one.path, record):
        return None
    if not seen and not any(_below(one.path, place.module) and place.phase == "forward" for place in record.operators):
        return None  # nothing to keep, e.g. where dropout is off
    inner = [each.name for each in again if each.name not in ("", one.path) and _below(one.path, each.name)]
    own = [path for path in record.trained if _below(one.path, path) and not any(_below(each, path) for each in inner)]
    if not seen and inner and not own:
        return None  # checkpoints below keep all that this one would
    cause = "" if seen else "it ran without gradients, or another forward runs"
    return (*_counted(seen, None, calls.forward, "recomputed forwards")[:2], cause)


def _needs_no_gradient(calls: ModuleCalls, path: str, record: Observed) -> bool:
    """Return whether no backward pass can have needed the activations of a module, or compiled code kept them."""
    backward = [place.module for place in record.operators if place.phase == "backward"]
    is_reached = any(_below(path, module) for module in backward)
    is_frozen = not calls.differentiable and not any(_below(path, each) for each in record.trained)
    return not backward or is_frozen or (calls.differentiable > 0 and not is_reached) or _runs_code(record, path)


@_compare.register(Compiled)
def _(effect: Compiled, one: Expectation, calls: ModuleCalls, record: Observed) -> Seen | None:
    here = [each for each in record.happenings if each.place.module == one.path]
    runs = [each for each in here if each.event == "compiled"]
    skipped = [each.name for each in here if each.event == "fallback"]
    if skipped or not runs:
        if not skipped and any(each.event == "unseen" for each in here):
            return None
        return "no compiled code", False, skipped[0] if skipped else "another forward runs"
    breaks = max(dict(each.facts).get("graph_breaks", 0) for each in runs)
    is_seen = effect.graph_breaks is None or breaks <= effect.graph_breaks
    return f"compiled code with {breaks or 'no'} graph breaks", is_seen, ""


@_compare.register(Replays)
def _(effect: Replays, one: Expectation, calls: ModuleCalls, record: Observed) -> Seen | None:
    here = {each: count for each, count in record.happenings.items() if each.place.module == one.path}
    seen = sum(count for each, count in here.items() if each.event == "replay")
    if not seen and any(each.event == "unseen" for each in here):
        return None
    words, is_seen, _ = _counted(seen, effect.times, calls.forward, "replays of a CUDA graph")
    return words, is_seen, next((each.name for each in here if each.event == "fallback"), "")


@_compare.register(Casts)
def _(effect: Casts, one: Expectation, calls: ModuleCalls, record: Observed) -> Seen | None:
    words, is_seen = [], True
    of_products = (types for place, types in record.products.items() if _within(one, place))
    of_parameters = (types for path, types in record.parameters.items() if _below(one.path, path))
    for what, wanted, found in (
        ("parameters", effect.storage, of_parameters),
        ("products", effect.compute, of_products),
    ):
        seen = {dtype for types in found for dtype in types if wanted is not None}
        if seen:
            words.append(f"{what} in {', '.join(sorted(seen))}")
            is_seen = is_seen and seen == {wanted}
    return (" and ".join(words), is_seen, "") if words else None


@_compare.register(NeverAllocates)
def _(effect: NeverAllocates, one: Expectation, calls: ModuleCalls, record: Observed) -> Seen | None:
    large = [
        each
        for (place, features), each in record.largest.items()
        if features == effect.features
        and _below(one.path, place.module)
        and math.prod(each.shape) > (calls.rows - 1 if effect.rows is None else effect.rows) * features
        and each.dtype in ("float64", "float32", "bfloat16", "float16")
    ]
    if not large:
        return "none", True, ""
    found = max(large)
    return f"{tuple(found.shape)} of {found.operator} in {found.place.module or 'the model'}", False, ""


def unexplained(record: Observed, expected: Iterable[Expectation], *, by_runtime: bool = False) -> Iterator[Finding]:
    """Yield collectives over the mesh in passes of the model that no step made.

    Compiled code does not tell whose its collectives are: there, steps below the module that expect any over the mesh
    dimension explain them.

    Args:
        record: of the training steps.
        expected: the mesh dimensions of a runtime's own effects are left out.
        by_runtime: whether a runtime trains the model; it exchanges what it needs over replicas and stages.
    """
    effects = [(one, one.effect.mesh_dim) for one in expected if isinstance(one.effect, Collective)]
    known = {mesh_dim for one, mesh_dim in effects if one.step is None}
    known |= {"dp", "dp_replicate", "pp"} if by_runtime else set()
    found: dict[tuple[str, str, str], int] = {}
    for call, count in record.collectives.items():
        if call.mesh_dim and call.in_passes and not call.record and call.mesh_dim not in known:
            key = (call.kind, call.mesh_dim, call.module)
            found[key] = found.get(key, 0) + count
    for (kind, mesh_dim, module), count in found.items():
        is_compiled = _runs_code(record, module)
        if is_compiled and any(each == mesh_dim and _below(module, one.path) for one, each in effects):
            continue
        seen_there = f"{count} {kind} over '{mesh_dim}' in '{module}'"
        yield Finding("", "", "no collective that neither a step nor the runtime makes", seen_there, False)
