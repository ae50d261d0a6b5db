"""What the nodes of a graph do besides computing: draw random numbers, write in place, switch gradients off.

Two nodes that were recorded in one order may run in the other only if neither notices. Of operators (``torch.ops``) the
schema and the tags say it. What is not known (a function or module of the model's author) is taken to do everything.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import fx, nn

from slapo_core.graph.functional import FunctionalForm, functional_form
from slapo_core.graph.leaves import is_changed
from slapo_core.graph.regions import set_state
from slapo_core.spec.tracer import check

__all__ = ["BATCH_STATISTICS", "Effects", "is_inert"]


def _words(text: str) -> list[str]:
    return text.split()


_FRESH = frozenset(
    _words("""
    abs add addcmul addmm arange baddbmm bmm cat clone conv1d conv2d conv3d cos cumsum div embedding empty
    empty_like eq erf exp full full_like ge gelu group_norm gt layer_norm le leaky_relu linear log log_softmax
    logical_and logical_not logical_or lt masked_fill matmul maximum mean minimum mish mul ne neg new_empty new_full
    new_ones new_zeros ones ones_like outer pow reciprocal relu rms_norm rsqrt scaled_dot_product_attention sigmoid
    silu sin softmax softplus sqrt square stack sub sum tanh tril triu true_divide truediv var where zeros
    zeros_like
""")
)
"""Names of functions and methods whose result is new memory; that of any other may be a view of what it is given."""

_RANDOM = frozenset(
    _words("""
    alpha_dropout bernoulli bernoulli_ cauchy_ dropout dropout1d dropout2d dropout3d dropout_ exponential_
    feature_alpha_dropout feature_dropout fractional_max_pool2d fractional_max_pool3d geometric_ gru gumbel_softmax
    log_normal_ lstm multi_head_attention_forward multinomial normal normal_ poisson rand rand_like randint
    randint_like randn randn_like random_ randperm rnn_relu rnn_tanh rrelu rrelu_ uniform_
