"""``fusion.sdpa`` and ``fusion.causal_sdpa`` on a GPU: types of masks, FlashAttention where it can be, and times."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import softmax
from torch.profiler import ProfilerActivity, profile

import slapo_core as slapo
from tests.gpu.subjects import close, gradients, microseconds, small_llama

SHAPE = (2, 4, 64, 32)  # batch, heads, length, size of a head


class Attention(nn.Module):
    """Attention as written out, with heads of its own and a buffer that says what is visible."""

    def __init__(self, form: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.qkv = nn.Linear(128, 384)
        self.register_buffer("visible", torch.ones(64, 64).tril().view(1, 1, 64, 64))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 64, 3, 4, 32).permute(2, 0, 3, 1, 4)
        return self.form(self, q, k, v, mask).transpose(1, 2).reshape(2, 64, 128)


def plain(self: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return softmax(q @ k.transpose(-2, -1) / math.sqrt(32), dim=-1) @ v


def causal(self: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(32))
    scores = scores.masked_fill(self.visible[:, :, : q.size(2), : q.size(2)] == 0, float("-inf"))
    return softmax(scores, dim=-1) @ v


def masked(self: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(2, 3)) * (1.0 / math.sqrt(32)) + mask
    weights = softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


WITHOUT_MASK = [("no mask", "fusion.sdpa"), ("causal", "fusion.causal_sdpa")]
FORMS = {"no mask": plain, "causal": causal, "added mask": masked}


def replaced(
    form: str, device: Any, dtype: torch.dtype, pattern: str = "fusion.sdpa"
) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    """The model, a scheduled one, and a batch whose mask is in float32."""
    inputs = (torch.randn(2, 64, 128).to(device, dtype), torch.zeros(2, 1, 64, 64, device=device))
    inputs[1][..., 48:] = -3e38
    models = [nn.Sequential(Wrapped(Attention(FORMS[form]))).to(device, dtype) for _ in range(2)]
    sch: Any = slapo.create_schedule(models[1], example_inputs=(inputs,))
    sch["0.attention"].trace(flatten=True)
    sch["0.attention"].replace(match=pattern)
    return models[0], models[1], inputs


class Wrapped(nn.Module):
    """So that the attention is called with two tensors below a sequence of one."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return self.attention(*inputs)  # type: ignore[no-any-return]


@pytest.mark.gpu(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_the_replacement_takes_any_mask_in_any_type(device: torch.device, form: str, dtype: str) -> None:
    model, kernel, inputs = replaced(form, device, getattr(torch, dtype))
    outputs = []
    for network in (model, kernel):
        output = network(inputs)
        output.float().square().mean().backward()
        outputs.append(output.detach())
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    torch.testing.assert_close(outputs[1], outputs[0], rtol=tolerance, atol=tolerance)
    close(gradients(kernel), gradients(model), rtol=1e-3 if dtype == "float32" else 5e-2)


@pytest.mark.gpu(3)
@pytest.mark.parametrize(("form", "pattern"), WITHOUT_MASK)
def test_without_a_mask_or_with_a_causal_one_flash_attention_can_be_chosen(
    device: torch.device, form: str, pattern: str
) -> None:
    model, kernel, inputs = replaced(form, device, torch.bfloat16, pattern)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # or "No available kernel"
        output = kernel(inputs)
        output.float().square().mean().backward()
    torch.testing.assert_close(output, model(inputs), rtol=2e-2, atol=2e-2)


def kernels_of(function: Callable[[], Any], device: torch.device) -> list[str]:
    """Names of the operators and of the kernels that ran."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
        function()
        if on_gpu:
            torch.cuda.synchronize()
    return sorted({event.key for event in profiler.key_averages()})


@pytest.mark.gpu(3.1)
@pytest.mark.parametrize(("form", "pattern"), WITHOUT_MASK)
def test_flash_attention_is_chosen(device: torch.device, measured: Any, form: str, pattern: str) -> None:
    _, kernel, inputs = replaced(form, device, torch.bfloat16, pattern)
    kernels = kernels_of(lambda: kernel(inputs), device)
    measured(kernels=[name for name in kernels if "flash" in name.lower() or "fmha" in name.lower()])
    assert any("flash" in name.lower() for name in kernels), kernels


def of_transformers(name: str, device: Any, attention: str) -> nn.Module:
    if name == "llama":
        return small_llama(device, torch.bfloat16, hidden_size=256, attn_implementation=attention)
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 96, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 64}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(**sizes, **off, use_cache=False, attn_implementation=attention)
    return GPT2LMHeadModel(config).to(device, torch.bfloat16)  # type: ignore[no-any-return]


@pytest.mark.gpu(3.2)
@pytest.mark.parametrize("pattern", ["fusion.sdpa", "fusion.causal_sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_transformers_in_bfloat16(device: torch.device, measured: Any, name: str, pattern: str) -> None:
    """The same numbers as written out; which kernels run, and what it takes beside transformers' own."""
    ids = torch.arange(128, device=device).reshape(2, 64) * 5 % 96
    batch = {"input_ids": ids, "labels": ids.flip(1)}
    eager = of_transformers(name, device, "eager")
    ours = of_transformers(name, device, "eager")
    sch: Any = slapo.create_schedule(ours, example_inputs=batch)
    layers = sch["model.layers.*" if name == "llama" else "transformer.h.*"]
    layers.trace(flatten=True).replace(match=pattern)
    models = {"eager": eager, "ours": ours, "transformers": of_transformers(name, device, "sdpa")}
    taken, losses = {}, {}
    for form, model in models.items():

        def step(model: nn.Module = model) -> Tensor:
            model.zero_grad(set_to_none=True)
            loss: Tensor = model(**batch).loss
            loss.backward()
            return loss

        losses[form] = float(step().detach())
        names = kernels_of(step, device)
        taken[f"{form}_kernels"] = [each for each in names if any(word in each.lower() for word in ("flash", "fmha"))]
        taken[f"{form}_us"] = microseconds(step, device, calls=10)[1]
    measured(**taken)
    if pattern == "fusion.causal_sdpa":
        assert any("flash" in each.lower() for each in taken["ours_kernels"])
    assert losses["ours"] == pytest.approx(losses["eager"], rel=2e-2)
    close(gradients(ours), gradients(eager), rtol=0.1)
