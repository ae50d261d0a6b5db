"""One forward of a model without memory, operator by operator, with the modules that call them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from slapo_core.internals import buffers_of, copies, module_calls_through, parameters_of
from slapo_core.observers import PATCHING
from slapo_estimate.values import KnownValues, UnknownValueError, hide_fake_tensors
from slapo_graph.tracing.fake import FakeMode
from slapo_models.auto.axes import Axis
from slapo_models.auto.private import (
    TorchDispatchMode,
    storage_id,
    tree_leaves,
    tree_map_only,
    unset_fake_temporarily,
)

_CONSTANT = frozenset(
    f"aten::{name}"
    for name in (
        *("detach", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "sign", "round"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "floor", "ceil", "trunc"),
    )
)
"""Operators whose results have no gradient."""
_RECURRENT = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))
_SHORT = 64  # elements of an index whose values are kept
PARAMETER, BUFFER, INPUT, CONSTANT, RESULT = "parameter", "buffer", "input", "constant", "result"


@dataclass(eq=False)
class Call:
    """A call of a module.

    Args:
        path: of the module.
        module: the module.
        around: the call that makes this one; None for the root.
        number: of the calls of this module, from 0.
        inputs: argument -> value, of tensors among the arguments: position or name.
        outputs: tensors among the results.
        is_tuple: whether the result is a tuple.
        operators: those that the module itself runs, in order.
    """

    path: str
    module: nn.Module
    around: Call | None
    number: int
    inputs: dict[int | str, Value] = field(default_factory=dict)
    outputs: list[Value] = field(default_factory=list)
    is_tuple: bool = False
    operators: list[Operator] = field(default_factory=list)

    def chain(self) -> list[Call]:
        """Return this call and those around it, innermost first."""
        found, call = [self], self
        while call.around is not None:
            call = call.around
            found.append(call)
        return found

    def is_within(self, other: Call) -> bool:
        """Return whether this call is ``other``, or made by it."""
        call: Call | None = self
        while call is not None:
            if call is other:
                return True
            call = call.around
        return False


@dataclass(eq=False)
class Value:
    """A tensor between operators.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        origin: where it is from.
        names: of a parameter or buffer: paths of its modules with its names there.
        made_by: the operator that makes it.
        uses: operators that read it.
        axes: filled by the operators' rules.
        needs_gradient: whether a gradient flows to it.
        numbers: the elements of a short integer tensor or constant, where they are known.
        changed_gradient: what changes its gradient in a way that is not known; ``""``: nothing.
        has_own_backward: whether its gradient goes through a backward that the model defines.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: str = RESULT
    names: tuple[tuple[str, str], ...] = ()
    made_by: Operator | None = None
    uses: list[Operator] = field(default_factory=list)
    axes: list[Axis] = field(default_factory=list)
    needs_gradient: bool = False
    numbers: tuple[float, ...] | None = None
    changed_gradient: str = ""
    has_own_backward: bool = False


@dataclass(eq=False)
class Operator:
    """A call of an operator.

    Args:
        name: without its overload, e.g. ``"aten::view"``, or ``"collective::all_reduce"``.
        function: the overload; None for a collective.
        arguments: by the names of the schema, tensors as values.
        results: its results.
        call: of the module that runs it.
        index: in the recording.
    """

    name: str
    function: Any
    arguments: dict[str, Any]
    results: list[Value]
    call: Call
    index: int

    @property
    def inputs(self) -> list[Value]:
        """The tensors among its arguments."""
        return [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, Value)]

    @property
    def is_random(self) -> bool:
        """Whether it uses the RNG."""
        if self.function is None or torch.Tag.nondeterministic_seeded not in self.function.tags:
            return False
        return bool(self.arguments.get("dropout_p", True))  # an attention may have no dropout

    @property
    def where(self) -> str:
        """The operator and its module, for a reason."""
        name = self.name.partition("::")[2]
        return f"{name} in {type(self.call.module).__name__}"


@dataclass
class Recording:
    """A recorded forward.

    Args:
        operators: in the order of their calls.
        calls: of modules, in the order of their beginnings.
        outputs: of the model.
        values: of parameters and buffers, by path.
        assumptions: about values that were read.
    """

    operators: list[Operator] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    assumptions: dict[str, None] = field(default_factory=dict)


