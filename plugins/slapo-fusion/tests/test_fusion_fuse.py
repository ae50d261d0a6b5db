"""``fuse``: matches become compiled regions, shared by equal layers, in every variant of their graphs."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import slapo_core as slapo
from slapo_core.observers import ONE_KERNEL, attributed
from slapo_fusion import Fuse, private
from slapo_fusion.compilers import AotEager, Inductor
from slapo_graph.match import Region
from tests.messages import Messages
from tests.tiers import sampled

from .small import bias_gelu, bias_gelu_dropout_add, dropout_add, gradients, layers, traced


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:fuse.compiler='torchscript'")
@pytest.mark.parametrize("compiler", sampled(["eager", "aot_eager", "torchscript"], 3))
def test_each_compiler_keeps_the_numbers_in_training_and_evaluation_at_any_size(compiler: str) -> None:
    sch, x = traced(), torch.randn(2, 6)
    expected = gradients(layers(), x)
    sch["*"].apply(Fuse(bias_gelu, compiler, name_="bias_gelu"))
    sch["*"].apply(Fuse(dropout_add, compiler))
    assert "bias_gelu(" in str(sch["0"].graph)
    assert "fused(" in str(sch["2"].graph)
    torch.testing.assert_close(gradients(sch.model, x), expected)
    slapo.verify(sch, x)
    untouched = layers().eval()
    sch.model.eval()
    for shape in ((5, 6), (2, 3, 6)):
        other = torch.randn(shape)
        torch.testing.assert_close(sch.model(other), untouched(other))


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_a_fused_region_is_one_kernel_of_an_estimate_where_its_compiler_fuses(compiler: str) -> None:
    """Nothing is compiled on fake tensors: the region runs, and tells what one kernel would compute."""
    seen: list[tuple[Any, tuple[Any, ...]]] = []

    def note(origin: Any, function: Any, *args: Any) -> Any:
        seen.append((origin, args))
        return function(*args)

    sch = traced()
    sch["*"].apply(Fuse(bias_gelu, compiler))
    with private.FakeTensorMode(allow_non_fake_inputs=True), attributed(note):
        x = torch.ones(2, 6)
        sch.model(x)
    assert [origin for origin, _ in seen] == [ONE_KERNEL] * len(sch["*"]) * (compiler == "inductor")


def test_equal_layers_share_what_was_compiled_and_other_lengths_compile_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    monkeypatch.setattr(
        torch._dynamo, "lookup_backend", lambda name: lambda graph, inputs: made.append(name) or graph.forward
    )
    sch = traced(12)
    sch["*"].apply(Fuse(bias_gelu, "aot_eager"))
    x = torch.randn(2, 6, requires_grad=True)
    sch.model(x)
    assert made == ["aot_eager"]
    for length in (3, 4, 5, 9):
        sch.model(torch.randn(length, 6, requires_grad=True))
    assert len(made) == 2
    sch.model.eval()
    sch.model(x)
    assert len(made) == 2  # training and evaluation compute the same here


def test_the_model_is_pickled_and_the_schedule_replayed() -> None:
    sch, x = traced(), torch.randn(2, 6)
    sch["*"].apply(Fuse(bias_gelu, "aot_eager", name_="bias_gelu"))
    expected = gradients(sch.model, x)
    for got in (pickle.loads(pickle.dumps(sch.model)), slapo.replay(layers(), sch.to_json(), example_inputs=x).model):
        torch.testing.assert_close(gradients(got, x), expected)
    sch.undo()
    assert "bias_gelu(" not in str(sch["2"].graph)


class Residual(nn.Module):
    """Two blocks that add their input in place, as torchvision's ResNets do."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            identity = x
            out = norm(x)
            out += identity
            x = self.relu(out)
        return x


