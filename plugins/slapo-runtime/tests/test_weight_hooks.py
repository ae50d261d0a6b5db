"""Weights that only a plugin understands leave and enter under the reference model's names, and start as it says."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.plugins import use_registry
from slapo_runtime.launcher import run_ranks
from slapo_testing.distributions import FakeDistribution, FakeEnvironment
from tests.messages import Messages

from .pieces import InMemory

PRIMITIVES = '''
from dataclasses import dataclass
import torch
from torch import nn
from torch.distributed.tensor import Shard
from slapo_core import Equivalence, Primitive
from slapo_core.layout import Layout

def _columns(forward):
    return lambda module, input: nn.functional.linear(input, module.weight.t(), module.bias)

@dataclass(frozen=True)
class Columns(Primitive):
    """Keep a linear layer's weight by columns, or on 'tp' a piece of it.

    rewrite: ``x @ w.T`` -> ``x @ c`` with ``c = w.T``
    """
    name = "odd.columns"
    equivalence = Equivalence.REORDERED
    split: bool = False
    honest: bool = True
    def apply(self, node, edit):
        value = node.parameters["weight"].detach().t().contiguous()
        layout = Layout("", tuple(value.shape), (("tp", Shard(1)),) if self.split else ())
        edit.set_parameter(node, "weight", layout.local(value, node.mesh), layout=layout if self.honest else None)
        edit.wrap_forward(node, _columns)

class Both(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.both = nn.Parameter(both)
    def forward(self, input):
        left, right = nn.functional.linear(input, self.both).chunk(2, dim=-1)
        return left * right

@dataclass(frozen=True)
class Merge(Primitive):
    """Merge the weights of two linear layers.

    rewrite: ``a(x) * b(x)`` -> ``chunk(ab(x))[0] * chunk(ab(x))[1]``
    """
    name = "odd.fold"
    equivalence = Equivalence.REORDERED
    def apply(self, node, edit):
        weights = [node[name].parameters["weight"].detach() for name in ("a", "b")]
        edit.replace_module(node, Both(torch.cat(weights)))
'''
HOOKS = """
import torch
from slapo_core import hookimpl

@hookimpl
def slapo_to_reference(node, name, tensor):
    if name == "weight":
        return {f"{node.path}.weight": tensor.t()}
    if name == "both":
        return dict(zip((f"{node.path}.a.weight", f"{node.path}.b.weight"), tensor.chunk(2)))

@hookimpl
def slapo_from_reference(node, name, tensors):
    if name == "weight":
        return tensors[f"{node.path}.weight"].t()
    if name == "both":
        return torch.cat([tensors[f"{node.path}.a.weight"], tensors[f"{node.path}.b.weight"]])
"""
ENTRY_POINTS = {
    "slapo.v1.primitives": {"odd.columns": "odd_slapo:Columns", "odd.fold": "odd_slapo:Merge"},
    "slapo.v1.hooks": {"odd": "odd_hooks"},
}


def odd(hooks: str = HOOKS) -> FakeDistribution:
    return FakeDistribution(
        "odd-slapo", entry_points=ENTRY_POINTS, modules={"odd_slapo": PRIMITIVES, "odd_hooks": hooks}
    )


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.a(input) * self.b(input)


class Model(nn.Module):
    """``square`` would load a transposed weight without any complaint about its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.pair, self.out = nn.Linear(6, 6), Pair(), nn.Linear(4, 2)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.out(self.pair(self.square(input).tanh()))


def model(device: str = "cpu", seed: int = 0) -> Model:
    torch.manual_seed(seed)
    with torch.device(device):
        return Model()


@pytest.fixture
def scheduled(fake_distributions: FakeEnvironment) -> Callable[..., slapo.Schedule]:
    def make(made: nn.Module, *others: FakeDistribution, hooks: str = HOOKS, plugins: tuple[str, ...] = ()):
        fake_distributions.install(odd(hooks), *others)
        with use_registry(fake_distributions.registry(with_installed=True)):
            schedule = slapo.create_schedule(made, plugins=plugins)
            schedule["square"].columns()
            schedule["out"].columns()
            schedule["pair"].fold()
        return schedule

    return make


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[key], right[key]) for key in right)


def test_verify_compares_translated_weights_and_their_gradients(scheduled: Callable[..., slapo.Schedule]) -> None:
    report = slapo.verify(scheduled(model()), torch.randn(3, 6))
    assert report.not_compared == ()


