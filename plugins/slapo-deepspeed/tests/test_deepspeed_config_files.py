"""A configuration is a dictionary, or a JSON file whose path every message names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from .planned import ADAM, plan, planned, refusal

EXAMPLE = 'config={"zero_optimization": {"stage": 1}}, or config="ds_config.json"'


def test_a_file_is_the_dictionary_that_it_holds(tmp_path: Path) -> None:
    config = {"optimizer": ADAM, "zero_optimization": {"stage": 2}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    assert plan(str(file), {"dp": 2}) == plan(file, {"dp": 2}) == plan(config, {"dp": 2})


def test_messages_name_the_file_and_the_key(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stag": 2}}')
    assert refusal(file) == (
        f"DeepSpeed refuses 'zero_optimization.stag' of {file}: Extra inputs are not permitted (got 2)"
    )
    file.write_text('{"train_batchsize": 2}')
    assert f"DeepSpeed has no 'train_batchsize' of {file}; did you mean 'train_batch_size'?" in refusal(file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"a": 1,}',
            "is no JSON: Illegal trailing comma before end of object in line 1, column 8\n"
            "  hint: plain JSON: no comments, no comma after the last entry",
        ),
        ("{\n  // ZeRO\n}", "is no JSON: Expecting property name enclosed in double quotes in line 2, column 3"),
        ("", "is no JSON: Expecting value in line 1, column 1"),
        ('{"a": {"b": 1, "b": 2}}', "has the key 'b' twice: 1 and 2"),
        ('{"gradient_clipping": NaN}', "holds NaN, which JSON does not have"),
        ("[1]", "must be an object, {...} (got list)"),
    ],
)
def test_a_file_that_is_no_configuration_says_where(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    message = refusal(str(file)).replace("Expecting property name enclosed in double quotes in line 1, column 9", "?")
    start = f"the DeepSpeed configuration {str(file)!r} "
    assert message.startswith((start + expected, start + "is no JSON: ?"))


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.json")
    expected = f"cannot read the DeepSpeed configuration {gone!r}: No such file or directory\n  hint: {EXAMPLE}"
    assert refusal(gone) == expected
    assert refusal(tmp_path).startswith(f"cannot read the DeepSpeed configuration {str(tmp_path)!r}: Is a directory")
    (tmp_path / "odd.json").write_bytes(b"\xff\xfe{}")
    assert "odd.json' is no text in UTF-8" in refusal(tmp_path / "odd.json")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (5, f"config must be a dictionary, or the path of a DeepSpeed JSON file (got 5)\n  hint: {EXAMPLE}"),
        ([], f"config must be a dictionary, or the path of a DeepSpeed JSON file (got [])\n  hint: {EXAMPLE}"),
        ({1: 2}, "the keys of config must be strings (got 1)"),
        (
            {"bf16": {"enabled": torch.bfloat16}},
            "'bf16.enabled' of config must be a value that JSON has (got torch.bfloat16)\n"
            "  hint: a number, a string, true or false, null, a list or a dictionary of such",
        ),
        ({"fp16": 3}, "'fp16' of config must be an object, {...} (got 3)"),
        ({"optimizer": "AdamW"}, "'optimizer' of config must be an object, {...} (got 'AdamW')"),
        ({"zero_optimization": 2}, "'zero_optimization' of config must be an object, {...} (got 2)"),
        ({"scheduler": {"type": "WarmupLR", "params": 3}}, "'scheduler.params' of config must be an object"),
    ],
)
def test_what_is_no_configuration_is_refused(config: Any, expected: str) -> None:
    assert refusal(config).startswith(expected)


def test_nothing_is_a_configuration_of_defaults() -> None:
    assert planned(None) == planned({})
    nothing = dict.fromkeys(("zero_optimization", "optimizer", "scheduler", "bf16", "train_batch_size"))
    assert planned({**nothing, "gradient_clipping": None}) == planned({})
    assert planned({"pipeline": None}, {"pp": 2}) == planned({}, {"pp": 2})
