"""Every field that the installed Megatron-core has is passed, filled in, or refused: by the table, and really."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from slapo_megatron.config import reading
from slapo_megatron.config.fields import FIELDS, Field
from slapo_megatron.config.slots import Slot, slots

from .planned import RATE, planned, refusal

_OTHER: dict[Any, Any] = {bool: None, int: 7, float: 0.5, str: "other", torch.dtype: torch.float16}


def other_value(slot: Slot) -> Any:
    """One that the type of the field has, but not its default."""
    if isinstance(slot.default, bool):
        return not slot.default
    for kind, value in _OTHER.items():
        if slot.takes(value) and value is not None and value != slot.default and kind is not bool:
            return value
    return next(
        value for value in (True, [2, 2], ["x"], len, "te", "mpi", "ucc") if slot.takes(value) and value != slot.default
    )


@pytest.mark.parametrize("option", FIELDS)
def test_every_field_of_the_installed_version_is_in_the_table(option: str) -> None:
    assert set(slots(option)) - set(FIELDS[option]) == set()


@pytest.mark.parametrize("option", FIELDS)
def test_what_the_table_refuses_is_refused_with_its_reason_and_its_default_is_not(option: str) -> None:
    fields = {name: field for name, field in FIELDS[option].items() if field.how == "refused" and name in slots(option)}
    assert len(fields) > 5 or option == "scheduler"
    known = {name: slots(option)[name] for name in fields if not name.startswith("_")}
    planned(**{option: {name: slot.default for name, slot in known.items()}})
    if known:
        message = refusal(**{option: {name: other_value(slot) for name, slot in known.items()}})
        assert message.splitlines()[1:] == [
            f"  - '{name}' of {option} is refused: {fields[name].why}" for name in known
        ]


def test_a_field_of_another_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    version = "Megatron-core 0.16.1"
    monkeypatch.setattr(reading, "found_version", lambda: "0.16.1")
    monkeypatch.setitem(FIELDS["ddp_config"], "of_tomorrow", Field("passed", ""))  # type: ignore[index]
    message = refusal(ddp_config={"of_tomorrow": 1})
    assert message == (
        f"Megatron cannot be run with these options: {version} has no 'of_tomorrow' of ddp_config, other versions do"
    )
    monkeypatch.delitem(FIELDS["ddp_config"], "bucket_size")  # type: ignore[attr-defined]
    assert f"is a field of {version} that this version of slapo-megatron does not know" in refusal(
        ddp_config={"bucket_size": 5}
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer_config": {"clip_gard": 1.0}}, "no 'clip_gard' of optimizer_config; did you mean 'clip_grad'?"),
        ({"ddp_config": {"clip_grad": 1.0}}, "no 'clip_grad' of ddp_config; it is one of optimizer_config"),
        ({"scheduler": {"xyz": 1.0}}, "no 'xyz' of scheduler; it has end_wd, init_lr, lr_decay_steps"),
        ({"optimizer_config": {"lr": "0.1"}}, "'lr' of optimizer_config must be a number, or None (got '0.1')"),
        ({"optimizer_config": {"lr": True}}, "must be a number, or None (got True)"),
        ({"optimizer_config": {"lr": float("nan")}}, "must be a number, or None (got nan)"),
        ({"optimizer_config": {"bf16": 1}}, "'bf16' of optimizer_config must be True or False (got 1)"),
        ({"optimizer_config": {"params_dtype": "bf16"}}, "must be a torch.dtype (got 'bf16')"),
        ({"ddp_config": {"bucket_size": 1.5}}, "must be a whole number, or None (got 1.5)"),
        ({"ddp_config": {3: 1.5}}, "the keys of ddp_config must be names of fields (got 3)"),
        ({"ddp_config": [1]}, "ddp_config must be a dictionary, or Megatron's DistributedDataParallelConfig (got [1])"),
        ({"scheduler": 3}, "scheduler must be a dictionary (got 3)"),
        ({"optimizer": "adam"}, "target 'megatron' has no option 'optimizer'; it has optimizer_config, ddp_config"),
        ({"lr": 1.0}, 'hint: optimizer_config={"lr": 1.0}'),
        ({"config": {"zero_optimization": {}}}, "target 'megatron' has no option 'config'; it has optimizer_config"),
        ({"origins": 3}, "origins is what a plan of target 'megatron' says, and no option (got 3)"),
        ({"batch_axes": {"x": "a"}}, "batch_axes must be an axis, or None"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_name_or_type_is_said_with_its_place(options: dict[str, Any], said: str) -> None:
    assert said in refusal(**options)


def test_all_that_is_wrong_with_a_configuration_is_said_at_once() -> None:
    message = refusal(optimizer_config={"clip_gard": 1.0, "lr": "x", "fp8_recipe": "mxfp8"})
    assert len(message.splitlines()) == 4


def test_an_object_of_megatrons_gives_what_differs_from_its_defaults() -> None:
    made = planned(
        optimizer_config=OptimizerConfig(lr=1e-3, adam_beta2=0.95),
        ddp_config=DistributedDataParallelConfig(overlap_grad_reduce=True),
        model_parallel_config=ModelParallelConfig(deallocate_pipeline_outputs=True),
    )
    assert made == {
        **planned(
            optimizer_config={"lr": 1e-3, "adam_beta2": 0.95, "clip_grad": 1.0},
            ddp_config={"overlap_grad_reduce": True},
            model_parallel_config={"deallocate_pipeline_outputs": True},
        ),
        "origins": made["origins"],
    }
    assert made["origins"]["optimizer_config.clip_grad"].startswith("of the object")


def test_what_megatrons_class_derives_itself_is_not_taken_for_said() -> None:
    config = ModelParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32
    )
    made = planned({"tp": 2, "pp": 2}, model_parallel_config=config)["model_parallel_config"]
    assert not {"autocast_dtype", "microbatch_group_size_per_vp_stage"} & set(made)
    assert "'tensor_model_parallel_size' of model_parallel_config is 2, but 'tp' of the mesh none is 1" in refusal(
        model_parallel_config=ModelParallelConfig(tensor_model_parallel_size=2)
    )


def test_a_transformer_config_is_refused_with_what_to_write() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    message = refusal(model_parallel_config=config)
    assert "must be Megatron's ModelParallelConfig itself (got a TransformerConfig, which has" in message
    assert message.endswith(
        "hint: model_parallel_config=ModelParallelConfig(**{name: getattr(config, name) for name in "
        "ModelParallelConfig.__dataclass_fields__})"
    )
    fields = {name: getattr(config, name) for name in ModelParallelConfig.__dataclass_fields__}
    planned(model_parallel_config=ModelParallelConfig(**fields))


def test_a_copy_of_what_is_given_is_filled_in() -> None:
    given = dict(RATE)
    planned(optimizer_config=given)
    assert given == RATE
