"""``verify`` on a GPU: right schedules pass in bfloat16, in float32 and with TF32, and wrong ones do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import slapo_core as slapo
from tests.gpu.subjects import moved, scheduled, stack

# The full schedules: of each family, in both types. Those of LLaMA and BERT first.

FAMILIES = (
    *("llama", "bert", "gpt", "t5", "wide_resnet", "opt", "roberta"),
    *("mistral", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe", "vit"),
)


def _ranked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.gpu(10 if name in ("llama", "bert") else 13))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [_ranked(name) for name in FAMILIES])
def test_the_full_schedule_of_a_family_is_right(device: torch.device, measured: Any, name: str, dtype: str) -> None:
    report = slapo.verify(scheduled(name, device, getattr(torch, dtype)))
    used = max(entry.fraction for entry in report.largest)
    measured(family=name, dtype=dtype, steps=report.steps_verified, tolerance_used=used)
    assert report.steps_verified > 0


# TF32, which products take under "high" and convolutions by cuDNN's default.


@pytest.fixture
def _defaults_of_torch() -> Iterator[None]:
    """Take back which precision products have."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def vit(device: torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    pictures = {"image_size": 32, "patch_size": 8, "intermediate_size": 256, "num_labels": 7}
    model = ViTForImageClassification(ViTConfig(**sizes, **pictures, attn_implementation="eager"))
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4)}
    return model.to(device), moved(batch, device)


def bert(device: torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**sizes, intermediate_size=512, max_position_embeddings=64, attn_implementation="eager")
    ids = torch.arange(128).reshape(2, 64) * 5 % 96
    return BertForMaskedLM(config).to(device), moved({"input_ids": ids, "labels": ids.flip(1)}, device)


@pytest.mark.gpu(6)
@pytest.mark.usefixtures("_defaults_of_torch")
@pytest.mark.parametrize("make", [bert, vit])
def test_a_right_schedule_passes_with_tf32(device: torch.device, make: Any) -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    model, batch = make(device)
    sch: Any = slapo.create_schedule(model, example_inputs=batch)
    layers = _layers(sch)
    layers.trace(flatten=True).replace(match="fusion.sdpa")
    layers.fuse("fusion.bias_gelu", compiler="eager")
    assert slapo.verify(sch).steps_verified == 3 * len(layers)
    assert torch.get_float32_matmul_precision() == "high"


def _layers(sch: Any) -> Any:
    """The layers of an encoder, wherever a version of transformers has them."""
    paths = [node.path for node in sch.root.walk() if type(node.module).__name__ in ("BertLayer", "ViTLayer")]
    assert paths
    return sch[f"{paths[0].rpartition('.')[0]}.*"]


@pytest.mark.gpu(6)
@pytest.mark.usefixtures("_defaults_of_torch")
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_wrong_schedule_is_found_with_and_without_tf32(device: torch.device, precision: str) -> None:
    """GELU by the hyperbolic tangent: another function, by less than TF32 rounds."""
    torch.set_float32_matmul_precision(precision)  # type: ignore[arg-type]
    model = stack(device, layers=2)
    sch: Any = slapo.create_schedule(model, example_inputs=torch.randn(4, 32, device=device))
    sch["1.1"].replace(nn.GELU(approximate="tanh"))
    with pytest.raises(slapo.VerifyError) as refused:
        slapo.verify(sch)
    assert "1.1" in str(refused.value)


# Kernels that take half precision only.


def half_only(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention by a kernel that takes bfloat16 and float16, as flash-attn's."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"the kernel takes float16 and bfloat16 (got {query.dtype})")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value)


class Attending(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.softmax(query @ key.transpose(-2, -1) / 8.0, dim=-1)
        return weights @ value


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attend, self.out = nn.Linear(128, 384), Attending(), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 16, 3, 2, 64).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(2, 16, 128))  # type: ignore[no-any-return]


@pytest.mark.gpu(6)
@pytest.mark.parametrize("how", ["bind", "replace"])
def test_a_kernel_for_half_precision_is_compared_in_its_own_type(device: torch.device, how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Heads()).to(device, torch.bfloat16)
    sch: Any = slapo.create_schedule(model, example_inputs=torch.randn(2, 16, 128, device=device).bfloat16())
    if how == "bind":
        sch["0.attend"].bind(half_only, rtol=2e-2)
    else:
        sch["0.attend"].replace(HalfOnly(), rtol=2e-2)
    report = slapo.verify(sch)
    assert "bfloat16" in str(report)


class HalfOnly(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return half_only(query, key, value)


# Random numbers.


@pytest.mark.gpu(16)
def test_recomputed_layers_drop_the_same_elements(device: torch.device) -> None:
    model = stack(device, layers=3, dropout=0.3)
    sch: Any = slapo.create_schedule(model, example_inputs=torch.randn(4, 32, device=device))
    sch["[01]"].checkpoint()
    sch["2"].trace()
    sch["2"].checkpoint()
    assert slapo.verify(sch).steps_verified == 4
