"""Promises of ``checkpoint``: the same numbers, less memory, nothing else different."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import InputError, PreconditionError
from slapo_testing.models import MLP, bert, cnn, gpt2
from tests.messages import Messages


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    more: dict[str, tuple[torch.Tensor, ...]]


class Nested(nn.Module):
    """Keyword arguments named like checkpoint's own, and outputs in every container."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, *, use_reentrant: float, debug: torch.Tensor, context_fn: str, function: Any = None
    ) -> tuple[Output, list[Any]]:
        y = torch.tanh(self.fc(x) * use_reentrant) + debug
        return Output(y, {"a": (y * 2, y * 3)}), [y.sum(), context_fn, None, function]


def _gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def _seeded(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(7)
    return call()


def test_gradients_are_bit_equal_with_dropout() -> None:
    torch.manual_seed(0)
    model, x = MLP(dropout=0.5), torch.randn(3, 8)
    expected_loss = _seeded(lambda: model(x).square().sum())
    expected = _gradients(model, expected_loss)
    after = torch.get_rng_state()
    slapo.create_schedule(model)["layers.*"].checkpoint()
    loss = _seeded(lambda: model(x).square().sum())
    assert torch.equal(loss, expected_loss)
    _assert_same(_gradients(model, loss), expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_without_the_random_state_gradients_differ() -> None:
    """The negative control: the test above would see it."""
    torch.manual_seed(0)
    model, x = MLP(dropout=0.5), torch.randn(3, 8)
    expected = _gradients(model, _seeded(lambda: model(x).square().sum()))
    slapo.create_schedule(model)["layers.*"].checkpoint(preserve_rng_state=False)
    got = _gradients(model, _seeded(lambda: model(x).square().sum()))
    assert any(not torch.equal(got[name], expected[name]) for name in expected)


def test_equivalence_of_checkpoint_follows_preserve_rng_state() -> None:
    sch = slapo.create_schedule(MLP(dropout=0.0))
    sch["layers.0"].checkpoint()
    assert sch.records[0].primitive.equivalence == slapo.Equivalence.EXACT
    sch["layers.1"].checkpoint(preserve_rng_state=False)
    promise = sch.records[1].primitive.equivalence
    assert promise != slapo.Equivalence.EXACT
    assert str(promise) == "EXACT provided a module checkpointed without its RNG state does not use the RNG"
    report = slapo.verify(sch, torch.randn(3, 8))  # it draws none: held to the very bits, and the condition is told
    assert report.tolerance.endswith(f"(float64, {promise})")
    assert all(entry.difference == 0 for entry in report.largest if entry.compared)


@pytest.mark.parametrize("make", [bert, gpt2])
def test_transformers_layers_train_with_the_same_bits(make: Callable[[], nn.Module]) -> None:
    model = make().train()
    ids = torch.arange(12).reshape(3, 4)
    call = lambda: model(input_ids=ids, labels=ids).loss  # noqa: E731
    expected = _gradients(model, _seeded(call))
    sch = slapo.create_schedule(model)
    sch["bert.encoder.layer.*" if make is bert else "transformer.h.*"].checkpoint()
    _assert_same(_gradients(model, _seeded(call)), expected)


@pytest.mark.parametrize("shape", [(1, 8), (0, 8), (5, 8)])
def test_keywords_named_like_checkpoints_own_and_nested_outputs(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"inner": Nested()})
    x = torch.randn(shape).t().contiguous().t()  # not contiguous, where that can be
    debug = torch.randn(8, requires_grad=True)
    marker = object()

    def call() -> tuple[Output, list[Any]]:
        return model["inner"](x, use_reentrant=0.5, debug=debug, context_fn="text", function=marker)

    def loss(result: tuple[Output, list[Any]]) -> torch.Tensor:
        output, (total, *_) = result
        return output.value.sum() + output.more["a"][1].square().sum() + total

    expected = torch.autograd.grad(loss(call()), [debug, *model.parameters()])
    slapo.create_schedule(model)["inner"].checkpoint()
    output, rest = call()
    assert isinstance(output, Output)
    assert rest[1:] == ["text", None, marker]
    got = torch.autograd.grad(loss((output, rest)), [debug, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_frozen_parameters_and_inputs_without_gradient() -> None:
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(2, 8)
    model.layers[0].requires_grad_(False)
    expected = _gradients(model, model(x).sum())
    slapo.create_schedule(model)["layers.*"].checkpoint()
    _assert_same(_gradients(model, model(x).sum()), expected)
    assert not any(name.startswith("layers.0") for name in expected)


def _saved(call: Callable[[], torch.Tensor]) -> int:
    """How many elements the graph keeps, the parameters left out."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(getattr(tensor, "_base", None), nn.Parameter):
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = call()
    assert loss.requires_grad
    return sum(kept.values())


def test_activations_are_freed() -> None:
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(64, 8)
    plain = _saved(lambda: model(x).sum())
    sch = slapo.create_schedule(model)
    sch["layers.0"].checkpoint()
    one = _saved(lambda: model(x).sum())
    sch["layers.[123]"].checkpoint()
    all_four = _saved(lambda: model(x).sum())
    # A layer keeps its input (64, 8), and inside, the hidden activations (64, 16) of the ReLU.
    assert plain - one >= 64 * 16
    assert one - all_four >= 3 * 64 * 16
    sch.undo(to=0)
    assert _saved(lambda: model(x).sum()) == plain


def test_forward_runs_once_without_gradients_and_twice_with_them() -> None:
    model, x = MLP(1), torch.randn(2, 8)
    sch = slapo.create_schedule(model)
    sch["layers.0"].checkpoint()
    calls: list[int] = []
    model.layers[0][0].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(x)
    model.eval()
    with torch.inference_mode():
        model(x)
    assert len(calls) == 2
    model(x).sum().backward()
    assert len(calls) == 4


def test_hooks_of_the_checkpointed_module_run_once() -> None:
    model, x = MLP(1), torch.randn(2, 8)
    calls: list[str] = []
    model.layers[0].register_forward_pre_hook(lambda *_: calls.append("pre"))
    model.layers[0].register_forward_hook(lambda *_: calls.append("post"))
    slapo.create_schedule(model)["layers.0"].checkpoint()
    model(x).sum().backward()
    assert calls == ["pre", "post"]


def test_nested_checkpoints_give_the_same_gradients() -> None:
    torch.manual_seed(0)
    model, x = MLP(dropout=0.3), torch.randn(2, 8)
    expected = _gradients(model, _seeded(lambda: model(x).sum()))
    sch = slapo.create_schedule(model)
    sch["layers.0.0"].checkpoint()
    sch["layers.0"].checkpoint()
    sch.checkpoint()
    _assert_same(_gradients(model, _seeded(lambda: model(x).sum())), expected)


def _refusal(call: Callable[[], Any], error: type[Exception] = PreconditionError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_checkpoint_of_a_module_list_or_twice_is_refused(message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    message(_refusal(sch["layers"].checkpoint), "ModuleList", "sch['layers.*'].checkpoint()")
    sch["layers.0"].checkpoint()
    message(
        _refusal(lambda: sch["layers.0"].checkpoint(preserve_rng_state=False)), "'layers.0'", "checkpointed already"
    )
    sch.undo()
    sch["layers.0"].checkpoint()


def test_root_can_be_checkpointed() -> None:
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(2, 8)
    expected = _gradients(model, model(x).sum())
    sch = slapo.create_schedule(model)
    sch.checkpoint()
    assert sch.records[0].path == ""
    _assert_same(_gradients(model, model(x).sum()), expected)


def test_key_value_cache_is_refused_with_the_way_out(message: Messages) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=50,
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.arange(8).reshape(2, 4)
    expected = _gradients(model, model(input_ids=ids, labels=ids, use_cache=False).loss)
    sch = slapo.create_schedule(model)
    sch["model.layers.*"].checkpoint()
    message(_refusal(lambda: model(input_ids=ids, labels=ids), InputError), "DynamicCache", "use_cache=False")
    _assert_same(_gradients(model, model(input_ids=ids, labels=ids, use_cache=False).loss), expected)
    model.config.use_cache = False
    _assert_same(_gradients(model, model(input_ids=ids, labels=ids).loss), expected)
    with torch.no_grad():
        assert model.eval()(input_ids=ids, use_cache=True).past_key_values is not None


def test_deep_copy_runs_on_its_own_weights() -> None:
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(2, 8)
    sch = slapo.create_schedule(model)
    sch["layers.*"].checkpoint()
    sch["head"].checkpoint()
    expected = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(x), expected)
    assert not twin(x).any()
    model.zero_grad()
    twin(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert twin.head.bias.grad is not None
    assert twin.layers[0].forward.__self__ is twin.layers[0]
    sch.undo(to=0)
    assert "forward" in twin.layers[0].__dict__
    assert "forward" not in model.layers[0].__dict__


def test_checkpointed_model_compiles() -> None:
    torch.manual_seed(0)
    model, x = MLP(2), torch.randn(2, 8)
    expected = _gradients(model, model(x).sum())
    slapo.create_schedule(model)["layers.*"].checkpoint()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _assert_same(_gradients(model, compiled(x).sum()), expected)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    _assert_same(_gradients(model, compiled(x).sum()), expected)
    torch._dynamo.reset()


def test_moving_modes_and_state_dict_are_as_before() -> None:
    torch.manual_seed(0)
    model = MLP(dropout=0.5)
    names = list(model.state_dict())
    slapo.create_schedule(model)["layers.*"].checkpoint()
    assert list(model.state_dict()) == names
    model.to(torch.float64).eval()
    x = torch.randn(2, 8, dtype=torch.float64)
    assert torch.equal(model(x), model(x))
    assert model(x).dtype is torch.float64
    fresh = MLP().to(torch.float64).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), model(x))


def test_forward_that_the_user_set_is_checkpointed_and_comes_back() -> None:
    torch.manual_seed(0)
    model, x = MLP(1), torch.randn(2, 8)
    own = lambda y: y * 3  # noqa: E731
    model.layers[0].forward = own
    expected = _gradients(model, model(x).sum())
    sch = slapo.create_schedule(model)
    sch["layers.0"].checkpoint()
    _assert_same(_gradients(model, model(x).sum()), expected)
    sch.undo()
    assert model.layers[0].__dict__["forward"] is own


def test_running_statistics_are_updated_once() -> None:
    torch.manual_seed(0)
    plain, model = cnn().train(), cnn().train()
    x = torch.randn(4, 3, 6, 6)
    slapo.create_schedule(model)["blocks.*"].checkpoint()
    expected, got = _gradients(plain, plain(x).sum()), _gradients(model, model(x).sum())
    _assert_same(got, expected)
    for (name, one), other in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(one, other), name
    assert model.blocks[0].bn1.num_batches_tracked == 1


class Recurrent(nn.Module):
    """A cell with a state that its forward reads and changes, called several times before the backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(4, 6), Cell(kind), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.last(self.cell(self.first(x[:, t]))) for t in range(x.shape[1])).square().mean()


def _count(cell: Any) -> None:
    cell.count += 1


class Cell(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(6, 6)
        self.count, self.counts, self.log = 0, {"calls": [0]}, list[torch.Tensor]()
        self.value = torch.zeros(6)
        self.register_buffer("temporary", torch.zeros(6), persistent=False)
        self.register_buffer("assigned", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x.detach().mean(0)
        if self.kind == "temporary":
            self.temporary.copy_(0.5 * self.temporary + seen)
            return torch.tanh(self.linear(x) + self.temporary.clone())
        if self.kind == "assigned":
            self.assigned = 0.5 * self.assigned + seen
            return torch.tanh(self.linear(x) + self.assigned)
        if self.kind == "value":
            self.value = 0.5 * self.value + seen
            return torch.tanh(self.linear(x) + self.value)
        if self.kind == "value in place":
            self.value += seen
            return torch.tanh(self.linear(x) + self.value.clone())
        if self.kind == "containers":
            self.log.append(x.detach())
            self.counts["calls"][0] += 1
            return torch.tanh(self.linear(x) * (len(self.log) + self.counts["calls"][0]))
        _count(self)
        return torch.tanh(self.linear(x) * self.count)

    def state(self) -> tuple[Any, ...]:
        tensors = torch.stack([self.temporary, self.assigned, self.value])
        return tensors.tolist(), self.count, self.counts, len(self.log)


@pytest.mark.parametrize("kind", ["temporary", "assigned", "value", "value in place", "containers", "count"])
def test_state_that_the_forward_changes_is_recomputed_as_seen_and_changed_once(kind: str) -> None:
    torch.manual_seed(0)
    plain, x = Recurrent(kind), torch.randn(3, 4, 4)
    model = copy.deepcopy(plain)
    slapo.create_schedule(model)["cell"].checkpoint()
    for _ in range(2):
        _assert_same(_gradients(model, model(x)), _gradients(plain, plain(x)))
        assert model.cell.state() == plain.cell.state()
    twin, other = copy.deepcopy(model), copy.deepcopy(plain)
    _assert_same(_gradients(twin, twin(x)), _gradients(other, other(x)))


def test_state_first_changed_by_a_later_call_is_refused_at_the_recompute(message: Messages) -> None:
    model = Recurrent("later")
    slapo.create_schedule(model)["cell"].checkpoint()
    x = torch.randn(3, 2, 4)
    model(x).backward()
    model.cell.kind = "temporary"
    with pytest.raises(InputError) as refused:
        model(x).backward()
    assert refused.value.path == "cell"
    message(str(refused.value), "'temporary'", "persistent=True")


class InPlace(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.act, self.linear = kind, nn.SiLU(inplace=True), nn.Linear(6, 6)

    def forward(self, x: Any, more: Any = None) -> torch.Tensor:
        if self.kind == "view":
            x[:, :3].mul_(2)
        elif self.kind == "keyword":
            return self.linear(self.act(more["inner"][0]))
        elif self.kind == "positional":
            x = self.act(x)
        return self.linear(x)


@pytest.mark.parametrize("kind", ["positional", "view", "keyword", "afterwards"])
def test_input_changed_in_place_is_refused_at_the_recompute(kind: str, message: Messages) -> None:
    first, block = nn.Linear(6, 6), InPlace(kind)
    slapo.create_schedule(nn.ModuleDict({"block": block}))["block"].checkpoint()
    x = first(torch.randn(3, 6))
    out = block(None, more={"inner": [x]}) if kind == "keyword" else block(x)
    if kind == "afterwards":
        x.mul_(2)
    with pytest.raises(InputError) as refused:
        out.sum().backward()
    assert refused.value.path == "block"
    message(str(refused.value), "a nested input" if kind == "keyword" else "input 0 (3, 6)", "inplace=False")


def test_containers_that_the_forward_fills_are_filled_once() -> None:
    class Filling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, terms: list[torch.Tensor], *, out: dict[str, Any]) -> torch.Tensor:
            y = torch.tanh(self.linear(x)) * (1 + len(terms) + len(out["all"]))
            terms.append(y.square().mean())
            out["all"].append(y)
            return y

    torch.manual_seed(0)
    plain, x = nn.ModuleList(Filling() for _ in range(2)), torch.randn(3, 6)
    model = copy.deepcopy(plain)
    slapo.create_schedule(model)["*"].checkpoint()
    gradients = []
    for each in (plain, model):
        terms, out, y = list[torch.Tensor](), {"all": list[torch.Tensor]()}, x
        for block in each:
            y = block(y, terms, out=out)
        gradients.append(_gradients(each, y.sum() + sum(terms) + sum(z.mean() for z in out["all"])))
        assert (len(terms), len(out["all"])) == (2, 2)
    _assert_same(gradients[1], gradients[0])
