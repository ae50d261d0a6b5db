"""``bind``: run a kernel of one's own in the place of a module's forward, or of a match."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slapo_core import (
    ApplyError,
    ArgumentError,
    Edit,
    Effect,
    Equivalence,
    Node,
    Primitive,
    TraceError,
    Violation,
    effects,
)
from slapo_core.observers import goes_around
from slapo_fusion.forwards import is_wrapped_by
from slapo_fusion.kernels import (
    Bound,
    Kernel,
    NamedInputs,
    Unavailable,
    has_backward,
    is_operator,
    load_kernel,
    shape_difference,
    without_values,
)
from slapo_graph.example_calls import example_call
from slapo_graph.graph import graph_of
from slapo_graph.match import by_place


@dataclass(frozen=True)
class Bind(Primitive):
    """Run a kernel in the place of the module's forward, or of each match.

    The kernel is an operator registered with torch (``torch.library.custom_op``), a function (for instance one that
    launches a Triton kernel), or an operator of C++ or CUDA sources that ``slapo_fusion.build_kernels`` built before: a
    schedule that is replayed builds and imports nothing by itself. It returns tensors of the forward's shapes and
    dtypes; ``verify`` checks their values. Where the kernel is unavailable, the step is refused, unless
    ``fallback=True`` lets the forward run; then the record has a note.

    Args:
        kernel: ``"namespace::name"`` of a registered operator, or a function.
        match: a match or a list of such, or a pattern, as for ``find``: the kernel is called with the inputs of the
            pattern in their order, then with further values that the match reads. None: the module's entire forward.
        inputs: the arguments of the kernel in the place of a forward, in its order: names of the forward's
            parameters, or of the module's own tensors and attributes, e.g. ``("input", "weight", "eps")``. None: the
            forward's arguments, then the module's own parameters.
        backward: another kernel, called with the gradient of each output and the kernel's inputs; returns the
            gradient of each input, None for inputs without one. None: autograd knows the kernel's gradient.
        fallback: whether the forward may run where the kernel is unavailable.
        rtol: as of ``replace``: how far the kernel's numbers may be off; None, with ``atol``: rounding only.
        atol: the absolute difference allowed.

    Raises:
        PreconditionError: the kernel is unavailable and there is no fallback; no gradient is known for it and
            parameters are trained; ``inputs`` names unknown values; a step changed the forward.
        ApplyError: at a call: another shape or type than the forward's, or a lost gradient.

    rewrite:
        ``y = forward(module, x)`` -> ``y = kernel(x, module.weight, module.bias)``

        ``h = x + bias; y = gelu(h)`` -> ``y = kernel(x, bias)``

        ``y = checkpoint(forward)(module, x)`` -> ``y = checkpoint(kernel)(x, ...)``, whichever step comes first

    Source: ``torch/library.py``, ``torch/utils/cpp_extension.py``; the reference implementation's ``bind``.
    """

    name = "fusion.bind"
    named_functions = ("kernel", "backward")
    selections = ("match",)

    kernel: str | Callable[..., Any]
    match: Any = None
    inputs: tuple[str, ...] | None = dataclasses.field(default=None, kw_only=True)
    backward: str | Callable[..., Any] | None = dataclasses.field(default=None, kw_only=True)
    fallback: bool = dataclasses.field(default=False, kw_only=True)
    rtol: float | None = dataclasses.field(default=None, kw_only=True)
    atol: float | None = dataclasses.field(default=None, kw_only=True)

    @property
    def equivalence(self) -> Equivalence:  # type: ignore[override]
        if self.rtol is None and self.atol is None:
            return Equivalence.REORDERED
        return Equivalence.APPROXIMATE(self.rtol or 0.0, self.atol or 0.0)

    def preconditions(self, node: Node) -> Iterator[Violation]:
        if isinstance(self.kernel, str) and "::" not in self.kernel:
            yield Violation(f"'{self.kernel}' is not an operator's name", f'bind("namespace::{self.kernel}")')
            return
        if self.match is not None:
            if self.inputs is not None:
                yield Violation(
                    "inputs= has no effect with a match: its kernel takes the pattern's inputs", "leave out inputs="
                )
            constants = {
                name: None
                for _, matches in by_place(node, self.match)
                for match in matches
                for name, value in match.captures.items()
                if isinstance(value, tuple)
            }
            if constants:
                yield Violation(
                    f"the match captured {', '.join(map(repr, constants))}, which the kernel would not be given",
                    "replace(kernel, match=...) passes on what a match captured",
                )
            yield from self._unusable(node)
            return
        if is_wrapped_by(node, Bound):
            yield Violation("a kernel is bound to the module already", "undo that step, or leave out this one")
        elif not all(map(goes_around, node.wrappers)):
            yield Violation(
                f"{' and '.join(map(str, node.records))} changed the forward, and the kernel would drop that change",
                "bind before that step, or leave out this one",
            )
        yield from self._unknown_arguments(node)
        yield from self._unusable(node)

    def apply(self, node: Node, edit: Edit) -> None:
        reason = self._missing(node)
        if reason is not None:
            edit.note(f"the forward runs as it is, by fallback=True: {reason}")
        if self.match is not None:
            for place, matches in by_place(node, self.match) if reason is None else ():
                graph: Any = graph_of(place)
                transform = functools.partial(Bound, kernel=self._kernel(place))
                edit.set_forward(
                    place, graph.with_region_called(place.module, matches, transform, name=self._call_name)
                )
            return
        kernel, arguments = self._kernel(node), self._names(node)
        if reason is None:
            self._compare_shapes(node, kernel, arguments)
        wrapper = functools.partial(Bound, kernel=kernel, arguments=arguments)
        edit.wrap_forward(node, wrapper, active=reason is None, inside=True)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if self.match is None and not is_wrapped_by(node, Bound):
            yield Violation("no kernel is bound to the module's forward")

    def effects(self, node: Node) -> Iterator[Effect]:
        if self._missing(node) is not None:
            return  # with fallback=True
        if self.match is not None:
            yield from self.match.effects(node)
        else:
            yield effects.Calls(self._kernel(node).name)

    @property
    def _call_name(self) -> str:
        """Return the name of the call in the printed graph."""
        own = self.kernel.rpartition("::")[2] if isinstance(self.kernel, str) else getattr(self.kernel, "__name__", "")
        return own if own.isidentifier() else "bound"

    def _kernel(self, node: Node) -> Kernel:
        shown = repr(self.kernel) if isinstance(self.kernel, str) else getattr(self.kernel, "__qualname__", "a kernel")
        return Kernel(self.kernel, self.backward, f"bind({shown}) at '{node.path}'")

    def _names(self, node: Node) -> tuple[str, ...]:
        if self.inputs is not None:
            return self.inputs
        return (*_parameters(node), *(name for name, value in node.parameters.items() if value is not None))

    def _missing(self, node: Node) -> str | None:
        try:
            self._kernel(node).load()
        except Unavailable as error:
            return error.reason
        return None

    def _unusable(self, node: Node) -> Iterator[Violation]:
        try:
            kernel = self._kernel(node).load()
        except Unavailable as error:
            if not self.fallback:
                yield Violation(f"the kernel is unavailable: {error.reason}", f"{error.remedy}; or bind(fallback=True)")
            return
        if self.backward is None and has_backward(kernel) is False and _is_trained(node):
            yield Violation(
                f"no gradient is known for {self.kernel!r}, and the model is trained",
                "register one (torch.library.register_autograd), or give backward=...",
            )

    def _unknown_arguments(self, node: Node) -> Iterator[Violation]:
        known = _parameters(node)
        for name in self.inputs or ():
            if name not in known and not hasattr(node.module, name):
                yield Violation(
                    f"neither the forward nor the module has '{name}'",
                    f"the forward takes {', '.join(known)}; the module has {', '.join(node.parameters) or 'none'}",
                )

    def _compare_shapes(self, node: Node, kernel: Kernel, arguments: tuple[str, ...]) -> None:
        """Refuse an operator of another output shape, if the example inputs are known."""
        call = load_kernel(self.kernel)
        if not is_operator(call):
            return  # a function may read the memory of its tensors, and fake ones have none
        try:
            args, kwargs = example_call(node)
        except (ArgumentError, TraceError):
            return
        forward = type(node.module).forward
        inputs = NamedInputs(forward, arguments)(node.module, args, kwargs)
        problem = shape_difference(without_values(node.module.forward, args, kwargs), without_values(call, inputs, {}))
        if problem is not None:
            raise ApplyError(f"{kernel.where}: {problem}", path=node.path, hint="fix the kernel")


def _parameters(node: Node) -> tuple[str, ...]:
    """Return the names of the forward's parameters."""
    return tuple(inspect.signature(type(node.module).forward).parameters)[1:]


def _is_trained(node: Node) -> bool:
    root = node
    while root.parent is not None:
        root = root.parent
    return any(parameter.requires_grad for parameter in root.module.parameters())
