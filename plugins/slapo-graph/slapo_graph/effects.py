"""Side effects of graph nodes: RNG use, in-place writes, switched-off gradients.

Two nodes may be swapped if neither reads what the other writes and not both use the RNG. The effects of torch's
functions and modules are observed in recordings, by the schemas and tags of the operators that they call. Functions and
modules of the model's author may have every effect.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn

from slapo_core.internals import SafeFakeTensorMode
from slapo_graph.autocast_state import set_state
from slapo_graph.leaves import is_changed
from slapo_graph.private import Dropout, OpOverload, TorchDispatchMode, schema_of, storage_id, tree_map_only
from slapo_graph.protocol import check

_TAGGED = ("aten", "prims", "_c10d_functional")
"""Namespaces whose operators that use the RNG have its tag; other namespaces may lack it."""

_STATISTICS = ("running_mean", "running_var")
"""Written by batch norms in training, without mention in their schemas."""


@dataclass(frozen=True)
class SideEffects:
    """Record the side effects of a call.

    Args:
        draws: whether it used the RNG.
        writes: which of its :func:`_operands` it wrote to, by position.
        shares: the operands whose memory its result shares; empty for new memory, None if unknown.
    """

    draws: bool = False
    writes: tuple[int, ...] = ()
    shares: tuple[int, ...] | None = None


class SideEffectObserver(TorchDispatchMode):
    """Observe the side effects of dispatched operators.

    Args:
        memory_of: gives the tensor that represents another one's memory, e.g. the fake one of a parameter.
    """

    supports_higher_order_operators = True

    def __init__(self, memory_of: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self._memory_of = memory_of
        self._is_known, self._draws = True, False
        self._written: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            self._is_known = False
        elif func.namespace != "prim":
            self._draws |= torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in _TAGGED
            schema = schema_of(func)
            given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
            given.update(kwargs)
            is_training = bool(given.get("training", given.get("train")))
            for argument in schema.arguments:
                is_write = argument.alias_info is not None and argument.alias_info.is_write
                if is_write or (is_training and argument.name in _STATISTICS):
                    self._written += _tensors(given.get(argument.name))
        return func(*args, **kwargs)

    def side_effects(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> SideEffects | None:
        """Return the side effects of the single call observed; None if unknown."""
        if not self._is_known:
            return None
        given = [self._memory(value) for value in _operands((args, kwargs))]
        written = {self._memory(tensor) for tensor in self._written}
        writes = tuple(position for position, memory in enumerate(given) if memory is not None and memory in written)
        made = {self._memory(tensor) for tensor in _tensors(out)}
        shares = tuple(position for position, memory in enumerate(given) if memory is not None and memory in made)
        return SideEffects(self._draws, writes, shares)

    def _memory(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        held = value if self._memory_of is None else self._memory_of(value)
        return storage_id(held) if held.layout is torch.strided else id(value)


class _Observing(fx.Interpreter):
    """Run a graph, and note the shapes and the side effects of its nodes."""

    def run_node(self, node: fx.Node) -> Any:
        if node.op in ("placeholder", "get_attr", "output"):
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        observer = SideEffectObserver()
        with observer:
            out = getattr(self, node.op)(node.target, args, kwargs)
        node.meta["side_effects"] = observer.side_effects(args, kwargs, out)
        if isinstance(out, torch.Tensor):
            node.meta["example"] = (tuple(out.shape), out.dtype)
        return out


def observe(graph: fx.Graph, module: nn.Module, values: Sequence[Any]) -> None:
    """Note the side effects in a graph of a tracer that does not; without them no match in it can become one call.

    Args:
        graph: run once on fake tensors, up to an error.
        module: the traced one.
        values: of the placeholders.
    """
    mode = SafeFakeTensorMode()
    try:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, list(values))
        with mode:
            _Observing(module, graph=graph).run(*fakes, enable_io_processing=False)
    except Exception:  # noqa: BLE001 - its nodes stay unknown
        return


def _operands(value: Any) -> list[Any]:
    """Return a call's arguments one by one, values and nodes in the same order."""
    if isinstance(value, dict):
        value = tuple(value.values())
    elif isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, list) or type(value) in (tuple, torch.Size):
        return [operand for part in value for operand in _operands(part)]
    return [value]