def without_memory(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device; the values of small integer buffers stay known."""
    memo: dict[int, Any] = {}
    known = KnownValues()
    for module in model.modules():
        for own in (parameters_of(module), buffers_of(module)):
            for tensor in own.values():
                if tensor is None or id(tensor) in memo:
                    continue
                meta = tensor.detach().to("meta")
                if isinstance(tensor, nn.Parameter):
                    meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
                    meta.__dict__.update(tensor.__dict__)
                known.copy_value(tensor, meta)
                memo[id(tensor)] = meta
    return copies.deep_copy(model, memo)


class Watch:
    """Watch a recording while it is made; what a method raises ends it."""

    def after_operator(self, operator: Operator) -> None:
        """Look at an operator with its results."""

    def after_call(self, call: Call) -> None:
        """Look at a finished call of a module."""


def record(model: nn.Module, inputs: Any, watch: Watch | None = None, *, training: bool = True) -> Recording:
    """Record a forward of a model on the meta device.

    Args:
        model: on the meta device.
        inputs: a mapping of keyword arguments, a tuple of positional ones, or one argument.
        watch: looks at each operator and call.
        training: whether in training mode, with gradients.
    """
    mode = FakeMode(_device_of(inputs))
    known = KnownValues(mode)
    recorder = _Recorder(model, known, watch or Watch())
    known.default = recorder.assumed_number

    def fake(tensor: Tensor) -> Tensor:
        made = mode.fake(tensor)
        if tensor.is_meta and not tensor.is_floating_point():
            known.set_value(made, torch.ones(tensor.shape, dtype=tensor.dtype))
        else:
            known.copy_value(tensor, made)
        recorder.add_input(made)
        return made

    args, kwargs = arguments_of(tree_map_only(torch.Tensor, fake, inputs))
    with (
        _unchanged(model),
        mode,
        hide_fake_tensors(),
        recorder,
        _Functions(recorder, mode),
        PATCHING,
        module_calls_through(recorder.call),
        torch.set_grad_enabled(training),
    ):
        model.train(training)
        output = model(*args, **kwargs)
    recorder.recording.outputs = [recorder.value(leaf) for leaf in tensors_in(output)]
    return recorder.recording


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put the attributes, parameters and buffers of modules back, which a forward may set."""
    before = [
        (module, dict(vars(module)), dict(parameters_of(module)), dict(buffers_of(module)))
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, parameters, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            parameters_of(module).update(parameters)
            buffers_of(module).update(buffers)


def first_row(inputs: Any) -> Any | None:
    """Return a batch of one sample; None where the batch has no axis of samples."""
    sizes = {leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1 or sizes == {1}:
        return None
    return tree_map_only(Tensor, lambda tensor: tensor[:1] if tensor.dim() else tensor, inputs)


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of a batch."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in containers and objects, but not in a key-value cache, which each rank has of its own."""
    seen = set() if seen is None else seen
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):
        return
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, (str, bytes, int, float, nn.Module, type)) or value is None:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, (tuple, list, set)):
        parts = value
    else:
        parts = vars(value).values() if hasattr(value, "__dict__") else ()
    for part in list(parts):
        yield from tensors_in(part, seen)


def _device_of(inputs: Any) -> torch.device:
    found = (leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and not leaf.is_meta)
    return next(found, torch.device("cpu"))


