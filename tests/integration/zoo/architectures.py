"""Every architecture of transformers that can be made tiny from its configuration alone, and one batch for it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from tests.integration.zoo.shrinking import IMAGE, POSITIONS, shrunk

__all__ = ["Architecture", "CannotMake", "architectures"]

_TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", "CTC",
    "AUDIO_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", "SEQUENCE_CLASSIFICATION", "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION", "DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION", "MASKED_IMAGE_MODELING", "TIME_SERIES_PREDICTION",
)  # fmt: skip
LENGTH, BATCH, LARGEST = 12, 2, 3_000_000


class CannotMake(Exception):  # noqa: N818
    """Why there is no tiny instance of an architecture."""


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers.

    Args:
        name: the model type, e.g. ``"bert"``.
        model: the class's name, e.g. ``"BertForMaskedLM"``.
        changes: fields that the tiny configuration must have.
    """

    name: str
    model: str
    changes: tuple[tuple[str, Any], ...] = ()

    def _class(self) -> Any:
        import transformers

        found = getattr(transformers, self.model, None)
        if found is None:
            raise CannotMake(f"transformers names {self.model}, but has no such class")
        return found

    def config(self) -> Any:
        """A tiny configuration.

        Raises:
            CannotMake: the configuration refuses.
        """
        model = self._class()
        try:
            config = shrunk(model.config_class, **dict(self.changes))
        except Exception as error:
            raise CannotMake(f"configuration: {_short(error)}") from error
        config.use_cache = False
        for name in ("text_config", "decoder", "llm_config", "language_config"):
            below = getattr(config, name, None)
            if below is not None and hasattr(below, "use_cache"):
                below.use_cache = False
        for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "router_jitter_noise"):
            if hasattr(config, name):
                setattr(config, name, 0.0)
        config._attn_implementation = "eager"
        return config

    def make(self) -> nn.Module:
        """The model with random weights, in training mode, on the default device.

        Raises:
            CannotMake: it cannot be constructed, or stays large.
        """
        model_class = self._class()
        config = self.config()
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class(config).parameters())
        except Exception:  # noqa: BLE001
            size = 0  # it cannot be built on meta: building it for real will tell more
        if size > LARGEST:
            raise CannotMake(f"stays large: {size / 1e6:.0f} M parameters")
        try:
            model: nn.Module = model_class(config)
        except Exception as error:
            raise CannotMake(f"construction: {_short(error)}") from error
        if not any(True for _ in model.parameters()):
            raise CannotMake("it has no parameters")
        return model.train()

    def inputs(self, model: Any) -> dict[str, Any]:
        """One batch, always the same."""
        generator = torch.Generator().manual_seed(7)
        taken = inspect.signature(type(model).forward).parameters
        config = model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocabulary = int(getattr(text, "vocab_size", None) or 96)
        ids = torch.randint(3, max(4, min(90, vocabulary)), (BATCH, LENGTH), generator=generator)
        batch: dict[str, Any] = {}
        main = getattr(model, "main_input_name", "input_ids")
        if "input_ids" in taken and main in ("input_ids", "pixel_values"):
            batch["input_ids"] = ids
        if main == "pixel_values" or ("pixel_values" in taken and "input_ids" not in taken):
            batch["pixel_values"] = torch.randn(BATCH, *_picture(config), generator=generator)
        if "pixel_values_videos" in taken and "pixel_values" not in taken and "input_ids" not in taken:
            batch["pixel_values_videos"] = torch.randn(BATCH, 4, *_picture(config), generator=generator)
        if "input_values" in taken and "input_ids" not in taken:
            batch["input_values"] = torch.randn(BATCH, *_sound(config), generator=generator)
        if "input_features" in taken and "input_ids" not in batch:
            batch["input_features"] = torch.randn(BATCH, *_features(model, config), generator=generator)
        if "decoder_input_ids" in taken and getattr(config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = ids[:, : LENGTH - 2].clone()
        if "labels" in taken and self.model.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")):
            batch["labels"] = ids.clone()
        if batch and "use_cache" in taken:
            batch["use_cache"] = False
        if not batch:
            raise CannotMake(f"its inputs are not known: {', '.join(taken)}")
        return batch


def _picture(config: Any) -> tuple[int, int, int]:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", IMAGE) or IMAGE
    size = size if isinstance(size, (list, tuple)) else (size, size)
    return int(getattr(vision, "num_channels", 3) or 3), int(size[0]), int(size[-1])


def _sound(config: Any) -> tuple[int, ...]:
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return int(config.max_length), int(config.num_mel_bins)
    return (1600,)


def _features(model: Any, config: Any) -> tuple[int, int]:
    audio = getattr(config, "audio_config", None) or config
    bins = int(getattr(audio, "num_mel_bins", None) or getattr(audio, "feature_size", 16))
    if hasattr(audio, "max_source_positions") and hasattr(audio, "num_mel_bins") and "Whisper" in type(model).__name__:
        return bins, 2 * int(audio.max_source_positions)
    own = getattr(audio, "input_feat_per_channel", 0) or getattr(audio, "feature_projection_input_dim", 0)
    return POSITIONS, int(own or bins)


@cache
def architectures() -> tuple[Architecture, ...]:
    """One model class for every model type of transformers: the first of its tasks, else the bare model."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, Architecture] = {}
    for task in (*(f"MODEL_FOR_{task}_MAPPING_NAMES" for task in _TASKS), "MODEL_MAPPING_NAMES"):
        for name, classes in getattr(auto, task).items():
            model = classes if isinstance(classes, str) else classes[0]
            found.setdefault(name, Architecture(name, model))
    return tuple(sorted(_distinct(found.values()), key=lambda each: each.name))


def _distinct(candidates: Iterable[Architecture]) -> Iterable[Architecture]:
    """Model types that share one class count once, under the shortest name: ``llama``, not ``code_llama``."""
    by_model: dict[str, Architecture] = {}
    for each in sorted(candidates, key=lambda each: (len(each.name), each.name)):
        by_model.setdefault(each.model, each)
    return by_model.values()


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
