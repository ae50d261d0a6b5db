"""A model on the meta device starts from the model's own initialization, the same under every schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.internals import Internals
from slapo_runtime.launcher import preload_modules, run_ranks
from tests.messages import Messages
from tests.support.building import MODELS, on_meta, real, split

preload_modules("transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2")

HF = ["gpt2", "bert", "t5", "llama"]


def initial_state(name: str, mesh: dict[str, int] | None) -> dict[str, torch.Tensor]:
    schedule = slapo.create_schedule(on_meta(name), mesh=mesh)
    if mesh is not None:
        split(schedule, name)
    return slapo.build(schedule).state_dict()


def initial_states(names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: initial_state(name, {"tp": 2}) for name in names}


@pytest.fixture(scope="module")
def states_of_two_ranks() -> list[dict[str, dict[str, torch.Tensor]]]:
    return run_ranks(initial_states, [*HF, "cnn"], world_size=2)


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*HF, "cnn"])
def test_every_layout_starts_from_the_same_full_weights(name: str, states_of_two_ranks: list) -> None:
    alone = initial_state(name, None)
    on_one_rank = initial_state(name, {"tp": 1})
    for state in (on_one_rank, *(states[name] for states in states_of_two_ranks)):
        assert list(state) == list(alone)
        for key, tensor in alone.items():
            assert torch.equal(state[key], tensor), key


@pytest.mark.parametrize("name", [*HF, "cnn"])
def test_initial_values_are_distributed_as_by_the_constructor(name: str) -> None:
    built, reference = on_meta(name), real(name)
    slapo.build(slapo.create_schedule(built))
    own = dict(built.named_parameters())
    for key, expected in reference.named_parameters():
        value = own[key]
        if expected.std(correction=0) == 0:
            assert torch.equal(value, expected), key
        elif expected.numel() >= 500:
            assert value.std().item() == pytest.approx(expected.std().item(), rel=0.15), key
            assert abs(value.mean().item()) < 0.2 * expected.std().item(), key
        else:
            assert 0 < value.std().item() < 3 * expected.std().item(), key
    for (key, value), (_, expected) in zip(built.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(value, expected), key


def test_an_initialization_by_an_enclosing_module_is_found() -> None:
    """GPT-2 scales the residual projections down from their parent's initialization."""
    model = on_meta("gpt2")
    slapo.build(slapo.create_schedule(model))
    assert model.transformer.h[0].attn.c_proj.weight.std().item() == pytest.approx(0.02 / 2, rel=0.1)
    assert model.transformer.h[0].attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_no_two_parameters_start_equal_and_another_seed_gives_other_values() -> None:
    first, second = on_meta("bert"), on_meta("bert")
    slapo.build(slapo.create_schedule(first))
    slapo.build(slapo.create_schedule(second), seed=1)
    layers = first.bert.encoder.layer
    assert not torch.equal(layers[0].attention.self.query.weight, layers[1].attention.self.query.weight)
    assert not torch.equal(layers[0].attention.self.query.weight, layers[0].attention.self.key.weight)
    assert not torch.equal(
        layers[0].attention.self.query.weight, second.bert.encoder.layer[0].attention.self.query.weight
    )


def test_ties_survive_materializing() -> None:
    for name, first, second in (
        ("gpt2", "transformer.wte.weight", "lm_head.weight"),
        ("bert", "cls.predictions.bias", "cls.predictions.decoder.bias"),
        ("t5", "shared.weight", "decoder.embed_tokens.weight"),
    ):
        model = on_meta(name)
        slapo.build(split(slapo.create_schedule(model, mesh={"tp": 1}), name))
        assert model.get_parameter(first) is model.get_parameter(second)
        assert not model.get_parameter(first).is_meta


def test_the_users_random_state_stays() -> None:
    before = torch.get_rng_state()
    slapo.build(slapo.create_schedule(on_meta("bert")))
    assert torch.equal(torch.get_rng_state(), before)


def test_real_values_stay_where_only_some_tensors_are_on_meta() -> None:
    model = real("mlp")
    bias = model.fc1.bias
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.fc1.weight = nn.Parameter(torch.empty(8, 6, device="meta"))
    slapo.build(slapo.create_schedule(model))
    assert model.fc1.bias is bias
    assert torch.equal(bias, before["fc1.bias"])
    assert torch.equal(model.fc2.weight, before["fc2.weight"])
    assert not model.fc1.weight.is_meta
    bound = 1 / 6**0.5
    assert 0.5 * bound < model.fc1.weight.abs().max().item() <= bound


def test_attributes_and_gradient_flags_follow_a_materialized_parameter() -> None:
    model = on_meta("mlp")
    model.fc1.weight.is_special = "yes"
    model.fc1.bias.requires_grad_(False)
    slapo.build(slapo.create_schedule(model))
    assert model.fc1.weight.is_special == "yes"
    assert not model.fc1.bias.requires_grad
    assert model.fc1.weight.requires_grad


def test_torch_modules_that_initialize_themselves_are_covered() -> None:
    def make() -> nn.Module:
        return nn.ModuleDict(
            {
                "lstm": nn.LSTM(8, 8, 2),
                "attention": nn.MultiheadAttention(16, 2),
                "embedding": nn.Embedding(50, 8, padding_idx=3),
                "norm": nn.BatchNorm1d(4),
                "bilinear": nn.Bilinear(3, 4, 5),
            }
        )

    with torch.device("meta"):
        model = make()
    slapo.build(slapo.create_schedule(model))
    assert not any(tensor.is_meta or tensor.isnan().any() for tensor in model.state_dict().values())
    assert torch.equal(model["embedding"].weight[3], torch.zeros(8))
    assert torch.equal(model["attention"].out_proj.bias, torch.zeros(16))
    assert torch.equal(model["norm"].running_var, torch.ones(4))
    outputs, _ = model["lstm"](torch.ones(2, 1, 8))
    assert outputs.isfinite().all()


class Scale(nn.Module):
    """Initialized by its constructor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.offset


def test_tensors_without_an_initializer_are_refused_by_name(message: Messages) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    before = list(model.parameters())
    schedule = slapo.create_schedule(model)
    with pytest.raises(slapo.WeightsError) as error:
        slapo.build(schedule)
    message(error, "2 tensors", "1.factor, 1.offset", "weights=")
    assert not schedule.is_sealed
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    weights = nn.Sequential(nn.Linear(3, 3), Scale()).state_dict()
    slapo.build(schedule, weights=weights)
    assert torch.equal(model[1].offset, torch.arange(3))


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def reset_parameters(self) -> None:
        self.weight[:2] = 0.0


class Raising(Partial):
    def reset_parameters(self) -> None:
        raise ValueError("not today")


def test_a_tensor_that_is_only_partly_written_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Partial())
    with pytest.raises(slapo.WeightsError, match=r"^a tensor .*: 0\.weight"):
        slapo.build(slapo.create_schedule(model))


def test_an_initializer_that_raises_is_named(message: Messages) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Raising())
    with pytest.raises(slapo.WeightsError) as error:
        slapo.build(slapo.create_schedule(model))
    message(error, "'0.weight'", "Raising.reset_parameters()", "ValueError: not today")
    assert isinstance(error.value.__cause__, ValueError)


def test_every_model_of_these_tests_has_splits_that_leave_something_to_gather() -> None:
    for name in MODELS:
        schedule = split(slapo.create_schedule(on_meta(name), mesh={"tp": 2}), name)
        assert any(layout.is_sharded for layout in Internals(schedule).tree.layouts.values())