def test_verify_compares_the_output_that_a_plugin_gathers(fake_distributions: FakeEnvironment) -> None:
    """Here of a model whose rows come in another order."""
    primitive = """
from dataclasses import dataclass
from slapo_core import Equivalence, Primitive

def _flipped(forward):
    return lambda module, input: forward(module, input).flip(0)

@dataclass(frozen=True)
class Flip(Primitive):
    \"\"\"Give the rows of the output in reverse.

    rewrite: ``y`` -> ``y[::-1]``
    \"\"\"
    name = "odd.flip"
    equivalence = Equivalence.EXACT
    def apply(self, node, edit):
        edit.wrap_forward(node, _flipped)
"""
    hooks = "from slapo_core import hookimpl\n@hookimpl\ndef slapo_gather_output(node, output):\n    return {}\n"
    for name, answer in (("odd", "output.flip(0) if node.path == '' else None"), ("mute", "None")):
        fake_distributions.install(
            FakeDistribution(
                f"{name}-slapo",
                entry_points={
                    "slapo.v1.primitives": {f"{name}.flip": f"{name}_slapo:Flip"},
                    "slapo.v1.hooks": {name: f"{name}_hooks"},
                },
                modules={
                    f"{name}_slapo": primitive.replace("odd.flip", f"{name}.flip"),
                    f"{name}_hooks": hooks.format(answer),
                },
            )
        )
    with use_registry(fake_distributions.registry(with_installed=True)):
        gathered, plain = slapo.create_schedule(model()), slapo.create_schedule(model())
        gathered.root.odd.flip()
        slapo.verify(gathered, torch.randn(3, 6))
        plain.root.mute.flip()
        with pytest.raises(slapo.VerifyError, match="output"):
            slapo.verify(plain, torch.randn(3, 6))


def test_verify_finds_a_wrong_translation(scheduled: Callable[..., slapo.Schedule]) -> None:
    schedule = scheduled(model(), hooks=HOOKS.replace('.weight": tensor.t()}', '.weight": tensor.t() * 2}'))
    with pytest.raises(slapo.VerifyError, match="weight"):
        slapo.verify(schedule, torch.randn(3, 6))


@pytest.mark.filterwarnings("error")
def test_state_dict_round_trip_has_reference_names_and_values(scheduled: Callable[..., slapo.Schedule]) -> None:
    engine = slapo.build(scheduled(model()))
    assert same(engine.state_dict(), model().state_dict())
    other = model(seed=5)
    engine.load_state_dict(other.state_dict())
    assert same(engine.state_dict(), other.state_dict())
    input = torch.randn(3, 6)
    torch.testing.assert_close(engine.module(input), other(input))
    with pytest.raises(slapo.WeightsError, match=r"missing: pair\.b\.weight"):
        engine.load_state_dict({k: v for k, v in model(seed=7).state_dict().items() if k != "pair.b.weight"})
    assert same(engine.state_dict(), other.state_dict())


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_weights_given_to_build_are_translated(scheduled: Callable[..., slapo.Schedule], device: str) -> None:
    other = model(seed=5)
    engine = slapo.build(scheduled(model(device)), weights=other.state_dict())
    input = torch.randn(3, 6)
    torch.testing.assert_close(engine.module(input), other(input))
    assert same(engine.state_dict(), other.state_dict())


def test_meta_initialization_equals_eager_after_translation(scheduled: Callable[..., slapo.Schedule]) -> None:
    plain = slapo.build(slapo.create_schedule(model("meta"))).state_dict()
    schedule = scheduled(model("meta"))
    slapo.verify(schedule, torch.randn(3, 6))
    assert same(slapo.build(schedule).state_dict(), plain)


def test_the_optimizer_state_of_a_translated_weight_never_enters_another_schedule(
    scheduled: Callable[..., slapo.Schedule], tmp_path
) -> None:
    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3)

    def loss(output, batch):
        return output.square().mean()

    engine = slapo.build(scheduled(model()), optimizer=adam, loss=loss)
    engine.train_step(torch.ones(3, 6))
    engine.save(tmp_path / "saved")
    plain = slapo.build(slapo.create_schedule(model()), optimizer=adam, loss=loss)
    before = plain.state_dict()
    with pytest.raises(slapo.BuildError, match=r"checkpoint: .*square\.weight as \(6, 6\)"):
        plain.load(tmp_path / "saved")
    assert same(plain.state_dict(), before)
    trained = engine.state_dict()
    engine.train_step(torch.ones(3, 6))
    engine.load(tmp_path / "saved")
    assert same(engine.state_dict(), trained)


