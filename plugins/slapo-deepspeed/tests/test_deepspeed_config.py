"""The configuration is completed by the schedule, by ``build``, and as transformers' Trainer completes "auto"."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_core.dialect import BuildArguments
from tests.messages import Messages

from .planned import ADAM, plan, planned, refusal, schedule_of

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
CONFIGS = Path(__file__).parent / "configs"
FACTORY = BuildArguments(has_optimizer=True)


def sizes(config: dict[str, Any] | None = None, mesh: dict[str, int] | None = None, **more: Any) -> tuple[int, ...]:
    made = planned(config, mesh, **more)
    return made[TOTAL], made[MICRO], made[STEPS]


@pytest.mark.parametrize(
    ("config", "mesh", "samples", "accumulate", "expected"),
    [
        ({}, None, None, 1, (1, 1, 1)),
        ({}, None, 6, 1, (6, 6, 1)),
        ({}, {"dp": 2}, 6, 1, (12, 6, 1)),
        ({}, {"dp": 2}, 6, 3, (12, 2, 3)),
        ({}, None, 7, 2, (2, 1, 2)),
        ({MICRO: 4}, {"dp": 2}, 6, 1, (8, 4, 1)),
        ({STEPS: 4}, None, None, 1, (4, 1, 4)),
        ({STEPS: 4}, None, None, 4, (4, 1, 4)),
        ({TOTAL: 24}, {"dp": 2}, 6, 3, (24, 4, 3)),
        ({TOTAL: 24, MICRO: 4}, {"dp": 2}, None, 1, (24, 4, 3)),
        ({TOTAL: 24, MICRO: 4, STEPS: 3}, {"dp": 2}, None, 3, (24, 4, 3)),
        ({TOTAL: "auto", MICRO: "auto", STEPS: "auto"}, {"dp": 2}, 6, 3, (12, 2, 3)),
        ({}, {"pp": 2}, 8, 1, (8, 4, 2)),
        ({}, {"pp": 2, "dp": 2, "tp": 2}, 8, 4, (16, 2, 4)),
        ({STEPS: 1}, {"pp": 2}, 8, 1, (8, 8, 1)),
    ],
)
def test_missing_sizes_are_computed_from_given_ones(
    config: dict[str, Any], mesh: Any, samples: int | None, accumulate: int, expected: tuple[int, int, int]
) -> None:
    schedule, arguments = schedule_of(mesh, samples=samples), BuildArguments(accumulate=accumulate)
    assert sizes(config, schedule=schedule, arguments=arguments) == expected


def test_the_samples_are_counted_along_the_axis_that_counts_them() -> None:
    schedule = slapo.create_schedule(torch.nn.Linear(4, 2), example_inputs={"input": torch.zeros(3, 5, 4)})
    assert sizes(schedule=schedule) == (3, 3, 1)
    assert sizes(schedule=schedule, batch_axes={"input": 1}) == (5, 5, 1)
    assert sizes(schedule=schedule, batch_axes={"input": None}) == (1, 1, 1)


@pytest.mark.parametrize(
    ("config", "accumulate", "words"),
    [
        ({STEPS: 4}, 2, (f"'{STEPS}' of config is 4", "accumulate=2")),
        ({TOTAL: 10, MICRO: 4, STEPS: 1}, 1, (f"'{TOTAL}' of config is 10", MICRO, STEPS, "2 replicas", "is 8")),
        ({TOTAL: 10, MICRO: 4}, 1, (f"'{TOTAL}'", "not divisible", MICRO, "is 1.25")),
        ({TOTAL: 10}, 3, (f"'{TOTAL}'", "not divisible", STEPS, "a multiple of 6: 12")),
        ({MICRO: 0}, 1, (f"'{MICRO}'", "positive", "got 0")),
        ({STEPS: True, TOTAL: "8"}, 1, (f"'{STEPS}'", "got True", f"'{TOTAL}'", "got '8'")),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_with_both(
    config: dict[str, Any], accumulate: int, words: tuple[str, ...], message: Messages
) -> None:
    message(refusal(config, {"dp": 2}, arguments=BuildArguments(accumulate=accumulate)), *words)


def test_clipping_follows_max_grad_norm_and_is_off_without_it(message: Messages) -> None:
    """DeepSpeed's own default is to clip at 1.0, which no other target does."""
    assert planned()["gradient_clipping"] == 0.0
    assert planned({"gradient_clipping": 0.5})["gradient_clipping"] == 0.5
    clips = BuildArguments(max_grad_norm=0.5)
    assert planned(arguments=clips)["gradient_clipping"] == 0.5
    assert planned({"gradient_clipping": 0.5}, arguments=clips)["gradient_clipping"] == 0.5
    assert planned({"gradient_clipping": "auto"}, arguments=clips)["gradient_clipping"] == 0.5
    message(refusal({"gradient_clipping": 1.0}, arguments=clips), "'gradient_clipping'", "max_grad_norm=0.5")
    message(refusal({"gradient_clipping": -1}), "'gradient_clipping'", "got -1")


