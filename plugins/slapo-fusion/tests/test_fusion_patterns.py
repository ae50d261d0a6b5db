"""The ready patterns find what people write out, replace it by the same function, and leave what is only close."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_fusion import causal_attention as causal
from slapo_fusion.causal_attention import causal_attention
from slapo_fusion.patterns import attention, rms_norm
from tests.messages import Messages
from tests.tiers import sampled

from .written_out import FOUND, LOW, NOT_FOUND, PADDING, K, Q, V, Written, repeated

REPLACED = ("fusion.sdpa", "fusion.causal_sdpa", "fusion.rms_norm", "fusion.gelu", "fusion.gelu_tanh")


class Model(nn.Module):
    """A root, so that the module below is one like others, and a parameter that every output depends on."""

    def __init__(self, function: Any, shape: torch.Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = Written(function)
        self.shift = nn.Parameter(torch.zeros(shape))  # of one element: a sum that cancels, and rounds as much

    def forward(self, first: Tensor, *others: Tensor) -> Any:
        return self.op(first + self.shift, *others)


def traced(function: Any, inputs: tuple[Tensor, ...]) -> slapo.Schedule:
    sch = slapo.create_schedule(Model(function, inputs[0].shape[1:]), example_inputs=inputs)
    sch["op"].trace(flatten=True)
    return sch


@pytest.mark.parametrize("case", sampled(FOUND))
def test_common_spellings_match_and_replacements_agree(case: str) -> None:
    name, function, inputs = FOUND[case]
    sch = traced(function, inputs)
    matches = sch["op"].find(name)
    assert len(matches) == 1, matches
    if name in REPLACED:
        sch["op"].replace(match=name)
        assert len(sch["op"].find(name)) == 0
    else:
        sch["op"].checkpoint(match=name)
    assert slapo.verify(sch, inputs).steps_verified == 2


@pytest.mark.parametrize("case", sampled(NOT_FOUND))
def test_near_misses_do_not_match(case: str) -> None:
    name, function, inputs = NOT_FOUND[case]
    sch = traced(function, inputs)
    assert list(sch["op"].find(name)) == []
    before = copy.deepcopy(sch.model)
    with pytest.raises(slapo.PreconditionError, match="no match for"):
        sch["op"].checkpoint(match=name)
    assert torch.equal(sch.model.eval()(*inputs), before.eval()(*inputs))


@pytest.mark.parametrize("name", ["fusion.sdpa", "fusion.causal_sdpa"])
def test_attention_that_is_not_written_out_is_named_with_the_option_of_the_model(name: str, message: Messages) -> None:
    sch = traced(lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v), (Q, K, V))
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["op"].replace(match=name)
    message(refused, "the graph calls scaled_dot_product_attention itself", 'attn_implementation="eager"')


def test_the_factor_of_gemma_is_one_and_the_weight_not_the_weight_alone() -> None:
    _, function, inputs = FOUND["RMSNorm of Gemma"]
    (match,) = traced(function, inputs)["op"].find("fusion.rms_norm")
    assert match.captures["weight"] not in ("weight", "self.weight")
    (plain,) = traced(FOUND["RMSNorm of LLaMA"][1], inputs)["op"].find("fusion.rms_norm")
    assert plain.captures["weight"] in ("weight", "self.weight")


def test_qkv_captures_the_projections_in_the_order_of_their_calls() -> None:
    _, function, inputs = FOUND["QKV"]
    (match,) = traced(function, inputs)["op"].find("fusion.qkv")
    assert [match.captures[name] for name in ("query", "key", "value")] == [
        f"self.{name}.weight" for name in ("first", "second", "third")
    ]
    assert len(match.outputs) == 3


def weighted(self: Written, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = F.softmax(self.first(q) @ k.mT * 0.3, dim=-1)
    return self.second(weights @ v), weights


class Caller(nn.Module):
    """Goes on with what an attention gives, and drops its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Written(weighted)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = self.attention(q, k, v)
        return out + q  # type: ignore[no-any-return]


class Outer(nn.Module):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Caller()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.layer(q, k, v)  # type: ignore[no-any-return]


def test_attention_weights_that_are_only_returned_are_none_behind_the_kernel() -> None:
    sch = slapo.create_schedule(Caller(), example_inputs=(Q, K, V))
    sch["attention"].trace(flatten=True)
    (match,) = sch["attention"].find("fusion.sdpa")
    assert len(match.outputs) == 2
    sch["attention"].replace(match="fusion.sdpa")
    assert sch.model.attention(Q, K, V)[1] is None  # type: ignore[union-attr, operator]
    slapo.verify(sch)
    sch.undo()
    assert sch.model.attention(Q, K, V)[1].shape == (Q @ K.mT).shape  # type: ignore[union-attr, operator]


