"""The right steps that split each part of each model, after Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.integration.bank.steps import Step, step

__all__ = ["PARTS", "parts_of", "sequence_parallel"]

_WITH_BIAS = ["weight", "bias"]


def pair(
    part: str,
    columns: Sequence[str],
    row: str,
    *,
    around: str | None,
    names: Any = "weight",
    axes: tuple[int, int] = (0, 1),
    packed: int = 1,
    inputs: tuple[str, ...] | None = None,
    counts: tuple[str, Sequence[str]] | None = None,
    more: Iterable[Step] = (),
) -> list[Step]:
    """Layers split by their output, and the one behind them split by its input.

    Args:
        part: what to call it.
        columns: those split by their output.
        row: the one split by its input.
        around: the module around the columns at whose input the gradient is summed; None sums it at each column.
        names: the parameters of the columns.
        axes: of a column's weight and of the row's.
        packed: of the columns.
        inputs: of ``around``.
        counts: a module, and its attributes to be divided.
        more: further steps.
    """
    given: dict[str, Any] = {"packed": packed} if packed != 1 else {}
    steps = [step(path, "shard", names, axis=axes[0], role="column", **given) for path in columns]
    chosen: dict[str, Any] = {"inputs": inputs} if inputs and around else {}
    for path in columns if around is None else (around,):
        steps.append(step(path, "sync", "bwd_post", "all_reduce", role="backward", **chosen))
    if counts is not None:
        steps.append(step(counts[0], "shard_attribute", list(counts[1]), role="count"))
    steps += more
    steps.append(step(row, "shard", "weight", axis=axes[1], role="row"))
    steps.append(step(row, "sync", "fwd_post", "all_reduce", role="forward"))
    return [each.with_(part=part) for each in steps]


def _bert(around: bool) -> dict[str, list[Step]]:
    parts = {}
    for number in range(2):
        at = f"bert.encoder.layer.{number}"
        inner = f"{at}.attention.self"
        parts[f"attention.{number}"] = pair(
            f"attention.{number}",
            [f"{inner}.{name}" for name in ("query", "key", "value")],
            f"{at}.attention.output.dense",
            around=inner if around else None,
            names=_WITH_BIAS,
            counts=(inner, ["num_attention_heads", "all_head_size"]),
            more=[step(inner, "fork_rng", role="random")],
        )
        parts[f"mlp.{number}"] = pair(
            f"mlp.{number}", [f"{at}.intermediate.dense"], f"{at}.output.dense",
            around=f"{at}.intermediate" if around else None, names=_WITH_BIAS,
        )  # fmt: skip
    head = "cls.predictions"
    parts["vocabulary"] = [
        step(head, "shard", "bias", axis=0, role="bias", part="vocabulary"),
        *_vocabulary(f"{head}.decoder", ["bert.embeddings.word_embeddings"]),
    ]
    return parts


def _gpt2(around: bool) -> dict[str, list[Step]]:
    parts = {}
    for number in range(2):
        at = f"transformer.h.{number}"
        parts[f"attention.{number}"] = pair(
            f"attention.{number}", [f"{at}.attn.c_attn"], f"{at}.attn.c_proj", around=f"{at}.attn" if around else None,
            names=_WITH_BIAS, axes=(1, 0), packed=3, inputs=("hidden_states",),
            counts=(f"{at}.attn", ["num_heads", "embed_dim", "split_size"]),
        )  # fmt: skip
        parts[f"mlp.{number}"] = pair(
            f"mlp.{number}", [f"{at}.mlp.c_fc"], f"{at}.mlp.c_proj", around=f"{at}.mlp" if around else None,
            names=_WITH_BIAS, axes=(1, 0),
        )  # fmt: skip
    parts["vocabulary"] = _vocabulary("lm_head", ["transformer.wte"])
    return parts


def _llama(around: bool, norms: bool = False) -> dict[str, list[Step]]:
    parts = {}
    for number in range(2):
        at = f"model.layers.{number}"
        norm = [step(f"{at}.self_attn.{name}_norm", "sync_gradient", "weight", role="norm") for name in "qk"]
        parts[f"attention.{number}"] = pair(
            f"attention.{number}", [f"{at}.self_attn.{name}_proj" for name in "qkv"], f"{at}.self_attn.o_proj",
            around=f"{at}.self_attn" if around else None, inputs=("hidden_states",), more=norm if norms else (),
        )  # fmt: skip
        parts[f"mlp.{number}"] = pair(
            f"mlp.{number}", [f"{at}.mlp.{name}_proj" for name in ("gate", "up")], f"{at}.mlp.down_proj",
            around=f"{at}.mlp" if around else None,
        )  # fmt: skip
    parts["embedding"] = [
        step("model.embed_tokens", "shard", "weight", axis=0, role="table", part="embedding"),
        step("model.embed_tokens", "sync", "fwd_post", "all_reduce", role="lookup", part="embedding"),
    ]
    parts["head"] = [
        step("lm_head", "shard", "weight", axis=0, role="head", part="head"),
        step("lm_head", "sync", "bwd_post", "all_reduce", role="backward", part="head"),
        step("lm_head", "sync", "fwd_post", "all_gather", role="gather", part="head"),
    ]
    return parts


def _qwen3(around: bool) -> dict[str, list[Step]]:
    return _llama(around, norms=True)


def _t5(around: bool) -> dict[str, list[Step]]:
    parts: dict[str, list[Step]] = {}
    for stack, last in (("encoder", 1), ("decoder", 2)):
        part = f"attention.{stack}"
        parts[part] = [
            step(
                f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias", "shard", "weight", axis=1,
                role="table", part=part,
            )
        ]  # fmt: skip
        for number in range(2):
            at = f"{stack}.block.{number}.layer"
            parts[part] += _t5_attention(f"{at}.0.SelfAttention", part, around)
            if last == 2:
                name = f"cross.{number}"
                parts.setdefault("cross", []).extend(
                    each.with_(part=name) for each in _t5_attention(f"{at}.1.EncDecAttention", name, False)
                )
            mlp = f"{at}.{last}.DenseReluDense"
            parts[f"mlp.{stack}.{number}"] = pair(
                f"mlp.{stack}.{number}", [f"{mlp}.wi"], f"{mlp}.wo", around=mlp if around else None,
                more=[step(f"{mlp}.dropout", "fork_rng", role="random")],
            )  # fmt: skip
    parts["vocabulary"] = _vocabulary("lm_head", ["encoder.embed_tokens", "decoder.embed_tokens"])
    return parts


def _t5_attention(at: str, part: str, around: bool) -> list[Step]:
    return pair(
        part, [f"{at}.{name}" for name in "qkv"], f"{at}.o", around=at if around else None, inputs=("hidden_states",),
        counts=(at, ["n_heads", "inner_dim"]), more=[step(at, "fork_rng", role="random")],
    )  # fmt: skip


def _vit(around: bool) -> dict[str, list[Step]]:
    parts = {}
    for number in range(2):
        at = f"vit.layers.{number}"
        parts[f"attention.{number}"] = pair(
            f"attention.{number}", [f"{at}.attention.{name}_proj" for name in "qkv"], f"{at}.attention.o_proj",
            around=f"{at}.attention" if around else None, names=_WITH_BIAS, inputs=("hidden_states",),
            more=[step(f"{at}.attention", "fork_rng", role="random")],
        )  # fmt: skip
        parts[f"mlp.{number}"] = pair(
            f"mlp.{number}", [f"{at}.mlp.fc1"], f"{at}.mlp.fc2", around=f"{at}.mlp" if around else None,
            names=_WITH_BIAS,
        )  # fmt: skip
    parts["head"] = [
        step("classifier", "shard", _WITH_BIAS, axis=0, role="head", part="head"),
        step("classifier", "sync", "bwd_post", "all_reduce", role="backward", part="head"),
        step("classifier", "sync", "fwd_post", "all_gather", role="gather", part="head"),
    ]
    patches = "vit.embeddings.patch_embeddings.projection"
    parts["patches"] = [
        step(patches, "shard", _WITH_BIAS, axis=0, role="head", part="patches"),
        step(patches, "sync", "bwd_post", "all_reduce", role="input", part="patches"),
        step(patches, "sync", "fwd_post", "all_gather", axis=1, role="gather", part="patches"),
    ]
    return parts


def _vocabulary(head: str, tables: Sequence[str]) -> list[Step]:
    """A table of words that is tied to the matrix in front of the output; tied, so one shard splits both."""
    steps = [
        step(head, "shard", "weight", axis=0, role="head"),
        step(head, "sync", "bwd_post", "all_reduce", role="backward"),
        step(head, "sync", "fwd_post", "all_gather", role="gather"),
        *(step(table, "sync", "fwd_post", "all_reduce", role="lookup") for table in tables),
    ]
    return [each.with_(part="vocabulary") for each in steps]


PARTS = {"bert": _bert, "gpt2": _gpt2, "llama": _llama, "qwen3": _qwen3, "t5": _t5, "vit": _vit}


def parts_of(model: str, *, around: bool = True) -> dict[str, list[Step]]:
    """The steps of each part that can be split by itself; T5's cross attentions go together.

    Args:
        model: its name.
        around: sum the gradient once, at the module around the columns, not at each column.
    """
    return PARTS[model](around)


def sequence_parallel(model: str) -> list[Step]:
    """LLaMA or Qwen3 with the sequence split between the pairs: whoever works there sees a part of the sequence."""
    steps = [step("model.embed_tokens", "shard", "weight", axis=0, role="table", part="enter")]
    for number in range(2):
        at = f"model.layers.{number}"
        for part, columns, row, around, norm in (
            (f"attention.{number}", [f"{name}_proj" for name in "qkv"], "o_proj", f"{at}.self_attn", "input_layernorm"),
            (f"mlp.{number}", ["gate_proj", "up_proj"], "down_proj", f"{at}.mlp", "post_attention_layernorm"),
        ):
            # The MLP is called by position, the attention by keywords.
            given: dict[str, Any] = {"inputs": ("hidden_states",)} if part.startswith("attention") else {}
            steps += [step(f"{around}.{name}", "shard", "weight", axis=0, role="column", part=part) for name in columns]
            steps += [
                step(around, "sync", "fwd_pre", "all_gather", axis=1, role="whole", part=part, **given),
                step(f"{around}.{row}", "shard", "weight", axis=1, role="row", part=part),
                step(f"{around}.{row}", "sync", "fwd_post", "reduce_scatter", axis=1, role="pieces", part=part),
                step(f"{at}.{norm}", "sync_gradient", "weight", role="norm", part=part),
            ]
            if model == "qwen3" and part.startswith("attention"):
                steps += [
                    step(f"{around}.{name}_norm", "sync_gradient", "weight", role="norm", part=part) for name in "qk"
                ]
    steps += [
        step(
            "model.layers.0", "sync", "fwd_pre", "reduce_scatter", axis=1, inputs=("hidden_states",), role="enter",
            part="enter",
        ),
        step("model.norm", "sync_gradient", "weight", role="norm", part="leave"),
        step("lm_head", "shard", "weight", axis=0, role="head", part="leave"),
        step("lm_head", "sync", "fwd_pre", "all_gather", axis=1, role="leave", part="leave"),
        step("lm_head", "sync", "fwd_post", "all_gather", role="gather", part="leave"),
    ]  # fmt: skip
    return steps
