"""Bad input of each command of ``slapo``: one clear line, exit status 2, and nothing on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from slapo_core.cli.main import main, make_app

SOURCE = """
from torch import nn


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


class Two(MLP):
    def forward(self, x, mask):
        return super().forward(x) * mask


def steps(sch):
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["fc2"].shard("weight", axis=1).sync("forward")


def failing_steps(sch):
    raise ValueError("in two\\nlines")


def failing_model():
    raise OSError("no disk")


def failing_loss(output, batch):
    raise ValueError("no loss")


def nothing():
    return None
"""

X = "--batch 4x16:float32"

WRONG: dict[str, str] = {
    "nosuch": "No such command 'nosuch'",
    "checkpoint show none": "'none' does not exist",
    "checkpoint show empty": "neither checkpoints nor safetensors",
    "checkpoint show broken.json": "truncated",
    "checkpoint verify none": "'none' does not exist",
    "checkpoint export none out": "no weights found",
    "checkpoint export empty out --dtype float31": "got 'float31'",
    "checkpoint export empty out --max-shard-size 5X": "got '5X'",
    "device measure --json none/x.json": "not a directory",
    "device measure --dtypes float31": "got float31",
    "device measure --ranks 0": "'--ranks'",
    "device show nosuch": "unknown device 'nosuch'",
    "device show broken.json": "'broken.json' is not a device",
    "dialects extra": "unexpected extra argument",
    "diff bad:steps --model bad:MLP --mesh tp=2": "(got 1)",
    "diff bad:MLP bad:Two --model bad:MLP": "neither schedule needs it",
    "diff bad:MLP broken.json --model bad:MLP": "broken.json",
    "doctor --nosuch": "No such option",
    "estimate bad:MLP": "e.g. --batch input_ids=4x512:int64",
    f"estimate nowhere:MLP {X}": "module 'nowhere' not found",
    f"estimate bad:none {X}": "no function 'none'",
    f"estimate bad {X}": "MODULE:FUNCTION",
    f"estimate bad:MLP {X} --mesh dp8": "got 'dp8'",
    f"estimate bad:MLP {X} --mesh dp=0": "got 'dp=0'",
    f"estimate bad:MLP {X} --mesh tpp=2": "unknown mesh dimension 'tpp'",
    f"estimate bad:MLP {X} --mesh tp=2 --rank 7": "rank from 0 to 1",
    f"estimate bad:MLP {X} --device nosuch": "unknown device 'nosuch'",
    f"estimate bad:MLP {X} --memory 70G": "got '70G'",
    f"estimate bad:MLP {X} --optimizer Adem": "no optimizer 'Adem'",
    f"estimate bad:MLP {X} --loss bad:none": "no function 'none'",
    f"estimate bad:MLP {X} --timeout 0": "equal to 1",
    "estimate bad:MLP --batch x=4,16": "got 'x=4,16'",
    "estimate bad:MLP --batch x=4x16:float31": "no dtype 'float31'",
    "estimate bad:MLP --batch x=4:int64 --batch x=4:int64": "'x' is given twice",
    f"estimate bad:MLP --batch x=4:int64 {X}": "give all tensors a name, or none",
    "estimate bad:MLP --batch bad:nothing": "must return a batch (got None)",
    "explain bad:steps": "--model",
    "explain none.json": "got 'none.json'",
    "explain newer.json --model bad:MLP": "format 99",
    "explain elsewhere.json --model bad:MLP": "step 1 of 1, checkpoint() at 'fc9'",
    "explain bad:failing_steps --model bad:MLP": "ValueError: in two lines",
    "explain bad:steps --model bad:MLP --mesh tp=3": "tp size 3",
    "models list --nosuch": "No such option",
    "models show nosuch": "'nosuch'",
    "observe bad:MLP": "e.g. --batch input_ids=2x64:int64",
    "observe bad:MLP --batch y=4x16:float32": "does not take this batch",
    "observe bad:MLP --batch 4x15:float32": "mat1 and mat2 shapes cannot be multiplied",
    f"observe bad:MLP {X} --loss bad:failing_loss": "ValueError: no loss",
    f"observe bad:MLP {X} --target nosuch": "dialect 'nosuch'",
    f"observe bad:steps --model bad:MLP {X}": "mesh",
    f"observe bad:steps --model bad:failing_model {X}": "bad:failing_model raised OSError: no disk",
    "patterns list --nosuch": "No such option",
    "patterns show nosuch": "pattern 'nosuch'",
    "pipeline draw --schedule nosuch": "schedule 'nosuch'",
    "pipeline draw --stages 4 --pp 3": "4 stages on 3 ranks",
    "pipeline draw --pp 0": "must be 1 or more",
    "plugins check nosuch": "no plugin 'nosuch'",
    "plugins list --kind nosuch": "no kind 'nosuch'",
    "plugins new Bad_!": "not a distribution name",
    "plugins new acme --directory empty --namespace 1x": "namespace '1x'",
    "plugins show nosuch": "no plugin 'nosuch'",
    "primitives nosuch": "primitive 'nosuch'",
    "show": "Missing argument",
    "show bad:steps": "--model",
    "show bad:MLP --mesh tp": "must be sizes",
    "show bad:MLP --html none/x.html": "is not a directory",
    "show bad:MLP --receipt broken.json": "broken.json is not JSON",
    "show bad:failing_steps --model bad:MLP": "ValueError: in two lines",
    "show bad:MLP bad:MLP bad:MLP": "at most two",
    "show bad:MLP --microbatches 4": "on ranks along pp",
    "stubs --install --output out": "--install and --output",
    "stubs --output broken.json": "not a directory",
    "suggest bad:MLP --devices 2": "e.g. --batch input_ids=64x512:int64",
    f"suggest bad:MLP --devices 0 {X}": "'--devices'",
    f"suggest bad:MLP --devices 2 {X} --memory 5Q": "got '5Q'",
    f"suggest bad:MLP --devices 2 {X} --json --python": "--json and --python",
    f"suggest bad:MLP --devices 2 {X} --study broken.json": "exists",
    f"suggest bad:failing_model --devices 2 {X}": "bad:failing_model raised OSError: no disk",
    f"suggest bad:nothing --devices 2 {X}": "got NoneType",
    "tune best empty.py": "no 'study'",
    "tune report none.py": "none.py",
    "tune resume empty.py": "no 'study'",
    "tune run failing.py": "ZeroDivisionError",
    "tune show empty.py": "no 'study'",
    "verify": "Missing argument 'SCHEDULE'",
    "verify bad:Two": "no batch can be made for Two.forward(x, mask)",
    "verify bad:MLP --batch 4x15:float32": "mat1 and mat2 shapes cannot be multiplied",
    "verify bad:MLP --precision fp8": "got 'fp8'",
    "verify bad:MLP --timeout 0": "equal to 1",
    "verify broken.json --model bad:MLP": "broken.json",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    record = '{"primitive": "core.checkpoint", "path": "fc9", "arguments": {}}'
    files = {
        "bad.py": SOURCE,
        "empty.py": "",
        "failing.py": "1 / 0\n",
        "broken.json": "{",
        "newer.json": '{"format": 99, "records": []}',
        "elsewhere.json": f'{{"format": 1, "records": [{record}]}}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("bad", None)


@pytest.mark.parametrize("words", WRONG)
def test_bad_input_is_one_clear_line(
    here: Path, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["slapo", *words.split()])
    with pytest.raises(SystemExit) as end:
        main()
    shown = capsys.readouterr()
    assert (end.value.code, shown.out) == (2, ""), shown.err
    assert "Traceback" not in shown.err
    (line,) = [line for line in shown.err.splitlines() if line.lower().startswith("error: ")]
    assert WRONG[words] in " ".join(shown.err[shown.err.index(line) :].split())


def test_each_command_has_a_row() -> None:
    def leaves(command: object, words: tuple[str, ...]) -> Iterator[str]:
        below = {**getattr(command, "commands", {}), **getattr(command, "contributed", dict)()}
        for name, child in below.items():
            yield from leaves(child, (*words, name))
        if not below:
            yield " ".join(words)

    commands = leaves(typer.main.get_command(make_app()), ())
    assert [name for name in commands if not any(row == name or row.startswith(f"{name} ") for row in WRONG)] == []
