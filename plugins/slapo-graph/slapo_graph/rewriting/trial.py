"""Comparison of a replacement's output with a match: shapes and dtypes, on fake tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from slapo_core.internals import SafeFakeTensorMode, is_data_pointer_error
from slapo_graph import autocast_state
from slapo_graph.match import Match
from slapo_graph.private import DataDependentOutputException, DynamicOutputShapeException
from slapo_graph.protocol import Recorded
from slapo_graph.rewriting.rewrite import only_given_out
from slapo_graph.tracing.session import buffers_restored

_TRIALS: weakref.WeakKeyDictionary[Any, dict[Any, str | None]] = weakref.WeakKeyDictionary()
"""Results by function and arguments: a cache, not a registry."""


def mismatch(
    recorded: Recorded,
    module: nn.Module,
    match: Match,
    new: Callable[..., Any],
    arguments: Sequence[str | int],
    keywords: Mapping[str, str | int],
    *,
    results_only: bool = False,
) -> str | None:
    """Return the difference of the outputs of ``new`` from the match's; None if equal or unknown.

    Args:
        recorded: the graph that the match lies in.
        module: the traced one.
        match: that ``new`` replaces.
        new: a function or a module.
        arguments: as of :meth:`slapo_graph.graph.TracedForward.replaced`.
        keywords: the same.
        results_only: as of :meth:`slapo_graph.graph.TracedForward.replaced`.
    """
    nodes = {node.name: node for node in recorded.graph.nodes}
    inside = set(match.nodes)
    outputs = [name for name in match.nodes if any(user.name not in inside for user in nodes[name].users)]
    if results_only:
        given = {node.name for node in only_given_out([nodes[name] for name in match.nodes])}
        outputs = [name for name in outputs if name not in given]
    expected = [nodes[name].meta.get("example") for name in outputs or match.nodes[-1:]]
    args = [_example(match, which, nodes, module) for which in arguments]
    kwargs = {name: _example(match, which, nodes, module) for name, which in keywords.items()}
    if None in expected or any(value is _UNKNOWN for value in (*args, *kwargs.values())):
        return None
    state = _state_at(recorded.graph, match.nodes[0])
    key = (tuple(map(_key, args)), tuple((name, _key(value)) for name, value in kwargs.items()), tuple(expected), state)
    trials = _TRIALS.setdefault(new, {})
    if key not in trials:
        device = next((tensor.device.type for tensor in (*module.parameters(), *module.buffers())), "cpu")
        trials[key] = _compare(new, args, kwargs, expected, state, device)
    return trials[key]


class _UNKNOWN:
    """Marks an unknown value."""


def _example(match: Match, which: str | int, nodes: Mapping[str, fx.Node], module: nn.Module) -> Any:
    value = match.inputs[which] if isinstance(which, int) else match.captures[which]
    if isinstance(value, tuple):
        return value[1]
    node = nodes.get(value)
    if node is not None and node.op != "get_attr":
        return node.meta.get("example", _UNKNOWN)
    path = str(node.target) if node is not None else value.removeprefix("self.")
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return (tuple(found.shape), found.dtype) if isinstance(found, torch.Tensor) else _UNKNOWN


def _is_example(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and isinstance(value[1], torch.dtype)


def _key(value: Any) -> Any:
    return value if _is_example(value) else (type(value), repr(value))


def _state_at(graph: fx.Graph, name: str) -> Any:
    """Return the gradient and autocast state before a node; None: the caller's."""
    state = None
    for node in graph.nodes:
        if node.name == name:
            return state
        if node.target is autocast_state.set_state:
            state = node.args
    return state


def _compare(
    new: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    expected: Sequence[Any],
    state: Any,
    device: str,
) -> str | None:
    held = new if isinstance(new, nn.Module) else nn.Module()
    with buffers_restored(held), SafeFakeTensorMode(), _in_state(state), torch.no_grad():
        try:
            with torch.random.fork_rng(devices=[]):
                given = [_fake(value, device) for value in args]
                out = new(*given, **{name: _fake(value, device) for name, value in kwargs.items()})
        except (NotImplementedError, DataDependentOutputException, DynamicOutputShapeException):
            return None  # its values decide: it cannot be known without them
        except Exception as error:  # noqa: BLE001 - told to whoever wrote it
            if is_data_pointer_error(error):
                return None  # a kernel that needs memory
            if isinstance(error, RuntimeError) and "device" in str(error):
                return None  # a model over several devices: which value is where is not known here
            shown = ", ".join([*map(_shown, args), *(f"{name}={_shown(value)}" for name, value in kwargs.items())])
            return f"called with ({shown}) it raises {type(error).__name__}: {error}"
    if len(expected) == 1:
        found = [out]
    elif isinstance(out, tuple) and len(out) == len(expected):
        found = list(out)
    else:
        got = f"a tuple of {len(out)}" if isinstance(out, tuple) else f"a {type(out).__name__}"
        return f"the match returns {len(expected)} values, so a tuple of {len(expected)} is required (got {got})"
    for number, (wanted, value) in enumerate(zip(expected, found, strict=True)):
        own = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        if own != wanted:
            which = "" if len(expected) == 1 else f" {number}"
            return f"output{which} must be {_shown(wanted)} (got {_shown(own) if own else type(value).__name__})"
    return None


@contextlib.contextmanager
def _in_state(state: Any) -> Iterator[None]:
    before = autocast_state.state()
    try:
        if state is not None:
            autocast_state.set_state(*state)
        yield
    finally:
        autocast_state.set_state(*before)
        torch.clear_autocast_cache()


def _fake(value: Any, device: str) -> Any:
    return torch.empty(value[0], dtype=value[1], device=device) if _is_example(value) else value


def _shown(value: Any) -> str:
    if not _is_example(value):
        return repr(value)
    return f"{str(value[1]).removeprefix('torch.')}{list(value[0])}"
