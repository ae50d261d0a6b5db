"""``cudagraphify``: a replay is the forward, for numbers, gradients, state and refusals.

Without a CUDA device graphs are recorded and replayed on the CPU by :mod:`.graphed`, in static memory as on a GPU.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slapo_core as slapo
from slapo_fusion import Cudagraphify
from slapo_fusion.cases import Feed
from slapo_fusion.cudagraphify import Captured
from tests.messages import Messages
from tests.tiers import sampled

from . import graphed


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphed.make_graphed_callables)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Captured, "device_type", "cpu")


class Block(nn.Module):
    """Statistics, a counter, dropout, a mask, and results of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, pair: Any = None) -> Any:
        hidden = self.dropout(torch.tanh(self.norm(self.up(x))))
        hidden = self.down(hidden) * scale
        if mask is not None:
            hidden = hidden * mask
        if pair is not None:
            return {"hidden": hidden * pair[0], "rest": (x.detach() + 1, None, 3)}
        return hidden


def blocks(count: int = 1, **options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a captured model and its reference."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(count)])
    reference = copy.deepcopy(model)
    slapo.create_schedule(model)["*"].apply(Cudagraphify(**options))
    return model, reference


def captured(model: Any, path: str = "0") -> Captured:
    (found,) = [part for part in model.get_submodule(path).forward.parts if isinstance(part, Captured)]
    return found  # type: ignore[no-any-return]


def same_step(models: tuple[nn.Module, nn.Module], step: Callable[[nn.Module], Any], seed: int = 1) -> None:
    """Both models give the same, draw the same, and have the same gradients and buffers after it."""
    results, states = [], []
    for model in models:
        torch.manual_seed(seed)
        results.append(step(model))
        states.append(torch.get_rng_state())
    torch.testing.assert_close(results[0], results[1])
    assert torch.equal(states[0], states[1])
    for mine, theirs in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        torch.testing.assert_close(mine[1].grad, theirs[1].grad, msg=mine[0])
    torch.testing.assert_close(list(models[0].buffers()), list(models[1].buffers()))


def loss_of(x: Tensor, **kwargs: Any) -> Callable[[nn.Module], Any]:
    def step(model: nn.Module) -> Any:
        loss = model[0](x, **kwargs).square().sum()  # type: ignore[index]
        loss.backward()
        return loss

    return step


# -- where there is no CUDA device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_does_nothing_and_says_so() -> None:
    model = nn.Sequential(Feed())
    sch = slapo.create_schedule(model)
    sch["0"].apply(Cudagraphify())
    assert "there is no CUDA device: the forward runs as it is" in sch.records[0].edits
    assert "forward" not in model[0].__dict__
    slapo.verify(sch, torch.randn(3, 6))


def test_cudagraphify_refuses_invalid_calls(message: Messages) -> None:
    model = nn.Sequential(Feed(), Feed())
    model[1].up.register_full_backward_hook(lambda *_: None)
    sch = slapo.create_schedule(model)
    sch["0"].apply(Cudagraphify())
    for path, step, word in (
        ("0", Cudagraphify(), "captured already"),
        ("1", Cudagraphify(), "'1.up' has backward hooks"),
        ("1", Cudagraphify(warmup=0), "at least 1"),
    ):
        with pytest.raises(slapo.PreconditionError) as refused:
            sch[path].apply(step)
        message(refused, word)


# -- gradients, results and state


@pytest.mark.parametrize(("accumulate", "set_to_none"), [(1, True), (2, True), (3, False)])
@pytest.mark.usefixtures("on_cpu")
def test_gradients_of_micro_batches_add_up(accumulate: int, set_to_none: bool) -> None:
    models = blocks(2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for model in models:
        model[0].up.weight.grad = torch.ones_like(model[0].up.weight)
    for step in range(3):

        def train(model: nn.Module, step: int = step) -> list[Tensor]:
            torch.manual_seed(step)
            losses = []
            for _ in range(accumulate):
                loss = model(torch.randn(4, 6)).square().mean()
                loss.backward()
                losses.append(loss.detach())
            return losses

        same_step(models, train)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert captured(models[0]).graphs


@pytest.mark.usefixtures("on_cpu")
def test_the_first_gradient_becomes_the_parameter_s_without_another_copy() -> None:
    model, _ = blocks()
    loss_of(torch.randn(4, 6))(model)
    seen = []
    model[0](torch.randn(4, 6))  # recorded
    for parameter in model.parameters():
        parameter.grad = None
    result = model[0](torch.randn(4, 6))
    (clone,) = [node for node, _ in result.grad_fn.next_functions]
    clone.register_hook(lambda gradients, _: seen.extend(each.data_ptr() for each in gradients if each is not None))
    result.sum().backward()
    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == seen  # type: ignore[union-attr]


@pytest.mark.usefixtures("on_cpu")
def test_results_and_input_gradients_are_the_caller_s_to_keep_and_to_change() -> None:
    def twice(model: nn.Module) -> Any:
        kept = []
        for _ in range(2):
            x = torch.randn(4, 6, requires_grad=True)
            result = model(x)
            loss = result.square().sum()
            loss.backward()
            kept.append((result.detach(), x.grad, loss.detach()))
            with torch.no_grad():
                result.add_(1.0)
                result.sub_(1.0)
        return kept

    models = blocks()
    same_step(models, twice)
    same_step(models, twice)
    x = torch.randn(4, 6, requires_grad=True)
    results = [model[0](x, pair=(torch.ones(6), None)) for model in models]
    assert [*map(type, results[0]["rest"])] == [Tensor, type(None), int]
    assert not results[0]["rest"][0].requires_grad
    torch.manual_seed(1)


@pytest.mark.usefixtures("on_cpu")
def test_a_shared_parameter_and_a_frozen_one_get_what_they_get_uncaptured() -> None:
    models = blocks(2)
    for model in models:
        model[1].up.weight = model[0].up.weight
        model[0].down.bias.requires_grad_(False)

    def train(model: nn.Module) -> Any:
        return [model(torch.randn(4, 6)).square().sum().backward() for _ in range(2)]

    same_step(models, train)
    for model in models:  # trained from now on
        model[0].down.bias.requires_grad_(True)
    same_step(models, train)


@pytest.mark.usefixtures("on_cpu")
def test_autocast_is_captured_for_itself() -> None:
    models, x = blocks(), torch.randn(4, 6)

    def train(model: nn.Module) -> Any:
        results = []
        for dtype in (None, torch.bfloat16, torch.float16, None, torch.bfloat16):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                result = model(x)
            results.append(result)
            result.float().square().sum().backward()
        return results

    same_step(models, train)
    same_step(models, train)
    assert len(captured(models[0]).graphs) == 3
    assert torch.is_autocast_cache_enabled()


@pytest.mark.usefixtures("on_cpu")
def test_evaluation_between_training_steps_runs_as_it_is_and_sees_the_statistics() -> None:
    models, x = blocks(), torch.randn(4, 6)
    for _ in range(2):
        same_step(models, loss_of(x))
        for model in models:
            model.eval()
        with torch.no_grad():
            torch.testing.assert_close(models[0](x), models[1](x))
        same_step(models, loss_of(x))  # with gradients, in evaluation mode
        for model in models:
            model.train()
    for model in models:
        model[0].norm.eval()  # of one module below
    same_step(models, loss_of(x))
    assert len(captured(models[0]).graphs) == 3


# -- what a graph fixes, and what changes it


def move_data(model: Any) -> None:
    model[0].up.weight.data = model[0].up.weight.data.clone().mul_(2)


def replace_parameter(model: Any) -> None:
    model[0].up.weight = nn.Parameter(model[0].up.weight.detach() * 2)


def replace_child(model: Any) -> None:
    torch.manual_seed(4)
    model[0].up = nn.Linear(6, 8)


def replace_buffer(model: Any) -> None:
    model[0].norm.running_mean = model[0].norm.running_mean.clone()


def set_attribute(model: Any) -> None:
    model[0].dropout.p = 0.8


def hook(model: Any) -> None:
    model[0].up.register_forward_hook(lambda module, args, output: output * 2)


def to_float64(model: Any) -> None:
    model.double()


@pytest.mark.parametrize(
    "change",
    sampled([move_data, replace_parameter, replace_child, replace_buffer, set_attribute, hook, to_float64]),
)
@pytest.mark.usefixtures("on_cpu")
def test_a_module_that_changed_since_its_capture_is_captured_again(change: Callable[[Any], None]) -> None:
    models, x = blocks(), torch.randn(4, 6)
    same_step(models, loss_of(x))
    for model in models:
        change(model)
        model.zero_grad()
    x = x.to(models[0][0].down.weight.dtype)
    same_step(models, loss_of(x))
    for model in models:  # in place: no change for a graph
        model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
    (graph,) = captured(models[0]).graphs.values()
    same_step(models, loss_of(x))
    assert [*captured(models[0]).graphs.values()] == [graph]


@pytest.mark.usefixtures("on_cpu")
def test_parameters_that_move_at_every_step_are_refused(message: Messages) -> None:
    models, x = blocks(), torch.randn(4, 6)
    for _ in range(3):
        same_step(models, loss_of(x))
        for model in models:
            move_data(model)
    with pytest.raises(slapo.ApplyError) as refused:
        models[0](x)
    message(refused, "at '0'", "soon after each")
    assert refused.value.path == "0"


@pytest.mark.usefixtures("on_cpu")
def test_a_forward_without_a_backward_costs_nothing_and_a_lost_one_is_refused(message: Messages) -> None:
    models, x = blocks(), torch.randn(4, 6)
    for model in models:
        model.eval()

    def skipped(model: nn.Module) -> Any:
        kept = model(x)  # a skipped loss
        return [kept, loss_of(x)(model)]

    same_step(models, skipped)
    model = models[0]
    first, second = model(x), model(x * 2)
    second.sum().backward(retain_graph=True)
    for lost in (first, second):
        with pytest.raises(slapo.ApplyError, match="overwritten"):
            lost.sum().backward()
    result = model(x).sum()
    result.backward(retain_graph=True)
    with pytest.raises(slapo.ApplyError) as refused:
        result.backward()
    message(refused, "at '0'", "overwritten")
    same_step(models, lambda model: [model.zero_grad(), loss_of(x)(model)][1])


# -- arguments


@pytest.mark.usefixtures("on_cpu")
def test_calls_that_differ_in_more_than_their_tensors_values_get_graphs_of_their_own(message: Messages) -> None:
    models, x = blocks(), torch.randn(4, 6)
    mask = torch.randint(0, 2, (6,)).float()
    for kwargs in ({}, {"mask": mask}, {"scale": 2.0}, {"scale": 2}):
        same_step(models, loss_of(x, **kwargs))
        same_step(models, loss_of(torch.randn(4, 6), **kwargs))
    assert len(captured(models[0]).graphs) == 4
    with pytest.raises(slapo.ApplyError) as refused:
        models[0](torch.randn(5, 6))
    message(refused, "at '0'", "more than 4")


def layer_call(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
    x, angles = torch.randn(2, 5, 16), torch.randn(1, 5, 4)
    causal = torch.full((5, 5), torch.finfo(torch.float32).min).triu(1)[None, None]
    if name == "bert":
        from transformers.models.bert.modeling_bert import BertConfig, BertLayer

        return BertLayer(BertConfig(**sizes, attn_implementation="eager")), (x, None), {}
    if name == "gpt2":
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config

        gpt2 = GPT2Block(GPT2Config(n_embd=16, n_head=4, n_inner=32, attn_implementation="eager"), 0)
        return gpt2, (x, None, causal), {"use_cache": False}
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer

    llama = LlamaDecoderLayer(LlamaConfig(**sizes, num_key_value_heads=2, attn_implementation="eager"), 0)
    return (
        llama,
        (x,),
        {
            "attention_mask": causal,
            "position_ids": torch.arange(5)[None],
            "past_key_values": None,
            "use_cache": False,
            "position_embeddings": (angles.cos(), angles.sin()),
        },
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.usefixtures("on_cpu")
def test_layers_of_transformers_are_captured_as_the_model_calls_them(name: str, message: Messages) -> None:
    layer, args, kwargs = layer_call(name)
    models = nn.Sequential(layer), nn.Sequential(copy.deepcopy(layer))
    slapo.create_schedule(models[0])["0"].apply(Cudagraphify())

    def train(model: Any) -> Any:
        found = []
        for _ in range(2):
            output = model[0](*args, **kwargs)
            output = output if isinstance(output, Tensor) else output[0]
            output.square().sum().backward()
            found.append(output)
        return found

    same_step(models, train)
    same_step(models, train)
    assert len(captured(models[0]).graphs) == 1
    if name == "llama":
        from transformers.cache_utils import DynamicCache

        with pytest.raises(slapo.ApplyError) as refused:
            models[0][0](*args, **kwargs | {"past_key_values": DynamicCache()})
        message(refused, "DynamicCache")


class Counts(nn.Module):
    """Changes what a replay would not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.linear = nn.Linear(6, 6)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        if self.kind == "attribute":
            self.calls += 1
        if self.kind == "buffer":
            self.total = self.total + 1
        if self.kind == "argument":
            x.mul_(2)
        return [slice(None), self.linear(x)] if self.kind == "result" else self.linear(x)


@pytest.mark.parametrize("kind", ["attribute", "buffer", "argument", "result", "hook", "device"])
@pytest.mark.usefixtures("on_cpu")
def test_side_effects_are_refused_before_the_capture(kind: str, message: Messages) -> None:
    model, x = nn.Sequential(Counts(kind)), torch.randn(4, 6)
    slapo.create_schedule(model)["0"].apply(Cudagraphify())
    words = {"attribute": "'calls'", "buffer": "'total'", "argument": "writes to", "result": "slice"}
    if kind == "hook":
        model[0].linear.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(slapo.ApplyError) as refused:
        model[0](x) if kind != "device" else model[0].forward(x, torch.zeros(1, device="meta"))
    message(refused, "at '0'", words.get(kind, kind if kind == "hook" else "on meta"))
    assert model[0].total.equal(torch.zeros(())) or kind == "buffer"


# -- with other steps


@pytest.mark.usefixtures("on_cpu")
def test_under_activation_checkpointing_it_is_refused_and_within_a_reentrant_one_right(message: Messages) -> None:
    models, x = blocks(), torch.randn(4, 6, requires_grad=True)
    with pytest.raises(slapo.ApplyError) as refused:
        checkpoint(models[0], x, use_reentrant=False)
    message(refused, "activation checkpointing")
    for model in models:
        model[0].norm.eval()  # a recompute would change its statistics twice

    def train(model: nn.Module) -> Any:
        loss = checkpoint(model, x, use_reentrant=True).square().sum()
        loss.backward()
        return loss

    same_step(models, train)
    same_step(models, train)


@pytest.mark.usefixtures("on_cpu")
def test_hooks_of_accumulated_gradients_run_once_for_each_backward() -> None:
    models, x, calls = blocks(), torch.randn(4, 6), []
    for model in models:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each: calls.append(each))
    same_step(models, loss_of(x))
    same_step(models, loss_of(x))
    assert len(calls) == 4 * len(list(models[0].parameters()))


@pytest.mark.usefixtures("on_cpu")
def test_inside_a_traced_model_around_another_one_and_copied() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), nn.Sequential(Block(), Block())), torch.randn(4, 6)
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model, example_inputs=x)
    for path in ("0", "1.0", "1"):
        sch[path].apply(Cudagraphify())
    sch.root.trace()
    for models in ((model, reference), (copy.deepcopy(model), copy.deepcopy(reference))):

        def train(model: nn.Module) -> Any:
            return [model(x).square().sum().backward() for _ in range(2)]

        same_step(models, train)
        same_step(models, train)
        assert captured(models[0]).graphs
        assert captured(models[0], "1").graphs
        assert not captured(models[0], "1.0").graphs
    assert not captured(pickle.loads(pickle.dumps(model))).graphs
    slapo.verify(sch, x)


@pytest.mark.usefixtures("on_cpu")
def test_a_built_engine_accumulates_as_without_it() -> None:
    results = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(), nn.Linear(6, 1))
        sch = slapo.create_schedule(model)
        if is_captured:
            sch["0"].apply(Cudagraphify())
        engine = slapo.build(
            sch,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
            loss=lambda output, batch: output.square().mean(),
            accumulate=2,
        )
        torch.manual_seed(1)
        steps = [engine.train_step(torch.randn(8, 6)).loss for _ in range(3)]
        assert not is_captured or captured(model).graphs
        results.append((steps, [each.detach() for each in model.parameters()]))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("casts", [False, True])
def test_on_cuda_gradients_results_and_state_are_those_of_the_forward(casts: bool) -> None:
    models = blocks(2)
    for model in models:
        model.cuda()
        for block in model:
            block.dropout.eval()

    def train(model: nn.Module) -> Any:
        kept = []
        for _ in range(3):
            x = torch.randn(4, 6, device="cuda", requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=casts):
                result = model(x)
            result.float().square().sum().backward()
            kept.append((result.detach(), x.grad))
        return kept

    same_step(models, train)
    same_step(models, train)
    assert captured(models[0]).graphs