def test_a_pipeline_is_given_the_settings_under_which_it_is_exact() -> None:
    made = planned({}, {"pp": 2, "dp": 2})
    assert made["pipeline"] == {"use_reentrant": False, "pipe_partitioned": False, "grad_partitioned": False}
    assert made["zero_optimization"] == {"stage": 1}
    assert planned({"zero_optimization": {"stage": 0}}, {"pp": 2})["zero_optimization"] == {"stage": 0}
    assert planned({"pipeline": {"stages": 2, "use_reentrant": False}}, {"pp": 2})["pipeline"]["stages"] == 2
    alone = plan({"pipeline": {"stages": 2}})
    assert "pipeline" not in alone.config["config"]
    assert "pipeline is left out: the mesh none has one rank along 'pp'" in str(alone)


@pytest.mark.parametrize(
    ("pipeline", "word"),
    [
        ({"stages": 4}, "{'pp': 2}"),
        ({"use_reentrant": True}, "must be false"),
        ({"pipe_partitioned": True}, "must be false"),
        ({"grad_partitioned": True}, "must be false"),
        ({"partition": "uniform"}, "is 'uniform'"),
        ({"seed_layers": True}, "is True"),
    ],
)
def test_the_schedule_decides_the_pipeline(pipeline: dict[str, Any], word: str, message: Messages) -> None:
    message(refusal({"pipeline": pipeline}, {"pp": 2}), f"'pipeline.{next(iter(pipeline))}' of config", word)


def test_parallelism_is_not_left_to_deepspeed(message: Messages) -> None:
    for size in (2, 0):
        made = plan({"tensor_parallel": {"autotp_size": size}}, {"tp": 2})
        assert "tensor_parallel" not in made.config["config"]
        assert "tensor_parallel is left out: the steps of the schedule split the model" in str(made)
    made = plan({"data_parallel_size": 2, "sequence_parallel_size": 1}, {"dp": 2})
    assert not {"data_parallel_size", "sequence_parallel_size"} & set(made.config["config"])
    message(refusal({"tensor_parallel": {"autotp_size": 4}}, {"tp": 2}), "'tensor_parallel.autotp_size'", "{'tp': 2}")
    message(refusal({"sequence_parallel_size": 2}, {"dp": 2}), "'sequence_parallel_size' of config is 2", "but 1")
    message(refusal({"data_parallel_size": 4}, {"dp": 2}), "'data_parallel_size' of config is 4", "but 2")


@pytest.mark.parametrize("name", ["fp16", "bf16", "bfloat16"])
def test_lower_precision_defaults_to_zero_1(name: str) -> None:
    """Without ZeRO, DeepSpeed does not scale the loss, and steps the optimizer when it is made."""
    config: dict[str, Any] = {name: {"enabled": True}}
    for mesh in (None, {"pp": 2}):
        assert planned(config, mesh)["zero_optimization"] == {"stage": 1}
    assert planned(config, arguments=BuildArguments())["zero_optimization"] == {"stage": 0}  # it only evaluates
    half = schedule_of(dtype=torch.float16)
    assert planned({"fp16": {"enabled": "auto"}}, schedule=half)["zero_optimization"] == {"stage": 1}


def test_an_optimizer_that_deepspeed_does_not_know_is_allowed() -> None:
    key = "zero_allow_untested_optimizer"
    zero = {"zero_optimization": {"stage": 2}}
    assert planned(zero, arguments=FACTORY)[key] is True
    assert planned({**zero, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})[key] is True
    assert planned({**zero, key: False}, arguments=FACTORY)[key] is False
    assert key not in planned({**zero, "optimizer": ADAM})
    assert key not in planned({}, arguments=FACTORY)