ORDERS = {
    "the caller's kernel first": ("trace caller", "replace caller", "checkpoint"),
    "the checkpoint first": ("checkpoint", "trace caller", "replace caller"),
    "the checkpoint between": ("trace caller", "checkpoint", "replace caller"),
    "the attention alone": ("trace attention", "checkpoint", "replace attention"),
    "the attention, then its caller": ("trace attention", "replace attention", "checkpoint", "trace caller"),
}


@pytest.mark.parametrize("order", sampled(ORDERS))
def test_attention_under_a_checkpoint_of_its_own_gets_its_kernel_in_any_order(order: str) -> None:
    sch = slapo.create_schedule(Outer(), example_inputs=(Q, K, V))
    nodes = {"caller": sch["layer"], "attention": sch["layer.attention"]}
    for step in ORDERS[order]:
        name, _, where = step.partition(" ")
        if name == "checkpoint":
            nodes["attention"].checkpoint()
        elif name == "trace":
            nodes[where].trace(flatten=True)
        else:
            nodes[where].replace(match="fusion.sdpa")
    assert "sdpa" in str(nodes["attention"].graph)
    slapo.verify(sch)


def test_attention_weights_that_are_used_or_are_the_model_s_own_result_keep_the_attention_as_it_is() -> None:
    def used(self: Written, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, weights = weighted(self, q, k, v)
        return out * weights.mean(), weights

    root = slapo.create_schedule(Written(weighted), example_inputs=(Q, K, V)).root
    root.trace(flatten=True)
    for node in (root, traced(used, (Q, K, V))["op"]):
        with pytest.raises(slapo.PreconditionError, match="returns 2 values"):
            node.replace(match="fusion.sdpa")
        assert len(node.records) == 1


# -- the replacements, held against what they stand for ------------------------------------------------------------


@pytest.mark.parametrize("view", [False, True])
def test_a_result_that_the_forward_writes_to_is_a_copy(view: bool) -> None:
    """The kernel keeps its result for backward, which what was matched did not."""

    def written_to(_: Written, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1)
        found = weights @ v
        changed = found.transpose(1, 2) if view else found
        changed += 1.0
        return changed * 2.0

    sch = traced(written_to, (Q, K, V))
    sch["op"].replace(match="fusion.sdpa")
    assert slapo.verify(sch, (Q, K, V)).steps_verified == 2


def test_a_query_from_which_everything_is_hidden_weighs_all_values_alike_as_before() -> None:
    hidden = torch.zeros(6, 6, dtype=torch.bool)
    hidden[2] = True
    hidden[3, :3] = True
    for fill in (torch.finfo(torch.float32).min, -1e9, -1e4, -2.0, 0.0):
        scores = (Q @ K.mT * 0.3).masked_fill(hidden, fill)
        expected = F.softmax(scores, dim=-1) @ V
        for given in ({"hidden": hidden}, {"visible": ~hidden}):
            found = attention(Q, K.mT, V, fill=fill, scale=0.3, **given)
            torch.testing.assert_close(found, expected)
    hidden[2] = False
    scores = (Q @ K.mT).masked_fill(hidden, -math.inf)
    torch.testing.assert_close(attention(Q, K.mT, V, hidden=hidden), F.softmax(scores, dim=-1) @ V)


def test_masks_of_another_type_and_learned_ones_get_their_gradient() -> None:
    bias = torch.randn(1, 4, 6, 6, requires_grad=True)
    expected = F.softmax(Q @ K.mT / 2.0 + bias + PADDING, dim=-1) @ V
    (wanted,) = torch.autograd.grad(expected.square().sum(), bias)
    found = attention(Q, K.mT, V, mask=bias, second_mask=PADDING, divisor=2.0)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), bias)[0], wanted)
    ones = PADDING < 0  # added, so that it is no mask: a number
    expected = F.softmax(Q @ K.mT + ones, dim=-1) @ V
    torch.testing.assert_close(attention(Q, K.mT, V, mask=ones), expected)
    with pytest.raises(RuntimeError, match="not causal"):
        causal_attention(Q, K.mT, V, mask=LOW < 0)
    rough = [each.bfloat16() for each in (Q, K, V)]
    expected = F.softmax(rough[0] @ rough[1].mT + PADDING, dim=-1).bfloat16() @ rough[2]
    found = attention(rough[0], rough[1].mT, rough[2], mask=PADDING)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=4e-2, atol=4e-2)


