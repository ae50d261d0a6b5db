"""What compiled, captured, bound and quantized code shows in a training step, and that it is missing where it is not in
effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import slapo_core as slapo
from slapo_core import Edit
from slapo_core.observers import happened
from slapo_fusion import Bind, Compile, Cudagraphify, Decompose, Fuse, Quantize, compilers
from slapo_fusion.cases import Feed
from slapo_fusion.cudagraphify import Captured

from . import graphed
from .small import bias_gelu, traced

X = torch.randn(5, 6)
COMPILED = Compile(backend="eager")


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def feeds(*steps: Any, at: str = "*") -> slapo.Schedule:
    torch.manual_seed(0)
    sch = slapo.create_schedule(nn.Sequential(Feed(), Feed()))
    for step in steps:
        sch[at].apply(step)
    return sch


def own_forward(sch: Any) -> None:
    """Run the second layer's own forward, as code does that sets ``forward`` of a module."""
    layer = sch.model[1]
    layer.forward = type(layer).forward.__get__(layer)


def missing(sch: slapo.Schedule) -> list[str]:
    """Observe a step; return which records miss an effect."""
    found = slapo.observe(sch, X)
    return list(dict.fromkeys(each.source for each in found.missing))


def records(sch: slapo.Schedule, *numbers: int) -> list[str]:
    return [str(sch.records[number - 1]) for number in numbers]


def test_compiled_layers_are_seen_and_not_compiled_again() -> None:
    counter = CompileCounterWithBackend("eager")
    sch = feeds(Compile(backend=counter))
    x = X.clone().requires_grad_()
    sch.model(x).sum().backward()
    compiled = counter.frame_count
    found = slapo.observe(sch, x)
    assert not found.missing
    assert [each.seen for each in found.findings] == ["compiled code with no graph breaks"] * 2
    sch.model(x).sum().backward()
    assert counter.frame_count == compiled


@pytest.mark.breadth
def test_code_first_compiled_in_an_observed_step_is_used_afterwards() -> None:
    counter = CompileCounterWithBackend("eager")
    sch = feeds(Compile(backend=counter))
    x = X.clone().requires_grad_()
    assert not slapo.observe(sch, x).missing
    compiled = counter.frame_count
    sch.model(x).sum().backward()
    assert counter.frame_count == compiled == 1


def test_a_layer_whose_own_forward_runs_is_missing() -> None:
    sch = feeds(COMPILED)
    own_forward(sch)
    assert missing(sch) == records(sch, 2)


def test_code_that_a_stance_keeps_from_being_compiled_is_missing() -> None:
    sch = feeds(COMPILED)
    with torch.compiler.set_stance("force_eager"):
        assert missing(sch) == records(sch, 1, 2)


class Disabled(nn.Module):
    """All of it is left to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x)

    @torch.compiler.disable
    def hidden(self, x: Tensor) -> Tensor:
        return self.up(x)


class Looping(nn.Module):
    """A graph break in a loop, which keeps the whole forward from being compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.up(x)
            print(end="")
        return x


@pytest.mark.parametrize("layer", [Disabled, Looping])
def test_a_forward_of_which_nothing_can_be_compiled_is_missing(layer: Callable[[], nn.Module]) -> None:
    sch = slapo.create_schedule(nn.Sequential(layer()))
    sch["0"].apply(COMPILED)
    (found,) = slapo.observe(sch, X).missing
    assert found.source == records(sch, 1)[0]
    assert "as it is" in found.cause


@pytest.mark.breadth
def test_code_that_exceeds_the_limit_of_recompilations_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "_MOST_VARIANTS", 3)
    monkeypatch.setattr(compilers, "_LIMIT", dict.fromkeys(compilers._LIMIT, 3))

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.calls = nn.Linear(6, 6), 0

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x) * self.calls

    model = nn.Sequential(Counting())
    sch = slapo.create_schedule(model)
    sch["0"].apply(Compile(backend="eager", dynamic=False))
    assert not missing(sch)
    for model[0].calls in range(1, 5):
        model(X)
    assert missing(sch) == records(sch, 1)