def test_offloading_takes_the_optimizer_of_a_factory() -> None:
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    key = "zero_force_ds_cpu_optimizer"
    assert planned(zero, arguments=FACTORY)[key] is False
    own = planned({**zero, "optimizer": ADAM}, arguments=BuildArguments())
    assert key not in own
    assert own["optimizer"]["params"] == {"lr": 1e-3}  # DeepSpeed's own Adam, which works on what was offloaded


def test_adam_of_the_configuration_needs_no_compiler_on_cpus() -> None:
    """And decays weights no more than DeepSpeed's own, whose default is another one than torch's."""
    from deepspeed.ops.adam import FusedAdam

    own = inspect.signature(FusedAdam).parameters["weight_decay"].default
    assert own != inspect.signature(torch.optim.AdamW).parameters["weight_decay"].default
    params = {"lr": 1e-3, "torch_adam": True, "weight_decay": own}
    assert planned({"optimizer": ADAM})["optimizer"]["params"] == params
    decaying = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1}}
    assert planned({"optimizer": decaying})["optimizer"]["params"] == {**params, "weight_decay": 0.1}
    given = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": False}}
    assert planned({"optimizer": given})["optimizer"] == given


def test_without_an_optimizer_nothing_is_partitioned_that_it_needs() -> None:
    for stage, expected in ((1, 0), (2, 0), (3, 3)):
        zero = {"zero_optimization": {"stage": stage}}
        assert planned(zero, arguments=BuildArguments())["zero_optimization"]["stage"] == expected
        assert planned(zero, arguments=FACTORY)["zero_optimization"]["stage"] == stage
        with_own = planned({**zero, "optimizer": ADAM}, arguments=BuildArguments())
        assert with_own["zero_optimization"]["stage"] == stage
    made = plan({"scheduler": {"type": "WarmupLR"}}, arguments=BuildArguments())
    assert "scheduler is left out: without an optimizer the engine only evaluates" in str(made)


# -- "auto" ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_auto_is_the_default_of_the_trainer(stage: int) -> None:
    """The examples of transformers, unchanged, with their own optimizer: what its TrainingArguments say."""
    made = plan(CONFIGS / f"ds_config_zero{stage}.json", {"dp": 2}, arguments=BuildArguments())
    config, origins = made.config["config"], made.config["origins"]
    params = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert config["optimizer"]["params"] == params
    assert config["scheduler"]["params"] == {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 1}
    assert config["gradient_clipping"] == 1.0
    assert config["fp16"]["enabled"] is False
    assert {name for name in origins if "TrainingArguments" in origins[name]} == {
        *(f"optimizer.params.{name}" for name in params),
        *("gradient_clipping", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_num_steps"),
    }
    assert "auto" not in json.dumps(config)


def test_auto_takes_the_defaults_of_transformers() -> None:
    defaults = pytest.importorskip("transformers").TrainingArguments
    fields = defaults.__dataclass_fields__
    assert (fields["learning_rate"].default, fields["weight_decay"].default) == (5e-5, 0.0)
    assert [fields[name].default for name in ("adam_beta1", "adam_beta2", "adam_epsilon")] == [0.9, 0.999, 1e-8]
    assert (fields["max_grad_norm"].default, fields["warmup_steps"].default) == (1.0, 0)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_that_is_all_auto_yields_to_a_factory(stage: int) -> None:
    made = plan(CONFIGS / f"ds_config_zero{stage}.json", {"dp": 2}, arguments=FACTORY)
    assert "optimizer" not in made.config["config"]
    assert "optimizer is left out: build(optimizer=...) makes it, and all its params are 'auto'" in str(made)
    assert made.config["config"]["scheduler"]["params"]["warmup_max_lr"] == "auto"
    assert "(filled in: the learning rates of the optimizer that build(optimizer=...) makes)" in str(made)


def test_two_optimizers_are_refused_with_both(message: Messages) -> None:
    message(refusal({"optimizer": ADAM}, arguments=FACTORY), "'AdamW'", "build(optimizer=...)")
    planned({"optimizer": ADAM}, arguments=BuildArguments())
    planned({}, arguments=FACTORY)


def test_auto_without_a_default_is_refused(message: Messages) -> None:
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}
    config = {"optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": "auto"}}, "scheduler": scheduler}
    message(refusal(config), "'scheduler.params.total_num_steps'", "'optimizer.params.momentum'", "no default")