""")
)
_IN_PLACE_OPERATORS = frozenset(
    function for name, function in vars(operator).items() if name.startswith("i") and f"__{name}__" in vars(operator)
) - {operator.is_, operator.is_not, operator.index, operator.inv, operator.invert}
_NO_TENSORS = (getattr, len, check)
BATCH_STATISTICS = {"batch_norm": (1, 2), "instance_norm": (1, 2)}
_TAGGED = ("aten", "prims", "_c10d_functional")
"""Namespaces whose operators have the tag of random numbers if they draw some; that of others may be missing."""


def is_inert(node: fx.Node) -> bool:
    """Whether ``node`` only reads something that never changes while the graph runs: a name, a size, a guard."""
    if node.op in ("get_attr", "placeholder", "output"):
        return True
    if node.op == "call_method":
        return node.target in ("size", "stride", "numel", "dim")
    return node.op == "call_function" and (
        node.target in _NO_TENSORS
        or bool(node.meta.get("is_size"))
        or getattr(node.target, "__module__", "") == math.__name__
        or (node.target is operator.getitem and bool(node.args) and _is_inert_argument(node.args[0]))
    )


def _is_inert_argument(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target is getattr and is_inert(value)


class Effects:
    """Of the nodes of one graph.

    Args:
        graph: must not change meanwhile, but for the places of its nodes.
        module: the traced module; what it calls is looked up there.
        fresh: nodes whose values are new memory, whatever they compute.
    """

    def __init__(self, graph: fx.Graph, module: nn.Module, *, fresh: Collection[fx.Node] = ()) -> None:
        self.module, self._fresh = module, frozenset(fresh)
        self._roots: dict[fx.Node, frozenset[Any]] = {}
        self._writes: dict[fx.Node, frozenset[Any]] = {}
        self._draws: dict[fx.Node, bool] = {}
        self._forms: dict[str, FunctionalForm | None] = {}
        self.graph = graph

    def conflict(self, first: fx.Node, second: fx.Node) -> str | None:
        """Why ``second`` may not run before ``first``; None if it may."""
        if is_inert(first) or is_inert(second):
            return None
        for one, other in ((first, second), (second, first)):
            if one.target is set_state:
                return f"'{other}' runs on one side of a place where gradients or autocast are switched"
        if self.draws(first) and self.draws(second):
            return f"'{first}' and '{second}' both may draw random numbers, and would do so in another order"
        for one, other in ((first, second), (second, first)):
            written = self.writes(one)
            if written & (self.reads(other) | self.writes(other)):
                return f"'{one}' may write in place to what '{other}' reads"
        return None

    def draws(self, node: fx.Node) -> bool:
        """Whether it may draw random numbers."""
        if node not in self._draws:
            self._draws[node] = self._find_draws(node)
        return self._draws[node]

    def writes(self, node: fx.Node) -> frozenset[Any]:
        """The memory that it may write to, as :meth:`roots` names it; but for what it makes itself."""
        if node not in self._writes:
            found = frozenset().union(*(self.roots(written) for written in self._written(node)))
            self._writes[node] = found
        return self._writes[node]

    def reads(self, node: fx.Node) -> frozenset[Any]:
        """The memory that it may read."""
        return frozenset().union(*(self.roots(value) for value in node.all_input_nodes))

    def roots(self, node: fx.Node) -> frozenset[Any]:
        """The memory that its value may lie in: nodes that made it, names of parameters, ``"arguments"``."""
        stack = [node]
        while stack:
            present = stack[-1]
            if present in self._roots:
                stack.pop()
                continue
            missing = [value for value in present.all_input_nodes if value not in self._roots]
            if missing and not self._is_fresh(present):
                stack.extend(missing)
                continue
            stack.pop()
            self._roots[present] = self._find_roots(present)
        return self._roots[node]

    def is_pure(self, node: fx.Node) -> bool:
        """Whether nobody would miss it, if nobody used its value."""
        if node.op in ("placeholder", "output") or node.target in (check, set_state):
            return False
        if is_inert(node):
            return True
        if node.op == "call_module":
            below = self.module.get_submodule(str(node.target))
            return (
                not is_changed(below)
                and self._form(node) is not None
                and not self.draws(node)
                and not self._written(node)
            )
        known = node.op == "call_method" or not _is_foreign(node.target)
        return known and not self.draws(node) and not self._written(node)

    # ----------------------------------------------------------------------------------------------------------

    def _form(self, node: fx.Node) -> FunctionalForm | None:
        """What the module that a node calls computes, whatever happens around it."""
        path = str(node.target)
        if path not in self._forms:
            self._forms[path] = functional_form(self.module.get_submodule(path), hooked=True)
        return self._forms[path]

    def _find_roots(self, node: fx.Node) -> frozenset[Any]:
        if node.op == "placeholder":
            return frozenset(["arguments"])
        if node.op == "get_attr":
            return frozenset([f"self.{node.target}"])
        if self._is_fresh(node):
            return frozenset([node])
        return frozenset([node]).union(*(self._roots[value] for value in node.all_input_nodes))

    def _is_fresh(self, node: fx.Node) -> bool:
        if node in self._fresh:
            return True
        if node.op in ("placeholder", "get_attr") or self._written(node):
            return node.op in ("placeholder", "get_attr")
        if node.op == "call_module":
            form = self._form(node)
            return form is not None and form.name in _FRESH
        operators = _operators(node.target)
        if operators:
            return all(result.alias_info is None for each in operators for result in each._schema.returns)
        return _name(node) in _FRESH

    def _find_draws(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            below = self.module.get_submodule(str(node.target))
            if is_changed(below) and not type(below).__module__.startswith("torch.nn."):
                return True
            form = self._form(node)
            return form is None or form.name in _RANDOM  # whatever its probability: that may change
        if node.op not in ("call_function", "call_method"):
            return False
        known = getattr(node.target, "slapo_draws", None)
        if known is not None:
            return bool(known)
        operators = _operators(node.target)
        if operators:
            tag = torch.Tag.nondeterministic_seeded
            return any(tag in each.tags or each.namespace not in _TAGGED for each in operators)
        if node.op == "call_function" and _is_foreign(node.target):
            return True
        name = _name(node)
        if name == "scaled_dot_product_attention":
            return _argument(node, "dropout_p", 4, 0.0) != 0.0
        if name not in _RANDOM:
            return False
        return _argument(node, "p", 1, 0.5) != 0 and _argument(node, "training", 2, True) is not False

    def _written(self, node: fx.Node) -> list[fx.Node]:
        """The arguments whose memory it may write to."""
        if node.op == "call_module":
            below = self.module.get_submodule(str(node.target))
            if self._form(node) is None and not type(below).__module__.startswith("torch.nn."):
                return list(node.all_input_nodes)
            return list(node.all_input_nodes[:1]) if getattr(below, "inplace", False) else []
        if node.op not in ("call_function", "call_method") or is_inert(node):
            return []
        if hasattr(node.target, "slapo_draws"):
            return []  # a region: what it writes to are values of its own
        operators = _operators(node.target)
        if operators:
            return [written for each in operators for written in _nodes(_mutated(each, node))]
        if node.op == "call_function" and _is_foreign(node.target):
            return list(node.all_input_nodes)
        found = []
        if node.kwargs.get("out") is not None:
            found += _nodes(node.kwargs["out"])
        name = _name(node)
        if node.op == "call_method":
            in_place = name.endswith("_") and not name.endswith("__")
        else:
            in_place = node.target in _IN_PLACE_OPERATORS or node.target is operator.setitem
            in_place = in_place or (name.endswith("_") and not name.startswith("_"))
        if in_place or _argument(node, "inplace", None, False):
            found += _nodes(node.args[0] if node.args else list(node.kwargs.values())[:1])
        for position in BATCH_STATISTICS.get(name, ()):
            found += _nodes(node.args[position] if position < len(node.args) else None)
            found += _nodes([node.kwargs.get(key) for key in ("running_mean", "running_var")])
        return found


def _name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]  # of an overload: add.Tensor


def _operators(target: Any) -> list[torch._ops.OpOverload]:
    """The overloads of an operator, any of which a call may take; none for what is no operator."""
    if isinstance(target, torch.library.CustomOpDef):
        target = target._opoverload
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return [target] if isinstance(target, torch._ops.OpOverload) else []


def _mutated(operator: torch._ops.OpOverload, node: fx.Node) -> list[Any]:
    """What a call gives for the arguments that the operator writes to."""
    found = []
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(node.args[position] if position < len(node.args) else node.kwargs.get(argument.name))
    return found


def _is_foreign(target: Any) -> bool:
    """Whether a function is neither torch's nor Python's own, so that it may do anything."""
    if isinstance(target, type) or target is set_state:  # containers that a forward makes
        return False
    module = getattr(target, "__module__", None)
    if module is None:
        return not isinstance(target, type(len) | type(torch.relu))
    return module.partition(".")[0] not in ("torch", "_operator", "operator", "builtins", "math")


def _argument(node: fx.Node, name: str, position: int | None, default: Any) -> Any:
    """What is given for a parameter, as far as the graph says it."""
    if name in node.kwargs:
        return node.kwargs[name]
    if node.op == "call_function":
        parameters = _parameters(node.target)
        if parameters is not None:
            if name not in parameters:
                return default
            position, default = parameters[name]
    return node.args[position] if position is not None and position < len(node.args) else default


@functools.lru_cache(maxsize=512)
def _parameters(function: Callable[..., Any]) -> dict[str, tuple[int, Any]] | None:
    """Name -> position and default; None for a function in C."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return {parameter.name: (position, parameter.default) for position, parameter in enumerate(parameters)}


def _nodes(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    if isinstance(value, list | tuple):
        return [node for item in value for node in _nodes(item)]
    return []


def names(nodes: Iterable[fx.Node]) -> str:
    """For messages: ``"'add', 'gelu'"``."""
    return ", ".join(f"'{node}'" for node in nodes)