def add_relu(out: Any, identity: Any) -> Any:
    out += identity
    return F.relu(out, inplace=True)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_residual_added_in_place_is_fused_and_leaves_the_sum_before_it_as_it_was(
    compiler: str, message: Messages
) -> None:
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(4, 6)
    sch = slapo.create_schedule(model, example_inputs=x)
    sch.trace(flatten=True)
    with pytest.raises(slapo.PreconditionError) as refused:
        sch.fuse(lambda out, identity: F.relu(out + identity), compiler=compiler)
    message(refused, "write add_ and relu_ in the pattern")
    assert len(sch.find(add_relu)) == 2
    sch.fuse(add_relu, compiler=compiler, name="add_relu")
    assert str(sch.root.graph).count("= add_relu(") == 2
    assert "add_(" not in str(sch.root.graph)
    assert slapo.verify(sch, x).steps_verified == 2
    given = x.clone()
    sch.model(given)
    assert torch.equal(given, x)


class Wrong(AotEager):
    """Its code is off by a hundredth."""

    name = "wrong"

    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        return lambda *args: region(*args) * 1.01


class FailsAtOnce(AotEager):
    name = "fails_at_once"

    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        raise OSError("no license")


class FailsWhenCalled(AotEager):
    name = "fails_when_called"

    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        def run(*args: Any) -> Any:
            raise OSError("no license")

        return run


def installed(sch: slapo.Schedule, monkeypatch: pytest.MonkeyPatch, compiler: type[slapo.Compiler]) -> None:
    """As if another distribution had it."""
    known = slapo.Node.plugin
    monkeypatch.setattr(
        slapo.Node, "plugin", lambda node, kind, name: compiler if name == compiler.name else known(node, kind, name)
    )


def test_verify_finds_a_compiler_whose_code_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    sch = traced()
    installed(sch, monkeypatch, Wrong)
    sch["1"].apply(Fuse(bias_gelu, "wrong"))
    with pytest.raises(slapo.VerifyError, match="differs by up to"):
        slapo.verify(sch, torch.randn(2, 6))


def test_a_compiler_that_raises_is_named_and_the_model_is_intact(
    monkeypatch: pytest.MonkeyPatch, message: Messages
) -> None:
    sch, x = traced(), torch.randn(2, 6)
    expected, steps = gradients(sch.model, x), len(sch.records)
    installed(sch, monkeypatch, FailsAtOnce)
    with pytest.raises(slapo.ApplyError) as raised:
        sch["1"].apply(Fuse(bias_gelu, "fails_at_once"))
    where = "fuse at '1' (match 1 of 1 at '1': "
    message(raised, where, "'fails_at_once'", "OSError: no license")
    assert len(sch.records) == steps
    installed(sch, monkeypatch, FailsWhenCalled)
    sch["1"].apply(Fuse(bias_gelu, "fails_when_called"))
    with pytest.raises(slapo.ApplyError) as raised:
        sch.model(x)
    message(raised, where, "'fails_when_called'", "OSError: no license\n  hint: ")
    sch.undo()
    torch.testing.assert_close(gradients(sch.model, x), expected)


def test_backend_errors_name_their_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        raise AttributeError("no such kernel")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: failing)
    sch = traced()
    sch["1"].apply(Fuse(bias_gelu, "aot_eager"))
    with pytest.raises(slapo.ApplyError, match="'aot_eager' failed: AttributeError: no such kernel\n"):
        sch.model(torch.randn(2, 6))


DEVICE_ERRORS = [torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistBackendError]


