"""A traced module is a module like any other: compiled, copied, cast, hooked, saved, undone and replayed."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Doubled(nn.Module):
    """A child with code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.fc(x)


class Tripled(Doubled):
    """The same parameters, another function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * self.fc(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 8), Doubled(), nn.LayerNorm(8)
        self.scale, self.gain = nn.Parameter(torch.full((8,), 1.5)), 2.0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        if self.training:
            self.steps += 1
        batch, length, _ = x.shape
        y = F.gelu(self.up(x)).view(batch, length, 2, -1).flatten(2) * self.scale * self.gain
        with torch.no_grad():
            shift = torch.arange(length, device=x.device, dtype=x.dtype)[:, None]
        y = self.down(y + shift)
        return {"out": self.norm(x + y if mask is None else x + y * mask), "length": length}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.second(self.first(x, mask)["out"])["out"]


def traced(*, flatten: bool = False) -> tuple[nn.Module, nn.Module, slapo.Schedule]:
    """A reference model, a traced copy, and its schedule."""
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    sch = slapo.create_schedule(model, example_inputs=X)
    sch["*"].trace(flatten=flatten)
    return plain, model, sch


def results(model: Any, *args: Any, of: nn.Module | None = None) -> list[Any]:
    owner = of or model
    owner.zero_grad()
    out = model(*args)
    out.square().sum().backward()
    return [out.detach(), *(parameter.grad for parameter in owner.parameters()), *owner.buffers()]


def assert_same(mine: list[Any], other: list[Any], *, exact: bool = True) -> None:
    for one, two in zip(mine, other, strict=True):
        if exact:
            assert torch.equal(one, two)
        else:
            torch.testing.assert_close(one, two)


@pytest.mark.breadth
@pytest.mark.parametrize(("backend", "flatten"), [("eager", True), ("aot_eager", False)])
def test_a_compiled_model_runs_its_graphs_in_one_piece(backend: str, flatten: bool) -> None:
    torch._dynamo.reset()
    plain, model, _ = traced(flatten=flatten)
    for mode in (True, False):
        plain.train(mode), model.train(mode)
        model(X)  # records what is needed in this mode
        plain(X)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for mode in (True, False):
        plain.train(mode), model.train(mode)
        for x in (X, torch.cat([X, X], 1), X[:1]):
            assert_same(results(compiled, x, of=model), results(plain, x), exact=False)


def test_compilation_records_what_is_missing_and_what_changes() -> None:
    torch._dynamo.reset()
    plain, model, _ = traced()
    compiled = torch.compile(model, backend="eager")
    for mode in (False, True):
        plain.train(mode), model.train(mode)
        for args in ((X,), (X, torch.ones(8))):
            assert_same(results(compiled, *args, of=model), results(plain, *args), exact=False)
    plain.first.gain = model.first.gain = 3.0
    assert_same(results(compiled, X, of=model), results(plain, X), exact=False)


def test_copies_of_every_kind_run_on_themselves() -> None:
    plain, model, _ = traced()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        reference = copy.deepcopy(plain)
        with torch.no_grad():
            twin.first.scale.mul_(2), reference.first.scale.mul_(2)
        assert_same(results(twin, X), results(reference, X))
        twin.second.down.fc.weight.data.zero_(), reference.second.down.fc.weight.data.zero_()
        assert_same(results(twin, X), results(reference, X))
    shallow = copy.copy(model.first)
    assert torch.equal(shallow(X)["out"], plain.first(X)["out"])
    assert_same(results(model, X)[:-2], results(plain, X)[:-2])


@pytest.mark.parametrize("flatten", [False, True])
def test_casts_modes_and_new_values_are_followed(flatten: bool) -> None:
    plain, model, _ = traced(flatten=flatten)
    for change in ("double", "bfloat16", "float", "eval", "train"):
        for one in (plain, model):
            getattr(one, change)()
        x = X.to(model.first.scale.dtype)
        assert_same(results(model, x), results(plain, x))
    for one in (plain, model):
        one.first.eval()  # one of them alone
    assert_same(results(model, X), results(plain, X))
    state = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    assert list(state) == list(model.state_dict())
    for one in (plain, model):
        one.load_state_dict(state)
    assert_same(results(model, X), results(plain, X))
    for one in (plain, model):
        one.first.up = nn.Linear(8, 8, bias=False, dtype=torch.float32)
        nn.init.ones_(one.first.up.weight)
        one.second.scale = nn.Parameter(torch.ones(8))
    assert_same(results(model, X), results(plain, X))
    with torch.inference_mode():
        assert torch.equal(model(X), plain(X))


@pytest.mark.parametrize("flatten", [False, True])
def test_hooks_on_the_traced_module_and_on_what_it_calls_run(flatten: bool) -> None:
    plain, model, _ = traced(flatten=flatten)
    told: dict[int, list[str]] = {id(plain): [], id(model): []}
    for one in (plain, model):
        log = told[id(one)]
        one.first.register_forward_hook(lambda m, args, out, log=log: log.append("block"))
        one.first.register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:]))
        one.first.up.register_forward_hook(lambda m, args, out: out * 3)
        one.first.down.register_forward_hook(lambda m, args, out, log=log: log.append("child"))
        one.first.down.fc.register_full_backward_hook(lambda m, given, out, log=log: log.append("backward"))
        one.first.scale.register_hook(lambda gradient: gradient * 5)
    model(X), plain(X)  # hooks below make it record anew, which runs them once more
    told[id(model)].clear(), told[id(plain)].clear()
    assert_same(results(model, X), results(plain, X))
    assert told[id(model)] == told[id(plain)] == ["child", "block", "backward"]


def test_undo_redo_and_replay_leave_nothing_behind() -> None:
    plain, model, sch = traced()
    before = dict(vars(plain.first))
    document = sch.to_json()
    sch["first.down"].trace()
    sch["first"].checkpoint()
    assert_same(results(model, X), results(plain, X))
    with sch.reference() as untouched:
        assert "forward" not in untouched.first.__dict__
        assert "forward" not in untouched.first.down.__dict__
    assert sch["first.down"].graph is not None
    assert_same(results(model, X), results(plain, X))
    sch.undo(to=0)
    assert dict(vars(model.first)).keys() == before.keys()
    assert sch["first"].graph is None
    other = copy.deepcopy(plain)
    again = slapo.replay(other, document, example_inputs=X)
    assert again["second"].graph is not None
    assert_same(results(other, X), results(plain, X))


def test_steps_below_a_traced_module_take_effect_and_are_taken_back() -> None:
    for flatten in (False, True):
        plain, model, sch = traced(flatten=flatten)
        replaced = copy.deepcopy(plain)
        new = Tripled()
        replaced.first.down = Tripled()
        replaced.first.down.load_state_dict(plain.first.down.state_dict())
        sch["first.down"].replace(new)
        assert_same(results(model, X), results(replaced, X))
        sch["first.up"].checkpoint()
        assert_same(results(model, X)[:-2], results(replaced, X)[:-2])
        sch.undo(to=2)
        for one in (model, plain):
            one.first.steps.zero_(), one.second.steps.zero_()
        assert_same(results(model, X), results(plain, X))


class Filling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, kept: Any) -> torch.Tensor:
        h = self.up(x)
        kept["terms"].append(h.mean())
        return x + h


class Twice(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Filling() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: Any = defaultdict(list)
        for layer in self.layers:
            x = layer(x, kept)
        return x + sum(kept["terms"])


def test_a_container_that_layers_fill_is_copied_with_the_graph_and_recomputed() -> None:
    torch.manual_seed(0)
    model, batch = Filled().double(), torch.randn(1, 3, dtype=torch.float64)
    plain = model(batch)
    sch = slapo.create_schedule(model, example_inputs=batch)
    sch["layers.*"].checkpoint()
    sch.trace()
    assert torch.equal(model(batch), plain)
    assert slapo.verify(sch, batch)


def test_a_copy_of_a_traced_module_traces_its_own_forward_set_by_a_tool() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh())).double()
    block: Any = model[0]
    before, batch = block.forward, torch.randn(1, 3, dtype=torch.float64)
    block.forward = lambda x: before(x * 2)
    sch = slapo.create_schedule(model, example_inputs=batch)
    sch["0"].trace()
    assert slapo.verify(sch, batch)  # with batches of more than one sample, for which the copies record
    sch["0.0"].replace(lambda old: Twice(3, 3).double())
    with pytest.raises(slapo.VerifyError):
        slapo.verify(sch, batch)
