"""Forwards and schedules that a graph once computed wrongly, or refused without need."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import slapo_core as slapo
from slapo_graph.flat import flat, graph_function
from tests.messages import Messages


def traced(module: nn.Module, *inputs: Any, flatten: bool = False) -> Any:
    """A schedule whose root is traced for these inputs."""
    sch = slapo.create_schedule(module, example_inputs=inputs)
    sch.trace(flatten=flatten)
    return sch


# -- classes of objects --------------------------------------------------------------------------------------------

SLOPES = {nn.GELU: 2.0, nn.ReLU: 3.0, torch.Tensor: 5.0}


class AsksForClasses(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.act, self.blocks = how, nn.GELU(), nn.ModuleList([nn.Linear(4, 4), nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "type":
            return self.act(x) if type(self.act) is nn.GELU else x
        if self.how == "class":
            return self.act(x) if self.act.__class__ is nn.GELU else x
        if self.how == "name":
            return x * len(self.__class__.__name__)
        if self.how == "table":
            return x * SLOPES[type(self.act)]
        if self.how == "get":
            return x * SLOPES.get(type(self.act), 7.0)
        if self.how == "size":
            return x * 2 if type(x.shape[0]) is int else x
        if self.how == "tensor":
            return x * SLOPES[type(x)]
        if self.how == "is a type":
            return x * 2 if isinstance(type(x), type) else x
        for block in self.blocks:
            x = block(x) if type(block) is nn.Linear else x + 1
        return x


HOWS = ["type", "class", "name", "table", "get", "size", "tensor", "is a type", "loop"]


@pytest.mark.parametrize("how", HOWS)
def test_code_that_asks_for_a_class_takes_the_same_branch_in_a_graph(how: str) -> None:
    model, x = AsksForClasses(how), torch.randn(3, 4)
    expected = model(x)
    traced(model, x)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("how", HOWS)
def test_code_above_a_pipeline_cut_that_asks_for_a_class_takes_the_same_branch(how: str) -> None:
    model, x = AsksForClasses(how), torch.randn(3, 4)
    recorded = flat(model, type(model).forward, {"x": x}, lambda module, path: bool(path))
    assert torch.equal(graph_function(recorded.graph)(model, x), model(x))
    assert "type" not in globals()


# -- operators -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("slapo_faults::fill", mutates_args={"x"})
def fill(x: torch.Tensor, value: float) -> None:
    x.fill_(value)


@torch.library.custom_op("slapo_faults::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


@torch.library.custom_op("slapo_faults::plain", mutates_args=())
def plain(x: torch.Tensor) -> torch.Tensor:
    return x * 2


for operator in (noise, plain):
    operator.register_fake(torch.empty_like)
fill.register_fake(lambda x, value: None)


class BetweenOperators(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        other = x * 1
        if self.what == "draws":
            h = functional.dropout(x, 0.5)
            other = noise(x)
            return functional.relu(h) + other
        h = torch.sin(x)
        if self.what == "writes":
            fill(x, 3.0)
        else:
            other = plain(x)
        return torch.cos(h) * x + other


def sine(x: Any) -> Any:
    return torch.cos(torch.sin(x))


def dropped(x: Any) -> Any:
    return functional.relu(functional.dropout(x, 0.5))


@pytest.mark.parametrize("primitive", ["fuse", "replace"])
@pytest.mark.parametrize("what", ["writes", "draws", "neither"])
def test_an_operator_that_writes_or_draws_keeps_its_place(what: str, primitive: str) -> None:
    model, x = BetweenOperators(what), torch.randn(3, 4)
    torch.manual_seed(1)
    expected = model(x)
    sch = traced(model, x)
    pattern = dropped if what == "draws" else sine
    sch.fuse(pattern, compiler="eager") if primitive == "fuse" else sch.replace(pattern, match=pattern)
    torch.manual_seed(1)
    assert torch.equal(model(x), expected)


# -- activation checkpointing in the model's own code --------------------------------------------------------------


class Checkpointing(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.use_reentrant is None:
            with torch.autograd.graph.save_on_cpu():
                return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True, None])
def test_checkpointing_in_the_models_code_is_refused(use_reentrant: bool | None, message: Messages) -> None:
    model, x = Checkpointing(use_reentrant), torch.randn(3, 4)
    sch = slapo.create_schedule(model, example_inputs=x)
    with pytest.raises(slapo.TraceError) as error:
        sch.trace()
    assert "checkpoint()" in error.value.hint
    assert error.value.location is not None
    assert error.value.location[0] == __file__
    message(error, "checkpoints activations")
    with pytest.raises(slapo.TraceError, match="checkpoints activations"):
        flat(model, type(model).forward, {"x": x}, lambda module, path: bool(path))
    around = nn.Sequential(model, nn.Linear(4, 4))
    traced(around, x)  # it stays a call there
    with torch.no_grad():
        assert torch.equal(around(x), around[1](around[0](x)))


# -- modules in the place of a match -------------------------------------------------------------------------------


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.linear = 2.0, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor


class Holds(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mid, self.out = Holds(Scales()), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.out(self.mid(x)))


class Kernel(nn.Module):
    def __init__(self, **settings: float) -> None:
        super().__init__()
        self.__dict__.update(settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x)


def gelu(x: Any) -> Any:
    return functional.gelu(x)


@pytest.mark.parametrize("settings", [{}, {"factor": 2.0}])
def test_a_module_in_the_place_of_a_match_leaves_the_guards_with_their_modules(settings: dict[str, float]) -> None:
    model, x = Layer(), torch.randn(3, 4)
    sch = traced(model, x, flatten=True)
    expected = model(x)
    sch.replace(Kernel(**settings), match=gelu)
    for mode in (True, False, False, True):  # each mode has a graph of its own, checked from its second call on
        model.train(mode)
        assert torch.equal(model(x), expected)
    model.mid.inner.factor = 3.0
    assert torch.equal(model(x), functional.gelu(model.out(model.mid(x))))


# -- compiled graphs -----------------------------------------------------------------------------------------------


class LooksAtSizes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 2 and x.shape[1] != 3 else x


def test_a_compiled_graph_takes_another_size() -> None:
    model = Holds(LooksAtSizes())
    traced(model, torch.randn(4, 4), flatten=True)
    compiled_model = torch.compile(model, backend="eager")
    for length in (4, 5, 6, 7):
        x = torch.randn(length, 4 + length)
        assert torch.equal(compiled_model(x), x * 2)


# -- keyword arguments ---------------------------------------------------------------------------------------------


def with_setting(forward: Any) -> Any:
    @functools.wraps(forward)
    def run(self: Any, *args: Any, factor: float | None = None, **kwargs: Any) -> Any:
        return forward(self, *args, factor=2.0 if factor is None else factor, **kwargs)

    return run


class WrappedForward(nn.Module):
    @with_setting
    def forward(self, x: torch.Tensor, factor: float | None = None, shift: float = 1.0, *more: Any) -> torch.Tensor:
        return x * factor + shift  # type: ignore[operator]


@pytest.mark.parametrize("call", [{}, {"factor": 3.0}, {"factor": None, "shift": 2.0}])
def test_a_wrapper_around_the_forward_gets_its_arguments_by_keyword(call: dict[str, Any]) -> None:
    model, x = WrappedForward(), torch.randn(3, 4)
    expected = model(x, **call)
    sch = slapo.create_schedule(model, example_inputs={"x": x, **call})
    sch.trace()
    assert torch.equal(model(x, **call), expected)


# -- specializations -----------------------------------------------------------------------------------------------


class ManyForms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, name: str = "") -> torch.Tensor:
        return self.linear(x) * (len(name) + 1) if self.linear.weight.requires_grad else x


def test_seventeenth_variant_drops_the_least_recently_used() -> None:
    model, x = ManyForms(), torch.randn(3, 4)
    graph = traced(model, x).root.graph
    first = graph.first
    names = ["a" * length for length in range(20)]
    with warnings.catch_warnings(record=True) as said:
        for name in names:
            assert torch.equal(model(x, name), model.linear(x) * (len(name) + 1))
            model(x, "a")
    assert sum("least recently" in str(warning.message) for warning in said) == 1
    assert len(graph.variants) == 16
    assert graph.first is first
    assert sum(key[1][0][1] == (str, "a") for key in graph.specializations) == 1


def test_a_parameter_may_be_frozen_between_two_steps() -> None:
    model, x = ManyForms(), torch.randn(3, 4)
    traced(model, x)
    assert torch.equal(model(x), model.linear(x))
    model.linear.requires_grad_(False)
    assert torch.equal(model(x), x)
    model.linear.requires_grad_(True)
    assert torch.equal(model(x), model.linear(x))


# -- threads -------------------------------------------------------------------------------------------------------


class Calls(nn.Module):
    def __init__(self, meanwhile: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.meanwhile = nn.Linear(4, 4), meanwhile

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if torch._C._len_torch_function_stack():  # while it is recorded
            self.meanwhile()
        return self.linear(x)


def test_tracing_in_two_threads_leaves_modules_as_they_were() -> None:
    started, entered, done, x = threading.Event(), threading.Event(), threading.Event(), torch.randn(3, 4)
    call, enter, apply = nn.Module.__call__, saved_tensors_hooks.__enter__, torch.autograd.Function.__dict__["apply"]
    outside = nn.Linear(4, 4)
    first = Calls(lambda: (started.set(), entered.wait(2)))
    second = Calls(lambda: (entered.set(), done.wait(5)))

    def trace_second() -> None:
        started.wait(5)
        traced(second, x)

    with ThreadPoolExecutor() as pool:
        one, other = pool.submit(traced, first, x), pool.submit(trace_second)
        started.wait(5)
        assert outside(x).shape == (3, 4)  # a module that is no part of it is called as ever
        one.result()
        done.set()
        other.result()
    assert nn.Module.__call__ is call
    assert saved_tensors_hooks.__enter__ is enter
    assert torch.autograd.Function.__dict__["apply"] is apply
    for model in (first, second):
        assert torch.equal(model(x), model.linear(model.linear(x)))


# -- modules with odd names, locks and compilers -------------------------------------------------------------------


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock, self.group = threading.Lock(), [threading.RLock()]
        self.hold, self.run_with, self.hold_tensor = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return self.hold_tensor(self.run_with(self.hold(x)))


def test_stages_of_a_model_with_a_lock_and_modules_named_like_methods() -> None:
    model, x = Holding(), torch.randn(3, 4)
    sch = slapo.create_schedule(model, example_inputs={"x": x})
    sch["hold"].pipeline_split()
    sch["run_with"].pipeline_split()
    stages = slapo.stages(sch, {"x": x}).partition.stages
    assert [[*stage.module._modules] for stage in stages] == [["hold"], ["run_with"], ["hold_tensor"]]


def test_a_module_that_holds_a_lock_is_traced() -> None:
    model, x = nn.Sequential(Holding(), nn.Linear(4, 4)), torch.randn(3, 4)
    expected = model(x)
    slapo.create_schedule(model, example_inputs=x)["0"].trace()
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("flatten", [False, True])
def test_a_compiled_module_stays_a_call(flatten: bool) -> None:
    model, x = nn.Sequential(Layer(), nn.Linear(4, 4)), torch.randn(3, 4)
    expected = model(x)
    model[0].mid.compile(backend="eager")
    sch = traced(model, x, flatten=flatten)
    assert "self.0.mid(" in str(sch.root.graph) or not flatten
    assert torch.allclose(model(x), expected)


# -- errors --------------------------------------------------------------------------------------------------------


def test_an_error_about_a_cut_says_once_where_the_model_is_at_fault(message: Messages) -> None:
    model, x = Checkpointing(use_reentrant=False), torch.randn(3, 4)
    sch = slapo.create_schedule(model, example_inputs={"x": x})
    sch["first"].pipeline_split()
    with pytest.raises(slapo.TraceError) as error:
        slapo.stages(sch, {"x": x})
    assert error.value.location is not None
    assert str(error.value).count(f"at {__file__}") == 1
    message(error, "cannot cut the model")


# -- logs and results ----------------------------------------------------------------------------------------------


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x


def test_a_refusal_comes_without_a_log_of_torch() -> None:
    model, x = nn.Sequential(Fails(), nn.Linear(4, 4)), torch.randn(3, 4)
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        with pytest.raises(slapo.TraceError):
            flat(model, type(model).forward, {"input": x}, lambda module, path: bool(path))
    finally:
        log.removeHandler(handler)
    assert not said


def test_find_says_that_a_module_is_closed_by_its_hook(message: Messages) -> None:
    model, x = nn.Sequential(Layer()), torch.randn(3, 4)
    model[0].register_forward_hook(lambda *_: None)
    found = traced(model, x, flatten=True).find(gelu)
    assert not found
    assert found.hooked == ("0",)
    message(repr(found), "hooks")
