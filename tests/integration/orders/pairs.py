"""Every ordered pair of primitives, at the same module, at a parent and its child, at a child and its parent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.integration.bank.steps import Step, step
from tests.integration.orders.drawing import Draw, Undo, resolved
from tests.integration.orders.families import FAMILIES, relu_kernel, renewed

__all__ = ["MUST_WORK", "NAMES", "RELATIONS", "Pair", "pairs"]

RELATIONS = {"same": "at the same module", "down": "at a module, then below it", "up": "below a module, then at it"}
_AT = FAMILIES["opt"]
_LAYER, _ATTENTION = _AT.layer, _AT.attention
_QUERY, _UP, _DOWN, _NORM = f"{_ATTENTION}.q_proj", _AT.ups[0], _AT.down, _AT.norm
_COLUMNS = tuple(f"{_ATTENTION}.{name}" for name in _AT.columns)
_BOTH = ("weight", "bias")
PLACES = (_UP, _ATTENTION, _LAYER, _DOWN, _NORM, _QUERY)
BELOW = (
    (_LAYER, _UP),
    (_LAYER, _ATTENTION),
    (_ATTENTION, _QUERY),
    (_ATTENTION, _AT.out),
    (_LAYER, _DOWN),
    (_LAYER, _NORM),
)


@dataclass(frozen=True)
class Use:
    """A step of a primitive at one place, with what is right to come before and after it."""

    step: Step
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A primitive, then another one.

    Args:
        first, second: of :data:`NAMES`.
        relation: of :data:`RELATIONS`.
        draw: the schedule.
    """

    first: str
    second: str
    relation: str
    draw: Draw

    @property
    def other_way(self) -> str:
        """The name of the pair with its steps in the other order."""
        return _name(self.second, self.first, {"same": "same", "down": "up", "up": "down"}[self.relation])


def _name(first: str, second: str, relation: str) -> str:
    return f"{first}, then {second}, {RELATIONS[relation]}"


def _traced(path: str) -> tuple[Step, ...]:
    return (step(path, "trace", flatten=True),)


def _everywhere(call: str, **given: object) -> dict[str, Use]:
    return {path: Use(step(path, call, **given)) for path in PLACES}


def _shard(path: str) -> Step:
    return step(path, "shard", _BOTH, axis=0, role="attention column" if path in _COLUMNS else "mlp column")


def _gathered(path: str) -> tuple[Step, ...]:
    return (step(path, "sync", "bwd_post", "all_reduce"), step(path, "sync", "fwd_post", "all_gather"))


