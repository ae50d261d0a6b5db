"""Batches of ``--batch``, and those made from a model's signature, configuration and first layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from slapo_core.cli.arguments import ExampleBatch, batch_of
from slapo_core.errors import ArgumentError
from slapo_core.tree import copies

SAMPLES, LENGTH, SIDES = 3, 12, (32, 64, 224)
"""Samples, tokens of a sequence, and sides of a picture, in the order in which they are tried."""

_CLASSES = ("ForSequenceClassification", "ForImageClassification")
_LANGUAGE = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration")


def make_batch(model: nn.Module, words: Sequence[str] | None, seed: int) -> ExampleBatch:
    """Make the batch of :func:`~slapo_core.cli.batch_for`."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(seed)
        return _made(model, generator) if not words else _given(model, words, generator)


def _given(model: nn.Module, words: Sequence[str], generator: torch.Generator) -> ExampleBatch:
    def tensor(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(tuple(shape), generator=generator).to(dtype)
        return integers(name, shape, model, generator).to(dtype)

    return ExampleBatch(batch_of(words, tensor), f"--batch {' '.join(words)}")


def _made(reference: nn.Module, generator: torch.Generator) -> ExampleBatch:
    tried: list[str] = []
    model = copies.deep_copy(reference, {}).eval()  # a forward may write: buffers, counts, a configuration
    for candidate in _candidates(model, generator):
        refused = _refusal(model, candidate.inputs)
        if refused is None:
            return candidate
        tried.append(f"{candidate.how}: {refused}")
    taken = ", ".join(inspect.signature(model.forward).parameters)
    why = f"the model refuses a batch {tried[-1]}" if tried else "its shapes are not known"
    raise ArgumentError(
        f"no batch can be made for {type(model).__name__}.forward({taken}): {why}",
        hint="--batch input_ids=4x32:int64, --batch 4x16:float32, or --batch MODULE:FUNCTION, which returns it",
    )


def integers(name: str, shape: Sequence[int], model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """Draw an integer tensor of a batch: ids of the vocabulary, positions, classes; ones for a mask.

    Args:
        name: of the argument.
        shape: of the tensor.
        model: whose configuration or first embedding has the size of the vocabulary.
        generator: of the values.
    """
    if "mask" in name:
        return torch.ones(*shape, dtype=torch.int64)
    if "position" in name:
        return torch.arange(shape[-1]).expand(*shape).clone()
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    first = next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), 2)
    count = int(getattr(text, "vocab_size", None) or first)
    if "type" in name:
        count = int(getattr(text, "type_vocab_size", None) or 2)
    elif len(shape) == 1 and getattr(config, "num_labels", None):
        count = int(getattr(config, "num_labels", 2))
    found = torch.randint(0, count, tuple(shape), generator=generator)
    padding = getattr(text, "pad_token_id", None)
    if isinstance(padding, int) and count > 2:  # which models leave out
        found[found == padding] = (padding + 1) % count
    return found