class Printing(nn.Module):
    """Two graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        print(end="")
        x = self.up(x)
        print(end="")
        return self.up(x)


@pytest.mark.breadth
def test_graph_breaks_are_told_and_no_alarm() -> None:
    sch = slapo.create_schedule(nn.Sequential(Printing()))
    sch["0"].apply(Compile(backend="aot_eager"))
    found = slapo.observe(sch, X)
    assert not found.missing
    assert found.findings[0].seen == "compiled code with 2 graph breaks"


def test_steps_within_compiled_code_are_no_alarm() -> None:
    sch = feeds()
    sch["*.up"].apply(Decompose())
    sch["*.down"].checkpoint()
    sch["*"].checkpoint()
    sch["*"].apply(Compile(backend="aot_eager"))  # with operators of its own for dropout
    assert not missing(sch)
    own_forward(sch)
    assert missing(sch) == records(sch, 6, 8)


def fused(compiler: str) -> slapo.Schedule:
    sch: Any = traced(2)
    sch["*"].apply(Fuse(bias_gelu, compiler))
    return sch


@pytest.mark.parametrize("compiler", ["aot_eager", "eager", "torchscript"])
@pytest.mark.filterwarnings("ignore:.*TorchScript:DeprecationWarning")
def test_fused_regions_are_seen_and_missing_in_a_layer_whose_own_forward_runs(compiler: str) -> None:
    sch = fused(compiler)
    found = slapo.observe(sch, X)
    assert not found.missing
    assert len(found.findings) == (4 if compiler == "aot_eager" else 2)
    own_forward(sch)
    assert missing(sch) == records(sch, 4)


def test_a_fused_region_that_is_not_compiled_is_missing() -> None:
    sch = fused("aot_eager")
    with torch.compiler.set_stance("force_eager"):
        assert missing(sch) == records(sch, 3, 4)


@pytest.mark.breadth
@pytest.mark.filterwarnings("ignore")
def test_a_region_that_torchscript_cannot_run_under_a_checkpoint_is_missing() -> None:
    sch = fused("torchscript")
    sch["0"].checkpoint()
    assert missing(sch) == records(sch, 3)


def kernel(x: Tensor) -> Tensor:
    return F.gelu(x)


def falling_back(x: Tensor) -> Tensor:
    happened("fallback", "the kernel takes no such shape")
    return F.gelu(x)


class Activated(nn.Module):
    """A layer with a module for its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(6, 6), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x))


def activated() -> slapo.Schedule:
    torch.manual_seed(0)
    return slapo.create_schedule(nn.Sequential(Activated(), Activated()), example_inputs=X)


def test_a_bound_kernel_is_seen_and_its_fallback_or_absence_is_missing() -> None:
    sch = activated()
    sch["*.act"].apply(Bind(kernel))
    assert len(slapo.observe(sch, X).findings) == 2
    assert not missing(sch)
    act = sch.model[1].act
    act.forward = type(act).forward.__get__(act)
    assert missing(sch) == records(sch, 2)
    sch = activated()
    sch["0.act"].apply(Bind(kernel))
    sch["1.act"].apply(Bind(falling_back))
    (found,) = slapo.observe(sch, X).missing
    assert found.source == records(sch, 2)[0]
    assert "no such shape" in found.cause


def test_a_kernel_bound_to_a_match_is_seen_and_missing_where_its_graph_does_not_run() -> None:
    sch: Any = activated()
    sch["*"].trace(flatten=True, leaves=nn.Linear)
    sch["*"].apply(Bind(kernel, F.gelu))
    found = slapo.observe(sch, X)
    assert not found.missing
    assert len(found.findings) == 2
    own_forward(sch)
    assert missing(sch) == records(sch, 4)


def test_an_unavailable_kernel_with_a_fallback_claims_nothing() -> None:
    sch = activated()
    sch["*.act"].apply(Bind("acme::no_such_kernel", fallback=True))
    assert not slapo.observe(sch, X).findings


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphed.make_graphed_callables)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Captured, "device_type", "cpu")


def no_gradients(sch: Any) -> None:
    layer = sch.model[0]
    layer.register_forward_pre_hook(lambda *_: torch.set_grad_enabled(False) and None)
    layer.register_forward_hook(lambda *_: torch.set_grad_enabled(True) and None)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("plant", "number"), [(own_forward, 2), (no_gradients, 1)])