_ATTENTION_STEPS = (
    *map(_shard, _COLUMNS),
    step(_ATTENTION, "sync", "bwd_post", "all_reduce", inputs=("hidden_states",)),
    step(_ATTENTION, "shard_attribute", "num_heads"),
    step(_AT.out, "shard", "weight", axis=1),
    step(_AT.out, "sync", "fwd_post", "all_reduce"),
)
_PAIR = (_shard(_UP), step(_UP, "sync", "bwd_post", "all_reduce"))
_ROW, _SUM = step(_DOWN, "shard", "weight", axis=1), step(_DOWN, "sync", "fwd_post", "all_reduce")
_QKV = tuple(_AT.columns)
_USES: dict[str, dict[str, Use]] = {
    "trace": {
        path: Use(step(path, "trace", flatten=True) if path in (_LAYER, _ATTENTION) else step(path, "trace"))
        for path in PLACES
    },
    "replace": {path: Use(step(path, "replace", renewed)) for path in PLACES},
    "replace(match)": {_LAYER: Use(step(_LAYER, "replace", relu_kernel, match="relu"), _traced(_LAYER))},
    "fuse": {
        path: Use(step(path, "fuse", "fusion.sdpa", compiler="eager"), _traced(path)) for path in (_LAYER, _ATTENTION)
    },
    "merge": {
        _ATTENTION: Use(step(_ATTENTION, "merge", _QKV, name="merged"), _traced(_ATTENTION)),
        _LAYER: Use(step(_LAYER, "merge", tuple(f"self_attn.{name}" for name in _QKV), name="merged"), _traced(_LAYER)),
    },
    "decompose": {path: Use(step(path, "decompose")) for path in (_UP, _DOWN, _NORM, _QUERY)},
    "checkpoint": _everywhere("checkpoint"),
    "checkpoint(match)": {_LAYER: Use(step(_LAYER, "checkpoint", match="*final_layer_norm"), _traced(_LAYER))},
    "shard column": {
        _UP: Use(_shard(_UP), after=_gathered(_UP)),
        _QUERY: Use(_ATTENTION_STEPS[0], after=_ATTENTION_STEPS[1:]),
    },
    "shard row": {_DOWN: Use(_ROW, _PAIR, (_SUM,))},
    "shard_attribute": {_ATTENTION: Use(_ATTENTION_STEPS[4], _ATTENTION_STEPS[:4], _ATTENTION_STEPS[5:])},
    "sync": {
        _UP: Use(_gathered(_UP)[0], (_shard(_UP),), _gathered(_UP)[1:]),
        _ATTENTION: Use(_ATTENTION_STEPS[3], _ATTENTION_STEPS[:3], _ATTENTION_STEPS[4:]),
        _DOWN: Use(_SUM, (*_PAIR, _ROW)),
        _AT.out: Use(_ATTENTION_STEPS[6], _ATTENTION_STEPS[:6]),
    },
    "fork_rng": {_ATTENTION: Use(step(_ATTENTION, "fork_rng"), _ATTENTION_STEPS)},
    "pipeline_split": {_LAYER: Use(step(_LAYER, "pipeline_split"))},
    "compile": _everywhere("compile", backend="eager"),
    "cudagraphify": _everywhere("cudagraphify"),
    "bind": {path: Use(step(path, "bind", "aten::linear")) for path in (_UP, _DOWN, _QUERY)},
    "quantize": {path: Use(step(path, "quantize")) for path in (_UP, _ATTENTION, _LAYER, _DOWN, _QUERY)},
}
NAMES = tuple(_USES)

_SHARDS = ("shard column", "shard row")
MUST_WORK = frozenset(
    [(before, shard) for before in ("decompose", "fuse", "merge", "replace(match)") for shard in _SHARDS]
    + [("trace", "shard_attribute"), ("shard column", "trace"), ("shard row", "trace"), ("sync", "trace")]
    + [pair for name in NAMES for one in ("checkpoint", "pipeline_split") for pair in ((one, name), (name, one))]
)
"""Pairs whose order may not matter to a user."""


def pairs() -> Iterator[Pair]:
    """Every pair that has a place."""
    for first, at_first in _USES.items():
        for second, at_second in _USES.items():
            if first == second:
                continue
            places = {
                "same": [(path, path) for path in PLACES],
                "down": BELOW,
                "up": [(below, above) for above, below in BELOW],
            }
            for relation, where in places.items():
                found = next(((one, other) for one, other in where if one in at_first and other in at_second), None)
                if found is not None:
                    calls = _calls(at_first[found[0]], at_second[found[1]])
                    name = _name(first, second, relation)
                    yield Pair(first, second, relation, Draw(name, "opt", 2, calls))


def _calls(first: Use, second: Use) -> tuple[Step | Undo, ...]:
    """The two, each behind what must come before it, traces first; then what belongs after; nothing twice."""
    two = (first.step, second.step)
    traces = [each for each in second.before if each.call == "trace"]
    before = [each for each in (*traces, *first.before) if each not in two]
    between = [each for each in second.before if each not in two]
    after = [each for each in (*first.after, *second.after) if each not in two]
    return resolved("opt", tuple(dict.fromkeys((*before, first.step, *between, second.step, *after))))