def _candidates(model: nn.Module, generator: torch.Generator) -> Iterator[ExampleBatch]:
    """Yield batches to be tried, the best first."""
    parameters = inspect.signature(model.forward).parameters
    if hasattr(model, "main_input_name") and hasattr(model, "config"):
        yield from _of_configuration(model, parameters, generator)
        return
    required = [
        name
        for name, one in parameters.items()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    first = next((module for module in model.modules() if _shapes(module)), None)
    if len(required) != 1 or first is None:
        return
    name, about = required[0], f"{type(first).__name__}({first.extra_repr()})"
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    for shape in _shapes(first):
        if isinstance(first, nn.Embedding):
            value = torch.randint(0, first.num_embeddings, shape, generator=generator)
        else:
            value = torch.randn(shape, generator=generator).to(dtype)
        kind = str(value.dtype).removeprefix("torch.")
        how = f"made for the first layer, {about}: {name} {shape} {kind}"
        yield ExampleBatch((value,), how + _left_out(parameters, name))


def _left_out(parameters: Mapping[str, inspect.Parameter], *given: str) -> str:
    ordinary = [name for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    others = ", ".join(name for name in ordinary if name not in given)
    return f"; without {others}, so what needs them does not run: --batch gives them" if others else ""


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of an input that a first layer takes; of an unknown layer none."""
    if isinstance(module, nn.Embedding):
        return [(SAMPLES, LENGTH), (SAMPLES, 4)]
    if isinstance(module, nn.Linear):
        return [(SAMPLES, module.in_features), (SAMPLES, LENGTH, module.in_features)]
    if isinstance(module, nn.LayerNorm):
        return [(SAMPLES, LENGTH, *module.normalized_shape), (SAMPLES, *module.normalized_shape)]
    if isinstance(module, nn.RNNBase):
        return [(SAMPLES, LENGTH, module.input_size)]
    if isinstance(module, nn.MultiheadAttention):
        return [(SAMPLES, LENGTH, module.embed_dim)]
    for axes, kind in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)):
        if isinstance(module, kind):
            return [(SAMPLES, module.in_channels, *([side] * axes)) for side in SIDES]
    return []


def _of_configuration(
    model: Any, taken: Mapping[str, inspect.Parameter], generator: torch.Generator
) -> Iterator[ExampleBatch]:
    """Yield batches for a model of transformers, with labels and without."""
    config = model.config
    batch: dict[str, Any] = {}
    if "input_ids" in taken and model.main_input_name in ("input_ids", "pixel_values"):
        batch["input_ids"] = integers("input_ids", (SAMPLES, LENGTH), model, generator)
    if "pixel_values" in taken and (model.main_input_name == "pixel_values" or "input_ids" not in taken):
        vision = getattr(config, "vision_config", None) or config
        side: Any = getattr(vision, "image_size", None) or SIDES[-1]
        sides = tuple(side) if isinstance(side, (list, tuple)) else (side, side)
        channels = getattr(vision, "num_channels", None) or 3
        batch["pixel_values"] = torch.randn(SAMPLES, channels, *sides, generator=generator).to(model.dtype)
    if "decoder_input_ids" in taken and getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = integers("input_ids", (SAMPLES, LENGTH - 2), model, generator)
    if not batch:
        return
    if "use_cache" in taken:
        batch["use_cache"] = False
    name = type(model).__name__
    tokens = batch.get("decoder_input_ids", batch.get("input_ids"))
    labels = None
    if "labels" in taken and tokens is not None and name.endswith((*_LANGUAGE, "ForTokenClassification")):
        labels = integers("labels", tokens.shape, model, generator)
        if name.endswith("ForTokenClassification"):
            labels %= config.num_labels
    elif "labels" in taken and name.endswith(_CLASSES):
        labels = integers("labels", (SAMPLES,), model, generator)
    for given in ([] if labels is None else [{**batch, "labels": labels}]) + [batch]:
        without = _left_out({name: taken[name] for name in ("labels",) if name in taken}, *given)
        yield ExampleBatch(given, f"made from the model's configuration: {_words(given, model)}{without}")


def _words(batch: Mapping[str, Any], model: Any) -> str:
    config = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    parts = []
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            parts.append(f"{name}={value}")
        elif name.endswith("ids") and size:
            parts.append(f"{name} {tuple(value.shape)} of {size} tokens")
        else:
            parts.append(f"{name} {tuple(value.shape)}")
    return ", ".join(parts)


def _refusal(model: nn.Module, inputs: Any) -> str | None:
    """Run the model once; return its error in a line, None if it runs."""
    device = next((one.device for one in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    kwargs = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
    try:
        with torch.no_grad(), torch.random.fork_rng(), torch.device("meta") if device.type == "meta" else nullcontext():
            model(*(value.to(device) for value in args), **kwargs)
    except Exception as error:  # noqa: BLE001 - any refusal: the next candidate is tried
        if device.type == "meta" and "meta" in str(error):
            return None  # it got as far as to read a value
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None
