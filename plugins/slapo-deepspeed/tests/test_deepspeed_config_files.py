"""A configuration is a dictionary, or a JSON file whose path every message names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.messages import Messages

from .planned import ADAM, plan, planned, refusal


def test_a_file_is_the_dictionary_that_it_holds(tmp_path: Path) -> None:
    config = {"optimizer": ADAM, "zero_optimization": {"stage": 2}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    assert plan(str(file), {"dp": 2}) == plan(file, {"dp": 2}) == plan(config, {"dp": 2})


def test_messages_name_the_file_and_the_key(tmp_path: Path, message: Messages) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stag": 2}}')
    by_deepspeed = refusal(file)  # the reason is in words of pydantic
    assert f"'zero_optimization.stag' of {file}: " in by_deepspeed
    assert "(got 2)" in by_deepspeed
    file.write_text('{"train_batchsize": 2}')
    message(refusal(file), "'train_batchsize' of TMP/ds.json", "'train_batch_size'")


@pytest.mark.parametrize(
    ("text", "place"),
    [('{"a": 1,}', "line 1, column "), ("{\n  // ZeRO\n}", "line 2, column 3"), ("", "line 1, column 1")],
)
def test_a_file_that_is_no_json_says_where(tmp_path: Path, text: str, place: str) -> None:
    """The reason is in words of Python's, which differ from version to version."""
    file = tmp_path / "ds.json"
    file.write_text(text)
    found = refusal(str(file))
    assert f"{str(file)!r} is not JSON: " in found
    assert f" in {place}" in found
    assert found.partition("\n  hint: ")[2].startswith("plain JSON")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"a": {"b": 1, "b": 2}}', "'b' twice"),
        ('{"gradient_clipping": NaN}', "NaN"),
        ("[1]", "got list"),
    ],
)
def test_a_file_that_is_no_configuration_says_why(tmp_path: Path, text: str, word: str, message: Messages) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    message(refusal(str(file)), "'TMP/ds.json'", word)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, message: Messages) -> None:
    message(refusal(str(tmp_path / "gone.json")), "'TMP/gone.json'", "No such file", "ds_config.json")
    message(refusal(tmp_path), "'TMP'", "Is a directory")
    (tmp_path / "odd.json").write_bytes(b"\xff\xfe{}")
    message(refusal(tmp_path / "odd.json"), "odd.json'", "UTF-8")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (5, ("got 5", "ds_config.json")),
        ([], ("got []", "ds_config.json")),
        ({1: 2}, ("keys", "got 1")),
        ({"bf16": {"enabled": torch.bfloat16}}, ("'bf16.enabled'", "got torch.bfloat16")),
        ({"fp16": 3}, ("'fp16'", "got 3")),
        ({"optimizer": "AdamW"}, ("'optimizer'", "got 'AdamW'")),
        ({"zero_optimization": 2}, ("'zero_optimization'", "got 2")),
        ({"scheduler": {"type": "WarmupLR", "params": 3}}, ("'scheduler.params'", "object")),
    ],
)
def test_what_is_no_configuration_is_refused(config: Any, words: tuple[str, ...], message: Messages) -> None:
    message(refusal(config), *words)


def test_nothing_is_a_configuration_of_defaults() -> None:
    assert planned(None) == planned({})
    nothing = dict.fromkeys(("zero_optimization", "optimizer", "scheduler", "bf16", "train_batch_size"))
    assert planned({**nothing, "gradient_clipping": None}) == planned({})
    assert planned({"pipeline": None}, {"pp": 2}) == planned({}, {"pp": 2})