def _tensors(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, tuple | list) else (value,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def is_inert(node: fx.Node) -> bool:
    """Return whether a node only reads a constant of the run: a name, a size, a guard."""
    if node.op in ("get_attr", "placeholder", "output"):
        return True
    if node.op == "call_method":
        return node.target in ("size", "stride", "numel", "dim")
    return node.op == "call_function" and (
        node.target in (getattr, len, check)
        or bool(node.meta.get("is_size"))
        or getattr(node.target, "__module__", "") == math.__name__
        or (node.target is operator.getitem and isinstance(read := node.args[0], fx.Node) and read.target is getattr)
    )


class Effects:
    """Analyze side effects of the nodes of one graph.

    Args:
        graph: must not change meanwhile, except the order of its nodes.
        module: the traced one.
        fresh: nodes whose values are new memory, whatever they compute.
    """

    def __init__(self, graph: fx.Graph, module: nn.Module, *, fresh: Collection[fx.Node] = ()) -> None:
        self.module, self._fresh = module, frozenset(fresh)
        self._roots: dict[fx.Node, frozenset[Any]] = {}
        self._side_effects: dict[fx.Node, SideEffects | None] = {}
        self.graph = graph

    def conflict(self, first: fx.Node, second: fx.Node) -> str | None:
        """Return why ``second`` may not run before ``first``; None if it may."""
        if is_inert(first) or is_inert(second):
            return None
        for one, other in ((first, second), (second, first)):
            if one.target is set_state:
                return f"'{other}' runs on one side of a place where gradients or autocast are switched"
        if self.draws(first) and self.draws(second):
            return f"'{first}' and '{second}' both use the RNG, and would do so in another order"
        for one, other in ((first, second), (second, first)):
            written = self.writes(one)
            if written & (self.reads(other) | self.writes(other)):
                return f"'{one}' may write in place to what '{other}' reads"
        return None

    def draws(self, node: fx.Node) -> bool:
        """Return whether a node may use the RNG."""
        found = self._of(node)
        return found is None or found.draws

    def writes(self, node: fx.Node) -> frozenset[Any]:
        """Return the memory, without its own, that a node may write to; see :meth:`roots`."""
        return frozenset().union(*(self.roots(written) for written in self._written(node)))

    def reads(self, node: fx.Node) -> frozenset[Any]:
        """Return the memory that a node may read."""
        return frozenset().union(*(self.roots(value) for value in node.all_input_nodes))

    def roots(self, node: fx.Node) -> frozenset[Any]:
        """Return the memory that its value may share: nodes, names of parameters, ``"arguments"``."""
        stack = [node]
        while stack:
            present = stack[-1]
            if present in self._roots:
                stack.pop()
                continue
            missing = [value for value in self._shared(present) if value not in self._roots]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            self._roots[present] = self._find_roots(present)
        return self._roots[node]

    def is_pure(self, node: fx.Node) -> bool:
        """Return whether a node has no effect besides its value."""
        if node.op in ("placeholder", "output") or node.target in (check, set_state):
            return False
        if is_inert(node):
            return True
        if node.op == "call_module" and is_changed(self.module.get_submodule(str(node.target))):
            return False
        found = self._of(node)
        return found is not None and not found.draws and not found.writes

    # ----------------------------------------------------------------------------------------------------------

    def _of(self, node: fx.Node) -> SideEffects | None:
        """Return the side effects of a node; None if unknown."""
        if node not in self._side_effects:
            self._side_effects[node] = self._find(node)
        return self._side_effects[node]

    def _find(self, node: fx.Node) -> SideEffects | None:
        if is_inert(node) or node.target in (operator.getitem, set_state) or isinstance(node.target, type):
            return node.meta.get("side_effects", SideEffects())
        draws = getattr(node.target, "slapo_draws", None)
        if draws is not None:  # a region, which writes to values of its own only; or a container that is made
            return SideEffects(draws=draws)
        found: SideEffects | None = node.meta.get("side_effects")
        if node.op == "call_module":
            below = self.module.get_submodule(str(node.target))
            if not type(below).__module__.startswith("torch.nn."):
                return None
            return SideEffects(True, found.writes, found.shares) if isinstance(below, Dropout) and found else found
        is_observed = getattr(node.target, "slapo_is_observed", False)
        if node.op == "call_function" and _is_foreign(node.target) and not is_observed:
            return None
        return self._tried(node) if node.op == "call_function" and "side_effects" not in node.meta else found

    def _tried(self, node: fx.Node) -> SideEffects | None:
        """Return the side effects of a rewrite's function, observed on fake tensors."""
        observer, target = SideEffectObserver(), cast("Callable[..., Any]", node.target)
        with SafeFakeTensorMode(allow_non_fake_inputs=False):
            try:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._example)
                with observer:
                    out = target(*args, **kwargs)
            except Exception:  # noqa: BLE001 - not known what it gets
                return None
            return observer.side_effects(args, kwargs, out)

    def _example(self, node: fx.Node) -> torch.Tensor:
        if node.op != "get_attr":
            shape, dtype = node.meta["example"]
            tensors = (*self.module.parameters(), *self.module.buffers())
            device = next((tensor.device for tensor in tensors), torch.device("cpu"))
            return torch.empty(shape, dtype=dtype, device=device)
        path, _, name = str(node.target).rpartition(".")
        held = getattr(self.module.get_submodule(path), name)
        return torch.empty(held.shape, dtype=held.dtype, device=held.device)

    def _find_roots(self, node: fx.Node) -> frozenset[Any]:
        if node.op == "placeholder":
            return frozenset(["arguments"])
        if node.op == "get_attr":
            return frozenset([f"self.{node.target}"])
        return frozenset([node]).union(*(self._roots[value] for value in self._shared(node)))

    def _shared(self, node: fx.Node) -> list[fx.Node]:
        """Return the arguments whose memory its value may share."""
        if node in self._fresh or node.op in ("placeholder", "get_attr"):
            return []
        found = self._of(node)
        return self._operands_at(node, None if found is None else found.shares)

    def _written(self, node: fx.Node) -> list[fx.Node]:
        """Return the arguments whose memory it may write to."""
        found = self._of(node)
        return self._operands_at(node, None if found is None else found.writes)

    def _operands_at(self, node: fx.Node, positions: tuple[int, ...] | None) -> list[fx.Node]:
        given = _operands((node.args, node.kwargs)) if positions else []
        if positions is None or max(positions, default=-1) >= len(given):  # a container of tensors is one node
            return list(node.all_input_nodes)
        return [given[position] for position in positions if isinstance(given[position], fx.Node)]


def _is_foreign(target: Any) -> bool:
    """Return whether a function is neither torch's nor Python's own."""
    module = getattr(target, "__module__", None)
    if module is None:
        return not isinstance(target, type(len) | type(torch.relu))
    return module.partition(".")[0] not in ("torch", "_operator", "operator", "builtins", "math")