def test_auto_of_types_and_sizes() -> None:
    config = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    zero = {"stage": "auto", "reduce_bucket_size": "auto", "stage3_max_live_parameters": 5}
    single = planned({**config, "zero_optimization": zero})
    assert (single["fp16"]["enabled"], single["bf16"]["enabled"]) == (False, False)
    assert single["zero_optimization"] == {"stage": 0, "stage3_max_live_parameters": 5}
    half = planned(config, schedule=schedule_of(dtype=torch.bfloat16))
    assert (half["fp16"]["enabled"], half["bf16"]["enabled"]) == (False, True)


# -- dictionaries and files ------------------------------------------------------------------------------------------


def test_a_file_is_the_dictionary_that_it_holds(tmp_path: Path) -> None:
    config = {"optimizer": ADAM, "zero_optimization": {"stage": 2}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    assert plan(str(file), {"dp": 2}) == plan(file, {"dp": 2}) == plan(config, {"dp": 2})
    file.write_text('{"train_batchsize": 2}')
    assert f"'train_batchsize' of {file}" in refusal(file)


@pytest.mark.parametrize("text", ['{"a": 1,}', "{\n  // ZeRO\n}", ""])
def test_a_file_that_is_not_json_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    """In words of Python's, which differ from version to version."""
    (tmp_path / "ds.json").write_text(text)
    assert "ds.json' is not JSON: " in refusal(tmp_path / "ds.json")


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path, message: Messages) -> None:
    message(refusal(str(tmp_path / "gone.json")), "'TMP/gone.json'", "No such file", "ds_config.json")
    (tmp_path / "list.json").write_text("[1]")
    message(refusal(tmp_path / "list.json"), "TMP/list.json", "got [1]")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (5, ("got 5", "ds_config.json")),
        ({"optimizer": "AdamW", "zero_optimization": True}, ("'optimizer'", "got 'AdamW'", "'zero_optimization'")),
        ({"optimizer": {"type": "SGD", "params": 3}, "scheduler": "WarmupLR"}, ("'optimizer.params'", "'scheduler'")),
        ({"pipeline": 3}, ("'pipeline'", "got 3")),
        ({"scheduler": {"type": "WarmupLR", "params": 3}}, ("'scheduler.params'", "object")),
        ({"scheduler": {"params": {}}, "optimizer": {"type": 7}}, ("'scheduler.type'", "'optimizer.type'", "got 7")),
        ({"zero_optimization": {"stage": 4}}, ("'zero_optimization.stage'", "got 4")),
        ({"zero_optimization": {"stage": True}}, ("'zero_optimization.stage'", "got True")),
    ],
)
def test_values_that_are_no_configuration_are_refused(config: Any, words: tuple[str, ...], message: Messages) -> None:
    message(refusal(config), *words)


def test_config_none_gives_defaults() -> None:
    assert planned(None) == planned({})
    nothing = dict.fromkeys(("zero_optimization", "optimizer", "scheduler", "bf16", "train_batch_size"))
    assert planned({**nothing, "gradient_clipping": None}) == planned({})


def test_the_options_of_the_dialect_are_two(message: Messages) -> None:
    message(refusal({}, zero_optimization={"stage": 1}), "no option 'zero_optimization'", "config, batch_axes")
    message(refusal({}, batch_axes={"x": "0"}), "batch_axes", "'0'")


def test_the_users_configuration_is_not_changed() -> None:
    config: dict[str, Any] = {"optimizer": ADAM, "scheduler": {"type": "WarmupLR"}, "zero_optimization": {"stage": 2}}
    before = copy.deepcopy(config)
    plan(config, {"dp": 2}, arguments=BuildArguments(accumulate=2))
    assert config == before
    schedule = schedule_of()
    with pytest.raises(slapo.BuildError, match="zero_optimisation"):
        slapo.build(schedule, target="deepspeed", config={"zero_optimisation": {}})
    assert not schedule.is_sealed
