"""Every field that the installed Megatron-core has is passed, filled in, or refused: by the table, and really."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from slapo_megatron.config import field_types
from slapo_megatron.config.field_types import FieldType, field_types_of
from slapo_megatron.config.fields import FIELDS, Field
from tests.messages import Messages

from .planned import RATE, planned, refusal

_OTHER: dict[Any, Any] = {bool: None, int: 7, float: 0.5, str: "other", torch.dtype: torch.float16}


def other_value(field_type: FieldType) -> Any:
    """One that the type of the field has, but not its default."""
    if isinstance(field_type.default, bool):
        return not field_type.default
    for kind, value in _OTHER.items():
        if field_type.takes(value) and value is not None and value != field_type.default and kind is not bool:
            return value
    return next(
        value
        for value in (True, [2, 2], ["x"], len, "te", "mpi", "ucc")
        if field_type.takes(value) and value != field_type.default
    )


@pytest.mark.parametrize("option", FIELDS)
def test_every_field_of_the_installed_version_is_in_the_table(option: str) -> None:
    assert set(field_types_of(option)) - set(FIELDS[option]) == set()


@pytest.mark.parametrize("option", FIELDS)
def test_what_the_table_refuses_is_refused_with_its_reason_and_its_default_is_not(option: str) -> None:
    fields = {
        name: field
        for name, field in FIELDS[option].items()
        if field.how == "refused" and name in field_types_of(option)
    }
    assert len(fields) > 5 or option == "scheduler"
    known = {name: field_types_of(option)[name] for name in fields if not name.startswith("_")}
    planned(**{option: {name: field_type.default for name, field_type in known.items()}})
    if known:
        lines = refusal(**{option: {name: other_value(field_type) for name, field_type in known.items()}}).splitlines()[
            1:
        ]
        for name, line in zip(known, lines, strict=True):
            assert f"'{name}' of {option} " in line
            assert line.endswith(f": {fields[name].why}")


def test_a_field_of_another_version_says_so(monkeypatch: pytest.MonkeyPatch, message: Messages) -> None:
    monkeypatch.setattr(field_types, "found_version", lambda: "0.16.1")
    monkeypatch.setitem(FIELDS["ddp_config"], "of_tomorrow", Field("passed", ""))  # type: ignore[index]
    message(refusal(ddp_config={"of_tomorrow": 1}), "0.16.1 has no 'of_tomorrow' of ddp_config")
    monkeypatch.delitem(FIELDS["ddp_config"], "bucket_size")  # type: ignore[attr-defined]
    message(refusal(ddp_config={"bucket_size": 5}), "'bucket_size' of ddp_config", "0.16.1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer_config": {"clip_gard": 1.0}}, ("no 'clip_gard' of optimizer_config", "'clip_grad'")),
        ({"ddp_config": {"clip_grad": 1.0}}, ("no 'clip_grad' of ddp_config", "one of optimizer_config")),
        ({"optimizer_config": {"lr": "0.1"}}, ("'lr' of optimizer_config", "got '0.1'")),
        ({"optimizer_config": {"lr": True}}, ("'lr'", "got True")),
        ({"optimizer_config": {"lr": float("nan")}}, ("'lr'", "got nan")),
        ({"optimizer_config": {"bf16": 1}}, ("'bf16' of optimizer_config", "True or False", "got 1")),
        ({"optimizer_config": {"params_dtype": "bf16"}}, ("'params_dtype'", "torch.dtype", "got 'bf16'")),
        ({"ddp_config": {"bucket_size": 1.5}}, ("'bucket_size'", "whole number", "got 1.5")),
        ({"ddp_config": {3: 1.5}}, ("keys of ddp_config", "got 3")),
        ({"ddp_config": [1]}, ("ddp_config", "DistributedDataParallelConfig", "got [1]")),
        ({"scheduler": 3}, ("scheduler", "dictionary", "got 3")),
        ({"optimizer": "adam"}, ("no option 'optimizer'", "optimizer_config, ddp_config")),
        ({"lr": 1.0}, ('hint: optimizer_config={"lr": 1.0}',)),
        ({"config": {"zero_optimization": {}}}, ("no option 'config'", "optimizer_config")),
        ({"origins": 3}, ("origins", "not an option", "got 3")),
        ({"batch_axes": {"x": "a"}}, ("batch_axes", "'a'")),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_name_or_type_is_said_with_its_place(
    options: dict[str, Any], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, message: Messages
) -> None:
    monkeypatch.setattr(field_types, "found_version", lambda: "0.16.1")
    message(refusal(**options), *words)


def test_an_unknown_name_comes_with_those_that_there_are() -> None:
    """Which differ from version to version."""
    text = refusal(scheduler={"xyz": 1.0})
    assert "no 'xyz' of scheduler" in text
    assert "end_wd, init_lr, lr_decay_steps" in text


def test_all_that_is_wrong_with_a_configuration_is_said_at_once() -> None:
    text = refusal(optimizer_config={"clip_gard": 1.0, "lr": "x", "fp8_recipe": "mxfp8"})
    assert len(text.splitlines()) == 4


def test_an_object_of_megatrons_gives_what_differs_from_its_defaults() -> None:
    made = planned(
        optimizer_config=OptimizerConfig(lr=1e-3, adam_beta2=0.95),
        ddp_config=DistributedDataParallelConfig(overlap_grad_reduce=True),
        model_parallel_config=ModelParallelConfig(deallocate_pipeline_outputs=True),
    )
    assert made == {
        **planned(
            optimizer_config={"lr": 1e-3, "adam_beta2": 0.95},
            ddp_config={"overlap_grad_reduce": True},
            model_parallel_config={"deallocate_pipeline_outputs": True},
        ),
        "origins": made["origins"],
    }


def test_what_megatrons_class_derives_itself_is_not_taken_for_said(message: Messages) -> None:
    config = ModelParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32
    )
    made = planned({"tp": 2, "pp": 2}, model_parallel_config=config)["model_parallel_config"]
    assert not {"autocast_dtype", "microbatch_group_size_per_vp_stage"} & set(made)
    text = refusal(model_parallel_config=ModelParallelConfig(tensor_model_parallel_size=2))
    message(text, "'tensor_model_parallel_size' of model_parallel_config is 2", "is 1")


def test_a_transformer_config_is_refused_with_what_to_write() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    text = refusal(model_parallel_config=config)  # it lists fields, which differ from version to version
    assert "got a TransformerConfig" in text
    assert text.partition("\n  hint: ")[2].startswith("model_parallel_config=ModelParallelConfig(**{")
    fields = {name: getattr(config, name) for name in ModelParallelConfig.__dataclass_fields__}
    planned(model_parallel_config=ModelParallelConfig(**fields))


def test_a_copy_of_what_is_given_is_filled_in() -> None:
    given = dict(RATE)
    planned(optimizer_config=given)
    assert given == RATE
