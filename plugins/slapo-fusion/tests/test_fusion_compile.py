"""``compile``: one artifact for equal layers, the same numbers, and errors that say which step it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import slapo_core as slapo
from slapo_fusion import Compile, compilers
from slapo_fusion.cases import Feed
from tests.messages import Messages

from .inductor import compile_in_static_memory


def layers(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Feed() for _ in range(count)])


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> None:
    torch._dynamo.reset()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def test_twelve_equal_layers_are_compiled_once_and_again_only_when_sizes_change() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model = layers(12)
    x = torch.randn(2, 6, requires_grad=True)
    expected = gradients(model, x)
    slapo.create_schedule(model)["*"].apply(Compile(backend=counter))
    got = gradients(model, x)
    assert counter.frame_count == 1
    torch.testing.assert_close(got, expected)
    for size in (3, 4, 5, 9):
        model(torch.randn(size, 6, requires_grad=True))
    assert counter.frame_count == 2  # sizes are symbolic from the second on
    model.eval()
    model(torch.randn(4, 6, requires_grad=True))
    assert counter.frame_count == 3


@pytest.mark.parametrize("flatten", [False, True])
def test_a_traced_layer_is_not_compiled_again_for_each_batch(flatten: bool) -> None:
    counter = CompileCounterWithBackend("eager")
    model = layers(1)
    sch: Any = slapo.create_schedule(model, example_inputs=torch.randn(2, 6))
    sch["0"].trace(flatten=flatten)
    sch["0"].apply(Compile(backend=counter))
    for _ in range(3):
        model(torch.randn(2, 6))
    assert counter.frame_count == 1


def test_names_stay_and_undo_copy_and_pickle_work() -> None:
    model, x = layers(), torch.randn(2, 6)
    names, expected = list(model.state_dict()), gradients(model, x)
    sch = slapo.create_schedule(model)
    sch["*"].apply(Compile(backend="aot_eager"))
    assert list(model.state_dict()) == names
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(gradients(other, x), expected)
        assert "forward" in other[0].__dict__
    sch.undo(to=0)
    assert "forward" not in model[0].__dict__
    assert all(torch.equal(one, other) for one, other in zip(gradients(model, x), expected, strict=True))


@pytest.mark.breadth
@pytest.mark.parametrize("first", ["compile", "checkpoint"])
def test_checkpoint_around_and_inside(first: str) -> None:
    model, x = layers(), torch.randn(2, 6)
    expected = gradients(model, x)
    sch = slapo.create_schedule(model)
    steps = [lambda: sch["*"].apply(Compile(backend="aot_eager")), lambda: sch["*"].checkpoint()]
    for step in steps if first == "compile" else steps[::-1]:
        step()
    torch.testing.assert_close(gradients(model, x), expected)
    slapo.verify(sch, x)


class Broken(nn.Module):
    """Dropout in what a compiler leaves to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.hidden(self.up(x)))

    @torch._dynamo.disable
    def hidden(self, x: Tensor) -> Tensor:
        return self.dropout(x)


def test_verify_sees_dropout_in_compiled_code_and_behind_graph_breaks() -> None:
    model = nn.Sequential(Feed(), Broken())
    sch = slapo.create_schedule(model)
    sch["*"].apply(Compile(backend="aot_eager"))
    slapo.verify(sch, torch.randn(3, 6))


class Within(nn.Module):
    """A module that is compiled, called by what a compiler leaves to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(self.up(x))

    @torch._dynamo.disable
    def hidden(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_verify_sees_dropout_once_in_compiled_code_that_compiled_code_calls() -> None:
    sch = slapo.create_schedule(nn.Sequential(Within()))
    sch["0.inner"].apply(Compile(backend="eager"))
    sch["0"].apply(Compile(backend="eager"))
    slapo.verify(sch, torch.randn(3, 6))


class InPieces(nn.Module):
    """Code behind graph breaks, for which a compiler gives wrong values where a mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for part in self.norm(self.up(x)).split([1, 2]):
            print(end="")
            parts.append(part.clone())
        return self.dropout(self.up(x)) + parts[0].sum()


def test_verify_of_what_is_compiled_in_pieces() -> None:
    sch = slapo.create_schedule(nn.Sequential(InPieces()))
    sch["0"].apply(Compile(backend="eager"))
    report = slapo.verify(sch, torch.randn(3, 6))
    assert "dropout" in str(report)


def off(graph: Any, inputs: Any) -> Any:
    """A backend whose code is wrong."""

    def run(*args: Any) -> Any:
        return tuple(value * 1.01 for value in graph(*args))

    return run


def dropping_more(graph: Any, inputs: Any) -> Any:
    """A backend whose code drops more than it should, while dropout is on."""
    has_dropout = any("dropout" in str(node.target) for node in graph.graph.nodes)

    def run(*args: Any) -> Any:
        return tuple(torch.dropout(value, 0.5, train=True) if has_dropout else value for value in graph(*args))

    return run


@pytest.mark.parametrize("backend", [off, dropping_more])
def test_verify_runs_the_compiled_code(backend: Any) -> None:
    sch = slapo.create_schedule(layers())
    sch["1"].apply(Compile(backend=backend))
    with pytest.raises(slapo.VerifyError, match="compile"):
        slapo.verify(sch, torch.randn(3, 6))


def failing(graph: Any, inputs: Any) -> Any:
    raise NotImplementedError("this compiler has a bad day")


def test_a_compiler_that_raises_is_named_with_the_node_and_the_model_is_intact(message: Messages) -> None:
    model, x = layers(), torch.randn(2, 6)
    expected = gradients(model, x)
    sch = slapo.create_schedule(model)
    sch["1"].apply(Compile(backend=failing))
    with pytest.raises(slapo.ApplyError) as raised:
        model(x)
    message(raised, "compile(backend=failing) at '1'", "NotImplementedError: this compiler has a bad day")
    sch.undo()
    torch.testing.assert_close(gradients(model, x), expected)