@pytest.fixture
def kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What torch's function is called with; a mask of another type than the query's is refused, as on a GPU."""
    calls, function = [], F.scaled_dot_product_attention

    def called(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **kwargs: Any) -> Tensor:
        calls.append({"mask": attn_mask, "heads": key.shape[-3], **kwargs})
        if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
            raise RuntimeError("invalid dtype for bias")
        return function(query, key, value, attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", called)
    return calls


@pytest.mark.usefixtures("kernels_of_a_gpu")
def test_masks_get_the_query_s_type_and_hide_no_more_than_before() -> None:
    low = torch.zeros(6, 6).masked_fill(torch.rand(6, 6) < 0.5, torch.finfo(torch.float32).min)
    low[2] = torch.finfo(torch.float32).min  # everything: all values alike
    for kind, bound in ((torch.bfloat16, 4e-2), (torch.float16, 4e-3), (torch.float32, 1e-6)):
        q, k, v = (each.to(kind) for each in (Q, K, V))
        expected = F.softmax(Q @ K.mT * 0.3 + low, dim=-1) @ V
        for mask in (low, low.double()):
            found = attention(q, k.mT, v, mask=mask, scale=0.3)
            assert found.dtype == kind
            assert found.isfinite().all()
            rows = [0, 1, 3, 4, 5] if kind == torch.float16 else [*range(6)]  # whose low numbers are not low enough
            torch.testing.assert_close(found[..., rows, :].float(), expected[..., rows, :], rtol=bound, atol=bound)


def test_a_causal_mask_is_checked_once_and_not_given_on(
    kernels_of_a_gpu: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[Tensor] = []
    is_causal = causal.assert_on_device
    monkeypatch.setattr(causal, "assert_on_device", lambda value, text: checks.append(value) or is_causal(value, text))
    few = [each[:, :2].double().requires_grad_() for each in (K, V)]
    q, mask = Q.double().requires_grad_(), LOW.clone()
    keys, values = (repeated(each, 2) for each in few)
    expected = F.softmax(q @ keys.mT * 0.3 + mask, dim=-1) @ values
    wanted = torch.autograd.grad(expected.square().sum(), [q, *few])
    shared = {"few_keys": few[0], "few_values": few[1], "groups": 2}
    for given in (shared, {"key": keys.mT, "value": values}):
        found = causal_attention(q, mask=mask, scale=0.3, **given)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), [q, *few], retain_graph=True), wanted)
    assert [(call["mask"], call["is_causal"], call["heads"]) for call in kernels_of_a_gpu] == [
        (None, True, 2),
        (None, True, 4),
    ]
    assert [call["enable_gqa"] for call in kernels_of_a_gpu] == [True, False]
    wide = {**shared, "few_values": torch.cat((few[1], few[1]), -1)}  # which no fast kernel shares
    torch.testing.assert_close(causal_attention(q, mask=mask, scale=0.3, **wide)[..., 8:], expected)
    assert kernels_of_a_gpu[-1]["heads"] == 4
    assert len(checks) == 1
    mask[0, 0, 3, 0] = -1e9  # a padded key: seen, although this mask was checked before
    with pytest.raises(RuntimeError, match="not causal"):
        causal_attention(q, mask=mask, scale=0.3, **shared)


def test_a_causal_mask_of_inference_mode_is_checked_at_every_call() -> None:
    expected = F.softmax(Q @ K.mT * 0.3 + LOW, dim=-1) @ V
    with torch.inference_mode():
        mask = LOW.clone()
        torch.testing.assert_close(causal_attention(Q, K.mT, V, mask=mask, scale=0.3), expected)
        mask[0, 0, 3, 0] = -1e9  # no version tells it
        with pytest.raises(RuntimeError, match="not causal"):
            causal_attention(Q, K.mT, V, mask=mask, scale=0.3)


BAD = {
    "padding": PADDING,
    "a window": LOW[:1] + torch.full((6, 6), -1e9).tril(-3),
    "a bias": LOW[:1] + torch.ones(6, 6).tril(-1),
    "the future": torch.zeros(1, 1, 6, 6),
    "one that does not hide": torch.full((6, 6), -5.0).triu(1),
}


@pytest.mark.parametrize("name", BAD)
def test_masks_that_are_not_causal_are_refused_by_their_values(name: str) -> None:
    with pytest.raises(RuntimeError, match="not causal"):
        causal_attention(Q, K.mT, V, mask=BAD[name])
    if name != "one that does not hide":
        hidden = BAD[name] < 0
        for given in ({"hidden": hidden}, {"visible": ~hidden}):
            if not torch.equal(hidden, (LOW[:1] < 0).expand_as(hidden)):
                with pytest.raises(RuntimeError, match="not causal"):
                    causal_attention(Q, K.mT, V, **given)


def test_masks_that_are_not_causal_are_refused_by_their_shapes(message: Messages) -> None:
    past = torch.cat((torch.zeros(6, 2), LOW[0, 0]), -1)
    for given in (
        {"key": torch.cat((K[..., :2, :], K), -2).mT, "value": torch.cat((V[..., :2, :], V), -2), "mask": past},
        {"key": K.mT, "value": V, "mask": torch.zeros(2, 1, 1, 6)},
        {"key": K.mT, "value": V, "hidden": LOW < 0, "fill": -5.0},
        {"key": K.mT, "value": V, "mask": LOW.clone().requires_grad_()},
    ):
        with pytest.raises(slapo.ApplyError) as refused:
            causal_attention(Q, **given)
        message(refused, "fusion.causal_sdpa", "not causal")


def model_of(family: str) -> tuple[nn.Module, dict[str, Tensor], str]:
    import transformers

    torch.manual_seed(0)
    ids = torch.randint(3, 32, (2, 6))
    eager = {"attn_implementation": "eager", "vocab_size": 32}
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32, "num_hidden_layers": 1}
    padded = {"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])} if "padded" in family else {}
    if family.startswith("bert"):
        config = transformers.BertConfig(**eager, **sizes)
        return transformers.BertModel(config, add_pooling_layer=False), {"input_ids": ids, **padded}, "encoder.layer.*"
    if family.startswith("t5"):
        config = transformers.T5Config(**eager, d_model=16, d_kv=4, num_heads=4, d_ff=32, num_layers=1)
        return transformers.T5EncoderModel(config), {"input_ids": ids, **padded}, "encoder.block.*"
    if family.startswith("gpt2"):
        config = transformers.GPT2Config(**eager, n_embd=16, n_head=4, n_layer=1, use_cache=False)
        return transformers.GPT2Model(config), {"input_ids": ids, **padded}, "h.*"
    config = transformers.LlamaConfig(**eager, **sizes, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaModel(config), {"input_ids": ids, **padded}, "layers.*"


CAUSAL = ("gpt2", "llama")


@pytest.mark.parametrize("family", sampled(["bert", "bert padded", "t5 padded", "gpt2", "llama padded", "llama"]))
def test_attention_of_transformers_gives_the_same_numbers_and_gradients(
    family: str, kernels_of_a_gpu: list[dict[str, Any]]
) -> None:
    model, inputs, path = model_of(family)
    model.double().eval()
    expected = model(**inputs).last_hidden_state
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wanted = torch.autograd.grad(expected.square().sum(), parameters, allow_unused=True)
    bound = 1e-5 if "llama" in family or "t5" in family else 1e-12  # these compute the softmax in float32
    for pattern in ("fusion.sdpa", "fusion.causal_sdpa") if family.split()[0] in CAUSAL else ("fusion.sdpa",):
        sch: Any = slapo.create_schedule(copy.deepcopy(model), example_inputs=inputs)
        sch[path].trace(flatten=True).replace(match=pattern)
        kernels_of_a_gpu.clear()
        if "causal" in pattern and "padded" in family:
            with pytest.raises(RuntimeError, match="not causal"):
                sch.model(**inputs)
            continue
        found = sch.model(**inputs).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
        parameters = [parameter for parameter in sch.model.parameters() if parameter.requires_grad]
        got = torch.autograd.grad(found.square().sum(), parameters, allow_unused=True)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=bound, atol=10 * bound)
        (call,) = kernels_of_a_gpu
        assert (call["mask"] is None) == ("causal" in pattern or family == "bert")
        assert call.get("is_causal", False) == ("causal" in pattern)
        assert call.get("enable_gqa", False) == ("causal" in pattern and family == "llama")


def test_a_dropped_weight_is_dropped_in_training_only_and_as_often() -> None:
    torch.manual_seed(3)
    dropped = attention(Q, K.mT, V, scale=1.0, p=0.5, training=True)
    torch.manual_seed(3)
    expected = F.dropout(F.softmax(Q @ K.mT, dim=-1), 0.5) @ V
    torch.testing.assert_close(dropped, expected)  # torch draws the same numbers
    torch.testing.assert_close(attention(Q, K.mT, V, p=0.5, training=False), F.softmax(Q @ K.mT, dim=-1) @ V)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float32, None])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_rms_norm_casts_where_the_model_does(kind: torch.dtype, cast: torch.dtype | None) -> None:
    x, weight = torch.randn(3, 5, 64), torch.rand(64).to(kind) + 0.5
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = weight * (normed if cast is None else normed.to(cast))
    found = rms_norm(x, 1e-6, weight, dtype=cast)
    assert found.dtype == expected.dtype
    step = torch.finfo(cast or torch.float32).eps
    torch.testing.assert_close(found, expected, rtol=2 * step, atol=1e-6)


def test_rms_norm_takes_a_factor_of_any_shape_and_none() -> None:
    x, gate = torch.randn(3, 5, 64), torch.randn(3, 5, 64)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(rms_norm(x, 1e-6, gate), gate * normed)
    torch.testing.assert_close(rms_norm(x, 1e-6), normed)
    rough = x.bfloat16()
    expected = rough * torch.rsqrt(rough.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    found = rms_norm(rough, 1e-6, fine=torch.float32)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected)