class Count(TorchDispatchMode):
    """Counts what runs on values."""

    runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += func is torch.ops.aten.gelu.default and type(args[0]) is Tensor
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", DEVICE_ERRORS)
def test_errors_of_memory_device_and_peers_pass_and_nothing_runs_again(
    kind: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = kind("of the device")

    class RunsAndFails(AotEager):
        name = "runs_and_fails"

        def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
            def run(*args: Any) -> Any:
                region(*args)
                raise error

            return run

    class FailsAtOnce(AotEager):
        name = "fails_at_once"

        def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
            raise error

    sch = traced()
    installed(sch, monkeypatch, RunsAndFails)
    sch["0"].apply(Fuse(bias_gelu, "runs_and_fails"))
    with pytest.raises(kind) as raised, Count() as count:
        sch.model(torch.randn(2, 6))
    assert raised.value is error
    assert count.runs == 1
    installed(sch, monkeypatch, FailsAtOnce)
    with pytest.raises(slapo.ApplyError, match="rolled back") as refused:
        sch["1"].apply(Fuse(bias_gelu, "fails_at_once"))
    assert refused.value.__cause__ is error


@pytest.mark.parametrize(("when", "kind"), [*zip(("compiling", "running", "verifying"), DEVICE_ERRORS, strict=True)])
def test_they_pass_through_torch_compile_too(
    when: str, kind: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    error, runs = kind("of the device"), []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(None)
            graph(*args)
            raise error

        if when == "compiling":
            raise error
        return run

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: backend)
    sch = traced()
    sch["0"].apply(Fuse(bias_gelu, "aot_eager"))
    sch["1"].compile(backend="aot_eager")
    watching = BaseTorchFunctionMode() if when == "verifying" else contextlib.nullcontext()
    for layer in ("0", "1"):
        with pytest.raises(kind) as raised, watching:
            sch[layer].module(torch.randn(2, 6))
        assert raised.value is error
    assert len(runs) == (0 if when == "compiling" else 2)


def test_errors_of_the_model_do_not_blame_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.gelu(x + y)

    sch: Any = slapo.create_schedule(Sum())
    sch.root.trace(example_inputs=(torch.randn(2, 6), torch.randn(6)))
    sch.root.apply(Fuse(bias_gelu, "aot_eager"))
    with pytest.raises(RuntimeError, match="length 7") as raised:
        sch.model(torch.randn(2, 6), torch.randn(7))
    assert not isinstance(raised.value, slapo.SlapoError)


def test_fuse_refuses_invalid_calls(message: Messages) -> None:
    sch = traced()
    for step, word in (
        (Fuse(bias_gelu, "induktor"), "did you mean 'inductor'"),
        (Fuse(bias_gelu, name_="bias gelu"), "got 'bias gelu'"),
        (Fuse(None), "pattern"),
    ):
        with pytest.raises(slapo.PreconditionError) as refused:
            sch["0"].apply(step)
        message(refused, word)
    with pytest.raises(slapo.ApplyError, match="no option 'max_autotun'"):
        sch["0"].apply(Fuse(bias_gelu, "inductor", options={"max_autotun": True}))
    with pytest.raises(slapo.PreconditionError, match="closest candidate"):
        sch["0"].apply(Fuse(lambda x, bias: F.relu(x + bias), "eager"))


def test_torchscript_says_that_it_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="TorchScript: take 'inductor'"):
        traced()["0"].apply(Fuse(bias_gelu, "torchscript"))


@pytest.mark.breadth
def test_under_checkpoint_autocast_and_no_grad() -> None:
    sch, x = traced(), torch.randn(2, 6)
    expected = gradients(layers(), x)
    sch["*"].apply(Fuse(bias_gelu, "aot_eager"))
    sch["*"].apply(Fuse(dropout_add, "aot_eager"))
    sch["*"].checkpoint()
    torch.testing.assert_close(gradients(sch.model, x), expected)
    slapo.verify(sch, x)
    untouched = layers().eval()
    sch.model.eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(sch.model(x), untouched(x))
    torch.testing.assert_close(sch.model(x), untouched(x))


def test_a_match_across_layers_is_found_from_the_root() -> None:
    sch, x = traced(), torch.randn(2, 6)
    sch.root.apply(Fuse(tuple(sch.root.find(bias_gelu)), "eager", name_="bias_gelu"))
    assert all("bias_gelu(" in str(sch[str(layer)].graph) for layer in range(3))
    slapo.verify(sch, x)


@pytest.mark.slow
@pytest.mark.breadth
def test_inductor_draws_the_same_dropout_as_the_reference_model(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path_factory.getbasetemp()
    # With test_tp_compiled.py, which another process may run: torch's headers are compiled once.
    common = own.parent if own.name.startswith("popen-") else own
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(common / "inductor"))
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    sch, x = traced(), torch.randn(2, 6)
    expected = gradients(layers(), x)
    step = Fuse(bias_gelu_dropout_add, Inductor.name)
    sch["*"].apply(step)
    torch.testing.assert_close(gradients(sch.model, x), expected)
    assert step.equivalence == slapo.Equivalence.REORDERED
    assert Fuse(bias_gelu, options={"fallback_random": False}).equivalence == slapo.Equivalence.RANDOM