class _Recorder(TorchDispatchMode):
    """Write down operators and calls of modules."""

    def __init__(self, model: nn.Module, known: KnownValues, watch: Watch) -> None:
        super().__init__()
        self.recording, self._known, self._watch = Recording(), known, watch
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._numbers: dict[str, int] = {}
        self._call = Call("", model, None, 0)
        self._is_started = False
        self._read: Value | None = None
        self.is_silent = False
        self._values: dict[int, Value] = {}
        self._tensors: dict[int, Tensor] = {}
        self._storages: dict[int, list[Tensor]] = {}
        self._stale: dict[int, tuple[Value, Call]] = {}
        self._backwards: dict[int, Any] = {}
        for kind in (PARAMETER, BUFFER):
            self._add_state(model, kind)

    def _add_state(self, model: nn.Module, kind: str) -> None:
        names: dict[int, list[tuple[str, str]]] = {}
        tensors: dict[int, Tensor] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for name, tensor in (parameters_of(module) if kind == PARAMETER else buffers_of(module)).items():
                if tensor is not None:
                    names.setdefault(id(tensor), []).append((path, name))
                    tensors[id(tensor)] = tensor
        for key, tensor in tensors.items():
            value = self._add(tensor, kind)
            value.names, value.needs_gradient = tuple(names[key]), tensor.requires_grad
            for path, name in names[key]:
                self.recording.values[f"{path}.{name}".lstrip(".")] = value

    def add_input(self, tensor: Tensor) -> None:
        """Add a tensor of the batch, whose gradient may be asked for."""
        self._add(tensor, INPUT).needs_gradient = tensor.is_floating_point()

    def _add(self, tensor: Tensor, origin: str) -> Value:
        value = Value(tuple(tensor.shape), tensor.dtype, origin)
        is_constant = origin == CONSTANT and type(tensor) is Tensor and not tensor.is_meta  # e.g. torch.tensor(0.5)
        if tensor.numel() <= _SHORT and (is_constant or (tensor.dtype == torch.int64 and tensor.dim() == 1)):
            value.numbers = self._numbers_in(tensor, is_constant=is_constant)
        self._values[id(tensor)] = value
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor  # so that no other tensor gets its id
            self._storages.setdefault(storage_id(tensor), []).append(tensor)
        return value

    def _numbers_in(self, tensor: Tensor, *, is_constant: bool) -> tuple[float, ...] | None:
        known = tensor if is_constant else self._known.value_of(tensor)
        if known is None or known.is_meta:
            return None
        with unset_fake_temporarily():
            return tuple(known.flatten().tolist())

    def value(self, tensor: Tensor) -> Value:
        """Return the value of a tensor."""
        stale = self._stale.pop(id(tensor), None)
        if stale is not None:
            self._overwrite(tensor, *stale)
        found = self._values.get(id(tensor))
        if found is None:
            found = self._add(tensor, CONSTANT)
            found.needs_gradient = tensor.requires_grad  # of a tensor that is not a parameter
        return found

    def assumed_number(self) -> int:
        """Return the number that is assumed where the model reads an unknown one."""
        if self._read is not None and self._read.dtype == torch.bool and _is_drawn(self._read):
            self.recording.assumptions["a condition on a random number is false, as when no layer is dropped"] = None
            return 0
        self.recording.assumptions["a number that the forward computes and reads is 1"] = None
        return 1

    def call(self, run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Make a call of a module."""
        path = self._paths.get(id(module))
        if path is None:
            return run(module, *args, **kwargs)
        around, number = self._call if self._is_started else None, self._numbers.get(path, 0)
        self._numbers[path] = number + 1
        call = Call(path, module, around, number)
        self.recording.calls.append(call)
        given: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
        for key, argument in given:
            for position, tensor in enumerate(tensors_in(argument)):
                call.inputs[key if isinstance(argument, Tensor) else f"{key}.{position}"] = self.value(tensor)
        self._call, before, self._is_started = call, self._call, True
        try:
            output = run(module, *args, **kwargs)
        finally:
            self._call = before
        call.outputs, call.is_tuple = [self.value(tensor) for tensor in tensors_in(output)], isinstance(output, tuple)
        self._watch.after_call(call)
        return output

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_silent or func.namespace == "prim" or func is torch.ops.aten._local_scalar_dense.default:
            self._read = self._values.get(id(args[0])) if args else None
            return self._run(func, args, kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                self._add_own_backward(leaf)
        arguments = {
            name: tree_map_only(Tensor, self.value, value) for name, value in _bound(func, args, kwargs).items()
        }
        result = self._run(func, args, kwargs)
        operator = Operator(func._schema.name, func, arguments, [], self._call, len(self.recording.operators))
        self.add(operator, [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])
        for argument in func._schema.arguments if func._schema.is_mutable else ():
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._write(_bound(func, args, kwargs).get(argument.name), operator)
        return result

    def _add_own_backward(self, tensor: Tensor) -> None:
        """Record the backward of an ``autograd.Function`` of the user's behind its forward, as more operators."""
        if tensor._backward_hooks:
            self.value(tensor).changed_gradient = "a hook on its gradient"
        backward: Any = tensor.grad_fn
        if not isinstance(backward, BackwardCFunction):
            return
        self._let_flow(self.value(tensor))
        cls: Any = getattr(backward, "_forward_cls", None)
        if _is_ours(cls.__module__):
            return
        self.value(tensor).has_own_backward = True
        if id(backward) in self._backwards:
            return
        self._backwards[id(backward)] = backward  # so that no other one gets its id
        try:
            with self, torch.no_grad():
                backward.apply(torch.empty_like(tensor))
        except Exception:  # noqa: BLE001 - of several results, or whatever it raises without memory
            self.value(tensor).changed_gradient = f"the backward of {cls.__name__}"

    def _let_flow(self, value: Value) -> bool:
        """Let a gradient flow through the operators of an ``autograd.Function``, which run without."""
        if not value.needs_gradient and value.made_by is not None and value.dtype.is_floating_point:
            flows = [self._let_flow(each) for each in value.made_by.inputs]
            value.needs_gradient = any(flows)
        return value.needs_gradient

    def add(self, operator: Operator, results: list[Tensor]) -> None:
        """Add an operator with its results."""
        self.recording.operators.append(operator)
        operator.call.operators.append(operator)
        for value in dict.fromkeys(operator.inputs):
            value.uses.append(operator)
        flows = torch.is_grad_enabled() and operator.name not in _CONSTANT
        flows = flows and any(value.needs_gradient for value in operator.inputs)
        for tensor in results:
            value = self._add(tensor, RESULT)
            value.made_by = operator
            value.needs_gradient = flows and (tensor.is_floating_point() or tensor.is_complex())
            operator.results.append(value)
        self._watch.after_operator(operator)

    def _write(self, target: Any, operator: Operator) -> None:
        """Give a tensor that was written to, and all that share its memory, new values."""
        for tensor in tree_leaves(target):
            if not isinstance(tensor, Tensor):
                continue
            written = operator.results[0] if self._values[id(tensor)] in operator.results else self._add(tensor, RESULT)
            if written.made_by is None:
                written.made_by, written.needs_gradient = operator, self._flows(operator)
                operator.results.append(written)
            for other in self._storages.get(storage_id(tensor), ()):
                if other is not tensor and self._values[id(other)].origin not in (PARAMETER, BUFFER):
                    self._stale[id(other)] = (written, operator.call)

    def _flows(self, operator: Operator) -> bool:
        return torch.is_grad_enabled() and any(value.needs_gradient for value in operator.inputs)

    def _overwrite(self, tensor: Tensor, written: Value, call: Call) -> None:
        before = self._values[id(tensor)]
        arguments = {"self": before, "written": written}
        self.add(Operator("slapo::overwritten", None, arguments, [], call, len(self.recording.operators)), [tensor])

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.split_with_sizes.default:
            args = (args[0], self._sizes(*args, **kwargs), *args[2:])
        if func is torch.ops.aten.nonzero.default:
            try:
                return self._known.run(func, args, kwargs)
            except UnknownValueError:
                return self._all_nonzero(args[0])
        if func is torch.ops.aten.index.Tensor:
            try:
                return self._known.run(func, args, kwargs)
            except UnknownValueError:
                return func(args[0], _all_true(args[1], self._all_nonzero))
        return self._known.run(func, args, kwargs)

    def _sizes(self, tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> Sequence[int]:
        """Return the sizes of a split; even ones where the model computes them, and so each is the assumed number."""
        size, parts = tensor.shape[dim], len(sizes)
        if not self.recording.assumptions or any(each != 1 for each in sizes) or size == parts:
            return sizes
        return [size * (part + 1) // parts - size * part // parts for part in range(parts)]

    def _all_nonzero(self, tensor: Tensor) -> Tensor:
        """Assume that all elements of an unknown mask are true."""
        self.recording.assumptions["a mask that the forward computes is true everywhere"] = None
        assert self._known.mode is not None
        with unset_fake_temporarily():
            where = torch.ones(tensor.shape, dtype=torch.bool).nonzero()
        fake = self._known.mode.from_tensor(where, static_shapes=True)
        self._known.set_value(fake, where)
        return fake


def _all_true(indices: Any, nonzero: Callable[[Tensor], Tensor]) -> list[Any]:
    found: list[Any] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        found.extend(nonzero(index).unbind(1) if is_mask else [index])
    return found


def _is_drawn(value: Value) -> bool:
    """Return whether a number is computed from a random number."""
    made = value.made_by
    return made is not None and (made.is_random or any(_is_drawn(each) for each in made.inputs if not each.shape))


def _is_ours(module: str) -> bool:
    return module.partition(".")[0].startswith(("slapo_", "torch"))


def _bound(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


class _Functions(TorchFunctionMode):
    """Write a collective of a step, or a recurrent layer, down as one operator; give numbers as text."""

    def __init__(self, recorder: _Recorder, mode: FakeMode) -> None:
        super().__init__()
        self._recorder, self._mode = recorder, mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "slapo_is_observed", False):
            return self._as_one(f"collective::{func.name}", None, {"self": args[0]}, lambda: func(*args, **kwargs))
        if func in _RECURRENT and not self._recorder.is_silent:
            fakes = tree_map_only(Tensor, self._mode.fake, args)  # it compares devices, before any operator
            name = func.__name__
            overload = getattr(torch.ops.aten, name).input
            return self._as_one(f"aten::{name}", overload, dict(enumerate(args)), lambda: func(*fakes, **kwargs))
        if func is Tensor.__format__ and not args[0].dim():  # torch writes what kind of tensor it is
            return format(args[0].item(), *args[1:])
        result = func(*args, **kwargs)
        if func is Tensor.to and args[0].is_meta and result.dtype is args[0].dtype:
            return args[0]  # as torch does where nothing changes, but for parameters among fake tensors
        return result

    def _as_one(self, name: str, function: Any, arguments: Mapping[Any, Any], run: Callable[[], Any]) -> Any:
        recorder = self._recorder
        values = {str(key): tree_map_only(Tensor, recorder.value, value) for key, value in arguments.items()}
        recorder.is_silent = True
        try:
            result = run()
        finally:
            recorder.is_silent = False
        operator = Operator(name, function, values, [], recorder._call, len(recorder.recording.operators))
        recorder.add(operator, list(tensors_in(result)))
        return result
