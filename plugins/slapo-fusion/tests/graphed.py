"""``torch.cuda.make_graphed_callables`` on the CPU, with the static memory of torch's.

A replay runs operators that were recorded, on the addresses that they were recorded with, and no Python of the
function. Inputs are copied in, results and gradients are the same tensors at each replay and overwritten by it, and
gradients leave detached. Warm-up and recording run the function, as on a GPU; what torch refuses is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


class Recorded:
    """A function's operators and those of its backward, in static memory.

    Args:
        module: what is recorded.
        inputs: static inputs.
        like: the results of a run that require gradients.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...], like: list[Tensor]) -> None:
        self.inputs = inputs
        surface = [each for each in (*inputs, *module.parameters()) if each.requires_grad]
        self.count = 0

        def both(tangents: list[Tensor]) -> Any:
            results = tree_leaves(module(*inputs))
            self.count = len(results)
            trained = [each for each in results if each.requires_grad]
            if not trained:
                return [*results]
            return [*results, *torch.autograd.grad(trained, surface, tangents[: len(trained)], allow_unused=True)]

        self.tangents = [torch.empty_like(each) for each in like]
        self.graph: fx.GraphModule = make_fx(both)([torch.ones_like(each) for each in like])
        for name in {str(node.target) for node in self.graph.graph.nodes if node.op == "get_attr"}:
            value = getattr(self.graph, name)  # by its address, not by its object
            delattr(self.graph, name)
            self.graph.register_buffer(name, value.detach())
        (self.returned,) = (node.args[0] for node in self.graph.graph.nodes if node.op == "output")
        self.after: set[Any] = set()
        for node in self.graph.graph.nodes:
            if node.op == "placeholder" or self.after.intersection(node.all_input_nodes):
                self.after.add(node)
        self.memory: dict[Any, Any] = {}
        self.static: dict[int, Tensor] = {}

    def _run(self, part: Callable[[Any], bool]) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for node in self.graph.graph.nodes:
                if node.op == "output" or not part(node):
                    continue
                if node.op == "get_attr":
                    self.memory[node] = getattr(self.graph, str(node.target))
                elif node.op == "call_function":
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.memory.__getitem__)
                    self.memory[node] = node.target(*args, **kwargs)

    def _fixed(self, position: int) -> Tensor | None:
        """The static memory of one returned value."""
        node = self.returned[position]
        if node is None:
            return None
        new = self.memory[node]
        self.static.setdefault(position, torch.empty_like(new)).copy_(new)
        if node.op == "call_function":
            self.memory[node] = self.static[position]  # for the backward, too
        return self.static[position]

    def forward(self) -> list[Tensor]:
        self._run(lambda node: node not in self.after)
        return [self._fixed(position) for position in range(self.count)]  # type: ignore[misc]

    def backward(self) -> list[Tensor | None]:
        places = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        self.memory.update(zip(places, self.tangents, strict=True))
        self._run(lambda node: node in self.after and node.op != "placeholder")
        with torch.no_grad():
            return [self._fixed(position) for position in range(self.count, len(self.returned))]


def make_graphed_callables(
    module: Any,
    sample_args: tuple[Tensor, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
) -> Any:
    """Stand for torch's on the CPU."""
    if torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled():
        raise RuntimeError("make_graphed_callables does not support the autocast caching")
    assert isinstance(module, nn.Module)
    assert allow_unused_input
    assert all(isinstance(each, Tensor) for each in sample_args)
    assert not any(buffer.requires_grad for buffer in module.buffers())
    parameters = tuple(module.parameters())
    surface = (*sample_args, *parameters)
    for _ in range(num_warmup_iters):
        results, spec = tree_flatten(module(*sample_args))
        kept = [each.requires_grad for each in results]
        trained = [each for each in results if each.requires_grad]
        if trained:
            inputs = [each for each in surface if each.requires_grad]
            torch.autograd.grad(trained, inputs, [torch.empty_like(each) for each in trained], allow_unused=True)
    recorded = Recorded(module, sample_args, [each.detach() for each in trained])

    class Replayed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            for static, value in zip(sample_args, inputs[: len(sample_args)], strict=True):
                if static.data_ptr() != value.data_ptr():
                    static.detach().copy_(value)
            results = recorded.forward()
            return tuple(each.detach() for each in results)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            given = [each for each, is_kept in zip(gradients, kept, strict=True) if is_kept]
            for static, value in zip(recorded.tangents, given, strict=True):
                static.copy_(value)
            found = iter(recorded.backward())
            answers = (next(found, None) if each.requires_grad else None for each in surface)
            return tuple(None if each is None else each.detach() for each in answers)

    training, original = module.training, module.forward

    def forward(*inputs: Tensor) -> Any:
        if module.training != training:
            return original(*inputs)
        return tree_unflatten(Replayed.apply(*inputs, *parameters), spec)

    module.forward = forward
    return module