def test_a_graph_break_is_an_error_with_fullgraph_only() -> None:
    sch = slapo.create_schedule(nn.Sequential(Broken()))
    sch["0"].apply(Compile(backend="eager", fullgraph=True))
    with pytest.raises(slapo.ApplyError, match=r"fullgraph=True.* at '0' failed: Unsupported"):
        sch.model(torch.randn(2, 6))


def test_an_error_of_the_model_itself_stays_its_own() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 2:
                raise ValueError("at most two")
            return x * 2

    sch = slapo.create_schedule(nn.Sequential(Picky()))
    sch["0"].apply(Compile(backend="eager"))
    sch.model(torch.randn(2, 6))
    with pytest.raises(ValueError, match="at most two"):
        sch.model(torch.randn(3, 6))


@pytest.mark.parametrize(
    ("step", "word"),
    [
        (Compile(backend="inducter"), "no backend 'inducter'; it knows "),
        (Compile("fastest"), "no mode 'fastest'; it has default, "),
        (Compile(options={"max_autotun": True}), "no option 'max_autotun'; "),
        (Compile("max-autotune", backend="eager"), "mode='max-autotune'"),
    ],
)
def test_compile_refuses_invalid_calls(step: Compile, word: str) -> None:
    """The names that torch knows differ from version to version."""
    with pytest.raises(slapo.PreconditionError) as refused:
        slapo.create_schedule(layers())["0"].apply(step)
    assert str(refused.value).startswith(f"cannot apply {step} at '0': ")
    assert word in str(refused.value)


def test_repeated_compile_and_uncalled_modules_are_refused(message: Messages) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Feed()])

        def forward(self, x: Tensor) -> Tensor:
            return self.parts[0](x)

    sch = slapo.create_schedule(Holder())
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["parts"].apply(Compile(backend="eager"))
    message(refused, "never called", "sch['parts.*']")
    sch["parts.0"].apply(Compile(backend="eager"))
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["parts.0"].apply(Compile(backend="eager"))
    message(refused, "compiled already")


@pytest.mark.parametrize("per_function", [True, False])
def test_a_function_has_more_variants_than_the_limit_of_torch(
    per_function: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``torch.compile(recompile_limit=)``, or where it takes none (torch 2.11) by its configuration."""
    if not per_function:
        monkeypatch.setattr(compilers, "_LIMIT", {})
    elif not compilers._LIMIT:
        pytest.skip("torch.compile takes no recompile_limit")
    torch._dynamo.reset()
    twice = compilers.Compiled(lambda x: x + x, compilers.Backend("eager"), where="twice", fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=1):
        for axes in range(3):
            assert twice(torch.ones((2,) * axes)).shape == (2,) * axes
        assert torch._dynamo.config.recompile_limit == 1


def test_autocast_no_grad_and_gradients_of_gradients() -> None:
    model, x = layers(), torch.randn(2, 6, requires_grad=True)
    twin = copy.deepcopy(model).eval()
    slapo.create_schedule(model)["*"].apply(Compile(backend="aot_eager"))
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), twin(x))
    torch.testing.assert_close(model(x), twin(x))  # what was compiled under autocast is not taken here
    with torch.no_grad():
        assert not model(x).requires_grad
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()
    plain = copy.deepcopy(twin)
    slapo.create_schedule(plain)["*"].apply(Compile(backend="eager"))
    for each in (plain, twin):
        (first,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
        first.square().sum().backward()
    torch.testing.assert_close(plain[0].up.weight.grad, twin[0].up.weight.grad)


def test_the_fake_run_of_the_whole_model_passes_through_what_is_compiled() -> None:
    x = torch.randn(2, 6)
    sch = slapo.create_schedule(layers(), example_inputs=x)
    sch["0"].apply(Compile(backend=failing))
    sch["1"].trace()
    assert sch["1"].graph is not None


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.shift = layers(2), nn.Parameter(torch.zeros(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + self.shift).square().mean()


@pytest.mark.parametrize("path", ["", "body.0"])
def test_with_cuda_graphs_gradients_of_micro_batches_add_up(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        monkeypatch.setattr(compilers, "compile_with_inductor", compile_in_static_memory)
    model, reference = WithLoss().to(device).eval(), WithLoss().to(device).eval()
    slapo.create_schedule(model)[path].compile(mode="reduce-overhead")
    for _ in range(2):
        found: list[Any] = []
        for each in (model, reference):
            torch.manual_seed(1)
            losses = []
            for _ in range(3):
                losses.append(each(torch.randn(2, 6).to(device)))
                losses[-1].backward()
            found.append((torch.stack(losses), [parameter.grad for parameter in each.parameters()]))
        torch.testing.assert_close(*found)
        for each in (model, reference):
            each.zero_grad()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradients[0]


class Cube(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cubed.apply(x)


@pytest.mark.parametrize("backend", ["eager", lambda graph, inputs: graph.forward])
def test_a_captured_autograd_function_refuses_gradients_of_gradients(backend: Any) -> None:
    """``torch.compile`` would give them as zero: it captures a backward without its derivative."""
    sch = slapo.create_schedule(nn.Sequential(Cube(), nn.Tanh()))
    sch.compile(backend=backend)
    x = torch.randn(3, requires_grad=True)
    plain = torch.tanh(x**3).sum()
    (first,) = torch.autograd.grad(sch.model(x).sum(), x, create_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(plain, x)[0])
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()
    sch.model(x).sum().backward()  # once, as ever