def test_a_captured_layer_is_seen_to_be_replayed_and_missing_where_it_runs(
    plant: Callable[[Any], None], number: int
) -> None:
    sch = activated()
    sch["*"].apply(Cudagraphify(warmup=1))
    x = X.clone().requires_grad_()
    sch.model(x).sum().backward()
    captured = sch.model[0].forward.parts[0]
    graphs = list(captured.graphs.values())
    found = slapo.observe(sch, x)
    assert not found.missing
    assert len(found.findings) == 2
    assert sch.model[0].forward.parts[0] is captured
    assert list(captured.graphs.values()) == graphs
    plant(sch)
    assert missing(sch) == records(sch, number)


@pytest.mark.breadth
def test_without_a_cuda_device_no_replay_is_expected() -> None:
    sch = activated()
    sch["*"].apply(Cudagraphify())
    assert not slapo.observe(sch, X).findings


@pytest.mark.parametrize("step", [Decompose(), Quantize("int8")], ids=["decompose", "quantize"])
@pytest.mark.filterwarnings("ignore")
def test_replaced_linears_are_seen_and_missing_where_the_old_one_runs(step: Any) -> None:
    if isinstance(step, Quantize):
        pytest.importorskip("torchao.quantization")
    sch = feeds()
    layer = sch.model[1]
    old = layer.up
    sch["*.up"].apply(step)
    assert len(slapo.observe(sch, X).findings) == 2
    assert not missing(sch)
    del layer._modules["up"]
    object.__setattr__(layer, "up", old)
    assert missing(sch) == records(sch, 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plant", ["no_rounding", "no_conversion"])
def test_a_quantization_that_rounds_nothing_is_missing(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao.quantization")
    if plant == "no_conversion":
        monkeypatch.setattr(Edit, "replace_module", lambda edit, *_: edit.note("nothing"))
        monkeypatch.setattr(Quantize, "postconditions", lambda *_: iter(()))
    sch = feeds()
    sch["0"].apply(Quantize())
    if plant == "no_rounding":
        sch.model[0].up.weight_fake_quantizer = None
    assert missing(sch) == records(sch, 1)


class Watching(TorchFunctionMode):
    """A mode as of ``verify``, which disables dropout."""

    slapo_switches_dropout_off = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"p": 0.0} if func is F.dropout else {})})


class BrokenByDropout(nn.Module):
    """A graph break and dropout: uncompiled while dropout is disabled."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        print(end="")
        return self.dropout(self.up(x))


def test_compiled_code_runs_and_is_seen_while_verify_watches() -> None:
    sch = feeds(COMPILED)
    with Watching():
        found = slapo.observe(sch, X)
    assert not found.missing
    assert [each.seen for each in found.findings] == ["compiled code with no graph breaks"] * 2
    sch = slapo.create_schedule(nn.Sequential(BrokenByDropout()))
    sch["0"].apply(COMPILED)
    with Watching():
        assert not slapo.observe(sch, X).findings  # nothing is concluded
    assert len(slapo.observe(sch, X).findings) == 1


@pytest.mark.usefixtures("on_cpu")
def test_what_is_not_replayed_only_while_it_is_watched_is_no_alarm() -> None:
    sch = activated()
    sch["*"].apply(Cudagraphify(warmup=1))
    with Watching():
        assert not slapo.observe(sch, X).findings
    with FlopCounterMode(display=False):
        assert not slapo.observe(sch, X).findings
    assert len(slapo.observe(sch, X).findings) == 2


def test_a_fused_region_that_calls_a_module_is_compiled_while_it_is_observed() -> None:
    sch: Any = slapo.create_schedule(nn.Sequential(Activated(), Activated()), example_inputs=X)
    sch["*.up"].checkpoint()
    sch["*"].trace()
    sch["*"].apply(Fuse(lambda x: F.gelu(slapo.patterns.call_module("up", x)), "aot_eager"))
    found = slapo.observe(sch, X)
    assert not found.missing
    assert len(found.findings) == 4