def test_checkpoint_shards_are_of_translated_reference_tensors(scheduled: Callable[..., slapo.Schedule]) -> None:
    engine = slapo.build(scheduled(model()))
    found = engine._state.shards()
    source = InMemory(found.own)
    assert {name: tuple(one.shape) for (_, name), one in source.full.items()} == {
        name: tuple(one.shape) for name, one in model().state_dict().items()
    }
    plain = slapo.build(slapo.create_schedule(model(seed=1)))
    plain._state.load_shards(found.description, source)
    assert same(plain.state_dict(), model().state_dict())
    other = slapo.build(slapo.create_schedule(model(seed=2)))._state.shards()
    engine._state.load_shards(other.description, InMemory(other.own))
    assert same(engine.state_dict(), model(seed=2).state_dict())


def on_two_ranks(directory: str) -> tuple[bool, bool, tuple[int, ...]]:
    sys.path.insert(0, directory)
    schedule = slapo.create_schedule(model("meta"), mesh={"tp": 2})
    schedule["square"].columns(split=True)
    engine = slapo.build(schedule, weights=model(seed=5).state_dict())
    first = same(engine.state_dict(), model(seed=5).state_dict())
    engine.load_state_dict(model(seed=6).state_dict())
    return first, same(engine.state_dict(), model(seed=6).state_dict()), tuple(engine.module.square.weight.shape)


@pytest.mark.ranks
def test_shards_of_a_translated_weight_are_gathered_and_cut(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(odd())
    assert run_ranks(on_two_ranks, str(fake_distributions.directory), world_size=2) == [(True, True, (6, 3))] * 2


def test_a_weight_that_its_layout_does_not_describe_is_refused(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    silent = odd(HOOKS.replace('if name == "weight"', "if False"))
    fake_distributions.install(silent)
    with use_registry(fake_distributions.registry(with_installed=True)):
        schedule = slapo.create_schedule(model())
        schedule["out"].columns(honest=False)
    with pytest.raises(slapo.WeightsError) as caught:
        slapo.build(schedule)
    message(caught, "'out.weight' of shape (4, 2)", "'out.weight' (2, 4)", 'layout=Layout("", (4, 2))')


WRONG = [
    ("tensor.t()}", "3}", "got {'square.weight': 3}"),
    ("tensor.t()}", "tensor[:1]}", "(1, 6), not (6, 6)"),
    ('{f"{node.path}.weight": t', '{"nowhere": t', "names 'nowhere'"),
    ('{f"{node.path}.weight": t', '{"out.bias": t', "names 'out.bias', which corresponds to 'out.bias'"),
    ("def slapo_from", "def _from", "no plugin answers slapo_from_reference"),
    ('.weight"].t()', '.weight"][:1]', "tensor of shape (6, 6)"),
]


@pytest.mark.parametrize(("old", "new", "word"), WRONG)
def test_a_wrong_answer_names_the_plugin_and_changes_nothing(
    scheduled: Callable[..., slapo.Schedule], old: str, new: str, word: str, message: Messages
) -> None:
    hooks = HOOKS.replace(old, new)
    if new == "def _from":
        hooks = hooks.replace("@hookimpl\ndef _from", "def _from")
    schedule = scheduled(model("meta"), hooks=hooks)
    with pytest.raises(slapo.HookError) as caught:
        slapo.build(schedule)
    message(caught, "odd-slapo" if new != "def _from" else "square.weight", word)
    assert all(parameter.is_meta for parameter in schedule.model.parameters())
    schedule.undo(to=0)


def test_a_parameter_of_several_reference_tensors_is_in_one_group_or_refused(
    scheduled: Callable[..., slapo.Schedule], message: Messages
) -> None:
    sch = scheduled(model())
    decayed, undecayed = slapo.parameter_groups(sch, no_decay=("pair.a.*", "pair.b.*", "square.bias"))
    assert [tuple(one.shape) for one in undecayed["params"]] == [(6,), (8, 6)]
    assert len(decayed["params"]) == 3
    with pytest.raises(slapo.OptimizerError) as refused:
        slapo.parameter_groups(sch, no_decay="pair.a.*")
    message(refused, "pair.a.weight, pair.b.weight")
