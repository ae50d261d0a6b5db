"""A correct schedule verifies, whatever the model looks like, and verifying changes nothing of the user's."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import slapo_core as slapo
from slapo_verify import VerifyReport
from tests.tiers import crossed


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.norm(self.conv(image))).mean((2, 3)))


class Out(NamedTuple):
    score: torch.Tensor
    parts: dict[str, Any]


class Opaque:
    pass


class Nested(nn.Module):
    """Keyword arguments, functional dropout, nested outputs, an output nobody can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, *, scale: float, mask: torch.Tensor | None = None) -> Out:
        self.calls += 1
        y = F.dropout(self.fc(x), 0.5, training=self.training) * scale
        y = y if mask is None else y * mask
        return Out(y, {"list": [y.sum(), None, "text", 3, y.mean().item()], "odd": Opaque()})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.out = nn.Linear(4, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed(ids)))


class Same(nn.Module):
    """The same function as a linear layer, with sums in another order."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        columns = reversed(range(self.weight.shape[1]))
        return self.bias / 3 + sum(input[..., c, None] * self.weight[:, c] for c in columns) + self.bias / 1.5


def same(old: nn.Linear) -> nn.Module:
    return Same(torch.empty_like(old.weight), torch.empty_like(old.bias))


def largest(report: VerifyReport, kind: str) -> Any:
    return next(entry for entry in report.largest if entry.kind == kind)


def test_a_cnn_with_batch_norm_agrees_in_outputs_buffers_gradients_and_optimizer_steps() -> None:
    sch = slapo.create_schedule(Cnn())
    sch["head"].replace(same)
    report = slapo.verify(sch, torch.randn(3, 3, 8, 8))
    counts = {entry.kind: entry.compared for entry in report.largest}
    assert counts == {
        "output": 1, "buffer": 3, "gradient": 6, "evaluation output": 1, "evaluation buffer": 3, "batch output": 2,
        "batch gradient": 6, "input gradient": 1, "parameter": 6, "updated output": 1, "updated buffer": 3,
        "own output": 1, "own buffer": 3, "own gradient": 6, "own evaluation output": 1,
    }  # fmt: skip
    assert 0 < largest(report, "output").difference < 1e-14  # it did look: this is no bitwise copy
    assert (report.dtype, report.coarsest_dtype, report.world_size, report.optimizer_steps) == (
        "float64", "float64", 1, 3,
    )  # fmt: skip
    assert report.notes == report.not_compared == ()


def test_no_optimizer_steps_are_run_when_none_are_asked_for() -> None:
    report = slapo.verify(slapo.create_schedule(Cnn()), torch.randn(2, 3, 8, 8), optimizer_steps=0)
    assert "parameter" not in {entry.kind for entry in report.largest}
    assert report.optimizer_steps == 0


def test_torch_transformer_with_dropout_agrees_bit_for_bit_when_checkpointed() -> None:
    model = nn.Transformer(16, 2, 2, 2, 32, dropout=0.3, batch_first=True)
    sch = slapo.create_schedule(model)
    sch["encoder.layers.*"].checkpoint()
    report = slapo.verify(sch, (torch.randn(1, 5, 16), torch.randn(1, 4, 16)))  # batch 1
    assert {entry.difference for entry in report.largest} == {0.0}


def transformers_models() -> dict[str, Any]:
    import transformers as hf

    small = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    bert = hf.BertConfig(**small, intermediate_size=32)
    llama = hf.LlamaConfig(**small, intermediate_size=32, use_cache=False)
    gpt2 = hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0)
    t5 = hf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, use_cache=False)
    t5.decoder_start_token_id = 0
    return {
        "bert": (hf.BertForMaskedLM, bert, "bert.encoder.layer.*"),
        "llama": (hf.LlamaForCausalLM, llama, "model.layers.*"),
        "gpt2": (hf.GPT2LMHeadModel, gpt2, "transformer.h.*"),
        "t5": (hf.T5ForConditionalGeneration, t5, "encoder.block.*"),
    }


@pytest.mark.parametrize(("name", "device"), crossed(["bert", "llama", "gpt2", "t5"], ["cpu", "meta"]))
def test_transformers_models_agree_when_checkpointed(name: str, device: str) -> None:
    cls, config, layers = transformers_models()[name]
    with torch.device(device):
        model = cls(config)
    ids = torch.randint(0, 64, (1, 6))
    sch = slapo.create_schedule(model, example_inputs={"input_ids": ids, "labels": ids})
    sch[layers].checkpoint()
    report = slapo.verify(sch)
    assert {entry.difference for entry in report.largest} == {0.0}
    assert largest(report, "gradient").compared == len(list(model.named_parameters(remove_duplicate=False)))
    assert largest(report, "output").compared >= 2  # loss and logits
    assert all(parameter.device.type == device for parameter in model.parameters())


def test_keyword_arguments_nested_outputs_and_functional_dropout() -> None:
    sch = slapo.create_schedule(Nested())
    sch["fc"].replace(same)
    report = slapo.verify(sch, {"x": torch.randn(2, 4), "scale": 0.5, "mask": torch.ones(2, 4)})
    assert report.not_compared == ("output.parts['odd']: slapo cannot look into a Opaque",)
    assert largest(report, "output").compared == 6
    assert largest(report, "input gradient").compared == 2
    assert largest(report, "buffer").compared == 1


def test_tied_weights_are_compared_under_both_names() -> None:
    report = slapo.verify(slapo.create_schedule(Tied()), torch.tensor([[1, 2, 3]]))
    assert largest(report, "gradient").compared == 2
    assert "input gradient" not in {entry.kind for entry in report.largest}  # token ids have none


def test_a_model_in_evaluation_mode_is_trained_as_a_copy_and_frozen_parts_of_a_training_one_stay_frozen() -> None:
    frozen = Cnn().eval()
    assert slapo.verify(slapo.create_schedule(frozen), torch.randn(2, 3, 8, 8))
    assert not any(module.training for module in frozen.modules())
    partly = Cnn()
    partly.norm.eval()
    sch = slapo.create_schedule(partly)
    sch["norm"].replace(lambda old: nn.BatchNorm2d(4).eval())
    before = partly.norm.running_mean.clone()
    slapo.verify(sch, torch.randn(2, 3, 8, 8))
    assert torch.equal(partly.norm.running_mean, before)


def test_a_model_that_hard_codes_float32_gets_the_tolerance_of_float32() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softmax(self.fc(x), -1, dtype=torch.float32).to(x.dtype)

    sch = slapo.create_schedule(Half())
    sch["fc"].replace(same)
    report = slapo.verify(sch, torch.randn(2, 4))
    assert (report.dtype, report.coarsest_dtype) == ("float64", "float32")
    assert report.tolerance.startswith("2e-05 * max|reference|")


def test_a_model_that_cannot_run_in_float64_runs_in_its_own_type_and_the_report_says_so() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.table = [torch.ones(4, 4)]  # no buffer: .double() does not reach it

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) @ self.table[0]

    report = slapo.verify(slapo.create_schedule(Stubborn()), torch.randn(2, 4))
    assert report.dtype == "float32"
    (note,) = report.notes
    assert note.startswith(
        "compared in the model's own types (float32); not in float64, because the reference model raises: RuntimeError"
    )


def test_the_report_prints_what_was_compared() -> None:
    torch.manual_seed(0)
    report = slapo.verify(slapo.create_schedule(nn.Linear(2, 2)), torch.randn(1, 2))
    assert str(report).splitlines() == [
        "verified: Linear with 0 steps agrees with the reference model (1 process, float64)",
        "  allowed: 3.6e-15 * max|reference| + 3.6e-15 * scale (float64, EXACT)",
        "  outputs, training mode                   1 compared: bitwise equal",
        "  buffers after a training step            0 compared: none",
        "  gradients of parameters                  2 compared: bitwise equal",
        "  outputs, evaluation mode                 1 compared: bitwise equal",
        "  buffers after evaluation                 0 compared: none",
        "  outputs, further batches                 1 compared: bitwise equal",
        "  gradients, further batches               2 compared: bitwise equal",
        "  gradients of inputs                      1 compared: bitwise equal",
        "  parameters after the optimizer steps     2 compared: bitwise equal",
        "  outputs after the optimizer steps        1 compared: bitwise equal",
        "  buffers after the optimizer steps        0 compared: none",
        "  outputs, own types                       1 compared: bitwise equal",
        "  buffers, own types                       0 compared: none",
        "  gradients, own types                     2 compared: bitwise equal",
        "  outputs, evaluation mode, own types      1 compared: bitwise equal",
    ]


def snapshot(model: nn.Module) -> dict[str, Any]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "tensors": {name: (id(t), t.detach().clone(), t.dtype, t.requires_grad) for name, t in tensors.items()},
        "grads": {n: None if p.grad is None else (id(p.grad), p.grad.clone()) for n, p in model.named_parameters()},
        "modes": [(id(module), module.training, getattr(module, "p", None)) for module in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), m.__dict__.get("forward")) for m in model.modules()
        ],
    }


def assert_same(before: Any, after: Any) -> None:
    if isinstance(before, dict):
        assert before.keys() == after.keys()
        for key in before:
            assert_same(before[key], after[key])
    elif isinstance(before, (tuple, list)):
        for one, other in zip(before, after, strict=True):
            assert_same(one, other)
    elif isinstance(before, torch.Tensor):
        assert torch.equal(before, after)
    else:
        assert before == after


@pytest.mark.parametrize("broken", [False, True])
def test_verifying_changes_nothing_of_the_users(broken: bool) -> None:
    import numpy

    model = nn.Sequential(Cnn(), nn.Dropout(0.5))
    batch = torch.randn(2, 3, 8, 8)
    model(batch).sum().backward()
    sch = slapo.create_schedule(model)
    new = nn.Linear(4, 5)
    sch["0.head"].replace(new)
    sch["0.conv"].checkpoint()
    if broken:
        sch["0.act"].replace(nn.GELU())
    states = lambda: (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist())  # noqa: E731
    before, rng, inputs = snapshot(model), states(), batch.clone()
    if broken:
        with pytest.raises(slapo.VerifyError):
            slapo.verify(sch, batch)
    else:
        slapo.verify(sch, batch)
    assert_same(before, snapshot(model))
    assert_same(rng, states())
    assert torch.equal(batch, inputs)
    assert not batch.requires_grad
    assert sch["0.head"].module is new
    assert torch.overrides._get_current_function_mode() is None
    assert len(sch.records) == 2 + broken
    sch.undo(to=0)


def test_no_dropout_of_torch_gets_through() -> None:
    """Every function that has a dropout probability is either the identity, or is given 0."""
    from slapo_verify.phases import fixed_conditions

    x = torch.randn(2, 3, 4, 4, 4)
    with fixed_conditions(0):
        for function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout):
            source = x[:, :, 0, 0] if function is F.dropout1d else x
            assert torch.equal(function(source, 0.5, True), source)
        for function in (torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout):
            assert torch.equal(function(x, 0.5, True), x)
        assert torch.equal(torch.native_dropout(x, 0.5, True)[0], x)
        q = torch.randn(1, 2, 4, 8)
        plain = F.scaled_dot_product_attention(q, q, q)
        assert torch.equal(F.scaled_dot_product_attention(q, q, q, dropout_p=0.9), plain)
        assert torch.equal(F.scaled_dot_product_attention(q, q, q, None, 0.9), plain)
        attention = nn.MultiheadAttention(8, 2, dropout=0.9, batch_first=True)
        y = torch.randn(1, 4, 8)
        first = attention(y, y, y, need_weights=True)[0]
        attention.dropout = 0.0
        assert torch.equal(first, attention(y, y, y, need_weights=True)[0])


def test_conditions_hold_while_activations_are_recomputed_in_backward() -> None:
    seen: list[bool] = []

    class Watch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.dropout(x * 2, 0.5)
            seen.append(torch.equal(y, x * 2))
            return y.sin().exp()  # saves tensors for backward, so that there is something to recompute

    model = nn.Sequential(nn.Linear(4, 4), Watch())
    sch = slapo.create_schedule(model)
    sch["1"].checkpoint()
    slapo.verify(sch, torch.randn(2, 4))
    # untouched, scheduled, and recomputed for its backwards; in one each of these dropout is on
    assert len(seen) == 11 + 11 + 8
    assert seen.count(False) == 3


class _Spy(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_that_the_user_has_on_stays_on() -> None:
    with _Spy() as spy:
        slapo.verify(slapo.create_schedule(nn.Linear(2, 2)), torch.randn(1, 2))
        assert torch.overrides._get_current_function_mode() is spy


def test_complex_numbers_are_rounded_like_their_parts_and_their_input_gradients_are_compared() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 4, dtype=torch.complex64))
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    report = slapo.verify(sch, torch.randn(2, 4, dtype=torch.complex64))
    assert report.coarsest_dtype == "float32"
    assert {one.kind: one.compared for one in report.largest}["input gradient"] == 1
